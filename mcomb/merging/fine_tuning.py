"""Fine-tune networks by gradient descent with early stopping.

`descend` learns shares of networks or their weights with Adam. It holds out the last tenth of the examples, measures
their loss twenty times during training, and keeps the best result.
"""

import hashlib
import io
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jaxtyping import Float, Int32, PRNGKeyArray

from mcomb.errors import Diverged, require_positive, require_whole
from mcomb.evaluation.batch_statistics import estimate_statistics, normalise_by_batch, statistics_of
from mcomb.evaluation.evaluate import score
from mcomb.evaluation.objectives import Objective, count_training, cross_entropy, minibatch_loss
from mcomb.io.fingerprints import fingerprint
from mcomb.io.paths import AnyPath, as_path, atomic
from mcomb.keys import stream
from mcomb.runtime.devices import replicate
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import SILENCE, progress_bar, warn
from mcomb.runtime.training_loop import Loss, TrainState, fit, initial_state, shuffled_rows, steps_per_call
from mcomb.symmetry.jaxpr_walk import all_equations, inner_jaxprs
from mcomb.trees import (
    Apply,
    Array,
    Inputs,
    Labels,
    Params,
    at_least_float32,
    from_lists,
    in_dtype_of,
    is_inexact,
    keep_non_floats,
    map_named,
    named_leaves,
)

CHECKS = 20  # number of times that a descent measures the held-out loss
STOPPING_PATIENCE = 5  # measurements without improvement before it stops


@runtime_checkable
class Parametrization(Hashable, Protocol):
    """Maps learned values to network parameters.

    Parametrizations with the same meaning should be equal, so that they are compiled only once.
    """

    def combine(self, numbers: Any, networks: Any, /) -> Params:
        """Return the network with these learned values, given constant networks."""
        ...


class Descent(NamedTuple):
    """The learned values with the lowest held-out loss, their network, and all held-out losses.

    The losses are those at the start and then at regular intervals.
    """

    numbers: Any
    params: Params
    losses: tuple[float, ...]


