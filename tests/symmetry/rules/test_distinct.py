"""Choices among entries that may be equal.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_programs import FEATURES, ROWS, UNITS, Program, check_freedom, weights


def copies_of(params, x):
    """Rows that are looked up, some of them twice."""
    return params["t"][jnp.argmax(jnp.einsum("f,jfk->jk", x[0], params["w"]), -1)]


def largest_copy(change, free=((3,), (FEATURES,))):
    """What is looked up at the largest of what is made of copies."""
    return Program(
        lambda p, x: p["v"][jnp.argmax(change(copies_of(p, x), x))],
        {"w": (UNITS, FEATURES, 3), "t": (3, FEATURES), "v": (UNITS,)},
        [*free],
    )


def largest_of(change):
    """What is looked up at the largest unit of each row, after something was done to rows."""
    return Program(
        lambda p, x: p["codes"][jnp.argmax(change(x @ p["up"]), 1)], {"up": (FEATURES, UNITS), "codes": (UNITS, 2)}, []
    )


def carried(change):
    """The same of what a loop carries, which is changed after each look."""

    def fn(params, x):
        def step(i, state):
            h, sums = state
            return change(h), sums + params["codes"][jnp.argmax(h)]

        return jax.lax.fori_loop(0, 3, step, (x[0] @ params["up"], jnp.zeros(2)))[1]

    return Program(fn, {"up": (FEATURES, UNITS), "codes": (UNITS, 2)}, [])


PROGRAMS = {
    "the first that is true": Program(
        lambda p, x: p["codes"][jnp.argmax(x @ p["up"] > 0, -1)], {"up": (FEATURES, UNITS), "codes": (UNITS, 2)}, []
    ),
    "the order of signs": Program(
        lambda p, x: p["codes"][jnp.argsort(x @ p["up"] > 0, axis=-1)[:, 1]],
        {"up": (FEATURES, UNITS), "codes": (UNITS, 2)},
        [],
    ),
    "the largest two integers": Program(
        lambda p, x: p["codes"][jax.lax.top_k((x @ p["up"]).astype(int), 2)[1]],
        {"up": (FEATURES, UNITS), "codes": (UNITS, 2)},
        [],
    ),
    "the largest of truth values as floats": weights(
        lambda w, v: v[jnp.argmax(1.0 - 2 * (w > 0).astype(float))], [], (6,), (6,)
    ),
    "the largest of signs times a number": weights(
        lambda w, v: v[jax.lax.top_k(w.sum() * jnp.sign(w), 2)[1]].sum(), [], (6,), (6,)
    ),
    "the order of rounded entries": weights(
        lambda w, v: v[jnp.argsort(jnp.round(w), descending=True)[:2]].sum(), [], (6,), (6,)
    ),
    "rounded entries that are sorted": weights(lambda w, v: jnp.sort(jnp.floor(w))[1:3] @ v, [(6,)], (6,), (2,)),
    "what is most often the largest": weights(
        lambda a, v: v[jnp.argmax(jax.nn.one_hot(jnp.argmax(a, 1), 3).sum(0))], [(6,)], (6, 3), (3,)
    ),
    "the largest of sorted copies": largest_copy(lambda r, x: jnp.sort(r, 1) @ x[1]),
    "the largest of copies, one by one": largest_copy(lambda r, x: jax.lax.map(lambda row: row @ x[1], r), [(3,)]),
    "the largest of entries of copies": largest_copy(
        lambda r, x: jnp.take_along_axis(r, jnp.argmax(r, 1)[:, None], 1)[:, 0], [(3,)]
    ),
    "the largest of numbers, one by one": weights(
        lambda a, v: v[jnp.argmax(jax.lax.map(lambda w: jnp.where(w > 0.1, 2.0, 1.0), a))], [], (6,), (6,)
    ),
    "the largest of positions": weights(lambda a, v: v[jnp.argmax(jnp.argmax(a, 1).astype(float))], [], (6, 3), (6,)),
    "the largest of floats that had eight bits": weights(
        lambda w, v: v[jnp.argmax(w.astype(jnp.float8_e4m3fn).astype(float))], [], (6,), (6,)
    ),
    "the largest of floats with few bits": weights(
        lambda w, v: v[jnp.argmax(jax.lax.reduce_precision(w, 5, 2))], [], (6,), (6,)
    ),
    "the largest of a stack of integers": Program(
        lambda p, x: p["v"][jnp.argmax((w := (8 * p["w"]).astype(int).astype(float))[0])] + jnp.sin(w[1]).sum(),
        {"w": (2, UNITS), "v": (UNITS,)},
        [],
    ),
    "the largest where others are written": weights(
        lambda w, v, a: v[jnp.argmax(w.at[jnp.argsort(w)].set(jnp.round(a)))], [], (6,), (6,), (6,)
    ),
    "the largest beside padding": largest_of(lambda h: jnp.pad(h, ((1, 0), (0, 0)))[:-1]),
    "the largest beside zeros": largest_of(lambda h: jnp.concatenate([jnp.zeros((1, UNITS)), h[1:]])),
    "the largest of a stack with zeros": largest_of(lambda h: jnp.stack([h, jnp.zeros_like(h)])[:, 0]),
    "the largest where rows are set": largest_of(lambda h: h.at[np.array([0, 2])].set(0.0)),
    "the largest where a row is set": largest_of(
        lambda h: jax.lax.dynamic_update_slice(h, jnp.zeros((1, UNITS)), (1, 0))
    ),
    "the largest of sums of none": largest_of(lambda h: jax.ops.segment_sum(h, np.array([0, 0, 1, 3]), ROWS)),
    "the largest of rows that are not there": largest_of(lambda h: jnp.take(h, np.array([0, 9, 1]), axis=0)),
    "the largest of what was before": largest_of(lambda h: np.tri(ROWS, k=-1) @ h),
    "the largest of the one before": largest_of(
        lambda h: jax.lax.scan(lambda before, row: (row, before), jnp.zeros(UNITS), h)[1]
    ),
    "the largest in windows of padding": largest_of(
        lambda h: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 1), (1, 1), ((1, 0), (0, 0)))[:-1]
    ),
    "the largest of rounded rows, one by one": largest_of(lambda h: jax.lax.map(jnp.round, h)),
    "the largest of a branch": largest_of(lambda h: jax.lax.cond(h.sum() > 0, jnp.sign, lambda h: h, h)),
    "the largest of signs of some scale": largest_of(lambda h: jnp.sign(h) * jnp.exp(h.sum(1, keepdims=True))),
    "the largest of eight bits": largest_of(lambda h: h.astype(jnp.float8_e4m3fn)),
    "the largest of signs that are carried": carried(jnp.sign),
    "the largest of copies that are carried": carried(lambda h: jnp.broadcast_to(h.sum(), h.shape)),
    "the largest of pairs that are carried": weights(
        lambda a, b: jax.lax.fori_loop(
            0, 3, lambda i, s: (s[0] + s[0].T, s[1] + b.reshape(-1)[jnp.argmax(s[0].reshape(-1))]), (a, 0.0)
        )[1],
        [],
        (4, 4),
        (4, 4),
    ),
    "the second largest": weights(
        lambda w, v: v[jnp.argmax(w - 100 * jax.nn.one_hot(jnp.argmax(w), 6))], [], (6,), (6,)
    ),
    "the largest of copies": weights(lambda w, v: v[jnp.argmax(jnp.tile(w, 2))], [], (3,), (6,)),
    "the largest of repeated entries": weights(lambda w, v: v[jnp.argmax(jnp.repeat(w, 2))], [], (3,), (6,)),
    "the largest of entries and zeros": weights(
        lambda w, v: v[jnp.argmax(jnp.concatenate([-jnp.exp(w), jnp.zeros(3)]))], [], (3,), (6,)
    ),
    "the largest of entries and padding": weights(
        lambda w, v: v[jnp.argsort(jnp.pad(-jnp.exp(w), (0, 3)))[0]], [], (3,), (6,)
    ),
    "the second of an identity matrix": weights(lambda v: v[jax.lax.top_k(jnp.eye(6), 2)[1][:, 1]].sum(), [], (6,)),
    "the first of some that are set": weights(lambda w, v: v[jnp.argsort(w.at[:3].set(-9.0))[0]], [], (6,), (6,)),
    "the largest of a symmetric matrix": weights(
        lambda a, b: b.reshape(-1)[jnp.argmax((a + a.T).reshape(-1))], [], (4, 4), (4, 4)
    ),
    "the largest of pairs": weights(
        lambda a, b: b.reshape(-1)[jnp.argmax((a[:, None] * a[None]).sum(-1).reshape(-1))], [(3,)], (4, 3), (4, 4)
    ),
    "the largest of what is the same in every step": weights(
        lambda a, b: b[jnp.argmax(jax.lax.map(lambda one: jnp.sin(a.sum() + one), jnp.ones(6)))], [(5,)], (5,), (6,)
    ),
    "the largest of looked up entries": weights(
        lambda a, b, c: c[jnp.argmax(b[jnp.argmax(a, 1)])], [(3,)], (6, 3), (3,), (6,)
    ),
    "the largest of products with one-hot vectors": weights(
        lambda a, b, c: c[jnp.argmax(jax.nn.one_hot(jnp.argmax(a, 1), 3) @ b)], [(3,)], (6, 3), (3,), (6,)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])
