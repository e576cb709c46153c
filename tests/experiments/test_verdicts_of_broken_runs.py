"""Verdicts are positive for good runs and never for broken ones."""

import copy
import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from results import results_of

from experiments import (
    bernoulli,
    centered,
    edges,
    functional,
    hyperplane,
    landscape,
    linear,
    matchers,
    merge,
    minmax,
    robustness,
    schematic,
    stitching,
    subcube,
    transitivity,
    triangle,
    uniform,
    width,
)
from mcomb.io.fingerprints import fingerprint
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.runs.results import Results
from mcomb.lab.runs.run import add_verdict, run
from mcomb.lab.runs.verdicts import why_no_verdict
from mcomb.matching.matchers import MATCHERS

SPLITS, METRICS = ("train", "test"), ("loss", "accuracy")
EXAMPLES = 10_000


def both(loss, accuracy):
    return {split: {"loss": loss, "accuracy": accuracy} for split in SPLITS}


GOOD, SMALL, LARGE = both(0.1, 0.95), both(0.05, 0.01), both(1.5, 0.5)
BASE = {
    "config": {"setup": "mlp-digits", "width": 32},
    "models": {"A": GOOD, "B": GOOD},
    "guessing": {split: {"loss": 2.3, "accuracy": 0.1, "examples": EXAMPLES} for split in SPLITS},
    "inner_products": {"B to A": {"naive": 1.0, "aligned": 50.0}},
    "ends": ["A", "B"],
    "paper": None,
}
TRIPLE = BASE | {
    "models": {letter: GOOD for letter in "ABC"},
    "inner_products": {f"{pair[1]} to {pair[0]}": {"naive": 1.0, "aligned": 50.0} for pair in ("AB", "AC", "BC")},
}


def line(values, losses, accuracies):
    """Return a curve with one network at each value, equal for both splits."""
    return {split: {"loss": [[x] for x in losses], "accuracy": [[x] for x in accuracies]} for split in SPLITS}


def parameter(values):
    return {"name": "s", "label": "s", "values": values}


def sweep_run():
    return BASE | {"barriers": {"naive": LARGE, "aligned": SMALL}}


def beyond_run():
    values = [-1.0, -0.5, -0.25, 0.0, 0.5, 1.0, 1.25, 1.5, 2.0]
    aligned = line(values, [0.6, 0.3, 0.12, 0.1, 0.1, 0.1, 0.12, 0.3, 0.6], [0.8, 0.9, 0.95, 0.95, 0.9] + [0.93] * 4)
    naive = line(values, [3.0, 2.0, 0.5, 0.1, 2.3, 0.1, 0.5, 2.0, 3.0], [0.2, 0.3, 0.8, 0.95, 0.1, 0.95, 0.8, 0.3, 0.2])
    return sweep_run() | {"parameter": parameter(values), "curves": {"naive": naive, "aligned": aligned}}


def centered_run():
    values = [0.0, 0.25, 0.5]
    curve = line(values, [0.1, 0.12, 3.0], [0.95, 0.94, 0.3])
    return sweep_run() | {"parameter": parameter(values), "curves": {"naive": curve, "aligned": curve}}


def minmax_run():
    curve = line([0, 1], [0.2, 2.0], [0.93, 0.4])
    return sweep_run() | {"curves": {"naive": curve, "aligned": curve}}


def transitivity_run():
    return TRIPLE | {"ends": ["B", "C"], "barriers": {"naive": LARGE, "through A": SMALL, "direct": SMALL}}


def triangle_run():
    shares = triangle.grid(4, 0.0).tolist()
    points = both([0.12] * len(shares), [0.94] * len(shares))
    best = {"shares": shares[6], "place": "in the interior", "index": 6}
    return TRIPLE | {
        "shares": shares,
        "points": points,
        "best": best,
    }


def edges_run():
    values = {"naive": 1.0, "aligned": 0.5}
    return BASE | {
        "mean": values,
        "near_zero": {"naive": 0.07, "aligned": 0.09},
        "long": {"naive": 0.4, "aligned": 0.3},
        "low": {"naive": 0.2, "aligned": 0.2},
        "low_of_near_zero": {"naive": 0.6, "aligned": 0.6},
    }


