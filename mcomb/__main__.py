"""Inspect, align, combine and evaluate networks in files, and run experiments.

usage: mcomb COMMAND, or python -m mcomb COMMAND

    mcomb inspect NETWORK --model MODEL              list parameters, permutations, and frozen axes with reasons
    mcomb align A B TO --model MODEL                 permute the units of B to match those of A
    mcomb align A B TO --torch MODULE:FUNCTION       the same for PyTorch state dicts
    mcomb align A/ B/ TO/                            the same for Hugging Face folders
    mcomb merge A/ B/ TO/ --method average           merge networks into one
    mcomb merge A/ B/ TO/ --method ties --base BASE/ merge networks that were fine-tuned from BASE
    mcomb combine A B TO --distribution uniform --s 0.5
                                                     draw a combination of A and B
    mcomb evaluate NETWORK … --model MODEL           print losses, and accuracies of classifiers
    mcomb uniform --setup mlp-digits                 run an experiment
    mcomb experiments --setup mlp-digits             list all experiments and their state

A network is an orbax folder or a .safetensors, .npz or .msgpack file. `align` and `merge` also take PyTorch's state
dicts (.safetensors, .pt, .pth or .bin) and Hugging Face folders. Use --names for files with other names and layouts of
weights, such as PyTorch's. MODEL is one of:

    SETUP:WIDTH          a model of the lab, such as resnet20-cifar10:1
    MODULE:FUNCTION      your function without arguments, which returns (apply, inputs), (apply, inputs, labels) or
                         (apply, inputs, labels, loss). `evaluate` and some matchers need labels. The default loss is
                         that of a classifier.

--torch names a function of yours that returns (module, inputs), and optionally labels and a loss.

`mcomb COMMAND --help` lists the flags of a command.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect as introspection
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from mcomb.combination import bernoulli, centered, hyperplane, linear, mix, subcube, uniform
from mcomb.errors import Diverged, UserError, name_error
from mcomb.evaluation.batch_statistics import estimate_statistics, names_of_statistics
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.checkpoints import ENDINGS, FILES, SAFETENSORS, fit_tree, read_checkpoint, read_metadata, write_checkpoint
from mcomb.io.paths import AnyPath, absolute, require_folder
from mcomb.io.pytorch_names import TABLES, Table, read_table, to_theirs
from mcomb.keys import LARGEST_SEED, stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag, Output
from mcomb.lab.runs.command import main as run_experiment
from mcomb.lab.setups import SETUPS
from mcomb.lab.symmetry_graph import draw_graph
from mcomb.lab.tables import columns
from mcomb.matching.ancestor import RELATED, Match, match_unless_related
from mcomb.matching.matchers import MATCHERS
from mcomb.merging.merge import BASED_METHODS, METHODS, Method
from mcomb.merging.merge import merge as merge_params
from mcomb.merging.shares import Shares
from mcomb.merging.task_vectors import LeafByLeaf
from mcomb.pytorch import files
from mcomb.runtime.progress import show, show_json
from mcomb.symmetry.derive import GROUPS, derive_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params, count_examples, keep_non_floats, named_leaves, require_finite

SPEC_EXAMPLES = 64  # inputs for deriving and checking a spec
MATCHER_EXAMPLES = 2_000  # inputs for matchers
MERGING_EXAMPLES = 10_000  # inputs for merge methods
UNRELATED = 0.05  # cosine similarity of networks that seem to be neither aligned nor related
ALL_METHODS = {**METHODS, **BASED_METHODS}
DISTRIBUTIONS = {own.name: own for own in (linear, uniform, subcube, hyperplane, bernoulli, centered)}
PARAMETERS = ("share", "s", "p")
PICTURES = (".png", ".pdf", ".svg")
MODEL_RETURNS = "(apply, inputs), (apply, inputs, labels) or (apply, inputs, labels, loss)"
NO_COMMANDS = ("pretrained", "report_page")  # pretrained writes into a clone, and report_page is part of report


class LoadedModel(NamedTuple):
    """A function of parameters and inputs, example inputs, their labels if any, and the loss."""

    apply: Apply
    inputs: Inputs
    labels: Labels = None
    loss: Objective = cross_entropy

    def first(self, count: int) -> tuple[Inputs, Any]:
        """Return the first inputs and their labels."""
        return jax.tree.map(lambda x: x[:count], (self.inputs, self.labels))


@dataclass(frozen=True)
class InspectConfig(Output):
    """Flags of `inspect`."""

    network: Annotated[AnyPath, Flag("the network to inspect")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; lists only parameters if missing")] = None
    names: Annotated[
        str | None, Flag("names of weights in the file: pytorch, git-re-basin, or a file with a table")
    ] = None
    graph: Annotated[AnyPath | None, Flag("file for a figure of the symmetry graph: .png, .pdf or .svg")] = None


@dataclass(frozen=True)
class AlignConfig(Output):
    """Flags of `align`."""

    a: Annotated[AnyPath, Flag("network A")]
    b: Annotated[AnyPath, Flag("network B")]
    to: Annotated[AnyPath, Flag("where to write the aligned B")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; required unless --torch or folders")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a table file")] = None
    torch: Annotated[str | None, Flag("MODULE:FUNCTION that returns a PyTorch module, for state dicts")] = None
    data: Annotated[AnyPath | None, Flag("inputs by name and labels for Hugging Face folders (.npz, …)")] = None
    matcher: Annotated[str, Flag("algorithm that matches units", choices=MATCHERS.keys())] = "weights"
    groups: Annotated[str, Flag("permutations, or all symmetries, such as rotations", choices=GROUPS)] = "permutations"
    force: Annotated[bool, Flag("match units even if A and B share an ancestor")] = False
    seed: Annotated[int, Flag("seed of the matcher", 0, LARGEST_SEED)] = 0


@dataclass(frozen=True)
class MergeFilesConfig(Output):
    """Flags of `merge`."""

    networks: Annotated[tuple[AnyPath, ...], Flag("two or more networks, aligned to the first or with a common base")]
    to: Annotated[AnyPath, Flag("where to write the merged network")]
    method: Annotated[str, Flag("merge method", choices=ALL_METHODS.keys())] = "average"
    groups: Annotated[str | None, Flag("align to the first network by these symmetries", choices=GROUPS)] = None
    base: Annotated[AnyPath | None, Flag(f"the networks' base, for {', '.join(BASED_METHODS)}")] = None
    shares: Annotated[
        tuple[str, ...], Flag("share of B, or one for each network (0.2,0.3,0.5); for layers: layers.0-9=0.3 …")
    ] = ()
    scale: Annotated[float | None, Flag(f"factor of the change, for {', '.join(BASED_METHODS)}")] = None
    density: Annotated[float | None, Flag("fraction of the change to keep, for ties and dare")] = None
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION, for methods that need data")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a table file")] = None
    torch: Annotated[str | None, Flag("MODULE:FUNCTION that returns a PyTorch module, for state dicts")] = None
    data: Annotated[AnyPath | None, Flag("inputs by name and labels for Hugging Face folders (.npz, …)")] = None
    seed: Annotated[int, Flag("seed, for dare and learned", 0, LARGEST_SEED)] = 0


@dataclass(frozen=True)
class CombineConfig(Output):
    """Flags of `combine`."""

    a: Annotated[AnyPath, Flag("network A")]
    b: Annotated[AnyPath, Flag("network B, aligned to A")]
    to: Annotated[AnyPath, Flag("where to write the combination")]
    distribution: Annotated[str, Flag("distribution of the shares of B", choices=tuple(DISTRIBUTIONS))] = "linear"
    share: Annotated[
        float | None,
        Flag("share of B (linear; extrapolates below 0 and above 1), or its mean from 0 to 1 (subcube, hyperplane)"),
    ] = None
    s: Annotated[float | None, Flag("half the width of the interval (uniform, centered), at least 0")] = None
    p: Annotated[float | None, Flag("probability of B's weight (bernoulli), from 0 to 1")] = None
    model: Annotated[str | None, Flag("model on whose inputs to re-estimate running statistics (BatchNorm)")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a table file")] = None
    seed: Annotated[int, Flag("seed of the shares", 0, LARGEST_SEED)] = 0


@dataclass(frozen=True)
class EvaluateConfig(Output):
    """Flags of `evaluate`."""

    networks: Annotated[tuple[AnyPath, ...], Flag("the networks to evaluate")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; required")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a table file")] = None


def load_model(text: str) -> LoadedModel:
    """Return the model named by SETUP:WIDTH or MODULE:FUNCTION."""
    module, _, name = text.rpartition(":")
    if module in SETUPS:
        if not name.isdecimal() or int(name) < 1:
            raise UserError(f"--model {text} has no width: pass {module}:32 for width 32.")
        setup = SETUPS[module]
        return LoadedModel(setup.apply(int(name)), *setup.dataset.load(None).test)
    if not module or not name:
        raise UserError(f"--model {text} is not a model: pass SETUP:WIDTH or MODULE:FUNCTION.")
    sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        found = getattr(importlib.import_module(module), name)()
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"Cannot load --model {text} ({name_error(error)}): name a function that returns {MODEL_RETURNS}."
        ) from error
    if not isinstance(found, tuple | list) or not 2 <= len(found) <= len(LoadedModel._fields):
        what = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"an object of type {type(found).__name__}"
        raise UserError(f"--model {text} returns {what}: return {MODEL_RETURNS}.")
    return LoadedModel(*found)


def require_model(command: str, text: str | None, otherwise: str = "") -> LoadedModel:
    """Return the model of a command that requires one."""
    if not text:
        remedy = f"pass --model SETUP:WIDTH or MODULE:FUNCTION{otherwise}"
        raise UserError(f"{command} needs the model of the networks: {remedy}.")
    return load_model(text)


def read_network(path: AnyPath, names: Table | None = None, model: LoadedModel | None = None) -> Params:
    """Read parameters from a file or folder; raise an error unless they are finite and fit the model."""
    params = read_checkpoint(path, names=names)
    require_finite(str(path), params)
    if model:
        try:
            jax.eval_shape(model.apply, params, model.inputs)
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"{path} does not fit the model ({name_error(error)}): pass another model, or --names."
            ) from error
    return params


def require_new(to: AnyPath, *read: AnyPath) -> None:
    """Raise an error unless the path is a valid output and none of the inputs."""
    if to.resolve() in [path.resolve() for path in read]:
        raise UserError(f"{to} is one of the input networks: use another name for the result.")
    if to.suffix in FILES:
        require_folder(to)
    elif to.suffix and not to.suffix[1:].isdecimal():
        raise UserError(f"{to} does not end in {ENDINGS}: use one of these, or no ending for an orbax folder.")


def write_network(to: AnyPath, params: Params, table: Table | None, like: AnyPath) -> None:
    """Write a network with the metadata of its source file and, with a table, its names and layouts."""
    metadata = read_metadata(like)
    if table is not None:
        params = to_theirs(table, named_leaves(params), named_leaves(read_checkpoint(like)))
    if table is TABLES["pytorch"]:
        metadata["format"] = "pt"  # required by loaders of PyTorch files
    write_checkpoint(to, params, metadata=metadata if to.suffix == SAFETENSORS else None)


def symmetries(model: LoadedModel, params: Params, groups: str = "permutations") -> PermutationSpec:
    """Derive a network's spec, and check on a few inputs that its symmetries do not change the outputs."""
    inputs = model.first(SPEC_EXAMPLES)[0]
    spec = derive_spec(model.apply, params, inputs, groups=groups)
    spec.check(model.apply, params, inputs)
    return spec


