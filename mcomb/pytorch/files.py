"""Align and merge PyTorch networks in files: state dicts and Hugging Face folders."""

import copy
import importlib
import inspect
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcomb.errors import UserError, first_words, list_some, name_error
from mcomb.evaluation.batch_statistics import statistics_of
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.checkpoints import read_checkpoint
from mcomb.matching.align import Alignment
from mcomb.matching.align import align as align_params
from mcomb.matching.matchers import Matcher
from mcomb.merging.merge import as_method
from mcomb.merging.merge import merge as merge_params
from mcomb.pytorch.environment import get_environment
from mcomb.pytorch.modules import build_module, same_function, to_arrays
from mcomb.trees import Inputs, Labels

Module = Any  # torch.nn.Module, with the attributes that transformers adds
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
PICKLES = (".pt", ".pth", ".bin")
RETURNS = "(module, inputs), (module, inputs, labels) or (module, inputs, labels, loss)"
TOKENS, EXAMPLES = 8, 2  # sizes of example inputs
IMAGE, SOUND = 64, 6400  # default sizes of example inputs without a size in the configuration
INERT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")  # settings without effect


@dataclass(frozen=True)
class Networks:
    """Modules loaded from files, with the data to run them on."""

    paths: Sequence[Path]
    modules: Sequence[Module]
    inputs: Inputs
    labels: Labels = None
    loss: Objective = cross_entropy
    has_data: bool = True  # whether inputs are data instead of random numbers

    def align(self, to: Path, matcher: Matcher) -> Alignment:
        """Align the second network to the first, and write it to a new file or folder."""
        if matcher.name != "weights" and not self.has_data:
            raise UserError(f"Matching by {matcher.name} needs data: give --data, or match by weights.")
        apply, (a, b) = self._same_function()
        inputs = self.inputs
        aligned = align_params(apply, a, b, inputs, self.labels, matcher=matcher, loss=self.loss)
        aligned.spec.check(apply, b, inputs, perms=aligned.matching.perms, draws=1)
        write(build_module(aligned.params, self.modules[1], share=True), to, self.paths[1])
        return aligned

    def merge(self, to: Path, method: str) -> None:
        """Merge all networks, and write the result to a new file or folder."""
        apply, params = self._same_function()
        if not self.has_data:
            if method != "average":
                raise UserError(f"Merging by {as_method(method).name} needs data: give --data, or merge by average.")
            if statistics_of(apply, params[0], self.inputs):
                raise UserError(f"{self.paths[0]} has running statistics, which need data: give --data.")
        merged = merge_params(apply, params, self.inputs, self.labels, method=method, loss=self.loss)
        write(build_module(merged.params, self.modules[0], share=True), to, self.paths[0])

    def _same_function(self) -> Any:
        """Return the common function and all weights, or raise an error that names a differing setting."""
        try:
            return same_function(self.modules, self.inputs, None, None)
        except UserError as error:
            configs = [module.config.to_dict() for module in self.modules if hasattr(module, "config")]
            for config in configs[1:]:
                for name, value in configs[0].items():
                    if name not in INERT and value != config.get(name):
                        raise UserError(
                            f"{self.paths[0]} and {self.paths[1]} differ in {name} ({value!s:.50} and "
                            f"{config.get(name)!s:.50}): give models of one configuration."
                        ) from error
            raise


def is_model_folder(path: Any) -> bool:
    """Return whether a path is a Hugging Face folder."""
    return Path(path).is_dir() and (Path(path) / CONFIG).is_file()


def read_state_dicts(paths: Sequence[Path], function: str) -> Networks:
    """Load state dicts into the module that MODULE:FUNCTION returns together with its inputs."""
    get_environment()
    module, inputs, *rest = _call(function)
    labels, loss = (*rest, None, None)[:2]
    modules = [_load_state(module, path) for path in paths]
    return Networks(paths, modules, to_arrays(inputs), to_arrays(labels), loss or cross_entropy)


def read_folders(paths: Sequence[Path], data: Path | None = None) -> Networks:
    """Load Hugging Face folders, and optionally a data file with arrays named after the model's inputs."""
    get_environment()
    modules = [_load_folder(path) for path in paths]
    if data is None:
        return Networks(paths, modules, to_arrays(example_inputs(modules[0])), has_data=False)
    inputs = dict(read_checkpoint(data))
    labels = inputs.pop("labels", None)
    known = inspect.signature(modules[0].forward).parameters
    if unknown := [name for name in inputs if name not in known]:
        raise UserError(f"{data} has {unknown[0]}, which is no input of {type(modules[0]).__name__}: rename it.")
    return Networks(paths, modules, inputs, labels)


def example_inputs(module: Module) -> dict[str, Any]:
    """Return random inputs for a Hugging Face model, with shapes from its configuration."""
    import torch

    config, known = module.config, inspect.signature(module.forward).parameters
    text = config.get_text_config()
    vision, main = getattr(config, "vision_config", config), module.main_input_name
    random = torch.Generator().manual_seed(0)
    count = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    found: dict[str, Any] = {}

    def floats(*shape: int) -> Any:
        return torch.randn(EXAMPLES, *shape, generator=random)

    def tokens() -> Any:
        return torch.randint(0, text.vocab_size, (EXAMPLES, count), generator=random)

    if main == "input_ids" or (hasattr(config, "text_config") and "input_ids" in known):
        found["input_ids"] = tokens()
    if main == "pixel_values" or (vision is not config and "pixel_values" in known):
        size = getattr(vision, "image_size", None) or IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        found["pixel_values"] = floats(getattr(vision, "num_channels", 3), height, width)
    if main == "input_features":
        found["input_features"] = floats(config.num_mel_bins, 2 * getattr(config, "max_source_positions", TOKENS))
    if main == "input_values":
        found["input_values"] = floats(max(SOUND, 2 * math.prod(getattr(config, "conv_stride", (1,)))))
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        found["decoder_input_ids"] = tokens()
    if not found:
        raise UserError(f"{type(module).__name__} takes {main}, for which mcomb has no example: give --data.")
    return found


