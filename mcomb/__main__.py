"""Networks from anywhere on the command line, and the experiments: `mcomb COMMAND`, or `python -m mcomb COMMAND`.

    mcomb inspect NETWORK --model MODEL              parameters, permutations, what is frozen and why
    mcomb align A B TO --model MODEL                 B with its units in the order of A's
    mcomb combine A B TO --distribution uniform --s 0.5
    mcomb evaluate NETWORK … --model MODEL           the loss of each, and the accuracy of classifiers
    mcomb uniform --setup mlp-digits                 an experiment
    mcomb experiments --setup mlp-digits             all of them, and what has been run

Networks are orbax folders or .safetensors, .npz and .msgpack files, read and written by their endings; --names is for
files with other names and layouts of weights, such as PyTorch's. MODEL is SETUP:WIDTH, as resnet20-cifar10:1, or
MODULE:FUNCTION: a function of yours that returns a function from parameters and inputs to outputs, example inputs, and
for `evaluate` and some matchers their labels, and the loss if it is not that of a classifier. `mcomb COMMAND --help`
lists the flags of each.
"""

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from mcomb.combination import bernoulli, centered, hyperplane, linear, mix, subcube, uniform
from mcomb.errors import Diverged, UserError, name_error
from mcomb.evaluation.batch_statistics import estimate_statistics, names_of_statistics
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import Objective, cross_entropy
from mcomb.io.checkpoints import ENDINGS, FILES, fit_tree, read_checkpoint, read_metadata, write_checkpoint
from mcomb.io.paths import AnyPath, absolute, atomic, require_folder
from mcomb.io.pytorch_names import TABLES, Table, read_table, to_theirs
from mcomb.keys import LARGEST_SEED, stream
from mcomb.lab import cli
from mcomb.lab.cli import Flag, Output
from mcomb.lab.runs import experiment
from mcomb.lab.runs.results import columns
from mcomb.lab.setups import SETUPS
from mcomb.matching.matchers import MATCHERS
from mcomb.runtime.progress import show, show_json
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params, count_examples, keep_non_floats, named_leaves, require_finite

EXAMPLES = 64  # of a setup's images, to derive and to check a spec with
MATCHING_EXAMPLES = 2_000  # of a setup's images, for matchers to see
DISTRIBUTIONS = {own.name: own for own in (linear, uniform, subcube, hyperplane, bernoulli, centered)}
PARAMETERS = ("share", "s", "p")
PICTURES = (".png", ".pdf", ".svg")
RETURNS = "(apply, inputs), (apply, inputs, labels) or (apply, inputs, labels, loss)"
NO_COMMANDS = ("pretrained", "report_page")  # it writes into a clone; it is a part of `report`


class Model(NamedTuple):
    """A function from parameters and inputs to outputs, example inputs, their labels if there are any, and the loss."""

    apply: Apply
    inputs: Inputs
    labels: Labels = None
    loss: Objective = cross_entropy

    def first(self, count: int) -> tuple[Inputs, Any]:
        """The first inputs, and their labels."""
        return jax.tree.map(lambda x: x[:count], (self.inputs, self.labels))


@dataclass(frozen=True)
class InspectConfig(Output):
    """The flags of `inspect`."""

    network: Annotated[AnyPath, Flag("the network")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; without it, only parameters are listed")] = None
    names: Annotated[str | None, Flag("names of weights in the file: pytorch, git-re-basin, or a file")] = None
    graph: Annotated[AnyPath | None, Flag("a picture of the symmetry graph to draw: .png, .pdf or .svg")] = None


@dataclass(frozen=True)
class AlignConfig(Output):
    """The flags of `align`."""

    a: Annotated[AnyPath, Flag("network A")]
    b: Annotated[AnyPath, Flag("network B")]
    to: Annotated[AnyPath, Flag("where B in the order of A goes")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; it is needed")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a file")] = None
    matcher: Annotated[str, Flag("how units are matched", choices=MATCHERS.keys())] = "weights"
    seed: Annotated[int, Flag("seed of the matcher", 0, LARGEST_SEED)] = 0