def inspect(config: InspectConfig) -> None:
    """List a network's parameters and permutations."""
    if config.graph:
        if config.graph.suffix not in PICTURES:
            raise UserError(f"--graph {config.graph} has an unknown ending: use one of {', '.join(PICTURES)}.")
        if not config.model:
            raise UserError(f"--graph {config.graph} needs a model: pass --model too.")
        require_folder(config.graph)
    model = load_model(config.model) if config.model else None
    params = read_network(config.network, read_table(config.names) if config.names else None, model)
    leaves = named_leaves(params)
    rows = [
        (name, " × ".join(map(str, leaf.shape)), str(leaf.dtype), f"{leaf.size:,}") for name, leaf in leaves.items()
    ]
    total = sum(leaf.size for leaf in leaves.values())
    found: dict[str, Any] = {
        "leaves": {name: {"shape": leaf.shape, "dtype": str(leaf.dtype)} for name, leaf in leaves.items()},
        "parameters": total,
    }
    show(columns([("leaf", "shape", "dtype", "parameters"), *rows, ("in all", "", "", f"{total:,}")]))
    if model:
        spec = symmetries(model, params)
        show(f"\n{spec}")
        found["permutations"] = {
            perm: {"size": size, "acts on": [f"{leaf}[{axis}]" for leaf, axis in spec.axes_of(perm)]}
            for perm, size in spec.sizes.items()
        }
        if config.graph:
            draw_graph(spec, config.graph)
            show(f"\n{absolute(config.graph)}")
            found["graph"] = str(absolute(config.graph))
    show_json(found)


