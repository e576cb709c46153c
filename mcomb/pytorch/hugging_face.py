"""Align and merge Hugging Face folders tensor by tensor, for models larger than memory.

Tensors are read from the safetensors files when they are needed, and written one at a time, in the shards of a source
folder. Only methods that work leaf by leaf do so; `files` loads whole modules for all others.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mcomb.errors import UserError, first_words
from mcomb.evaluation.batch_statistics import names_of_statistics
from mcomb.io.safetensors_shards import INDEX, Shard, StoredTensor, list_shards, write_shard
from mcomb.matching.ancestor import Match, match_unless_related
from mcomb.matching.matchers import Matcher
from mcomb.merging.merge import Method
from mcomb.merging.shares import resolve_shares
from mcomb.merging.task_vectors import LeafByLeaf
from mcomb.pytorch.modules import from_module, leaf_names, to_arrays
from mcomb.symmetry.derive import derive_spec
from mcomb.trees import Inputs, require_finite

CONFIG = "config.json"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
# Settings without effect on the function of the weights.
INERT = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "_commit_hash"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


class Folder(NamedTuple):
    """A Hugging Face folder: its configuration and the places of its tensors."""

    path: Path
    config: Mapping[str, Any]
    shards: Sequence[Shard]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


def is_model_folder(path: Any) -> bool:
    """Return whether a path is a Hugging Face folder."""
    return Path(path).is_dir() and (Path(path) / CONFIG).is_file()


def require_model_folder(path: Path) -> None:
    """Raise an error unless a path is a Hugging Face folder."""
    if not path.exists():
        raise UserError(f"There is no folder {path}: check the path.")
    if not is_model_folder(path):
        raise UserError(f"{path} is not a Hugging Face folder: pass one with a {CONFIG}.")


def open_folder(path: Path) -> Folder:
    """Read the configuration of a folder and the headers of its files."""
    require_model_folder(path)
    config = _read_json(path / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{path / CONFIG} is not a configuration of a model: download it again.")
    return Folder(path, config, list_shards(path))


def differing_setting(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Return the name of a setting that differs between configurations and may change the function."""
    names = {name for name in a.keys() | b.keys() if name not in INERT and a.get(name) != b.get(name)}
    return "model_type" if "model_type" in names else min(names, default=None)


def differ_in(setting: str, a: Path, b: Path, values: tuple[Any, Any]) -> UserError:
    """Return an error that names a differing setting."""
    shown = f"{values[0]!s:.50} and {values[1]!s:.50}"
    return UserError(f"{a} and {b} differ in {setting} ({shown}): use models of one configuration.")


def require_same_vocabulary(a: Path, b: Path) -> None:
    """Raise an error that names a token with different numbers in two folders that both have a vocabulary."""
    first, second = (_read_vocabulary(path) for path in (a, b))
    if first and second and first != second:
        token = min(token for token in first.keys() | second.keys() if first.get(token) != second.get(token))
        numbers = " and ".join(str(vocabulary.get(token, "none")) for vocabulary in (first, second))
        raise UserError(
            f"{a} and {b} have different vocabularies (token {token!r:.40} is number {numbers}): "
            "use models with one tokenizer."
        )


