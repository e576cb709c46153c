"""Elementwise rules, unknown primitives, and the reasons that frozen axes give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rule_programs import FEATURES, ROWS, UNITS, WHOLE, check_freedom, layer, unused_rules
from zoo import Shape

from mcomb import derive_spec
from mcomb.symmetry.rules import elementwise

PROGRAMS = {
    "elementwise": layer(lambda h, p: jnp.select([h > 0, h < -0.5], [h, 2 * h], 0.0), WHOLE),
    "the same array": layer(lambda h, p: jax.lax.optimization_barrier(h), WHOLE),
    "a primitive without a rule": layer(lambda h, p: jax.lax.approx_max_k(h, UNITS)[0], []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(elementwise, PROGRAMS, monkeypatch)


def sharded_units(params, x):
    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    run = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P(None, "device"), out_specs=P(None, "device"))
    return run(params["in"]).sum()


def cut_twice(params, x):
    """Six units are three pairs in one place and two triples in another."""
    hidden = x @ params["in"]
    return hidden.reshape(ROWS, 2, 3).max(1) @ params["out"] + hidden.reshape(ROWS, 3, 2).max(1) @ params["other"]


@pytest.mark.parametrize(
    ("fn", "shapes", "words"),
    [
        (
            lambda p, x: jax.lax.ragged_dot(x, p["in"], jnp.array([1, 3])) @ p["out"],
            {"in": (2, FEATURES, UNITS), "out": (UNITS, 2)},
            "ragged_dot_general (groups take the rows in turn)",
        ),
        (
            cut_twice,
            {"in": (FEATURES, UNITS), "out": (3, 2), "other": (2, 2)},
            "reshape (its parts end where those of a product or a concatenation do not)",
        ),
        (sharded_units, {"in": (FEATURES, UNITS)}, "shard_map (devices split the array by position)"),
        (lambda p, x: jnp.take(x @ p["in"], jnp.array([2, 0]), 1), {"in": (5, 6)}, "gather (entries are looked up by"),
        (lambda p, x: jnp.argmax(x @ p["in"] > 0, 1), {"in": (5, 6)}, "argmax (of equal entries it takes the first)"),
        (lambda p, x: jnp.argmax(x @ p["in"], 1), {"in": (5, 6)}, "argmax (positions are used as numbers)"),
        (
            lambda p, x: jax.lax.approx_max_k(x @ p["in"], 2)[0],
            {"in": (5, 6)},
            "approx_top_k (its dependence on the order is unknown)",
        ),
    ],
)
def test_frozen_axis_names_the_reason(fn, shapes, words):
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    spec = derive_spec(fn, params, Shape((ROWS, FEATURES), jnp.float32))
    assert any(frozen.leaf == "in" and frozen.reason.startswith(words) for frozen in spec.frozen), str(spec)


def test_sort_freezes_its_result_alone():
    def fn(params, x):
        return jnp.sort(x @ params["up"], axis=-1) * 2 @ params["down"]

    params = {"up": Shape((FEATURES, UNITS), jnp.float32), "down": Shape((UNITS, 2), jnp.float32)}
    spec = derive_spec(fn, params, Shape((ROWS, FEATURES), jnp.float32))
    assert spec.axes == {"up": (None, "up"), "down": (None, None)}
    assert {frozen.reason.split()[0] for frozen in spec.frozen if frozen.leaf == "down"} == {"sort", "the"}