def align(config: AlignConfig) -> None:
    """Match the units of network B to A's, and write the result with the names and layouts of B's file."""
    options = {"seed": config.seed} if config.matcher != "activations" else {}  # not random
    matcher = MATCHERS[config.matcher](**options)
    if is_pytorch(config, config.a, config.b):
        paths, data = [Path(config.a), Path(config.b)], Path(config.data) if config.data else None
        to = Path(config.to)
        match = files.align_files(paths, to, matcher, config.torch, data, config.force, config.groups)
        show_alignment(match, config.to)
        return
    require_new(config.to, config.a, config.b)
    if missing := [path for path in (config.a, config.b) if not path.exists()]:
        raise UserError(f"There is no file or folder {missing[0]}: check the path.")
    model = require_model("align", config.model, ", or --torch MODULE:FUNCTION for PyTorch modules")
    table = read_table(config.names) if config.names else None
    a, b = (read_network(path, table, model) for path in (config.a, config.b))
    spec = symmetries(model, a, config.groups)
    inputs, labels = model.first(MATCHER_EXAMPLES)
    given = {"apply": model.apply, "inputs": inputs, "labels": labels, "loss": model.loss}
    match = match_unless_related(matcher, spec, a, b, force=config.force, **given)
    spec.check(model.apply, b, model.first(SPEC_EXAMPLES)[0], perms=match.matching.perms)
    aligned = spec.apply(match.matching.perms, b)
    write_network(config.to, aligned, table, config.b)
    show_alignment(match, config.to)