@dataclass(frozen=True)
class CombineConfig(Output):
    """The flags of `combine`."""

    a: Annotated[AnyPath, Flag("network A")]
    b: Annotated[AnyPath, Flag("network B, aligned")]
    to: Annotated[AnyPath, Flag("where the combination goes")]
    distribution: Annotated[str, Flag("what shares of B are drawn from", choices=tuple(DISTRIBUTIONS))] = "linear"
    share: Annotated[
        float | None,
        Flag(
            "the share of B (linear; below 0 or above 1 it extrapolates), "
            "or its mean, from 0 to 1 (subcube, hyperplane)"
        ),
    ] = None
    s: Annotated[float | None, Flag("half the width of uniform and centered, from 0 on")] = None
    p: Annotated[float | None, Flag("the probability of B's weight, of bernoulli, from 0 to 1")] = None
    model: Annotated[str | None, Flag("on whose inputs running statistics (BatchNorm) are estimated anew")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a file")] = None
    seed: Annotated[int, Flag("seed of the shares", 0, LARGEST_SEED)] = 0


@dataclass(frozen=True)
class EvaluateConfig(Output):
    """The flags of `evaluate`."""

    networks: Annotated[tuple[AnyPath, ...], Flag("the networks")]
    model: Annotated[str | None, Flag("SETUP:WIDTH or MODULE:FUNCTION; it is needed")] = None
    names: Annotated[str | None, Flag("names of weights in the files: pytorch, git-re-basin, or a file")] = None


def load_model(text: str) -> Model:
    """The model that SETUP:WIDTH or MODULE:FUNCTION names."""
    module, _, name = text.rpartition(":")
    if module in SETUPS:
        if not name.isdecimal() or int(name) < 1:
            raise UserError(f"--model {text} has no width: give {module}:32 for width 32")
        setup = SETUPS[module]
        return Model(setup.apply(int(name)), *setup.dataset.load(None).test)
    if not module or not name:
        raise UserError(f"--model {text} is no model: give SETUP:WIDTH or MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        found = getattr(importlib.import_module(module), name)()
    except UserError:
        raise
    except Exception as error:  # it is the user's own code
        raise UserError(
            f"--model {text} gives no model ({name_error(error)}): name a function that returns {RETURNS}"
        ) from error
    if not isinstance(found, tuple | list) or not 2 <= len(found) <= len(Model._fields):
        what = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"an object of type {type(found).__name__}"
        raise UserError(f"--model {text} returns {what}: let it return {RETURNS}")
    return Model(*found)


def require_model(command: str, text: str | None) -> Model:
    """The model of a command that cannot do without one."""
    if not text:
        raise UserError(
            f"{command} needs the model that the networks belong to: give --model SETUP:WIDTH or MODULE:FUNCTION"
        )
    return load_model(text)


def read_network(path: AnyPath, names: Table | None = None, model: Model | None = None) -> Params:
    """The parameters in a file or folder, all of them finite, and such as the model takes."""
    params = read_checkpoint(path, names=names)
    require_finite(str(path), params)
    if model:
        try:
            jax.eval_shape(model.apply, params, model.inputs)
        except Exception as error:  # the model is the user's own code
            raise UserError(f"{path} does not fit the model ({name_error(error)}): give another, or --names") from error
    return params


def require_new(to: AnyPath, *read: AnyPath) -> None:
    """An error unless a network may be written to this place, where none is that is read."""
    if to.resolve() in [path.resolve() for path in read]:
        raise UserError(f"{to} is one of the networks that are read: give another name for the result")
    if to.suffix in FILES:
        require_folder(to)
    elif to.suffix and not to.suffix[1:].isdecimal():
        raise UserError(
            f"{to} ends in none of {ENDINGS}: give one of these, or a name without an ending for an orbax folder"
        )


def write_network(to: AnyPath, params: Params, table: Table | None, like: AnyPath) -> None:
    """Writes a network with the metadata, and with a table the names and layouts, of the file that it was made from."""
    metadata = read_metadata(like)
    if table is not None:
        params = to_theirs(table, named_leaves(params), named_leaves(read_checkpoint(like)))
    if table is TABLES["pytorch"]:
        metadata["format"] = "pt"  # loaders refuse files without it
    write_checkpoint(to, params, metadata)


def symmetries(model: Model, params: Params) -> PermutationSpec:
    """The permutations of a network, checked on a few inputs to change nothing."""
    inputs = model.first(EXAMPLES)[0]
    spec = derive_spec(model.apply, params, inputs)
    spec.check(model.apply, params, inputs)
    return spec


def inspect(config: InspectConfig) -> None:
    """Lists a network's parameters, and what may be permuted in it."""
    if config.graph:
        if config.graph.suffix not in PICTURES:
            raise UserError(f"--graph {config.graph} ends in none of {', '.join(PICTURES)}: give one of these")
        if not config.model:
            raise UserError(f"--graph {config.graph} shows the symmetries of a model: give --model as well")
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
    """Writes network B with its units in the order of A's, in the names and layouts of B's file."""
    require_new(config.to, config.a, config.b)
    model, table = require_model("align", config.model), read_table(config.names) if config.names else None
    a, b = (read_network(path, table, model) for path in (config.a, config.b))
    spec = symmetries(model, a)
    inputs, labels = model.first(MATCHING_EXAMPLES)
    options = {"seed": config.seed} if config.matcher != "activations" else {}  # which nothing random is in
    matcher = MATCHERS[config.matcher](**options)
    matching = matcher.match(spec, a, b, apply=model.apply, inputs=inputs, labels=labels, loss=model.loss)
    spec.check(model.apply, b, model.first(EXAMPLES)[0], perms=matching.perms)
    aligned = spec.apply(matching.perms, b)
    write_network(config.to, aligned, table, config.b)
    moved = sum(int((perm != np.arange(perm.shape[-1])).sum()) for perm in matching.perms.values())
    units = sum(perm.size for perm in matching.perms.values())
    products = {"naive": matching.trace[0], "aligned": matching.objective}
    rose = "from {naive:.4g} to {aligned:.4g}".format_map(products)
    show(f"{moved:,} of {units:,} units moved; the inner product with A rose {rose}\n{absolute(config.to)}")
    show_json({"path": str(absolute(config.to)), "moved": moved, "units": units, "inner_products": products})


def combine(config: CombineConfig) -> None:
    """Writes a combination of two networks, in the names and layouts of A's file."""
    distribution = DISTRIBUTIONS[config.distribution]
    wanted, (least, largest) = distribution.parameter, distribution.limits
    for name in PARAMETERS:
        if (getattr(config, name) is None) == (name == wanted):
            raise UserError(f"the distribution {config.distribution} is given by --{wanted}: give that, and no other")
    if not least <= (value := getattr(config, wanted)) <= largest:
        raise UserError(f"--{wanted} {value:g} is out of range for {distribution.name}: give {distribution.bounds}")
    require_new(config.to, config.a, config.b)
    model = load_model(config.model) if config.model else None
    table = read_table(config.names) if config.names else None
    a = read_network(config.a, table, model)
    b = fit_tree(str(config.b), read_network(config.b, table), a, str(config.a), "give two networks of one model")
    if not model and (names := names_of_statistics(a)):
        raise UserError(
            f"{config.a} has running statistics, as {names[0]}, of which the combination needs its own: give the "
            "--model on whose inputs to estimate them"
        )
    with np.errstate(over="ignore"):
        parameter = np.float32(value)
    combination = keep_non_floats(jax.jit(mix(distribution))(stream(config.seed, "combine"), parameter, a, b), a)
    require_finite(f"the combination with --{wanted} {value:g}", combination, f"give a --{wanted} nearer to 0")
    if model:
        combination = estimate_statistics(model.apply, combination, model.inputs)
    write_network(config.to, combination, table, config.a)
    show(str(absolute(config.to)))
    show_json({"path": str(absolute(config.to))})


def evaluate(config: EvaluateConfig) -> None:
    """Prints the loss of networks on the model's inputs, and the accuracy of classifiers."""
    model, table = require_model("evaluate", config.model), read_table(config.names) if config.names else None
    if model.labels is None:
        raise UserError(f"--model {config.model} has no labels: let it return (apply, inputs, labels)")
    count, scores = count_examples(model.inputs), {}
    for path in config.networks:
        params = read_network(path, table, model)
        try:
            found = score(model.apply, params, model.inputs, model.labels, loss=model.loss)
        except Diverged as error:
            raise UserError(f"{path} gives no loss: {error}") from error
        accuracy = {"accuracy": found.accuracy} if model.loss is cross_entropy else {}
        scores[str(path)] = {"loss": found.loss, **accuracy, "inputs": count}
    formats = {"loss": ".4f", "accuracy": ".2%", "inputs": ","}
    head = next(iter(scores.values()))
    rows = [(path, *(f"{own[name]:{formats[name]}}" for name in head)) for path, own in scores.items()]
    show(columns([("", *head), *rows]))
    show_json({"networks": scores})


def draw_graph(spec: PermutationSpec, path: AnyPath) -> None:
    """Draws which permutation acts on which axis of which leaf."""
    import matplotlib
    from matplotlib.figure import Figure

    from mcomb.lab.figures import STYLE

    perms, leaves = list(spec.sizes), [leaf for leaf in spec.axes if spec.axes[leaf]]
    height = max(len(perms), len(leaves))
    place = {
        name: (x, height * (i + 0.5) / len(names))
        for x, names in ((0.0, perms), (1.0, leaves))
        for i, name in enumerate(names)
    }
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(5.6, 0.8 + 0.24 * height), layout="constrained")
        axes = figure.subplots()
        for i, perm in enumerate(perms):
            colour = f"C{i % 10}"
            for leaf, axis in spec.axes_of(perm):
                (x0, y0), (x1, y1) = place[perm], place[leaf]
                x1 -= 0.06 * (len(spec.axes[leaf]) - axis)
                axes.plot([x0, x1], [y0, y1], color=colour, linewidth=0.8, alpha=0.7, zorder=1)
                axes.plot(x1, y1, "o", color="white", markeredgecolor=colour, markersize=6, zorder=2)
                axes.text(x1, y1, str(axis), fontsize=5, ha="center", va="center_baseline", color=colour, zorder=3)
            axes.text(-0.02, place[perm][1], f"{perm} ({spec.sizes[perm]})", ha="right", va="center", fontsize=7)
        for leaf in leaves:
            axes.text(1.0, place[leaf][1], leaf, ha="left", va="center", fontsize=7)
        axes.set_xlim(-0.4, 1.4)
        axes.invert_yaxis()
        axes.axis("off")
        axes.set_title("permutations, with their sizes, and the axes of the weights that they act on")
        with atomic(path) as temporary:
            figure.savefig(temporary, dpi=200, format=path.suffix[1:])


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "inspect": (InspectConfig, inspect),
    "align": (AlignConfig, align),
    "combine": (CombineConfig, combine),
    "evaluate": (EvaluateConfig, evaluate),
}