def robustness_run():
    same = {"alike": True, "magnitude": 1.0, "distance": 0.0}

    def layer(losses, accuracies):
        barriers = {split: {"loss": losses, "accuracy": accuracies} for split in SPLITS}
        barriers = {"barriers": barriers, "by": {"correlation": barriers}}
        return {"units": 100, "k": [2, 50, 100], "correlation": [], **barriers, "activations": same, "weights": same}

    layers = {
        "dense1": layer([0.05, 0.1, 1.5], [0.01, 0.02, 0.5]),
        "dense2": layer([0.05, 0.1, 0.2], [0.01, 0.02, 0.03]),
    }
    return BASE | {"layers": layers, "unperturbed": SMALL, "extra": {"correlation": SMALL}}


def landscape_run():
    names = ("midpoint", "best uniform", "best random point", "best corner", "best on the slice")
    found = {"learned": both(0.05, 0.96)} | dict.fromkeys(names, both(0.12, 0.94))
    found |= {"naive midpoint": both(1.6, 0.45), "naive learned": both(0.15, 0.93)}
    config = BASE["config"] | {"per": "weight", "scatter": 25}
    return BASE | {"config": config, "found": found, "deviation": 0.2}


def functional_run(differing=600):
    both_right = EXAMPLES - differing
    counts = [
        [[[round(differing * (1 - t)), 0], [round(differing * t), 0], [both_right, 0], [0, 0]]]
        for t in np.linspace(0, 1, 11)
    ]
    sweeps = {name: {"parameter": parameter([]), "counts": counts} for name in functional.FUNCTIONAL_SWEEPS}
    return BASE | {"differing": differing, "labels": EXAMPLES, "sweeps": sweeps}


def width_run():
    by_width = [{"aligned": both(loss, accuracy)} for loss, accuracy in ((3.0, 0.6), (0.4, 0.1), (0.05, 0.01))]
    return {
        "config": BASE["config"],
        "models": {f"{letter}, width {w}": GOOD for letter in "AB" for w in (1, 4, 16)},
        "guessing": BASE["guessing"],
        "widths": [1, 4, 16],
        "by_width": dict.fromkeys(width.WIDTH_SWEEPS, by_width),
    }


def matchers_run():
    names = {"naive": LARGE} | dict.fromkeys(MATCHERS, SMALL)
    barriers = {f"{sweep}, {name}": barrier for sweep in matchers.MATCHER_SWEEPS for name, barrier in names.items()}
    return BASE | {"barriers": barriers, "tried": [1.0, 1.1]}


HIGH_LOSS, IDENTITY = ("test.loss", 5.0), ("inner_products.B to A.aligned", 1.0)
UNTRAINED = ("models.B.test.accuracy", 0.11)
SWEEP_BREAKS = [
    *(UNTRAINED, IDENTITY, ("barriers.aligned.test.loss", 5.0), ("barriers.aligned.test.accuracy", 0.4)),
    *(("barriers.naive.test.loss", 0.06), ("barriers.naive.test.accuracy", 0.01)),
    ("barriers.aligned.test.loss", float("nan")),
]


# For each experiment: a good run, and single changes that break it.
def merge_run():
    at = lambda accuracy, loss: {split: {"accuracy": accuracy, "loss": loss} for split in ("withheld", "test")}  # noqa: E731
    methods = {name: at(0.90, 0.3) for name in merge.COMPARED_METHODS}
    methods |= {"midpoint, naive": at(0.5, 1.5), "midpoint, aligned": at(0.93, 0.25), "best sample": at(0.93, 0.24)}
    methods |= {"learned per unit": at(0.96, 0.12), "ensemble": at(0.96, 0.13), "joint": at(0.98, 0.05)}
    config = BASE["config"] | {"split": "biased", "candidates": 100}
    return TRIPLE | {"config": config, "methods": methods}