def is_pytorch(config: AlignConfig | MergeFilesConfig, *paths: AnyPath) -> bool:
    """Return whether networks are PyTorch's state dicts or Hugging Face folders; reject flags for the other kind."""
    is_pickled = any(path.suffix in files.PICKLES for path in paths)
    found = config.torch is not None or is_pickled or any(map(files.is_model_folder, paths))
    for flag in ("model", "names") if found else ("data",):
        if getattr(config, flag) is not None:
            reason = "is not for PyTorch's state dicts and folders" if found else "is for Hugging Face folders"
            raise UserError(f"--{flag} {getattr(config, flag)!s:.80} {reason}: drop it.")
    return found


def show_alignment(match: Match, to: AnyPath) -> None:
    """Print how many units moved and where the aligned network is."""
    matching = match.matching
    orders = [perm for perm in matching.perms.values() if np.issubdtype(perm.dtype, np.integer)]
    moved = sum(int((perm != np.arange(perm.shape[-1])).sum()) for perm in orders)
    units = sum(perm.size for perm in orders)
    products = {"naive": matching.trace[0], "aligned": matching.objective}
    if match.is_skipped:
        show(
            "The networks share an ancestor, so that no alignment is needed: each unit of B has a cosine similarity of "
            f"at least {match.similarity:.3f} with the same unit of A. The result equals B.\n{absolute(to)}"
        )
    else:
        rose = "from {naive:.4g} to {aligned:.4g}".format_map(products)
        show(f"{moved:,} of {units:,} units moved; the inner product with A rose {rose}\n{absolute(to)}")
    found = {"moved": moved, "units": units, "inner_products": products}
    show_json({"path": str(absolute(to)), **found, "skipped": match.is_skipped, "similarity": match.similarity})


def merge(config: MergeFilesConfig) -> None:
    """Merge networks that are aligned or share a base, and write the result like the first network.

    With flags alone, as in `mcomb merge --setup SETUP`, the command runs the experiment instead.
    """
    base = [config.base] if config.base else []
    if len(config.networks) < 2:
        raise UserError(f"Cannot merge {config.networks[0]} alone: pass two or more networks, then the result.")
    method = configure_method(config)
    similarity = None
    if is_pytorch(config, *config.networks, *base):
        if config.groups:
            raise UserError(f"--groups {config.groups} is not for PyTorch networks: align them first by mcomb align.")
        paths, data = [Path(path) for path in config.networks], Path(config.data) if config.data else None
        of_base = Path(config.base) if config.base else None
        similarity = files.merge_files(paths, Path(config.to), method, config.torch, data, of_base)
    else:
        merge_networks(config, method)
    show_relation(similarity, config.networks[:2], config.base)
    show(str(absolute(config.to)))
    show_json({"path": str(absolute(config.to)), "method": config.method, "similarity": similarity})