def descend(
    parametrization: Parametrization,
    numbers: Any,
    networks: Sequence[Params],
    apply: Apply,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    keep: AnyPath | str | None,
    describe: str,
) -> Descent:
    """Learn `numbers` by gradient descent, and return those with the lowest held-out loss.

    Running statistics are those of each minibatch during training. For held-out losses and the result, they are
    estimated on all training examples. The file `keep` stores the progress after each measurement, and the same call
    resumes from it. Files that are damaged or belong to another call are ignored.
    """
    labels = from_lists(labels)
    require_whole(steps=steps, batch_size=batch_size)
    require_positive(learning_rate=learning_rate)
    train_count = count_training(apply, networks[0], inputs, labels, loss)
    given = replicate((tuple(networks), inputs, labels))
    held_out = jax.tree.map(lambda x: x[train_count:], given[1:])
    train_inputs = jax.tree.map(lambda x: x[:train_count], inputs)
    has_statistics = bool(statistics_of(apply, networks[0], train_inputs))
    optimizer, compiled_combine = _adam(float(learning_rate)), jax.jit(parametrization.combine)
    size, every = min(batch_size, train_count), max(1, steps // CHECKS)

    def finish(combined: Params) -> Params:
        return estimate_statistics(apply, combined, train_inputs) if has_statistics else combined

    def look(numbers: Any) -> float:
        try:
            return score(apply, finish(compiled_combine(numbers, given[0])), *held_out, loss=loss).loss
        except Diverged as error:
            raise Diverged(
                "The held-out loss is infinite or not a number: check the inputs, or lower the learning rate."
            ) from error

    start = initial_state(numbers, optimizer)
    kept = _ProgressFile(None, "")
    if keep is not None:
        call = [
            parametrization,
            *_code_of(apply, loss, networks[0], inputs, labels),
            steps,
            batch_size,
            learning_rate,
            seed,
        ]
        call += map(fingerprint, (numbers, networks, inputs, labels))
        kept = _ProgressFile(as_path(keep), hashlib.blake2b(repr(call).encode()).hexdigest())
    state, best, losses = kept.read(start) or (start, jax.device_get(numbers), [look(numbers)])
    done = int(state.step)
    step_loss = (
        _loss(_by_batch(apply), loss, parametrization, size) if has_statistics else _loss(apply, loss, parametrization)
    )
    per_call = steps_per_call(networks[0], every)
    calls = ((rows, given) for rows in _minibatches(steps, every, per_call, train_count, size, seed, done))
    fitting = fit(step_loss, state, calls, optimizer, stream(seed), network=networks[0])
    with progress_bar(steps, "step", describe, done, delay=SILENCE) as bar:
        while done < steps and min(losses[-STOPPING_PATIENCE:]) <= min(losses):
            state, step_losses, _ = next(fitting)
            done += len(step_losses)
            bar.update(len(step_losses))
            if done % every and done < steps:
                continue
            losses.append(look(state.params))
            if losses[-1] == min(losses):
                best = jax.device_get(state.params)
            kept.write(state, best, losses)
            bar.set_postfix(loss=f"{step_losses.mean():.4f}", best=f"{min(losses):.4f}", refresh=False)
    params = finish(compiled_combine(best, given[0]))
    return Descent(best, keep_non_floats(params, networks[0]), tuple(losses))


def _minibatches(
    steps: int, every: int, per_call: int, count: int, size: int, seed: int, done: int
) -> Iterator[Int32[np.ndarray, "n b"]]:
    """Yield the minibatches after the first `done`, grouped by compiled call; no group crosses a measurement."""
    epoch, step, rows = 0, 0, np.zeros((0, size), np.int32)
    while step < steps:
        together = min(per_call, every - step % every, steps - step)
        while len(rows) < together:
            rows = np.concatenate([rows, shuffled_rows(seed, epoch, count, size)])
            epoch += 1
        now, rows = np.split(rows, [together])
        if step >= done:
            yield now
        step += together


@dataclass(frozen=True)
class _Weights:
    """The parametrization of fine-tuning: the learned values are the weights, by name."""

    def combine(self, numbers: Mapping[str, Array], networks: Sequence[Params]) -> Params:
        return map_named(lambda name, leaf: in_dtype_of(leaf, numbers.get(name, leaf)), networks[0])


@dataclass(frozen=True, repr=False)
class FineTuned:
    """A network after fine-tuning.

    Attributes:
        params: The parameters with the lowest held-out loss.
        loss: Their held-out loss.
        losses: The held-out losses at the start and then at regular intervals.

    Examples:
        >>> tuned = mcomb.fine_tune(apply, a, x, y, steps=100)
        >>> tuned
        FineTuned(held-out loss from 0.1603 to 0.1466)
    """

    params: Params
    loss: float
    losses: tuple[float, ...]

    def __repr__(self) -> str:
        return f"FineTuned(held-out loss from {self.losses[0]:.4g} to {self.loss:.4g})"


def fine_tune(
    apply: Apply,
    params: Params,
    inputs: Inputs,
    labels: Labels,
    *,
    loss: Objective = cross_entropy,
    steps: int = 400,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    seed: int = 0,
    keep: AnyPath | str | None = None,
) -> FineTuned:
    """Train a network with Adam, and return the parameters with the lowest loss on held-out data.

    The last tenth of the data is held out.

    Args:
        apply: The function, called as `apply(params, inputs)`.
        params: Parameters to start from.
        inputs: Inputs with examples along the first axis.
        labels: Labels with examples along the first axis.
        loss: The loss: a function of one example's output and label that returns a sum and a count.
        steps: Number of gradient steps. Training stops early if a quarter of them does not lower the held-out loss.
        batch_size: Number of examples in a minibatch.
        learning_rate: Learning rate of Adam.
        seed: Seed of the minibatches.
        keep: A file that stores the progress, so that the same call resumes.

    Returns:
        The trained parameters and the held-out losses.

    Raises:
        UserError: The function, the data or the loss do not fit together.
        Diverged: A loss is not finite.

    Examples:
        >>> midpoint = mcomb.combine(a, aligned.params, 0.5)
        >>> tuned = mcomb.fine_tune(apply, midpoint, x, y, steps=200).params
        >>> mcomb.score(apply, midpoint, x_test, y_test)
        Metrics(loss=0.3202, accuracy=0.9012)
        >>> mcomb.score(apply, tuned, x_test, y_test)
        Metrics(loss=0.2804, accuracy=0.9246)
    """
    # Half precision would round small steps to zero.
    numbers = {name: at_least_float32(leaf) for name, leaf in named_leaves(params).items() if is_inexact(leaf)}
    how: Any = {"loss": loss, "steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    found = descend(_Weights(), numbers, [params], apply, inputs, labels, **how, keep=keep, describe="fine-tuning")
    return FineTuned(found.params, min(found.losses), found.losses)


class _ProgressFile(NamedTuple):
    """A file with the state of a descent, its best values and its losses; without a path, it stores nothing."""

    path: AnyPath | None
    call: str  # digest of the arguments of the call

    def write(self, state: TrainState, best: Any, losses: Sequence[float]) -> None:
        if self.path is None:
            return
        leaves = {f"leaf {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((state, best)))}
        from_first(self._write, leaves | {"losses": np.array(losses), "call": np.array(self.call)})

    def _write(self, arrays: Mapping[str, np.ndarray]) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]

    def read(self, like: TrainState) -> tuple[TrainState, Any, list[float]] | None:
        arrays = from_first(self._read)
        if arrays is None:
            return None
        leaves, structure = jax.tree.flatten((like, like.params))
        # NumPy reads bfloat16 as raw bytes.
        read = [arrays[f"leaf {i}"].view(jnp.result_type(leaf)) for i, leaf in enumerate(leaves)]
        state, best = jax.tree.unflatten(structure, read)
        return state, best, arrays["losses"].tolist()

    def _read(self) -> dict[str, np.ndarray] | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            with np.load(io.BytesIO(self.path.read_bytes())) as file:
                arrays = dict(file)
        except Exception as error:  # a damaged zip file may raise anything
            warn(f"Cannot read {self.path} ({type(error).__name__}): starting again.")
            return None
        return arrays if arrays.get("call") == self.call else None


def _code_of(apply: Apply, loss: Objective, params: Params, inputs: Inputs, labels: Labels) -> tuple[str, str]:
    """Return a description of what the function and the loss compute, which is the same in every process.

    It includes the constants, which a jaxpr does not print.
    """
    traced = jax.make_jaxpr(lambda *args: jax.vmap(loss)(apply(*args[:2]), args[2]))(params, inputs, labels)
    jaxprs = [traced, *(inner for eqn in all_equations(traced) for inner in inner_jaxprs(eqn))]
    constants = [value for jaxpr in jaxprs if isinstance(jaxpr, core.ClosedJaxpr) for value in jaxpr.consts]
    return re.sub(r"0x[0-9a-f]+", "", str(traced)), fingerprint(constants)


@cache  # the same function object for the same arguments, so that it is compiled only once
def _loss(apply: Apply, objective: Objective, parametrization: Parametrization, size: int | None = None) -> Loss:
    """Return the loss of the network on a minibatch, as a function of the learned values.

    `size` cuts off padding, which would otherwise count in the statistics of the minibatch.
    """

    def loss(numbers: Any, rows: Int32[Array, "b"], given: Any, key: PRNGKeyArray) -> tuple[Float[Array, ""], None]:
        networks, inputs, labels = given
        rows = rows[:size]
        x, y = jax.tree.map(lambda leaf: leaf[rows], (inputs, labels))
        return minibatch_loss(objective, apply(parametrization.combine(numbers, networks), x), y, rows >= 0), None

    return loss


@cache
def _by_batch(apply: Apply) -> Apply:
    """Return the function with the running statistics of each batch."""
    return lambda params, inputs: normalise_by_batch(apply, params, inputs)[0]


@cache
def _adam(learning_rate: float) -> optax.GradientTransformation:
    return optax.adam(learning_rate)