def experiment_names() -> dict[str, str]:
    """The experiments, each with its module: in a clone that is not installed they are a package of their own."""
    for package in ("mcomb.experiments", "experiments"):
        if spec := importlib.util.find_spec(package):
            found = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
            names = {"experiments" if name == "__main__" else name: f"{package}.{name}" for name in found}
            return {name: module for name, module in names.items() if name not in NO_COMMANDS}
    return {}


def main(argv: list[str] | None = None) -> None:
    """Runs the command or the experiment that the first word names."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    experiments = experiment_names()
    if command in ("-h", "--help"):
        print(f"{__doc__}\nexperiments: {', '.join(experiments)}")
    elif command in COMMANDS:
        config, run = COMMANDS[command]
        run(cli.parse(config, run.__doc__ or "", rest, prog=f"mcomb {command}"))
    elif command in experiments:
        module = importlib.import_module(experiments[command])
        if hasattr(module, "EXPERIMENT"):
            experiment.main(module.EXPERIMENT, module.__doc__, rest)
        else:
            module.main(rest)
    else:
        names = [*COMMANDS, *experiments]
        near = difflib.get_close_matches(command, names, 1)
        remedy = f"did you mean {near[0]}?" if near else f"give one of {', '.join(names)}"
        raise UserError(f"there is no command {command:.50}: {remedy}")


def console() -> None:
    """The program `mcomb`."""
    cli.run(main)


if __name__ == "__main__":
    console()