def configure_method(config: MergeFilesConfig) -> Method:
    """Return the merge method with the options of the command; reject options that it lacks."""
    make = ALL_METHODS[config.method]
    options: dict[str, Any] = {"scale": config.scale, "density": config.density, "base": config.base}
    options["shares"] = parse_shares(config.shares) if config.shares else None
    options = {name: value for name, value in options.items() if value is not None}
    known = introspection.signature(make).parameters
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"The method {config.method} has no {unknown[0]}: drop --{unknown[0]}, or use another method.")
    if "base" in known and not config.base:
        raise UserError(f"The method {config.method} needs the networks' common base: pass --base.")
    return make(**options, **({"seed": config.seed} if "seed" in known else {}))


def parse_shares(words: Sequence[str]) -> Shares:
    """Return the shares in words such as 0.3 or layers.0-9=0.3."""

    def numbers(text: str) -> float | tuple[float, ...]:
        found = tuple(float(number) for number in text.split(","))
        return found[0] if len(found) == 1 else found

    try:
        if len(words) == 1 and "=" not in words[0]:
            return numbers(words[0])
        pairs = [word.rsplit("=", 1) for word in words]
        return {layers: numbers(text) for layers, text in pairs}
    except ValueError:
        text = " ".join(words)
        raise UserError(f"--shares {text:.80} is not understood: pass 0.3, or layers.0-9=0.3 lm_head=0.") from None


def merge_networks(config: MergeFilesConfig, method: Method) -> None:
    """Merge networks in files that need not fit any model, unless the method needs data."""
    require_new(config.to, *config.networks, *([config.base] if config.base else []))
    model = load_model(config.model) if config.model else None
    table = read_table(config.names) if config.names else None
    first, *others = (read_network(path, table, model) for path in config.networks)
    given = (*config.networks[1:], config.base) if config.base else config.networks[1:]
    others += [read_network(config.base, table, model)] if config.base else []
    others = [
        fit_tree(str(path), network, first, str(config.networks[0]), "pass networks of one model")
        for path, network in zip(given, others, strict=True)
    ]
    networks = (first, *others[: len(config.networks) - 1])
    if config.base:
        method = dataclasses.replace(method, base=others[-1])
    if model:
        inputs, labels = model.first(MERGING_EXAMPLES)
        how: Any = {"method": method, "groups": config.groups, "loss": model.loss}
        merged = merge_params(model.apply, networks, inputs, labels, **how)
        params = merged.params
    elif config.groups:
        raise UserError(f"--groups {config.groups} needs --model: pass it, or align the networks first.")
    elif not isinstance(method.function, LeafByLeaf):
        raise UserError(f"Merging by {method.name} needs data: pass --model, or merge by average.")
    elif names := names_of_statistics(first):
        raise UserError(
            f"{config.networks[0]} has running statistics such as {names[0]}, which cannot be merged: pass --model to "
            "estimate them on its inputs."
        )
    else:
        params = method.function.merge_networks(networks, method.base, **method.options)
    require_finite("the merged network", params)
    write_network(config.to, params, table, config.networks[0])


def show_relation(similarity: float | None, networks: Sequence[AnyPath], base: AnyPath | None) -> None:
    """Say whether the merged networks needed an alignment, given the similarity of the first two, if known."""
    a, b = networks
    known = "" if similarity is None else f" The cosine similarity of {a} and {b} is {similarity:.3f}."
    if similarity is not None and similarity < UNRELATED:
        show(f"{a} and {b} seem to be neither related nor aligned: align {b} to {a} first, with `mcomb align`.{known}")
    elif base or (similarity is not None and similarity >= RELATED):
        ancestor = f"the ancestor {base}" if base else "an ancestor"
        show(f"The networks share {ancestor}, so that no alignment is needed.{known}")
    elif known:
        show(known.strip())