CASES = {
    **{module: (sweep_run, SWEEP_BREAKS) for module in (uniform, subcube, hyperplane, bernoulli, stitching)},
    linear: (
        beyond_run,
        [
            *(UNTRAINED, IDENTITY),
            *(("curves.aligned.train.loss.2.0", 0.4), ("curves.aligned.train.accuracy.6.0", 0.8)),
            ("curves.aligned.train.loss.8.0", 20.0),
            ("curves.naive.train.accuracy", [[0.95]] * 9),
        ],
    ),
    centered: (
        centered_run,
        [UNTRAINED, IDENTITY, ("curves.aligned.test.loss.1.0", 5.0), ("curves.aligned.test.accuracy.1.0", 0.5)],
    ),
    minmax: (
        minmax_run,
        [
            *(UNTRAINED, IDENTITY, ("curves.aligned.test.accuracy.1.0", 0.9), ("curves.aligned.test.loss.1.0", 0.2)),
            ("curves.aligned.test.accuracy.0.0", 0.3),
        ],
    ),
    transitivity: (
        transitivity_run,
        [
            *(UNTRAINED, ("models.A.test.accuracy", 0.1), ("inner_products.C to A.aligned", 0.5)),
            *(("barriers.through A.test.loss", 5.0), ("barriers.through A.test.accuracy", 0.4)),
            ("barriers.naive", SMALL),
        ],
    ),
    triangle: (
        triangle_run,
        [UNTRAINED, IDENTITY, ("points.test.loss.7", 5.0), ("points.test.accuracy.7", 0.5)],
    ),
    edges: (
        edges_run,
        [
            *(UNTRAINED, IDENTITY, ("mean.aligned", 1.0), ("near_zero.aligned", 0.07), ("near_zero.aligned", 0.03)),
            *(("long.aligned", 0.01), ("low_of_near_zero.aligned", 0.2)),
        ],
    ),
    robustness: (
        robustness_run,
        [
            *(UNTRAINED, IDENTITY, ("unperturbed.test.loss", 5.0), ("unperturbed.test.accuracy", 0.5)),
            *(("layers.dense2.barriers.test.loss.2", 5.0), ("layers.dense2.barriers.test.accuracy.2", 0.5)),
            *(("layers.dense1.barriers.test.loss.1", 1.2), ("layers.dense1.barriers.test.accuracy.1", 0.4)),
            *(("layers.dense1.activations.alike", False), ("layers.dense1.activations.magnitude", 0.5)),
            ("layers.dense2.weights.alike", False),
        ],
    ),
    landscape: (
        landscape_run,
        [
            *(UNTRAINED, IDENTITY, ("found.learned", both(0.12, 0.94)), ("found.learned.test.loss", float("nan"))),
            *(("found.learned.test.accuracy", 0.5), ("found.learned.test.loss", 0.13)),
            *(("found.midpoint.test.loss", 5.0), ("found.midpoint.test.loss", 0.05), ("found.midpoint", LARGE)),
            *(("found.best uniform.test.loss", 0.05), ("found.naive learned.test.loss", 0.05)),
            ("found.naive midpoint", both(0.12, 0.94)),
        ],
    ),
    functional: (functional_run, [UNTRAINED, IDENTITY]),
    width: (
        width_run,
        [
            *(("models.A, width 1.test.accuracy", 0.1), ("by_width.linear.2.aligned.test.loss", 5.0)),
            *(("by_width.uniform.2.aligned.test.accuracy", 0.6), ("widths", [16, 16])),
        ],
    ),
    matchers: (
        matchers_run,
        [
            *(UNTRAINED, IDENTITY, ("barriers.linear, naive", SMALL)),
            *((f"barriers.uniform, {name}.test.loss", 5.0) for name in MATCHERS),
            ("barriers.linear, ste.test.accuracy", 0.2),
        ],
    ),
    merge: (
        merge_run,
        [
            *(UNTRAINED, IDENTITY, ("methods.A.test.accuracy", 0.958), ("methods.learned per unit.test.accuracy", 0.9)),
            *(("methods.midpoint, naive.test.accuracy", 0.94), ("methods.best sample.test.loss", 0.1)),
            ("methods.ensemble.test.accuracy", 0.999),
        ],
    ),
}


@pytest.fixture
def judge(tmp_path):
    def of(module, results):
        undrawn = dataclasses.replace(module.EXPERIMENT, draw=lambda results, folder: None)
        return add_verdict(undrawn, results_of(module.EXPERIMENT.results, results), tmp_path).agrees

    return of


def changed(results, path, value):
    """Return a copy in which the value at a path of keys and indices is replaced."""
    results = json.loads(json.dumps(results))  # deep copy
    *steps, last = [int(step) if re.fullmatch(r"\d+", step) else step for step in path.split(".")]
    inner = results
    for step in steps:
        inner = inner[step]
    assert inner[last] != value
    inner[last] = value
    return results


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.EXPERIMENT.name)
def test_verdict_of_good_run_is_positive(module, judge):
    assert judge(module, CASES[module][0]()) is True


