"""Small programs that need one rule each, and what the tests of all rule modules share."""

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
    """A function of parameters of these shapes and of an input, and the shapes of its permutations' index arrays."""

    fn: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    free: list[tuple[int, ...]]
    input: tuple[int, ...] = (ROWS, FEATURES)

    @property
    def arguments(self) -> tuple[dict[str, Shape], Shape]:
        """The shapes of the parameters and of the input."""
        params = {name: Shape(shape, jnp.float32) for name, shape in self.shapes.items()}
        return params, Shape(self.input, jnp.float32)


def layer(middle, free, **shapes):
    """A layer of tanh units, an operation on them, and a dense layer."""

    def fn(params, x):
        return middle(jnp.tanh(x @ params["up"]), params) @ params["down"]

    return Program(fn, {"up": (FEATURES, UNITS), "down": (UNITS, 2)} | shapes, free)


def pooled(pool, free):
    """An operation on a layer of tanh units."""
    return Program(lambda p, x: pool(jnp.tanh(x @ p["up"])), {"up": (FEATURES, UNITS)}, free)


def weights(fn, free, *shapes):
    """A function of tanh of parameters of these shapes."""
    names = "abc"[: len(shapes)]
    run = lambda p, x: fn(*(jnp.tanh(p[name]) for name in names))  # noqa: E731
    return Program(run, dict(zip(names, shapes, strict=True)), free)


def check_freedom(program: Program) -> None:
    """Fail unless a program has the freedom that it claims, and computes the same when its parameters are permuted."""
    params, x = program.arguments
    with jax.numpy_rank_promotion("allow"):
        spec = derive_from(program.fn, params, x)
        assert sorted(map(spec.shape, spec.sizes)) == sorted(program.free), str(spec)
        spec.check(program.fn, random_arrays(params), random_arrays(x), draws=3)


def unused_rules(module: ModuleType, programs: Mapping[str, Program], monkeypatch: Any) -> set[str]:
    """Return a primitive for each rule of a module that none of the programs needs."""
    tables = (rules.RULES, rules.FACT_RULES)
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
