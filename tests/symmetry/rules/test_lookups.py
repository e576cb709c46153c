"""Rules of lookups, writes and positions.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_programs import (
    BY_EXPERT,
    EXPERTS,
    FEATURES,
    ONE_OUTPUT,
    ROWS,
    UNITS,
    WHOLE,
    Program,
    check_freedom,
    layer,
    pooled,
    unused_rules,
    weights,
)

from mcomb.symmetry.rules import lookups


def choose(params, x):
    return jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)


def experts_by_one_hot(params, x):
    weight, index = choose(params, x)
    weights = jnp.einsum("bk,bke->be", weight, jax.nn.one_hot(index, 3))
    hidden = jnp.tanh(jnp.einsum("bi,eih->beh", x, params["in"]))
    return jnp.einsum("be,beh,eho->bo", weights, hidden, params["out"])


def switch(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    index = gates.argmax(-1)
    gate = jnp.take_along_axis(gates, index.reshape(-1, 1), -1)
    return gate * jnp.einsum("bi,bih->bh", x, params["in"][index]) @ params["last"]


def best_two(params, x):
    index = jnp.argsort(-(x @ params["router"]), axis=-1)[:, :2]
    return jnp.einsum("bi,bkih->bh", x, params["in"][index]) @ params["last"]


def expert_of_the_batch(params, x):
    return jnp.tanh(x @ params["in"][jnp.argmax(x.mean(0) @ params["router"])]) @ params["last"]


def experts_and_their_load(params, x):
    _, index = choose(params, x)
    return experts_by_one_hot(params, x) * jnp.square(jnp.zeros(3).at[index].add(1.0)).sum()


def experts_row_by_row(params, x):
    def one(row, index):
        return jnp.tanh(row @ params["in"][index]) @ params["out"][index]

    return jax.vmap(one)(x, jnp.argmax(x @ params["router"], axis=-1))


def experts_by_descending_scores(params, x):
    index = jnp.argsort(x @ params["router"], axis=-1, descending=True)[:, :2]
    return jnp.einsum("bi,bkih->bh", x, params["in"][index]) @ params["last"]


def written_to(params, x):
    """A function that returns nothing writes units to an array."""
    array = jax.new_ref(jnp.zeros(UNITS))

    @jax.jit
    def write(w):
        jax.ref.addupdate(array, ..., w * x[0, 0])

    write(params["w"])
    return array[...] * 2, (jnp.tanh(params["w"]) * params["v"]).sum()


def last_of_several(params, x):
    """Units write the same rows to positions of their own: what was written last stays."""
    positions = jnp.argmax(jnp.einsum("if,jfk->jik", x, params["w"]), -1)
    return jnp.zeros(3).at[positions].set(jnp.broadcast_to(x[:, 0], positions.shape)) @ params["c"]


def by_largest(write):
    """Each unit writes to the entry that is the largest of its own."""

    def fn(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return write(jnp.zeros(3).at[(hidden.T @ params["router"]).argmax(-1)], hidden.sum(0)) @ params["last"]

    return fn, {"up": (FEATURES, UNITS), "router": (ROWS, 3), "last": (3, 2)}


def pairs_of_positions(params, x):
    """Entries of a square matrix, whose rows and columns are both numbered by the largest units."""
    index = jax.lax.top_k(jnp.tanh(x @ params["up"]), 2)[1]
    dims = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
    return jax.lax.gather(params["square"], index, dims, (1, 1))


def code_book(params, x):
    z = x @ params["in"]
    distances = jnp.square(z.reshape(ROWS, 1, UNITS) - params["codes"].reshape(1, 7, UNITS)).sum(-1)
    return params["codes"][distances.argmin(-1)] @ params["out"]


def residual(params, x, i):
    return x + jnp.tanh(x @ params["up"][i] + params["bias"][i].reshape(1, -1)) @ params["down"][i]


def by_counter(params, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: residual(params, x, i), x)


LAYERS = {"up": (3, FEATURES, UNITS), "bias": (3, UNITS), "down": (3, UNITS, FEATURES)}


PROGRAMS = {
    "expert of the whole batch": Program(expert_of_the_batch, ONE_OUTPUT, [(6,)]),
    "experts and their load": Program(experts_and_their_load, EXPERTS, [(3,), (3, UNITS)]),
    "units add to their largest entries": Program(*by_largest(lambda at, h: at.add(h)), BY_EXPERT),
    "units write to their largest entries": Program(*by_largest(lambda at, h: at.set(h)), [(3,)]),
    "units write to one entry": Program(
        lambda p, x: (
            jnp.zeros(3).at[jnp.broadcast_to((x.sum(0) @ p["router"]).argmax(), UNITS)].set((x @ p["up"]).sum(0))
            @ p["last"]
        ),
        {"up": (FEATURES, UNITS), "router": (FEATURES, 3), "last": (3, 2)},
        [(3,)],
    ),
    "median": pooled(lambda h: jnp.median(h, -1), WHOLE),
    "quantile": pooled(lambda h: jnp.quantile(h, jnp.array([0.2, 0.7]), axis=-1), WHOLE),
    "the largest two": pooled(lambda h: jax.lax.top_k(h, 2)[0], WHOLE),
    "trace": pooled(lambda h: jnp.trace(h.T @ h), []),
    "the first two set": layer(lambda h, p: h.at[:, :2].set(0.0), []),
    "experts row by row": Program(experts_row_by_row, EXPERTS, [(6,)]),
    "experts by descending scores": Program(experts_by_descending_scores, ONE_OUTPUT, [(6,)]),
    "the best expert": Program(switch, ONE_OUTPUT, BY_EXPERT),
    "experts by argsort": Program(best_two, ONE_OUTPUT, [(6,)]),
    "code book": Program(code_book, {"in": (FEATURES, UNITS), "codes": (7, UNITS), "out": (UNITS, 2)}, [(6,), (7,)]),
    "layers by a counter": Program(by_counter, LAYERS, [(6,)]),
    "positions as numbers": pooled(lambda h: h.argmax(-1) + 1.0, []),
    "positions as the result": pooled(lambda h: jax.lax.top_k(h, 2)[1], []),
    "positions of another axis": pooled(
        lambda h: jax.nn.one_hot(h.argmax(-1), UNITS + 1) @ jnp.arange(UNITS + 1.0), []
    ),
    "positions that are shifted": pooled(lambda h: jnp.take(h, h.argmax(-1) + 1, -1).sum(), []),
    "positions less a number": pooled(lambda h: jnp.where(h.argmax(-1) + jnp.array([-3]) < 0, 1.0, 2.0), []),
    "positions in other rows": pooled(lambda h: h.argmax(-1)[np.array([1, 0, 3])], []),
    "positions by number": pooled(lambda h: jnp.take_along_axis(jax.lax.top_k(h, 2)[1], np.array([[1]] * 4), 1), []),
    "positions at positions": pooled(lambda h: jnp.argsort(h, axis=-1)[jnp.arange(4), h.argmax(-1) // 2], []),
    "windows at positions": pooled(jax.vmap(lambda row: jax.lax.dynamic_slice_in_dim(row, row.argmax(), 2)), []),
    "pairs of positions": Program(pairs_of_positions, {"up": (FEATURES, UNITS), "square": (UNITS, UNITS)}, []),
    "positions of a type that is too small": Program(
        lambda p, x: jnp.take(p["codes"], (x @ p["up"]).argmax(-1).astype(jnp.int8), axis=0, mode="clip"),
        {"up": (FEATURES, 300), "codes": (300, 2)},
        [],
    ),
    "positions made in a type that is too small": Program(
        lambda p, x: jnp.take(p["codes"], jax.lax.argmax(x @ p["up"], 1, jnp.int8), axis=0, mode="clip"),
        {"up": (FEATURES, 300), "codes": (300, 2)},
        [],
    ),
    "columns at the largest of all rows": weights(lambda a: a[:, jnp.argmax(a, 1)].sum(), [(4,), (5,)], (4, 5)),
    "written to the largest of all rows": weights(
        lambda a: jnp.square(jnp.tanh(a.at[:, jnp.argmax(a, 1)].add(1.0))).sum(), [(4,), (5,)], (4, 5)
    ),
    "the largest of each row": weights(
        lambda a: jnp.take_along_axis(a, jnp.argmax(a, 1, keepdims=True), 1).sum(), [(4,), (4, 5)], (4, 5)
    ),
    "ranks": Program(
        lambda p, x: jnp.where(jnp.argsort(jnp.argsort(h := x @ p["up"], 1), 1) > 3, h, 0) @ p["down"],
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [],
    ),
    "ranks of other rows": weights(lambda a, w: (jnp.argsort(jnp.argsort(a, 1), 0) * w).sum(), [], (4, 3), (4, 3)),
    "the largest of each row, one by one": Program(
        lambda p, x: jax.vmap(lambda row: jax.lax.dynamic_index_in_dim(row, row.argmax()))(x @ p["up"]),
        {"up": (FEATURES, UNITS)},
        WHOLE,
    ),
    "positions at least no number": Program(
        lambda p, x: p["codes"][jnp.maximum(jnp.argmax(x @ p["up"], 1).astype(float), jnp.nan).astype(int)],
        {"up": (FEATURES, UNITS), "codes": (UNITS, 2)},
        [],
    ),
    "an array that is written to": Program(written_to, {"w": (UNITS,), "v": (UNITS,)}, []),
    "several updates of one entry": Program(last_of_several, {"w": (UNITS, FEATURES, 3), "c": (3,)}, [(3,)]),
    "the largest as one of all positions": weights(
        lambda w, v: ((jnp.argmax(w) == jnp.arange(UNITS)) * v).sum(), [(6,)], (6,), (6,)
    ),
    "positions of no case": weights(
        lambda a, b, c: (
            c[jax.lax.select_n(-1, jnp.argmax(a), jnp.argmax(b))] + c[jax.lax.select_n(7, 0, jnp.argmax(b))]
        ),
        [],
        *[(6,)] * 3,
    ),
    "looked up by two positions for each row": weights(
        lambda a, b, c: c[jnp.argmax(a, 1), jnp.argmax(b, 1)].sum(), [(5,), (6,), (3,)], (5, 6), (5, 3), (6, 3)
    ),
    "looked up by a position and a number": weights(
        lambda a, c: c[jnp.argmax(a, 1), jnp.array([2, 0])].sum(), [(6,)], (2, 6), (6, 3)
    ),
    "looked up by several positions in turn": weights(
        lambda a, b, c: a[jnp.array([jnp.argmax(a), jnp.argmax(b)])] @ c, [], (6,), (6,), (2,)
    ),
    "positions beside numbers": weights(
        lambda a, b: jnp.append(jnp.argmax(a, keepdims=True), 0).astype(float) @ b, [], (6,), (2,)
    ),
    "looked up by a position and by numbers": weights(
        lambda a, b, c: a[jnp.argmax(b), jnp.array([2, 0, 1])] @ c, [(6,)], (6, 3), (6,), (3,)
    ),
    "added up at a position of each row": weights(
        lambda a, b: jnp.square(jnp.zeros((3, 6)).at[jnp.arange(3), jnp.argmax(a)].add(b)).sum(1) @ jnp.arange(3.0),
        [(6,)],
        (6,),
        (3,),
    ),
    "added up where numbers say": weights(lambda a, b: jnp.zeros(2).at[(a > 0).astype(int)].add(b), [(6,)], (6,), (6,)),
    "written where numbers say": weights(lambda a, b: jnp.zeros(2).at[(a > 0).astype(int)].set(b), [], (6,), (6,)),
    "the largest of each block": Program(
        lambda p, x: (
            ((h := (x @ p["up"]).reshape(ROWS, 3, 2)) * jax.nn.one_hot(h.argmax(-1), 2)).reshape(ROWS, UNITS)
            @ p["down"]
        ),
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [(3,), (3, 2)],
    ),
    "how often each is the largest": weights(
        lambda a, w: (jnp.bincount(jnp.argmax(a, 1), length=3) * w).sum(), [(5,), (3,)], (5, 3), (3,)
    ),
    "positions that are made larger": weights(lambda w, v: v[jnp.maximum(jnp.argmax(w), 2)], [], (6,), (6,)),
    "updated slice": layer(lambda h, p: jax.lax.dynamic_update_slice(h, h[:, :2], (0, 4)), []),
    "updated rows": layer(lambda h, p: jax.lax.dynamic_update_slice(h, h[:1], (2, 0)), WHOLE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(lookups, PROGRAMS, monkeypatch)
