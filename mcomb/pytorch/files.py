"""Align and merge PyTorch networks in files: state dicts and Hugging Face folders."""

import copy
import importlib
import inspect
import math
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcomb.errors import UserError, first_words, list_some, name_error
from mcomb.evaluation.batch_statistics import names_of_statistics, statistics_of
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.checkpoints import read_checkpoint
from mcomb.io.safetensors_shards import read_header
from mcomb.matching.ancestor import Match, match_unless_related
from mcomb.matching.matchers import Matcher
from mcomb.merging.merge import BASED_METHODS, Method
from mcomb.merging.merge import merge as merge_params
from mcomb.merging.task_vectors import LeafByLeaf
from mcomb.pytorch.environment import get_environment
from mcomb.pytorch.hugging_face import (
    CONFIG,
    LOCAL,
    align_folders,
    differ_in,
    differing_setting,
    is_model_folder,
    merge_folders,
    new_folder,
    read_model_class,
    require_same_vocabulary,
)
from mcomb.pytorch.modules import build_module, same_function, to_arrays, to_tensor
from mcomb.runtime.batching import free_memory
from mcomb.symmetry.derive import derive_spec
from mcomb.trees import Inputs, Labels, require_alike, require_finite

Module = Any  # torch.nn.Module, with the attributes that transformers adds
PICKLES = (".pt", ".pth", ".bin")
TORCH_RETURNS = "(module, inputs), (module, inputs, labels) or (module, inputs, labels, loss)"
WITHOUT_DATA = ("average", "slerp", *BASED_METHODS)
TOKENS, EXAMPLE_ROWS = 8, 2  # sizes of example inputs
IMAGE, SOUND = 64, 6400  # default sizes of example inputs without a size in the configuration


@dataclass(frozen=True)
class Networks:
    """Modules loaded from files, with the data to run them on."""

    paths: Sequence[Path]
    modules: Sequence[Module]
    inputs: Inputs
    labels: Labels = None
    loss: Objective = cross_entropy
    has_data: bool = True  # whether inputs are data instead of random numbers

    def align(self, to: Path, matcher: Matcher, force: bool, groups: str) -> Match:
        """Align the second network to the first, and write it to a new file or folder."""
        if matcher.name != "weights" and not self.has_data:
            raise UserError(f"Matching by {matcher.name} needs data: pass --data, or match by weights.")
        apply, (a, b) = self._same_function()
        spec = derive_spec(apply, a, self.inputs, groups=groups)
        data = {"apply": apply, "inputs": self.inputs, "labels": self.labels, "loss": self.loss}
        match = match_unless_related(matcher, spec, a, b, force=force, **data)
        spec.check(apply, b, self.inputs, perms=match.matching.perms, draws=1)
        aligned = spec.apply(match.matching.perms, b)
        write(build_module(aligned, self.modules[1], share=True), to, self.paths[1])
        return match

    def merge(self, to: Path, method: Method) -> None:
        """Merge all networks, and write the result to a new file or folder; the last is the base of the method."""
        apply, params = self._same_function()
        networks = params
        if "base" in method.needs:
            method, networks = replace(method, base=params[-1]), params[:-1]
        if not self.has_data:
            if method.name not in WITHOUT_DATA:
                raise UserError(f"Merging by {method.name} needs data: pass --data, or merge by average.")
            if statistics_of(apply, params[0], self.inputs):
                raise UserError(f"{self.paths[0]} has running statistics, which need data: pass --data.")
        merged = merge_params(apply, networks, self.inputs, self.labels, method=method, loss=self.loss)
        if merged.apply is not apply:
            raise UserError(f"A merge by {method.name} has another architecture: use mcomb.merge in Python.")
        write(build_module(merged.params, self.modules[0], share=True), to, self.paths[0])

    def _same_function(self) -> Any:
        """Return the common function and all weights, or raise an error that names a differing setting."""
        try:
            return same_function(self.modules, self.inputs, None, None)
        except UserError as error:
            configs = [module.config.to_dict() for module in self.modules if hasattr(module, "config")]
            for path, config in zip(self.paths[1:], configs[1:], strict=False):
                if name := differing_setting(configs[0], config):
                    raise differ_in(name, self.paths[0], path, (configs[0].get(name), config.get(name))) from error
            raise


