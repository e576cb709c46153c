"""Sweep a parameter, draw combinations of networks at each of its values, and measure them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from mcomb.combination import Distribution, Draw, as_draw
from mcomb.errors import UserError, brief, require_whole
from mcomb.evaluation.barriers import Barrier, barrier
from mcomb.evaluation.evaluate import Metrics, evaluate, list_objectives, measure_examples, require_tuple, score
from mcomb.evaluation.objectives import Objective, accuracy, agreement, cross_entropy, on_label, predicted
from mcomb.evaluation.plotting import plot_sweeps
from mcomb.evaluation.repair import repaired
from mcomb.io.paths import AnyPath
from mcomb.keys import stream
from mcomb.runtime.batching import BATCH
from mcomb.runtime.progress import SILENCE, progress_bar
from mcomb.symmetry.derive import derive_spec
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Labels, Params, from_lists


@dataclass(frozen=True, repr=False)
class Sweep:
    """Metrics of combinations of networks along a parameter.

    Each metric is also an attribute: `sweep.loss` is `sweep.values["loss"]`.

    Attributes:
        parameter: The name of the parameter.
        points: Its p values.
        values: The mean of each objective by name: arrays of shape (p, samples, ...).
        ends: The metrics of each network.

    Examples:
        >>> networks = a, aligned.params
        >>> sweep = mcomb.sweep(apply, networks, x_test, y_test, mcomb.uniform, points=3)
        >>> sweep.accuracy.mean(axis=1).round(2)  # one value for each point
        array([0.9, 0.9, 0.9])
    """

    parameter: str
    points: np.ndarray
    values: Mapping[str, np.ndarray]
    ends: tuple[Metrics, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise AttributeError(f"There is no metric {name!r}, only {', '.join(self.values)}.")
        return self.values[name]

    def __repr__(self) -> str:
        points, samples = self.values["loss"].shape[:2]
        size = f"{points} values of {self.parameter}, {samples} combination{'s' * (samples > 1)} each"
        barriers = ", ".join(f"{m} barrier {x:.4f}" for m, x in self.barrier._asdict().items() if x is not None)
        return f"Sweep({size}: {barriers})"

    @property
    def barrier(self) -> Barrier:
        """Return how much worse the worst combination is than the mean of the networks.

        Returns:
            The barriers in loss and accuracy.

        Examples:
            >>> sweep = mcomb.sweep(apply, (a, aligned.params), x_test, y_test, mcomb.linear)
            >>> sweep.barrier
            Barrier(loss=0.0276, accuracy=0.0176)
        """
        names = [name for name in Barrier._fields if name in self.values]
        return Barrier(**{m: barrier(m, self.values[m], *(end.values[m] for end in self.ends)) for m in names})

    def plot(self, path: str | AnyPath, *, naive: "Sweep | None" = None, title: str = "") -> None:
        """Plot loss and accuracy: mean, range and each combination, with the levels of the networks.

        Args:
            path: The file to write. Its ending (.png, .pdf, .svg) chooses the format.
            naive: The same sweep without alignment, for comparison.
            title: The title of the figure.

        Raises:
            UserError: The ending is unknown, or the sweep has more than one parameter.

        Examples:
            >>> naive = mcomb.sweep(apply, (a, b), x_test, y_test, mcomb.uniform, points=3)
            >>> sweep.plot("uniform.png", naive=naive)
        """
        plot_sweeps(path, {"mixtures": self} if naive is None else {"naive": naive, "aligned": self}, title)


def sweep(
    apply: Apply,
    networks: tuple[Params, ...],
    inputs: Inputs,
    labels: Labels,
    draw: Distribution | Draw,
    *,
    points: int | Any = 25,
    samples: int | None = None,
    loss: Objective = cross_entropy,
    metrics: Mapping[str, Objective] | None = None,
    repair: bool = False,
    spec: PermutationSpec | None = None,
    statistics_from: Inputs | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
    vmap_size: int | None = None,
) -> Sweep:
    """Sweep a parameter, draw combinations of the networks at each of its values, and measure them.

    Compiled calls draw and measure hundreds of combinations at once, on all devices.

    Args:
        apply: The function that all networks belong to, called as `apply(params, inputs)`.
        networks: Parameters of the networks: A and B for a distribution.
        inputs: Inputs with examples along the first axis.
        labels: Labels with examples along the first axis.
        draw: A distribution of shares (`mcomb.uniform`, `mcomb.linear`, ...), or a function `(key, point, *networks)`
            that returns the parameters of a combination.
        points: The number of values across the distribution's range, or an array of values. A function needs an array.
        samples: The number of combinations at each value; by default 10, or 1 if nothing is random.
        loss: The loss: a function of one example's output and label that returns a sum and a count.
        metrics: Further objectives by name. By default, `accuracy` if the labels are class indices.
        repair: Restore the variance of activations in each combination (REPAIR), with statistics of the inputs.
        spec: The symmetries of the network, for `repair`; derived from `apply` by default.
        statistics_from: Inputs on which to estimate the running statistics (BatchNorm) of each combination.
        seed: Seed of the draws.
        batch_size: Number of inputs that a device processes at once; fewer if they do not fit into memory.
        vmap_size: Number of combinations that a device processes at once; chosen by default.

    Returns:
        The sweep: `.loss` and `.accuracy` of shape (points, samples), `.barrier`, and `.plot(path)`. For two
        classifiers, `.agreement` has the fraction of labels on which a combination agrees with A only, B only, both
        or neither, and whether it is correct: an array of shape (points, samples, 4, 2).

    Raises:
        UserError: The networks, the data, the points or the objectives do not fit together.

    Examples:
        >>> mcomb.sweep(apply, (a, b), x_test, y_test, mcomb.uniform, points=5)
        Sweep(5 values of s, 10 combinations each: loss barrier 0.5479, accuracy barrier 0.1985)
        >>> mcomb.sweep(apply, (a, aligned.params), x_test, y_test, mcomb.uniform, points=5)
        Sweep(5 values of s, 10 combinations each: loss barrier 0.0794, accuracy barrier 0.0310)
    """
    require_tuple(networks)
    if not networks:
        raise UserError("There are no networks to sweep: pass a tuple of parameter trees.")
    as_draw(draw, len(networks))
    values, labels = _points(draw, points), from_lists(labels)
    is_random = not isinstance(draw, Distribution) or draw.is_random
    samples = (10 if is_random else 1) if samples is None else samples
    require_whole(samples=samples, batch_size=batch_size)
    how: Any = {"loss": loss, "metrics": metrics, "batch_size": batch_size}
    ends = tuple(score(apply, network, inputs, labels, **how) for network in networks)
    objectives = dict(list_objectives(apply, networks[0], inputs, labels, **how))
    loss = objectives.pop("loss")
    if objectives.get("accuracy") is accuracy and len(networks) == 2:
        only = (("predicted", predicted),)
        of_ends = [
            measure_examples(apply, network, inputs, labels, only, batch_size=batch_size)["predicted"][0]
            for network in networks
        ]
        labels = {"label": labels, "predicted": np.stack(of_ends, axis=1)}
        loss, objectives = on_label(loss), {name: on_label(own) for name, own in objectives.items()}
        objectives["agreement"] = agreement
    repaired_draw = draw
    if repair:
        spec = derive_spec(apply, networks[0], inputs) if spec is None else spec
        apply, repaired_draw, networks = repaired(apply, networks, inputs, draw, spec=spec, batch_size=batch_size)
    rows = np.repeat(values, samples, axis=0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(stream(seed, "sweep"), np.arange(len(rows)))
    with progress_bar(len(rows), "net", "evaluating", delay=SILENCE) as bar:
        found = evaluate(
            *(apply, networks, inputs, labels, repaired_draw, rows, keys),
            loss=loss,
            metrics=objectives,
            statistics_from=statistics_from,
            batch_size=batch_size,
            vmap_size=vmap_size,
            report=lambda metrics: bar.update(len(metrics.loss)),
        )
    shape = len(values), samples
    of_points = {name: value.reshape(*shape, *value.shape[1:]) for name, value in found.values.items()}
    parameter = draw.parameter if isinstance(draw, Distribution) else "point"
    return Sweep(parameter, values, of_points, ends)


def _points(draw: Distribution | Draw, points: Any) -> Float[np.ndarray, "p ..."]:
    """Return the values of the parameter; raise an error if they are outside its limits."""
    if np.ndim(points) == 0:
        require_whole(2, points=points)
        if not isinstance(draw, Distribution):
            raise UserError(f"A function has no range for {points} points: pass an array of values as points.")
        return np.linspace(draw.low, draw.high, points, dtype=np.float32)
    if isinstance(draw, Distribution):
        draw.check(points)
    try:
        return np.asarray(points, np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"The points are {brief(points)}: pass an array of numbers.") from error