def _read_vocabulary(folder: Path) -> dict[str, Any]:
    """Return the number of each token, without added tokens; empty if there is no vocabulary in a known format."""
    if (folder / "tokenizer.json").is_file():
        found = _read_json(folder / "tokenizer.json")
        model = found.get("model") if isinstance(found, dict) else None
        tokens = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(tokens, list):  # pairs of a token and its logarithmic probability
            return {str(pair[0]): number for number, pair in enumerate(tokens)}
    elif (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return {line: number for number, line in enumerate(lines)}
    else:
        tokens = _read_json(folder / "vocab.json") if (folder / "vocab.json").is_file() else None
    return tokens if isinstance(tokens, dict) else {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({first_words(error)}): download it again.") from error


def merge_folders(paths: Sequence[Path], to: Path, method: Method, base: Path | None) -> float | None:
    """Merge folders tensor by tensor; return the cosine similarity of A and B, or None if this is impossible.

    It is impossible if the method needs whole networks, if a folder has no safetensors, or if names differ because one
    of several tied tensors is stored.
    """
    if not isinstance(method.function, LeafByLeaf):
        return None
    every = [open_folder(path) for path in (*paths, *([base] if base else []))]
    for folder in every[1:]:
        require_same_vocabulary(paths[0], folder.path)
        if setting := differing_setting(every[0].config, folder.config):
            raise differ_in(setting, paths[0], folder.path, (every[0].config.get(setting), folder.config.get(setting)))
    tensors = [folder.tensors for folder in every]
    names = list(tensors[0])
    if not names or any(names_of_statistics(dict.fromkeys(names, 0)) for names in tensors):
        return None
    if any(own.keys() != tensors[0].keys() for own in tensors):
        return None
    for folder, own in zip(every[1:], tensors[1:], strict=True):
        for name, tensor in own.items():
            if tensor.shape != tensors[0][name].shape:
                where = f"{tensors[0][name].shape} in {paths[0]} and {tensor.shape} in {folder.path}"
                raise UserError(f"{name} is {where}: pass networks of one architecture and width.")
    options = dict(method.options)
    shares = resolve_shares(options.pop("shares", None), names, len(paths))
    function, similarity = method.function, Similarity()

    def compute(name: str) -> np.ndarray:
        leaves = [own[name].read() for own in tensors]
        for folder, leaf in zip(every, leaves, strict=True):
            require_finite(str(folder.path), {name: leaf})
        networks, of_base = leaves[: len(paths)], leaves[-1] if base else None
        similarity.add(networks[0], networks[1])
        return np.asarray(function.merge_leaf(name, networks, shares[name], of_base, **options))

    write_folder(to, every[0], compute)
    return similarity.cosine


class Similarity:
    """The cosine similarity of two networks, over leaves with two or more axes."""

    def __init__(self) -> None:
        self.products = np.zeros(3)

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add a leaf of both networks."""
        if a.ndim < 2 or a.dtype.kind not in "fV":
            return
        rows = max(1, 2**22 // max(1, a[0].size))
        for start in range(0, len(a), rows):
            x, y = (np.asarray(leaf[start : start + rows], np.float32).ravel() for leaf in (a, b))
            self.products += [np.dot(x, y), np.dot(x, x), np.dot(y, y)]

    @property
    def cosine(self) -> float:
        """The cosine similarity of all leaves so far."""
        inner, *squares = self.products
        return float(inner / np.sqrt(np.prod(squares))) if all(squares) else 0.0


def align_folders(
    paths: Sequence[Path],
    to: Path,
    matcher: Matcher,
    force: bool,
    make_inputs: Callable[[Any], Inputs],
    check: Callable[[Path, Path], None],
) -> Match | None:
    """Align folder B to folder A by weights, tensor by tensor, or return None if this is impossible.

    It is impossible if a folder has no safetensors, if the names of its tensors are not those of the model, or if
    configurations differ, perhaps without effect.

    Args:
        paths: The folders of A and B.
        to: The folder to write.
        matcher: A matcher by weights.
        force: Match even if A and B share an ancestor.
        make_inputs: A function that returns example inputs for a module.
        check: Called with B's folder and the new folder before it gets its name.
    """
    a, b = map(open_folder, paths)
    require_same_vocabulary(*paths)
    if differing_setting(a.config, b.config):
        return None
    module = build_skeleton(a.path)
    leaves = [leaf for leaf in (_leaves(module, folder) for folder in (a, b)) if leaf is not None]
    if len(leaves) < 2:
        return None
    apply, shapes = from_module(module)
    spec = derive_spec(apply, shapes, make_inputs(module))
    tensors = a.tensors, b.tensors
    params = [{leaf: own[names[leaf][0]].read() for leaf in shapes} for own, names in zip(tensors, leaves, strict=True)]
    match = match_unless_related(matcher, spec, *params, force=force)
    leaf_of = {name: leaf for leaf, names in leaves[1].items() for name in names}

    def compute(name: str) -> np.ndarray:
        tensor = tensors[1][name].read()
        return spec.permute_array(match.matching.perms, spec.axes[leaf_of[name]], tensor) if name in leaf_of else tensor

    write_folder(to, b, compute, check)
    return match


def build_skeleton(path: Path) -> Any:
    """Return the model of a folder without its parameters, on PyTorch's meta device; buffers have their values."""
    config, model_class = read_model_class(path)
    with parameters_on_meta():
        return model_class(config).eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create modules without memory for their parameters."""
    import torch

    module_class: Any = torch.nn.Module
    register = module_class.register_parameter

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def read_model_class(path: Path) -> tuple[Any, Any]:
    """Return the configuration and the class of the model in a folder, without running code from the folder."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"Cannot open the Hugging Face folder {path} ({error}): install mcomb[pytorch].") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    require_model_folder(path)
    settings = _read_json(path / CONFIG)
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    if model_type and model_type not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"transformers does not know the model type {model_type!s:.50} of {path}, and mcomb never runs code from a "
            "folder: use a model type of transformers."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    except Exception as error:  # broken folders raise many kinds of errors
        raise UserError(f"{path} cannot be loaded ({first_words(error)}): save it with save_pretrained.") from error
    names = config.architectures or ["None"]
    model_class: Any = getattr(transformers, names[0], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise UserError(f"{path} needs code for {names[0]!s:.50}, which mcomb never runs: use a class of transformers.")
    return config, model_class


def _leaves(module: Any, folder: Folder) -> dict[str, list[str]] | None:
    """Return the names of the tensors of each leaf, or None if a leaf is missing or constants have other values."""
    leaf_of, state = leaf_names(module), module.state_dict()
    prefix = f"{module.base_model_prefix}."
    found: dict[str, list[str]] = {}
    for name, tensor in folder.tensors.items():
        names = (name, prefix + name, name.removeprefix(prefix))  # files may hold the model without its head
        own = next((other for other in names if other in state), None)
        if own in leaf_of and tensor.shape == tuple(state[own].shape):
            found.setdefault(leaf_of[own], []).append(name)
        elif own is not None and not np.array_equal(tensor.read(), to_arrays(state[own])):
            return None
    return found if found.keys() == {*leaf_of.values()} else None


def write_folder(
    to: Path,
    like: Folder,
    compute: Callable[[str], np.ndarray],
    check: Callable[[Path, Path], None] = lambda like, made: None,
) -> None:
    """Write a folder atomically with the files of another, and tensors that are computed one at a time."""
    with new_folder(to, like.path) as made:
        for shard in like.shards:
            write_shard(made / shard.path.name, shard, compute)
        if (like.path / INDEX).is_file():
            shutil.copyfile(like.path / INDEX, made / INDEX)
        check(like.path, made)


@contextmanager
def new_folder(to: Path, like: Path) -> Iterator[Path]:
    """Yield a folder that becomes `to`, with the tokenizer and the configuration of the folder `like`."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as temporary:
        made = Path(temporary) / to.name
        made.mkdir()
        for path in like.iterdir():
            if path.is_file() and not path.name.endswith((*WEIGHTS, ".index.json")):
                shutil.copyfile(path, made / path.name)
        yield made
        os.replace(made, to)