def write(module: Module, to: Path, like: Path) -> None:
    """Write a module atomically, in the format of the file or folder `like`."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as folder:
        made = Path(folder) / to.name
        if is_model_folder(like):
            module.save_pretrained(made)
            for path in like.iterdir():
                if path.is_file() and not path.name.endswith((*WEIGHTS, ".index.json")):
                    shutil.copyfile(path, made / path.name)
        else:
            _write_state(module, made, like)
        os.replace(made, to)


def require_new_place(to: Path, paths: Sequence[Path]) -> None:
    """Raise an error unless the result can be written to `to`."""
    if to.exists():
        raise UserError(f"{to} is there already: give another name for the result.")
    if not to.absolute().parent.is_dir():
        raise UserError(f"{to} cannot be written, because its folder does not exist: create it.")
    endings = (".safetensors", *PICKLES)
    for path in (*paths, to) if not any(map(is_model_folder, paths)) else ():
        if path.suffix not in endings:
            raise UserError(f"{path} is no state dict: give a file that ends in one of {', '.join(endings)}.")


def _call(function: str) -> Any:
    """Call the user's function."""
    import torch

    place, _, name = function.rpartition(":")
    if not place or not name:
        raise UserError(f"--torch {function} names no function: give MODULE:FUNCTION.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(place), name)()
    except Exception as error:  # user code may raise any error
        raise UserError(
            f"--torch {function} fails ({name_error(error)}): name a function that returns {RETURNS}."
        ) from error
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4 or not isinstance(found[0], torch.nn.Module):
        raise UserError(f"--torch {function} returns no module with inputs: let it return {RETURNS}.")
    return found


def _read_state(path: Path) -> dict[str, Any]:
    """Return the tensors in a file by name, without running code from the file."""
    import torch
    from safetensors.torch import load_file

    try:
        found = torch.load(path, map_location="cpu", weights_only=True) if path.suffix in PICKLES else load_file(path)
    except Exception as error:  # broken files raise many kinds of errors
        raise UserError(
            f"{path} is no state dict ({first_words(error)}): save one, with model.state_dict()."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{path} holds more than tensors by name: save model.state_dict() alone.")
    return dict(found)


def _load_state(module: Module, path: Path) -> Module:
    """Return a copy of a module with the tensors in a file."""
    state, own = _read_state(path), copy.deepcopy(module)
    _require_alike(str(path), own, state)
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    for name, tensor in [*own.named_parameters(), *own.named_buffers()]:
        if tensor.is_floating_point() and name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])  # use the dtype in the file
    own.load_state_dict(state, strict=False)
    return own


def _require_alike(path: str, module: Module, state: Mapping[str, Any]) -> None:
    """Raise an error that names tensors that are missing, unknown or of another shape."""
    wanted = module.state_dict(keep_vars=True)
    given = {id(wanted[name]) for name in state if name in wanted}  # one name suffices for tied tensors
    if missing := [name for name, tensor in wanted.items() if name not in state and id(tensor) not in given]:
        raise UserError(f"{path} lacks {list_some(missing)}: give a state dict of {type(module).__name__}.")
    if unknown := [name for name in state if name not in wanted]:
        raise UserError(f"{type(module).__name__} has no {list_some(unknown)}, but {path} does: give another module.")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)} in {path} and {tuple(wanted[name].shape)} in {type(module).__name__}"
            raise UserError(f"{name} is {shapes}: give networks of one architecture and width.")


def _write_state(module: Module, to: Path, like: Path) -> None:
    """Write the tensors that the file `like` has, storing tied tensors once in safetensors files."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    names, state = _read_state(like), module.state_dict(keep_vars=True)
    if to.suffix in PICKLES:
        torch.save({name: state[name].detach() for name in names}, to)
        return
    metadata: dict[str, str] = {"format": "pt"}
    if like.suffix not in PICKLES:
        with safe_open(like, "pt") as file:
            metadata = {**(file.metadata() or {}), "format": "pt"}
    once = {id(state[name]): name for name in reversed(names)}
    save_file(
        {name: state[name].detach().contiguous() for name in names if once[id(state[name])] == name}, to, metadata
    )


def _load_folder(path: Path) -> Module:
    """Load the model in a Hugging Face folder, without running code from the folder."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{path} is a folder of Hugging Face ({error}): install transformers.") from error
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not is_model_folder(path):
        raise UserError(f"{path} is no folder of Hugging Face: give one that has a {CONFIG}.")
    try:
        config = transformers.AutoConfig.from_pretrained(path, **options)
        names = config.architectures or ["None"]
        model_class: Any = getattr(transformers, names[0], None)
        is_known = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        if not is_known:
            raise UserError(
                f"{path} needs the class {names[0]!s:.50}, which transformers lacks: mcomb runs no code of folders."
            )
        module, report = model_class.from_pretrained(path, dtype="auto", output_loading_info=True, **options)
    except UserError:
        raise
    except Exception as error:  # broken folders raise many kinds of errors
        raise UserError(f"{path} cannot be loaded ({first_words(error)}): save it with save_pretrained.") from error
    if report["missing_keys"]:
        raise UserError(f"{path} lacks {list_some(sorted(report['missing_keys']))}: give a folder with all weights.")
    return module.eval()
