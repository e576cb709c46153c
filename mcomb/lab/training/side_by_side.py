"""Train several networks in parallel threads that share devices and memory and stop together."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from mcomb.errors import UserError
from mcomb.lab.data.datasets import Split
from mcomb.lab.tables import readable_bytes
from mcomb.lab.training.checkpoints import TrainingCheckpoints
from mcomb.lab.training.time_estimate import EMBEDDED, say_if_long
from mcomb.lab.training.train import (
    Needs,
    Recipe,
    Stopped,
    Training,
    compile_training,
    initial_state,
    train,
    training_bar,
)
from mcomb.runtime.batching import MEMORY_VARIABLE, free_memory
from mcomb.runtime.devices import describe_devices, device_mesh, meshes_of, replicate
from mcomb.runtime.interrupts import unsaved
from mcomb.runtime.processes import are_several, from_first
from mcomb.runtime.progress import say
from mcomb.runtime.training_loop import TrainState, all_finite
from mcomb.trees import Apply, Params

T = TypeVar("T")


def run_side_by_side(work: Callable[[T, Event], None], arguments: Sequence[T]) -> None:
    """Call work(argument, stop) for each argument, each in its own thread.

    If a thread fails or the user interrupts, this function sets `stop`, waits for the threads and raises the first
    error. Threads should return or raise soon after `stop` is set.
    """
    stop, errors = Event(), list[BaseException]()

    def run(argument: T) -> None:
        try:
            work(argument, stop)
        except BaseException as error:
            errors.append(error)  # before `stop` is set, because other threads fail then too
            stop.set()

    with ThreadPoolExecutor(max(1, len(arguments))) as pool:
        try:
            wait([pool.submit(run, argument) for argument in arguments])
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]


class Budget:
    """Memory budget of several threads: each reserves its part and waits until enough is free."""

    def __init__(self, size: float):
        self.size = self._left = size
        self._changed = Condition()

    @contextmanager
    def reserve(self, needed: float, stop: Event, on_wait: Callable[[], object]) -> Iterator[None]:
        """Reserve `needed` bytes, at most `size`, for the body of the context.

        Args:
            needed: The number of bytes.
            stop: Ends the wait when set.
            on_wait: Called once before waiting.

        Raises:
            RuntimeError: `stop` is set.
        """
        with self._changed:
            if needed > self._left:
                on_wait()
            while needed > self._left and not stop.is_set():
                self._changed.wait(timeout=0.2)
            if stop.is_set():
                raise RuntimeError("stopped while waiting for memory")
            self._left -= needed
        try:
            yield
        finally:
            with self._changed:
                self._left += needed
                self._changed.notify_all()


class Unfinished(NamedTuple):
    """A network to train: its name, its seed and examples, and its checkpoints."""

    name: str
    training: Training
    checkpoints: TrainingCheckpoints


@dataclass(frozen=True)
class Trainer:
    """Trainer of several networks with the same architecture and recipe, in parallel.

    Attributes:
        apply: The function from parameters and raw inputs to logits.
        init: The function from a seed to the parameters of a new network.
        data: All train examples.
        groups: The function from labels to the group of each example, by which networks split the data.
        recipe: The training recipe.
        steps_per_call: Training steps in one compiled call, or None for an automatic choice.
    """

    apply: Apply
    init: Callable[[int], Params]
    data: Split
    groups: Callable[[np.ndarray], np.ndarray]
    recipe: Recipe
    steps_per_call: int | None = None

    def train_side_by_side(self, networks: Sequence[Unfinished], share: int) -> None:
        """Train networks in parallel, each on `share` devices or on its previous number of devices."""
        by_size: dict[int, list[Unfinished]] = {}
        for network in networks:
            begun_with = None if are_several() else network.checkpoints.device_count
            by_size.setdefault(min(begun_with or share, len(jax.devices())), []).append(network)
        on_cpu = jax.default_backend() == "cpu"
        budget = Budget(from_first(free_memory) * (len(jax.local_devices()) if on_cpu else 1))
        for size, group in by_size.items():
            meshes = meshes_of(size)
            lanes = [(mesh, group[i :: len(meshes)], budget) for i, mesh in enumerate(meshes)]
            run_side_by_side(self._train_in_turn, lanes)

    def _train_in_turn(self, lane: tuple[Mesh, Sequence[Unfinished], Budget], stop: Event) -> None:
        mesh, networks, budget = lane
        for network in networks:
            self._train(network, mesh, budget, stop)

    def _train(self, network: Unfinished, mesh: Mesh, budget: Budget, stop: Event) -> None:
        (name, (seed, subset), checkpoints), data, recipe = network, self.data, self.recipe
        if subset:
            data = data.take(subset.rows(self.groups(data.labels)))
        describe = f"training {name}"
        with ExitStack() as held:
            # Show the bar first: compilation takes seconds, and creating the first state another one or two.
            bar = held.enter_context(training_bar(recipe, len(data.labels), checkpoints.step, describe))
            if recipe.epochs:
                steps = recipe.epochs * (len(data.labels) // recipe.batch_size) - checkpoints.step
                mesh, needs = self._compile_to_fit(data, mesh, budget.size, describe)
                sizes = f"{readable_bytes(needs.memory)} of {readable_bytes(budget.size)}"
                wait = partial(say, f"{describe}: waiting for memory ({sizes})")
                shared = needs.memory if jax.default_backend() == "cpu" else 0.0
                held.enter_context(budget.reserve(shared, stop, wait))
                say_if_long(needs.flop * steps, mesh, describe)
            state = initial_state(self.init(seed), recipe, len(data.labels))
            if checkpoints.records:
                state = checkpoints.restore(state)
            elif recipe.epochs == 0:
                checkpoints.save(0, replicate(state, mesh), mesh)
            before = int(state.step)
            how: dict[str, Any] = {"mesh": mesh, "per_call": self.steps_per_call, "stop": stop}
            how |= {"describe": describe, "bar": bar, "begun": held.enter_context(unsaved())}
            epochs = train(self.apply, state, data, recipe, seed, **how)
            del state  # free it, because a network may fill half of the memory
            try:
                for epoch, trained, _ in epochs:
                    if epoch % recipe.checkpoint_every == 0 or epoch == recipe.epochs:
                        checkpoints.save(epoch, trained, mesh)
            except Stopped as stopped:
                self._save_stopped(checkpoints, stopped.state, before, len(data.labels), mesh)
                raise

    def _compile_to_fit(self, data: Split, mesh: Mesh, free: float, describe: str) -> tuple[Mesh, Needs]:
        """Compile the training step on a mesh, or on one CPU device if only that fits into free memory.

        Each device stores a copy of the weights, and all devices of a CPU share its memory.
        """
        alone = [device_mesh(mesh.devices.tolist()[:1])] if mesh.size > 1 and jax.default_backend() == "cpu" else []
        shapes = jax.eval_shape(lambda: self.init(0))
        for candidate in (mesh, *([] if are_several() else alone)):
            needs = compile_training(self.apply, shapes, data, self.recipe, candidate, self.steps_per_call)
            if needs.memory <= free:
                if candidate is not mesh:
                    say(f"{describe} on {describe_devices(candidate)} to fit into {readable_bytes(free)}")
                return candidate, needs
        raise UserError(
            f"{describe} needs {readable_bytes(needs.memory)} of memory, but only {readable_bytes(free)} is free: "
            f"reduce --width or --batch-size, use --setup {EMBEDDED}, or set {MEMORY_VARIABLE}."
        )

    def _save_stopped(
        self, checkpoints: TrainingCheckpoints, state: TrainState, before: int, examples: int, mesh: Mesh
    ) -> None:
        """Save the state of a stopped run if it advanced beyond the step `before` in a single process."""
        epoch, within = divmod(int(state.step), examples // self.recipe.batch_size)
        if int(state.step) > before and not are_several() and all_finite(state.params):
            checkpoints.save(None if within else epoch, state, mesh)


def device_share(networks: int) -> int:
    """Return the number of devices for each of several networks.

    Connected processes train the networks one after the other, each on all devices.
    """
    return len(jax.devices()) if are_several() else max(1, len(jax.devices()) // networks)