def align_files(
    paths: Sequence[Path],
    to: Path,
    matcher: Matcher,
    function: str | None,
    data: Path | None,
    force: bool,
    groups: str,
) -> Match:
    """Align the second state dict or folder to the first, and write it to a new file or folder."""
    require_new_place(to, paths)
    require_used(paths, function, data)
    if function:
        return read_state_dicts(paths, function).align(to, matcher, force, groups)
    if not any(map(is_model_folder, paths)):
        raise UserError(f"{paths[0]} is a state dict: pass --torch MODULE:FUNCTION, which returns {TORCH_RETURNS}.")
    by_tensors = matcher.name == "weights" and groups == "permutations" and data is None
    if by_tensors and all(map(is_model_folder, paths)):
        get_environment()
        make_inputs = lambda module: to_arrays(example_inputs(module))  # noqa: E731
        if match := align_folders(paths, to, matcher, force, make_inputs, require_same_outputs):
            return match
    return read_folders(paths, data).align(to, matcher, force, groups)


def merge_files(
    paths: Sequence[Path], to: Path, method: Method, function: str | None, data: Path | None, base: Path | None
) -> float | None:
    """Merge state dicts or folders into a new file or folder; return the cosine similarity of A and B, if known."""
    every = [*paths, *([base] if base else [])]
    require_new_place(to, every)
    require_used(every, function, data)
    if function:
        read_state_dicts(every, function).merge(to, method)
        return None
    if not any(map(is_model_folder, every)):
        merge_states(paths, to, method, base)
        return None
    similarity = merge_folders(paths, to, method, base) if data is None else None
    if similarity is None:
        read_folders(every, data).merge(to, method)
    return similarity


def merge_states(paths: Sequence[Path], to: Path, method: Method, base: Path | None) -> None:
    """Merge state dicts leaf by leaf, without their module."""
    if not isinstance(method.function, LeafByLeaf):
        raise UserError(f"Merging by {method.name} needs the module: pass --torch MODULE:FUNCTION.")
    get_environment()
    every = [*paths, *([base] if base else [])]
    states = [to_arrays(_read_state(path)) for path in every]
    for path, state in zip(every, states, strict=True):
        require_finite(str(path), state)
        require_alike("The state dicts", states[0], state, (str(every[0]), str(path)))
    if names := names_of_statistics(states[0]):
        raise UserError(f"{paths[0]} has running statistics such as {names[0]}: pass --torch to estimate them.")
    count = len(paths)
    merged = method.function.merge_networks(states[:count], states[count] if base else None, **method.options)
    with _new_file(to) as made:
        _write_tensors({name: to_tensor(leaf, share=True) for name, leaf in merged.items()}, made, paths[0])


def require_same_outputs(original: Path, made: Path) -> None:
    """Raise an error unless two folders compute the same outputs; check nothing if memory is too small."""
    import torch

    size = sum(path.stat().st_size for path in made.iterdir())
    if 2 * size > free_memory():
        return
    found = []
    for path in (original, made):
        module = _load_folder(path)
        with torch.no_grad():
            outputs = module(**example_inputs(module))
        found.append([own for own in outputs.values() if isinstance(own, torch.Tensor) and own.is_floating_point()])
        dtype = module.dtype
        del module
    for ours, theirs in zip(*found, strict=True):
        tolerance = math.sqrt(torch.finfo(dtype).eps) * float(theirs.abs().max())
        if (difference := float((ours - theirs).abs().max())) > tolerance:
            raise UserError(
                f"The aligned network differs from {original} by {difference:.2g} in its outputs: report this to mcomb."
            )


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
    for path in paths[1:]:
        require_same_vocabulary(paths[0], path)
    if data is None:
        return Networks(paths, modules, to_arrays(example_inputs(modules[0])), has_data=False)
    inputs = dict(read_checkpoint(data))
    labels = inputs.pop("labels", None)
    known = inspect.signature(modules[0].forward).parameters
    if unknown := [name for name in inputs if name not in known]:
        raise UserError(f"{data} has {unknown[0]}, but {type(modules[0]).__name__} has no such input: rename it.")
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
        return torch.randn(EXAMPLE_ROWS, *shape, generator=random)

    def tokens() -> Any:
        return torch.randint(0, text.vocab_size, (EXAMPLE_ROWS, count), generator=random)

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
        raise UserError(f"{type(module).__name__} takes {main}, and mcomb has no example of it: pass --data.")
    return found


def write(module: Module, to: Path, like: Path) -> None:
    """Write a module atomically, in the format of the file or folder `like`."""
    if is_model_folder(like):
        with new_folder(to, like) as made:
            copied = {path.name: path.read_bytes() for path in made.iterdir()}
            module.save_pretrained(made)
            for name, content in copied.items():
                (made / name).write_bytes(content)
        return
    with _new_file(to) as made:
        names, state = _read_state(like), module.state_dict(keep_vars=True)
        _write_tensors({name: state[name] for name in names}, made, like)


