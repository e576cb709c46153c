"""Measure mixtures of two transformers in other bases of their weights.

    python -m experiments.gauge --setup decoder-text --pretrained

A residual stream can be rotated, and heads can be mixed by invertible matrices, without changing the function. Moving
two aligned networks together by such an element keeps the line between them. However, mixtures with a share for each
weight change, because they depend on the basis. The experiment measures `linear`, `uniform` and `bernoulli` between A
and aligned B as trained, in canonical form (folded and balanced), in the basis learned for uniform mixtures of the
train examples, and in random bases. The paper's networks have only permutations and scales, so it does not ask this
question.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mcomb.combination import bernoulli, linear, uniform
from mcomb.errors import UserError
from mcomb.io.paths import AnyPath
from mcomb.keys import stream
from mcomb.lab.cache.matchings import B_TO_A, MATCHING_EXAMPLES
from mcomb.lab.cli import Flag
from mcomb.lab.figures import STYLE, save
from mcomb.lab.flags import SweepConfig
from mcomb.lab.models import Decoder, ViT
from mcomb.lab.runs.command import main
from mcomb.lab.runs.experiment import Experiment
from mcomb.lab.runs.measure import Run, Task
from mcomb.lab.runs.results import METRICS, Curves, spread
from mcomb.lab.runs.verdicts import Verdict
from mcomb.lab.setups import SETUPS
from mcomb.matching.learned_groups import learn_basis
from mcomb.symmetry.folding import balancing
from mcomb.symmetry.matrix_groups import Element, SymmetrySpec
from mcomb.trees import Params

# The distribution and the last value of each sweep.
GAUGE_SWEEPS = {"linear": (linear, 1.0), "uniform": (uniform, 0.5), "bernoulli": (bernoulli, 1.0)}
GAUGE_MARKS = {"linear": ("o", "#0072B2"), "uniform": ("s", "#D55E00"), "bernoulli": ("D", "#CC79A7")}
TRAINED, BALANCED, LEARNED_BASIS = FIXED = ("as trained", "balanced", "learned")  # bases that are not random


@dataclass(frozen=True)
class GaugeConfig(SweepConfig):
    """Flags of a sweep, without --groups, because only networks with all groups have other bases."""

    groups: ClassVar[str] = "all"  # type: ignore[misc]
    bases: Annotated[int, Flag("random bases", at_least=1)] = 3
    basis_steps: Annotated[int, Flag("gradient steps of the learned basis", at_least=1)] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if SETUPS[self.setup].model not in (Decoder, ViT):
            raise UserError(f"--setup {self.setup} has no rotations: use a transformer such as decoder-text.")


def bases(config: GaugeConfig) -> list[str]:
    """Return the names of the bases."""
    return [*FIXED, *(f"random {i}" for i in range(1, config.bases + 1))]


def measure(run: Run) -> Curves:
    """Measure each sweep in each basis."""
    config, spec = run.config, run.store.symmetries
    assert isinstance(spec, SymmetrySpec)
    networks = run.networks["A"].params, run.align(B_TO_A)
    combine, last = GAUGE_SWEEPS["uniform"]
    examples, apply = run.store.data.train.subset(MATCHING_EXAMPLES), run.store.apply
    learned = learn_basis(spec, networks, apply, *examples, combine, last, seed=config.seed, steps=config.basis_steps)
    elements: dict[str, Element] = {
        TRAINED: spec.identity(),
        BALANCED: balancing(spec, networks[0]),
        LEARNED_BASIS: learned,
    }
    elements |= {name: spec.random(stream(config.seed, "basis", name)) for name in bases(config)[len(FIXED) :]}
    tasks: dict[str, Task] = {}
    for sweep, (combine, last) in GAUGE_SWEEPS.items():
        samples = 1 if sweep == "linear" else config.samples
        values = np.repeat(np.linspace(0, last, config.points, dtype=np.float32), samples)
        for basis, element in elements.items():
            moved: tuple[Params, ...] = tuple(spec.apply(element, params) for params in networks)
            tasks[f"{sweep}, {basis}"] = Task(combine, moved, values, rng_name=sweep)
    return Curves(**run.measure_curves(tasks, (config.points, -1)))


def judge(results: Curves) -> Verdict:
    """Answer whether both kinds of mixtures have lower test loss barriers as trained than in any random basis."""
    lost = {name: barrier["test"]["loss"] for name, barrier in results.barriers.items()}
    parts, answers = [], []
    for sweep in GAUGE_SWEEPS:
        of_basis = {name.partition(", ")[2]: loss for name, loss in lost.items() if name.startswith(f"{sweep}, ")}
        random = [loss for basis, loss in of_basis.items() if basis not in FIXED]
        answers += [of_basis[TRAINED] < min(random)] if sweep != "linear" else []
        parts.append(
            f"{sweep}: {', '.join(f'{of_basis[name]:.3f} {name}' for name in FIXED)}, and {min(random):.3f} to "
            f"{max(random):.3f} in random bases"
        )
    return Verdict(all(answers), f"Test loss barriers of {'; '.join(parts)}.")


def draw(results: Curves, folder: AnyPath) -> None:
    """Draw the barriers of each sweep in each basis."""
    names = [name.partition(", ")[2] for name in results.barriers if name.startswith("linear, ")]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 2.6), layout="constrained")
        panels = figure.subplots(1, len(METRICS), sharey=True)
        at = np.arange(len(names))[::-1]
        for axes, metric in zip(panels, METRICS, strict=True):
            for (sweep, marker), offset in zip(GAUGE_MARKS.items(), (0.2, 0, -0.2), strict=True):
                values, low, high = (
                    np.array([part.barriers[f"{sweep}, {basis}"]["test"][metric] for basis in names])
                    for part in (results, *spread(results))
                )
                style: Any = {"color": marker[1], "markersize": 4.5}
                axes.plot(values, at + offset, marker[0], label=sweep, **style)
                axes.hlines(at + offset, low, high, color=marker[1], linewidth=0.8)
            axes.margins(x=0.05)
            axes.set_xlim(left=0)
            axes.set_xlabel(f"test {metric} barrier")
        panels[0].set_yticks(at, names)
        panels[0].set_ylim(-0.6, len(names) - 0.4)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(results.title, fontsize=9)
        save(figure, folder, results.experiment)


EXPERIMENT = Experiment(
    name="gauge",
    title="mixtures in other bases",
    claim="Do mixtures with a share for each weight work best in the basis in which the networks were trained?",
    alt="Loss and accuracy barriers of the line, uniform and Bernoulli mixtures, as trained and in other bases.",
    matchings=lambda config: (B_TO_A,),
    config=GaugeConfig,
    combinations=lambda config: len(bases(config)) * config.points * (1 + 2 * config.samples),
    results=Curves,
    measure=measure,
    draw=draw,
    judge=judge,
    is_open=True,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