@pytest.mark.parametrize(
    ("module", "path", "value"),
    [(module, *change) for module, (_, breaks) in CASES.items() for change in breaks],
    ids=lambda it: it.EXPERIMENT.name if hasattr(it, "EXPERIMENT") else None,
)
def test_verdict_of_broken_run_is_not_positive(module, path, value, judge):
    assert judge(module, changed(CASES[module][0](), path, value)) is not True


def test_cases_cover_every_experiment_with_claim():
    from experiments import report

    assert {module.EXPERIMENT.name for module in report.ORDER} - {"schematic"} == {
        module.EXPERIMENT.name for module in CASES
    }


def test_verdict_of_illustration_is_none(judge):
    assert judge(schematic, {"experiment": "schematic", "config": BASE["config"]}) is None


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.4, True), (1.6, False)])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("module", [uniform, subcube, hyperplane, bernoulli], ids=lambda m: m.EXPERIMENT.name)
def test_verdict_uses_barriers_of_paper_at_same_width(module, metric, factor, agrees, judge):
    paper = vars(module.EXPERIMENT.paper["resnet20-cifar10"])
    aligned = both(paper["loss"], paper["accuracy"])
    aligned["test"][metric] *= factor
    results = sweep_run() | {"paper": paper, "barriers": {"naive": LARGE, "aligned": aligned}}
    assert judge(module, results) is agrees
    assert judge(module, results | {"config": {"setup": "resnet20-cifar10", "width": 16}}) is True


def test_triangle_verdict_uses_worst_accuracy_of_paper(judge):
    results = triangle_run() | {"config": {"setup": "resnet20-cifar10", "width": 40}}
    assert judge(triangle, results) is True
    assert judge(triangle, changed(results, "points.test.accuracy.7", 0.9)) is False


def test_robustness_verdict_uses_layers_of_paper(judge):
    results = robustness_run()
    first, second = results["layers"].values()
    names = [f"conv{i}" for i in range(1, 9)]
    results |= {"config": {"setup": "tiny10-cifar10", "width": 32}, "layers": dict.fromkeys(names, second)}
    assert judge(robustness, results) is True
    assert judge(robustness, results | {"layers": results["layers"] | {"conv2": first}}) is True
    assert judge(robustness, results | {"layers": results["layers"] | {"conv6": first}}) is False


def test_robustness_verdict_requires_correlation_order(judge):
    results = robustness_run()
    assert judge(robustness, results | {"extra": {"correlation": SMALL, "norm": SMALL}}) is True
    assert judge(robustness, results | {"extra": {"norm": SMALL}}) is None


@pytest.mark.parametrize("examples", range(-4, 5))
@pytest.mark.parametrize(("count", "total"), [(4, 397), (1, 397), (600, 10_000), (30, 397), (20, 10_000)])
def test_functional_verdict_is_stable_to_four_examples(count, total, examples, judge):
    def run_of(differing):
        guess = BASE["guessing"]["test"] | {"examples": total}
        return functional_run(max(0, differing)) | {"labels": total, "guessing": {"test": guess}}

    assert judge(functional, run_of(count + examples)) is judge(functional, run_of(count))


def test_functional_verdict_rejects_jump_of_labels(judge):
    results = functional_run()
    for name in functional.FROM_A_TO_B:
        counts = copy.deepcopy(results["sweeps"][name]["counts"])
        jump = [*[counts[0]] * 5, *[counts[-1]] * 6]
        broken = results | {"sweeps": results["sweeps"] | {name: {"parameter": parameter([]), "counts": jump}}}
        assert judge(functional, broken) is False
    # Both ends of this sweep are mixtures, so it does not show how labels change from A to B.
    assert (
        judge(
            functional,
            results | {"sweeps": results["sweeps"] | {"uniform": {"parameter": parameter([]), "counts": jump}}},
        )
        is True
    )


