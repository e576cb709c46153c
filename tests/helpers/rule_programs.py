"""Small programs that need one rule each, and helpers for the tests of all rule modules."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from zoo import Shape, random_arrays

from mcomb.symmetry import rules
from mcomb.symmetry.derive import derive_from

ROWS, FEATURES, UNITS = 4, 5, 6
WHOLE = [(UNITS,)]
ONE_OUTPUT = {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "last": (UNITS, 2)}
EXPERTS = {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "out": (3, UNITS, 2)}
BY_EXPERT = [(3,), (UNITS,)]


class Program(NamedTuple):
    """A function of parameters and an input, their shapes, and the shapes of its index arrays."""

    fn: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    free: list[tuple[int, ...]]
    input: tuple[int, ...] = (ROWS, FEATURES)

    @property
    def arguments(self) -> tuple[dict[str, Shape], Shape]:
        """Return the shapes of the parameters and the input."""
        params = {name: Shape(shape, jnp.float32) for name, shape in self.shapes.items()}
        return params, Shape(self.input, jnp.float32)


def layer(middle, free, **shapes):
    """Return a program with a layer of tanh units, an operation on them, and a dense layer."""

    def fn(params, x):
        return middle(jnp.tanh(x @ params["up"]), params) @ params["down"]

    return Program(fn, {"up": (FEATURES, UNITS), "down": (UNITS, 2)} | shapes, free)


def pooled(pool, free):
    """Return a program that applies an operation to a layer of tanh units."""
    return Program(lambda p, x: pool(jnp.tanh(x @ p["up"])), {"up": (FEATURES, UNITS)}, free)


def weights(fn, free, *shapes):
    """Return a program that applies a function to the tanh of its parameters."""
    names = "abc"[: len(shapes)]
    run = lambda p, x: fn(*(jnp.tanh(p[name]) for name in names))  # noqa: E731
    return Program(run, dict(zip(names, shapes, strict=True)), free)


def check_freedom(program: Program) -> None:
    """Fail unless a program has the expected permutations and they preserve its result."""
    params, x = program.arguments
    with jax.numpy_rank_promotion("allow"):
        spec = derive_from(program.fn, params, x)
        assert sorted(map(spec.shape, spec.sizes)) == sorted(program.free), str(spec)
        spec.check(program.fn, random_arrays(params), random_arrays(x), draws=3)


def unused_rules(module: ModuleType, programs: Mapping[str, Program], monkeypatch: Any) -> set[str]:
    """Return one primitive for each of the module's rules that no program uses."""
    tables = (rules.CONTROL, rules.RULES, rules.FACT_RULES)
    unused = {rule: name for table in tables for name, rule in table.items() if rule.__module__ == module.__name__}

    def spy(rule):
        def run(*args):
            unused.pop(rule, None)
            return rule(*args)

        return run

    for table in tables:
        for name, rule in table.items():
            monkeypatch.setitem(table, name, spy(rule))
    with jax.numpy_rank_promotion("allow"):
        for program in programs.values():
            derive_from(program.fn, *program.arguments)
    return {*unused.values()}
