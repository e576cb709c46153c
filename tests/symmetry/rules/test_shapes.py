"""Rules of reshapes, slices and concatenations.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import pytest
from rule_programs import FEATURES, ROWS, UNITS, WHOLE, Program, check_freedom, layer, unused_rules, weights
from zoo import Shape

from mcomb import derive_spec
from mcomb.symmetry.rules import shapes


def rotate_pairs(h, params):
    even, odd = h[:, ::2], h[:, 1::2]
    return jnp.stack([even - odd, even * odd], -1).reshape(h.shape)


def attend(qkv):
    q, k, v = qkv
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def heads_in_halves(params, x):
    """Attention, the heads of keys and those of values in one parameter, one after the other."""
    keys, values = jnp.split(params["kv"], 2)
    q, k, v = (jnp.einsum("ni,hid->nhd", x, kernel) for kernel in (params["q"], keys, values))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k), axis=-1)
    return jnp.einsum("hqk,khd,hdo->qo", weights, v, params["down"])


def layer_of_heads(params, x):
    q, k, v = ((x @ params[name]).reshape(-1, 3, 2) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return x + jnp.einsum("hqk,khd->qhd", weights, v).reshape(-1, UNITS) @ params["out"]


def heads_by_number(params, x):
    for i in range(2):
        x = layer_of_heads({name: stack[i] for name, stack in params.items()}, x)
    return x


def in_groups_that_cut_across(params, x):
    """Of 8 and 4 channels, in groups of 6, the second group has two of the one and all of the other."""
    channels = jnp.concatenate([x @ params["a"], x @ params["b"]], 1)
    return jax.nn.softmax(channels.reshape(ROWS, 2, 6)).reshape(ROWS, 12) @ params["down"]


def residual(params, x, i):
    return x + jnp.tanh(x @ params["up"][i] + params["bias"][i].reshape(1, -1)) @ params["down"][i]


def by_number(params, x):
    for i in range(3):
        x = residual(params, x, i)
    return x


def tell_apart(h, params):
    heads = h.reshape(ROWS, 2, 3) * jnp.stack([h.sum(), h.max()]).reshape(1, 2, 1)
    return heads.reshape(h.shape)


def add_groups(h, params):
    groups = jnp.einsum("bgi,gio->bgo", h.reshape(ROWS, 2, 3), params["mid"])
    return groups[:, 0] + groups[:, 1]


def rotary(params, x):
    """Attention over the rows, in which pairs of neighbouring dimensions turn with the row."""
    q, k, v = (jnp.einsum("tc,chd->thd", x, params[name]) for name in "qkv")
    angles = jnp.arange(ROWS)[:, None] / 10.0 ** jnp.arange(2)[None]
    cos, sin = (jnp.expand_dims(f(angles), 1) for f in (jnp.cos, jnp.sin))

    def turn(z):
        even, odd = z[..., ::2], z[..., 1::2]
        return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(z.shape)

    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", turn(q), turn(k)))
    return jnp.einsum("hqk,khd,hdo->qo", weights, v, params["out"])


LAYERS = {"up": (3, FEATURES, UNITS), "bias": (3, UNITS), "down": (3, UNITS, FEATURES)}


HEADS = dict.fromkeys("qkv", (2, FEATURES, UNITS)) | {"out": (2, UNITS, FEATURES)}


PROGRAMS = {
    "interleaved pairs": layer(rotate_pairs, [(3,)]),
    "select": layer(lambda h, p: jnp.select([h > 0, h < -0.5], [h, 2 * h], 0.0), WHOLE),
    "stacked": Program(
        lambda p, x: jnp.stack([jnp.tanh(x @ p["one"]), x @ p["two"]], 1).max(1) @ p["down"],
        {"one": (FEATURES, UNITS), "two": (FEATURES, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "rotary embeddings": Program(rotary, dict.fromkeys("qkv", (FEATURES, 3, 4)) | {"out": (3, 4, 2)}, [(3,), (3, 4)]),
    "heads of layers by their number": Program(heads_by_number, HEADS, [(3,), (3, 2), (3, 2)]),
    "layers by their number": Program(by_number, LAYERS, [(6,)]),
    "heads in halves": Program(
        heads_in_halves,
        {"q": (2, FEATURES, 3), "kv": (4, FEATURES, 3), "down": (2, 3, 2)},
        [(2,), (2, 3)],
    ),
    "a batch of one": layer(lambda h, p: jax.nn.softmax(h, 0) * h.mean(0, keepdims=True), WHOLE)._replace(
        input=(1, FEATURES)
    ),
    "attention over a sequence of one": Program(
        lambda p, x: attend(x.reshape(1, -1) @ p[name] for name in "qkv") @ p["down"],
        dict.fromkeys("qkv", (FEATURES, UNITS)) | {"down": (UNITS, 2)},
        WHOLE * 2,
        (FEATURES,),
    ),
    "positional embeddings of which some are used": Program(
        lambda p, x: (jnp.tanh(x @ p["up"]) + p["position"][:ROWS]) @ p["down"],
        {"up": (FEATURES, UNITS), "position": (3000, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "units of heads that are told apart": layer(tell_apart, [(2, 3)]),
    "units of groups that are added one by one": layer(add_groups, [(2, 3), (4,)], mid=(2, 3, 4), down=(4, 2)),
    "groups of a stack of which one entry is read": weights(
        lambda w: w.reshape(2, 3, 4).sum((0, 1)) + w[1], [(4, 3)], (6, 4)
    ),
    "ranks of reshaped positions": weights(
        lambda a, w: (jnp.argsort(jnp.argsort(a).reshape(2, 3), 1) * w).sum(), [], (6,), (2, 3)
    ),
    "groups that cut across a concatenation": Program(
        in_groups_that_cut_across, {"a": (FEATURES, 8), "b": (FEATURES, 4), "down": (12, 2)}, [(6,), (2,), (4,)]
    ),
    "tiles of heads": Program(
        lambda p, x: (
            jnp.einsum(
                "bhd,bhd->bh", (x @ p["q"]).reshape(ROWS, 4, 3), jnp.tile((x @ p["k"]).reshape(ROWS, 2, 3), (1, 2, 1))
            )
            @ p["out"]
        ),
        {"q": (FEATURES, 12), "k": (FEATURES, 6), "out": (4, 2)},
        [(2,), (2, 2), (2, 3)],
    ),
    "segments whose product is that of the factors": Program(
        lambda p, x: ((x @ p["w"]).reshape(ROWS, 2, 3) @ p["v"], (x @ p["w"])[:, 1:3]),
        {"w": (FEATURES, UNITS), "v": (3,)},
        [],
    ),
    "repeated rows": weights(
        lambda v, o: (jnp.repeat(v, 2, axis=0) * o).sum(), [(2,), (2, 4), (2, 4, 2)], (2, 4), (4, 4)
    ),
    "reshaped across its axes": weights(
        lambda c: (jnp.tanh(c.reshape(4, 3, 2)) * c.transpose(0, 2, 1)).sum(), [(4,)], (4, 2, 3)
    ),
    "factors in another order": weights(
        lambda a, b: (a.sum((0, 2)) * b.sum((0, 2))).sum() + (a.reshape(24, 5) * b.reshape(24, 5)).sum(),
        [(5,)],
        (2, 3, 4, 5),
        (4, 3, 2, 5),
    ),
    "nothing after nothing": layer(lambda h, p: jnp.concatenate([h[:, :0], h[:, :0], h], 1), WHOLE),
    "bits": layer(
        lambda h, p: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(h, jnp.int32), jnp.float32), WHOLE
    ),
    "bytes": weights(lambda w: jax.lax.bitcast_convert_type(w, jnp.uint8).sum(0) * 1.0, [], (6,)),
    "numbers of units": layer(lambda h, p: h * jnp.arange(UNITS, dtype=float), []),
    "padding": layer(lambda h, p: jnp.pad(h, ((0, 0), (1, 2))), [(UNITS,), (2,)], down=(9, 2)),
    "entries of a stack": layer(lambda h, p: jnp.add(*jnp.unstack(p["w"])) * h, WHOLE, w=(2, UNITS)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(shapes, PROGRAMS, monkeypatch)


@pytest.mark.slow
def test_chain_of_neighbours_may_be_long():
    spec = derive_spec(lambda p, x: jnp.square(p[1:] - p[:-1]).sum(), Shape((3000,), jnp.float32), Shape((), float))
    assert not spec.sizes