def combine(config: CombineConfig) -> None:
    """Combine two networks, and write the result with the names and layouts of A's file."""
    distribution = DISTRIBUTIONS[config.distribution]
    wanted, (least, largest) = distribution.parameter, distribution.limits
    for name in PARAMETERS:
        if (getattr(config, name) is None) == (name == wanted):
            raise UserError(
                f"The distribution {config.distribution} has the parameter --{wanted}: pass that and no other."
            )
    if not least <= (value := getattr(config, wanted)) <= largest:
        raise UserError(f"--{wanted} {value:g} is out of range for {distribution.name}: pass {distribution.bounds}.")
    require_new(config.to, config.a, config.b)
    model = load_model(config.model) if config.model else None
    table = read_table(config.names) if config.names else None
    a = read_network(config.a, table, model)
    b = fit_tree(str(config.b), read_network(config.b, table), a, str(config.a), "pass two networks of one model")
    if not model and (names := names_of_statistics(a)):
        raise UserError(
            f"{config.a} has running statistics such as {names[0]}, which cannot be averaged: pass --model to estimate "
            "them on its inputs."
        )
    with np.errstate(over="ignore"):
        parameter = np.float32(value)
    combination = keep_non_floats(jax.jit(mix(distribution))(stream(config.seed, "combine"), parameter, a, b), a)
    require_finite(f"the combination with --{wanted} {value:g}", combination, f"pass a --{wanted} nearer to 0")
    if model:
        combination = estimate_statistics(model.apply, combination, model.inputs)
    write_network(config.to, combination, table, config.a)
    show(str(absolute(config.to)))
    show_json({"path": str(absolute(config.to))})


def evaluate(config: EvaluateConfig) -> None:
    """Print the losses of networks on the model's inputs, and the accuracies of classifiers."""
    model, table = require_model("evaluate", config.model), read_table(config.names) if config.names else None
    if model.labels is None:
        raise UserError(f"--model {config.model} has no labels: return (apply, inputs, labels).")
    count, scores = count_examples(model.inputs), {}
    for path in config.networks:
        params = read_network(path, table, model)
        try:
            found = score(model.apply, params, model.inputs, model.labels, loss=model.loss)
        except Diverged as error:
            raise UserError(f"Cannot evaluate {path}: {error}") from error
        accuracy = {"accuracy": found.accuracy} if model.loss is cross_entropy else {}
        scores[str(path)] = {"loss": found.loss, **accuracy, "inputs": count}
    formats = {"loss": ".4f", "accuracy": ".2%", "inputs": ","}
    head = next(iter(scores.values()))
    rows = [(path, *(f"{own[name]:{formats[name]}}" for name in head)) for path, own in scores.items()]
    show(columns([("", *head), *rows]))
    show_json({"networks": scores})


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "inspect": (InspectConfig, inspect),
    "align": (AlignConfig, align),
    "merge": (MergeFilesConfig, merge),
    "combine": (CombineConfig, combine),
    "evaluate": (EvaluateConfig, evaluate),
}


def experiment_names() -> dict[str, str]:
    """Return the modules of the experiments by name, from the installed package or from a clone."""
    for package in ("mcomb.experiments", "experiments"):
        if spec := importlib.util.find_spec(package):
            found = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
            names = {"experiments" if name == "__main__" else name: f"{package}.{name}" for name in found}
            return {name: module for name, module in names.items() if name not in NO_COMMANDS}
    return {}


def main(argv: list[str] | None = None) -> None:
    """Run the command or experiment named by the first argument."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    experiments = experiment_names()
    if command in ("-h", "--help"):
        print(f"{__doc__}\nexperiments: {', '.join(experiments)}")
    elif command in COMMANDS and (command not in experiments or is_about_files(rest)):
        config, run = COMMANDS[command]
        run(cli.parse(config, introspection.getdoc(run) or "", rest, prog=f"mcomb {command}"))
    elif command in experiments:
        module = importlib.import_module(experiments[command])
        if hasattr(module, "EXPERIMENT"):
            run_experiment(module.EXPERIMENT, module.__doc__, rest)
        else:
            module.main(rest)
    else:
        names = [*COMMANDS, *experiments]
        near = difflib.get_close_matches(command, names, 1)
        remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}."
        raise UserError(f"Unknown command {command:.50}: {remedy}")


def is_about_files(words: list[str]) -> bool:
    """Return whether the arguments start with a file, or only ask for help."""
    return bool(words) and (not words[0].startswith("-") or words[0] in ("-h", "--help"))


def console() -> None:
    """Run the program `mcomb`."""
    cli.run(main)


if __name__ == "__main__":
    console()
