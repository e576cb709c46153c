"""Rules of calls, branches, loops and shards.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rule_programs import FEATURES, UNITS, WHOLE, Program, check_freedom, layer, pooled, unused_rules, weights

from mcomb.symmetry.rules import control


def sharded(params, x):
    def inner(params, x):
        return jax.lax.psum((jnp.tanh(x @ params["up"]) @ params["down"]).sum(0), "device")

    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    return jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("device")), out_specs=P())(params, x)


def exchanged(a):
    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    swap = lambda part: jax.lax.ppermute(part, "device", [(0, 1), (1, 0)])  # noqa: E731
    return jnp.sum(jax.shard_map(swap, mesh=mesh, in_specs=P("device"), out_specs=P("device"))(a) * jnp.sin(a))


own_mapping = jax.custom_batching.custom_vmap(jnp.sin)


own_mapping.def_vmap(lambda size, is_mapped, x: (jnp.sin(x), is_mapped[0]))


PROGRAMS = {
    "shards": Program(sharded, {"up": (FEATURES, UNITS), "down": (UNITS, 2)}, WHOLE),
    "positions as the result of a loop": pooled(
        lambda h: jax.lax.scan(lambda c, _: (c + 1, jnp.argmax(h * c, -1)), 1.0, length=2)[1], []
    ),
    "normalised over examples of a named axis": layer(
        lambda h, p: jax.vmap(lambda row: row - jax.lax.pmean(row, "rows"), axis_name="rows")(h), WHOLE
    ),
    "units compared along a named axis": layer(
        lambda h, p: jax.vmap(lambda unit: unit / jax.lax.pmax(unit, "units"), 1, 1, axis_name="units")(h), WHOLE
    ),
    "exchanged among devices": weights(exchanged, [(6,)], (4, 6)),
    "steps that are added up": weights(
        lambda a, b: jax.lax.scan(lambda c, row: (c + (row * b).sum(), None), 0.0, a)[0], [(5,)], (4, 5), (5,)
    ),
    "a row in every step": weights(
        lambda a, b: jax.lax.scan(lambda c, r: (jnp.cos(c), c * (r * a[0]).sum()), 0.0, b)[1].sum() + (a * b).sum(),
        [(5,)],
        (4, 5),
        (4, 5),
    ),
    "the same in every step": weights(
        lambda a, b: (jax.lax.scan(lambda c, r: (jnp.cos(c), a), 0.0, b)[1][:, 0] * b).sum() + (a * b).sum(),
        [(5,)],
        (4, 5),
        (4, 5),
    ),
    "own rule of mapping": layer(lambda h, p: own_mapping(h), WHOLE),
    "branches": layer(lambda h, p: jax.lax.cond(h.sum() > 0, jnp.sin, lambda h: h * p["w"], h), WHOLE, w=(1, UNITS)),
    "while loop": layer(
        lambda h, p: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ p["w"]), (0, h))[1],
        WHOLE,
        w=(UNITS, UNITS),
    ),
    "linear equations": layer(lambda h, p: jnp.linalg.solve(h.T @ h + jnp.eye(UNITS), h.T).T, []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(control, PROGRAMS, monkeypatch)


def test_rows_of_an_explicit_sharding_leave_units_free():
    def fn(params, x):
        hidden = jnp.tanh(jax.sharding.reshard(x, P("device", None)) @ params["up"])
        return jax.sharding.reshard(hidden, P(None, None)) @ params["down"]

    mesh = Mesh(np.array(jax.devices()[:2]), "device", axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        check_freedom(Program(fn, {"up": (FEATURES, UNITS), "down": (UNITS, 2)}, WHOLE))