def test_verdict_requires_enough_examples(judge):
    few = {split: guess | {"examples": 8} for split, guess in BASE["guessing"].items()}
    results = sweep_run() | {"guessing": few, "models": {"A": both(0.5, 0.6), "B": both(0.5, 0.6)}}
    assert judge(uniform, results) is None
    assert judge(uniform, results | {"guessing": BASE["guessing"]}) is True


@pytest.mark.parametrize(
    ("reached", "examples", "end"),
    [
        (0.15, 397, "on 397 examples, and guessing the most common label has 11.8%: train longer."),
        (0.15, 1, "on 1 example, and guessing the most common label has 11.8%: train longer."),
        (0.6, 8, "on 8 examples, and guessing the most common label has 11.8%: measure on more examples."),
        (0.6, 397, None),
    ],
)
def test_why_no_verdict_names_weak_network_and_remedy(reached, examples, end):
    guess = {"examples": examples, "accuracy": 0.118}
    found = why_no_verdict(Results(models={"B": {"test": {"accuracy": reached}}}, guessing={"test": guess}))
    said = f"No verdict: network B hardly beats guessing. It has a test accuracy of {reached:.1%} {end}"
    assert found == (said if end else None)


FLAGS = ["--width", "1", "--train-examples", "20", "--test-examples", "20"]
SHORT = {
    triangle: ["--grid", "2"],
    landscape: ["--grid", "2", "--scatter", "2"],
    robustness: ["--counts", "2", "--line-points", "3"],
    width: ["--widths", "1"],
    merge: ["--pairs", "1", "--steps", "2", "--candidates", "2"],
}


# One sampled sweep represents all, because they differ only in the distribution. Matchers take long. The default
# tests use one sweep and one other experiment.
LIKE_UNIFORM = (bernoulli, hyperplane, subcube)
OF_EVERY_DAY = ((uniform, "mlp-digits"), (stitching, "decoder-text"))
VISION_TRANSFORMER = (uniform, stitching, robustness)  # depend on layers and units; labels are as those of the MLP


@pytest.mark.parametrize(
    ("module", "setup"),
    [
        pytest.param(
            module,
            setup,
            marks=() if (module, setup) in OF_EVERY_DAY else pytest.mark.slow,
            id=f"{module.EXPERIMENT.name}-{setup}",
        )
        for module in CASES
        if module not in (matchers, *LIKE_UNIFORM)
        for setup in ("mlp-digits", "decoder-text", *(["vit-digits"] if module in VISION_TRANSFORMER else []))
    ],
)
def test_verdict_of_untrained_networks_is_none(module, setup, tmp_path_factory):
    out = tmp_path_factory.getbasetemp() / "untrained"  # shared, so that networks are initialized once
    config = module.EXPERIMENT.config
    flags = ["--setup", setup, *FLAGS, "--epochs", "0", "--out", str(out), *SHORT.get(module, [])]
    flags += ["--points", "3"] if "points" in cli.flags(config) else []
    flags += ["--samples", "1"] if "samples" in cli.flags(config) else []
    results = run(module.EXPERIMENT, cli.parse(config, "", flags))
    assert results.agrees is None
    assert "hardly beats guessing" in results.finding
    assert (Store(cli.parse(config, "", flags)).folder(module.EXPERIMENT.name) / "results.json").is_file()


@pytest.mark.slow
def test_verdict_of_identity_matching_is_none(results, config_of, tmp_path):
    results(edges)  # creates the networks that are copied below
    config = config_of(edges)
    shutil.copytree(Store(config).folders.home / "networks", tmp_path / "mlp-digits" / "width-2" / "networks")
    config = dataclasses.replace(config, out=tmp_path)
    before = run(edges.EXPERIMENT, config)
    assert "No verdict" not in before.finding
    (path,) = Store(config).folders.home.glob("matchings/*.npz")
    with np.load(path) as file:
        kept = dict(file)
    perms = {name: np.arange(len(value)) for name, value in kept.items() if name.startswith("perms/")}
    np.savez(path, **kept | perms)
    after = run(edges.EXPERIMENT, config)
    assert after.agrees is None
    assert "does not bring their weights closer" in after.finding
    assert after.mean["aligned"] == after.mean["naive"] == before.mean["naive"]
    stored = json.loads((Store(config).folder("edges") / "results.json").read_text())
    assert stored["matchings"] == {"B to A": fingerprint({n.removeprefix("perms/"): p for n, p in perms.items()})}