@contextmanager
def _new_file(to: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes `to`."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as folder:
        yield (made := Path(folder) / to.name)
        os.replace(made, to)


def require_new_place(to: Path, paths: Sequence[Path]) -> None:
    """Raise an error unless the result can be written to `to`."""
    if to.exists():
        raise UserError(f"{to} already exists: choose another name for the result.")
    if not to.absolute().parent.is_dir():
        raise UserError(f"{to} cannot be written, because its folder does not exist: create it.")
    endings = (".safetensors", *PICKLES)
    if any(map(is_model_folder, paths)):
        return
    for path in paths:
        if path.suffix not in endings:
            raise UserError(f"{path} is not a state dict: pass a file that ends in one of {', '.join(endings)}.")
    if to.suffix not in endings:
        raise UserError(f"{to} has no known format: choose a name that ends in one of {', '.join(endings)}.")


def require_used(paths: Sequence[Path], function: str | None, data: Path | None) -> None:
    """Raise an error if a flag does not apply to these files or folders."""
    folder = next(filter(is_model_folder, paths), None)
    if folder and function:
        raise UserError(f"{folder} is a Hugging Face folder, whose {CONFIG} names its architecture: drop --torch.")
    if data and not folder:
        raise UserError("--data is for Hugging Face folders: return inputs and labels from the function of --torch.")


def _call(function: str) -> Any:
    """Call the user's function."""
    import torch

    place, _, name = function.rpartition(":")
    if not place or not name:
        raise UserError(f"--torch {function} does not name a function: pass MODULE:FUNCTION.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        make = getattr(importlib.import_module(place), name)
    except Exception as error:  # user code may raise any error
        raise UserError(f"--torch {function} cannot be imported ({name_error(error)}): check the name.") from error
    try:
        found = make()
    except Exception as error:
        raise UserError(f"--torch {function} fails ({name_error(error)}): correct the function.") from error
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4 or not isinstance(found[0], torch.nn.Module):
        raise UserError(f"--torch {function} does not return a module with inputs: return {TORCH_RETURNS}.")
    return found


def _read_state(path: Path) -> dict[str, Any]:
    """Return the tensors in a file by name, without running code from the file."""
    import torch
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(f"There is no file {path}: check the path.")
    if path.suffix not in PICKLES:
        read_header(path)  # its errors are clearer
        return load_file(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # broken files raise many kinds of errors
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise UserError(f"{path} contains more than tensors: save model.state_dict() alone.") from error
        raise UserError(f"{path} is damaged or not a file of torch.save: save model.state_dict() again.") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{path} contains a {type(found).__name__}, not a state dict: save model.state_dict().")
    if others := [str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(
            f"{path} has entries that are not tensors ({list_some(others)}): save model.state_dict() alone."
        )
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
        raise UserError(f"{path} lacks {list_some(missing)}: pass a state dict of {type(module).__name__}.")
    if unknown := [name for name in state if name not in wanted]:
        raise UserError(f"{type(module).__name__} has no {list_some(unknown)}, but {path} does: pass another module.")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)} in {path} and {tuple(wanted[name].shape)} in {type(module).__name__}"
            raise UserError(f"{name} is {shapes}: pass networks of one architecture and width.")


def _write_tensors(state: Mapping[str, Any], to: Path, like: Path) -> None:
    """Write tensors with the metadata of the file `like`, storing tied tensors once in safetensors files."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    if to.suffix in PICKLES:
        torch.save({name: tensor.detach() for name, tensor in state.items()}, to)
        return
    metadata: dict[str, str] = {"format": "pt"}
    if like.suffix not in PICKLES:
        with safe_open(like, "pt") as file:
            metadata = {**(file.metadata() or {}), "format": "pt"}
    once = {id(state[name]): name for name in reversed(list(state))}
    tensors = {name: own.detach().contiguous() for name, own in state.items() if once[id(own)] == name}
    save_file(tensors, to, metadata)


def _load_folder(path: Path) -> Module:
    """Load the model in a Hugging Face folder, without running code from the folder."""
    _, model_class = read_model_class(path)
    options = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True, **LOCAL}
    try:
        module, report = model_class.from_pretrained(path, **options)
    except Exception as error:  # broken folders raise many kinds of errors
        raise UserError(f"{path} cannot be loaded ({first_words(error)}): save it with save_pretrained.") from error
    if report["missing_keys"]:
        raise UserError(f"{path} lacks {list_some(sorted(report['missing_keys']))}: pass a folder with all weights.")
    if report["mismatched_keys"]:
        name, stored, wanted = min(report["mismatched_keys"])
        shapes = f"{tuple(stored)} in {path} and {tuple(wanted)} by its {CONFIG}"
        raise UserError(f"{name} is {shapes}: download the folder again.")
    return module.eval()
