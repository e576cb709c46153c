"""Reshapes that are only read in slices.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_programs import FEATURES, ROWS, Program, check_freedom

from mcomb.symmetry.rules.slices import deferrable_reshapes

HEADS, DIMS = 2, 3
SHAPES = {"qkv": (FEATURES, 3 * HEADS * DIMS), "out": (HEADS * DIMS, 2)}
SEPARATE = [(HEADS,), (HEADS, DIMS), (HEADS, DIMS)]
SHARED = [(HEADS,), (HEADS, DIMS)]


def attention(read, whole=lambda qkv: 0.0):
    """Return attention that reads query, key and value from one product."""

    def fn(params, x):
        qkv = (x @ params["qkv"]).reshape(ROWS, 3, HEADS, DIMS)
        q, k, v = read(qkv)
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
        return jnp.einsum("hqk,khd->qhd", weights, v).reshape(ROWS, -1) @ params["out"] + whole(qkv)

    return fn


def sliced(qkv):
    return [jax.lax.index_in_dim(qkv, i, 1, keepdims=False) for i in range(3)]


def split(qkv):
    return [part[:, 0] for part in jnp.split(qkv, 3, axis=1)]


PROGRAMS = {
    "slices": Program(attention(sliced), SHAPES, SEPARATE),
    "split": Program(attention(split), SHAPES, SEPARATE),
    "unstack": Program(attention(lambda qkv: jnp.unstack(qkv, axis=1)), SHAPES, SEPARATE),
    "slices that are also read as a whole": Program(attention(sliced, lambda qkv: (qkv**3).sum()), SHAPES, SHARED),
    "slices that overlap": Program(
        attention(lambda qkv: [jnp.tanh(qkv[:, :2]).sum(1), qkv[:, 1], qkv[:, 2]]), SHAPES, SEPARATE
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_slices_of_transposes_are_found():
    def fn(x):
        q, k, v = (part.sum((2, 3)) for part in jnp.split(x.reshape(ROWS, 3, HEADS, DIMS).swapaxes(0, 1), 3))
        return q * k + v

    jaxpr = jax.make_jaxpr(fn)(np.zeros((ROWS, 3 * HEADS * DIMS))).jaxpr
    names = {eqn.primitive.name for eqn in jaxpr.eqns if deferrable_reshapes(jaxpr.eqns, ()) & {*eqn.outvars}}
    assert names == {"reshape", "transpose"}
    whole = jaxpr.eqns[0].outvars  # a result of the function is not only read in slices
    assert not deferrable_reshapes(jaxpr.eqns, whole)
