"""Rules keep as much freedom as a person would count, and permuted parameters compute the same."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from zoo import Shape, random_arrays

from mcomb import derive_spec

ROWS, FEATURES, UNITS = 4, 5, 6


class Program(NamedTuple):
    """A function of parameters of these shapes and of an input, and the shapes of its permutations' index arrays."""

    fn: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    free: list[tuple[int, ...]]
    input: tuple[int, ...] = (ROWS, FEATURES)


def layer(middle, free, **shapes):
    """A layer of tanh units, something that is done with them, and a dense layer."""

    def fn(params, x):
        return middle(jnp.tanh(x @ params["up"]), params) @ params["down"]

    return Program(fn, {"up": (FEATURES, UNITS), "down": (UNITS, 2)} | shapes, free)


def pooled(pool, free):
    """A layer of tanh units, of which something is computed."""
    return Program(lambda p, x: pool(jnp.tanh(x @ p["up"])), {"up": (FEATURES, UNITS)}, free)


def weights(fn, free, *shapes):
    """Something that is computed of parameters alone, of tanh of these."""
    names = "abc"[: len(shapes)]
    run = lambda p, x: fn(*(jnp.tanh(p[name]) for name in names))  # noqa: E731
    return Program(run, dict(zip(names, shapes, strict=True)), free)


def rotate_pairs(h, params):
    even, odd = h[:, ::2], h[:, 1::2]
    return jnp.stack([even - odd, even * odd], -1).reshape(h.shape)


def attend(qkv):
    q, k, v = qkv
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def fused(params, x):
    return attend(jnp.unstack((x @ params["qkv"]).reshape(ROWS, 3, UNITS), axis=1)) @ params["down"]


def heads_in_halves(params, x):
    """Attention, the heads of keys and those of values in one parameter, one after the other."""
    keys, values = jnp.split(params["kv"], 2)
    q, k, v = (jnp.einsum("ni,hid->nhd", x, kernel) for kernel in (params["q"], keys, values))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k), axis=-1)
    return jnp.einsum("hqk,khd,hdo->qo", weights, v, params["down"])


def class_token(params, x):
    tokens = jnp.tanh(x.reshape(ROWS, FEATURES, 1) @ params["up"])
    return jnp.concatenate([jnp.tile(params["class"], (ROWS, 1, 1)), tokens], 1).max(1) @ params["down"]


def kernel_derivative(params, x):
    def energy(kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        result = jax.lax.conv_general_dilated(
            x @ params["up"], kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=2
        )
        return (result**3).sum()

    return jnp.square(jax.grad(energy)(params["k"])).sum((0, 1, 2)) @ params["down"]


def layer_of_heads(params, x):
    q, k, v = ((x @ params[name]).reshape(-1, 3, 2) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return x + jnp.einsum("hqk,khd->qhd", weights, v).reshape(-1, UNITS) @ params["out"]


def heads_by_number(params, x):
    for i in range(2):
        x = layer_of_heads({name: stack[i] for name, stack in params.items()}, x)
    return x


def heads_by_counter(params, x):
    return jax.lax.fori_loop(
        0, 2, lambda i, x: layer_of_heads({name: stack[i] for name, stack in params.items()}, x), x
    )


def ensemble(params, x):
    """A convolution mapped over its kernels."""
    return jax.vmap(lambda kernel: jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME")).sum((1, 2, 3)))(params["k"])


def solve(params, x):
    return jnp.linalg.solve(x.T @ x + jnp.eye(FEATURES), jnp.tanh(x.T @ params["up"])) @ params["down"]


def sharded(params, x):
    def inner(params, x):
        return jax.lax.psum((jnp.tanh(x @ params["up"]) @ params["down"]).sum(0), "device")

    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    return jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("device")), out_specs=P())(params, x)


def sharded_units(params, x):
    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P(None, "device"), out_specs=P(None, "device"))(
        params["in"]
    ).sum()


def exchanged(a):
    mesh = Mesh(np.array(jax.devices()[:2]), "device")
    swap = lambda part: jax.lax.ppermute(part, "device", [(0, 1), (1, 0)])  # noqa: E731
    return jnp.sum(jax.shard_map(swap, mesh=mesh, in_specs=P("device"), out_specs=P("device"))(a) * jnp.sin(a))


own_mapping = jax.custom_batching.custom_vmap(jnp.sin)
own_mapping.def_vmap(lambda size, is_mapped, x: (jnp.sin(x), is_mapped[0]))


def choose(params, x):
    return jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)


def experts_by_one_hot(params, x):
    weight, index = choose(params, x)
    weights = jnp.einsum("bk,bke->be", weight, jax.nn.one_hot(index, 3))
    hidden = jnp.tanh(jnp.einsum("bi,eih->beh", x, params["in"]))
    return jnp.einsum("be,beh,eho->bo", weights, hidden, params["out"])


def experts_by_gather(params, x):
    weight, index = choose(params, x)
    hidden = jnp.tanh(jnp.einsum("bi,bkih->bkh", x, params["in"][index]))
    return jnp.einsum("bk,bkh,bkho->bo", weight, hidden, jnp.take(params["out"], index, axis=0))


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


def experts_in_turn(params, x):
    def one(row):
        return jnp.tanh(row @ params["in"][jnp.argmax(row @ params["router"])]) @ params["last"]

    return jax.lax.map(one, x)


def experts_and_their_load(params, x):
    _, index = choose(params, x)
    return experts_by_one_hot(params, x) * jnp.square(jnp.zeros(3).at[index].add(1.0)).sum()


def experts_row_by_row(params, x):
    def one(row, index):
        return jnp.tanh(row @ params["in"][index]) @ params["out"][index]

    return jax.vmap(one)(x, jnp.argmax(x @ params["router"], axis=-1))


def gates_written_to_pairs(params, x):
    weight, index = choose(params, x)
    gates = jnp.zeros((ROWS, 3)).at[jnp.arange(ROWS)[:, None], index].set(weight)
    hidden = jnp.tanh(jnp.einsum("bi,eih->beh", x, params["in"]))
    return jnp.einsum("be,beh,eho->bo", gates, hidden, params["out"])


def experts_by_descending_scores(params, x):
    index = jnp.argsort(x @ params["router"], axis=-1, descending=True)[:, :2]
    return jnp.einsum("bi,bkih->bh", x, params["in"][index]) @ params["last"]


def experts_one_by_one(params, x):
    gates = jax.nn.softmax(x @ params["router"])

    def add(sums, expert):
        gate, up, down = expert
        return sums + gate[:, None] * (jnp.tanh(x @ up) @ down), None

    return jax.lax.scan(add, jnp.zeros((ROWS, 2)), (gates.T, params["in"], params["out"]))[0]


def sorted_by_expert(finish, counted=lambda index, params: jnp.bincount(index, length=3), also=lambda params, index: 0):
    """Rows that are sorted by expert, for experts to take them in turn, and what is done then."""

    def fn(params, x):
        index = jnp.argmax(x @ params["router"], axis=-1)
        order = jnp.argsort(index)
        sizes = counted(index, params)
        hidden = jnp.tanh(jax.lax.ragged_dot(x[order], params["in"], sizes) + also(params, index[order]))
        return finish(jax.lax.ragged_dot(hidden, params["out"], sizes), order, params)

    return fn


def sum_as_they_are(one_hot):
    return jnp.sum(one_hot, axis=0, promote_integers=False).astype(int)


def put_back(y, order, params):
    return y[jnp.argsort(order)]


def best_two_sorted_by_expert(counted):
    """Each row is there twice, for two experts, whose results are added up."""

    def fn(params, x):
        weight, index = choose(params, x)
        order = jnp.argsort(index.reshape(-1))
        sizes = counted(index)
        hidden = jnp.tanh(jax.lax.ragged_dot(x[order // 2], params["in"], sizes))
        weighted = jax.lax.ragged_dot(hidden, params["out"], sizes) * weight.reshape(-1)[order].reshape(-1, 1)
        return jnp.zeros((ROWS, 2)).at[order // 2].add(weighted)

    return fn


def sorted_twice(params, x):
    """Two routers sort the same rows: what is added is of different rows."""
    both = [jnp.argmax(x @ params[name], axis=-1) for name in ("router", "other")]
    orders = [jnp.argsort(index) for index in both]
    products = [
        jax.lax.ragged_dot(x[order], params["in"], jnp.bincount(index, length=3))
        for order, index in zip(orders, both, strict=True)
    ]
    return (products[0] + products[1])[jnp.argsort(orders[0])] @ params["last"]


def dispatched_to_places(params, x):
    """Each row has a place of its own in the room of its expert."""
    index = jnp.argmax(x @ params["router"], axis=-1)
    place = jnp.take_along_axis(jnp.cumsum(jax.nn.one_hot(index, 3, dtype=int), 0), index.reshape(-1, 1), 1)[:, 0] - 1
    room = jnp.zeros((3, ROWS, FEATURES)).at[index, place].add(x)
    hidden = jnp.tanh(jnp.einsum("epi,eih->eph", room, params["in"]))
    return jnp.einsum("eph,eho->epo", hidden, params["out"])[index, place]


def counted_as_another(params, x):
    """Each position three times: how often each occurs is not what is counted."""
    index = jnp.argmax(x @ params["router"], axis=-1)
    order = jnp.argsort(jnp.maximum(index[:, None], jnp.zeros((1, 3), index.dtype)).reshape(-1))
    product = jax.lax.ragged_dot(jnp.repeat(x, 3, 0)[order], params["in"], jnp.bincount(index, length=3))
    return product[jnp.argsort(order)] @ params["last"]


def in_groups_that_cut_across(params, x):
    """Of 8 and 4 channels, in groups of 6, the second group has two of the one and all of the other."""
    channels = jnp.concatenate([x @ params["a"], x @ params["b"]], 1)
    return jax.nn.softmax(channels.reshape(ROWS, 2, 6)).reshape(ROWS, 12) @ params["down"]


def layers_of_another_type(params, x):
    ups, downs = params["up"].astype(jnp.bfloat16), jnp.unstack(0.5 * params["down"])
    for i in range(3):
        x = x + jnp.tanh(x @ ups[i].astype(x.dtype)) @ downs[i]
    return x


@jax.custom_jvp
def same(array):
    return array


same.defjvp(lambda arrays, tangents: (same(*arrays), *tangents))


def ridge(params, x):
    """Linear regression on hidden units."""
    h = jnp.tanh(x @ params["up"])
    return h @ jnp.linalg.solve(h.T @ h + jnp.eye(UNITS), h.T @ x) + jnp.linalg.inv(h.T @ h + jnp.eye(UNITS)).sum()


def roughly_solved(params, x):
    """Rows and columns of the matrix move apart for the solution, but not for what is near it."""
    matrix = jnp.sin(params["a"])
    solve = lambda apply, b: b - apply(b)  # noqa: E731
    return params["c"] @ jax.lax.custom_linear_solve(lambda v: matrix @ v, params["b"], solve, solve)


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


def factorised_too(params, x):
    h = jnp.tanh(x @ params["up"])
    gram = h.T @ h + jnp.eye(UNITS)
    return h @ jnp.linalg.solve(gram, h.T @ x) + jax.scipy.linalg.lu(gram)[2][0, 0]


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


def experts_of_scanned_layers(params, x):
    """Each layer sorts the rows by its own experts, and puts them back."""

    def layer(x, params):
        return x + sorted_by_expert(put_back)(params, x), None

    return jax.lax.scan(layer, x, params)[0]


def sorted_in_every_step(params, x):
    """Rows of different steps, sorted by what is computed in each, are added up: they are different rows."""

    def step(x, shift):
        index = jnp.argmax(x @ params["router"] + shift, axis=-1)
        y = jax.lax.ragged_dot(x[jnp.argsort(index)], params["in"], jnp.bincount(index, length=3))
        return x, y

    return jax.lax.scan(step, x, params["shift"])[1].sum(0)[:1] @ params["last"]


def sorted_rows(params, x):
    index = jnp.argmax(x @ params["router"], axis=-1)
    return jax.lax.ragged_dot(x[jnp.argsort(index)], params["in"], jnp.bincount(index, length=3))


def sorted_in_a_while_loop(params, x):
    """The same, in a loop whose carry has an axis that is free before."""

    def body(carry):
        i, sums = carry
        return i + 1, sums + sorted_rows(params, x * jnp.cos(i + params["shift"])).sum(1)

    start = jnp.concatenate([jnp.full(ROWS, params["shift"].sum()), jnp.zeros(2)])[:ROWS]
    return jnp.square(jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, start))[1]).sum()


def sorted_on_each_device(params, x):
    """Rows of different devices are added up: they are sorted by what each device computes."""

    def inner(params, x):
        return jax.lax.psum(sorted_rows(params, x), "units")

    mesh = Mesh(np.array(jax.devices()[:2]), "units")
    run = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("units")), out_specs=P(), check_vma=False)
    return jnp.square(run(params, x)).sum(0) @ params["last"]


def sparse_code(params, x):
    """Only the largest two units of each row are active."""

    def keep(row):
        values, index = jax.lax.top_k(row, 2)
        return jnp.zeros_like(row).at[index].set(values)

    return jax.vmap(keep)(x @ params["up"]) @ params["down"]


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


def pooled_derivative(derive):
    """The derivative of something that is computed of the maxima of windows, along another axis than that of units."""

    def energy(params, x):
        hidden = jnp.tanh(x.reshape(ROWS, FEATURES, 1) * params["up"].reshape(1, 1, UNITS))
        return jnp.sin(jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")).sum()

    return Program(lambda p, x: derive(lambda x: energy(p, x), x), {"up": (UNITS,)}, WHOLE)


def code_book(params, x):
    z = x @ params["in"]
    distances = jnp.square(z.reshape(ROWS, 1, UNITS) - params["codes"].reshape(1, 7, UNITS)).sum(-1)
    return params["codes"][distances.argmin(-1)] @ params["out"]


def residual(params, x, i):
    return x + jnp.tanh(x @ params["up"][i] + params["bias"][i].reshape(1, -1)) @ params["down"][i]


def by_number(params, x):
    for i in range(3):
        x = residual(params, x, i)
    return x


def by_counter(params, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: residual(params, x, i), x)


def by_counter_of_a_function(params, x):
    """An entry of each stack, read by a function that JAX traces for each stack anew."""

    def step(i, x):
        entry = {name: jax.lax.dynamic_index_in_dim(stack, i, keepdims=True) for name, stack in params.items()}
        return residual(entry, x, 0)

    return jax.lax.fori_loop(0, 3, step, x)


def while_counting(params, x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, residual(params, c[1], c[0])), (0, x))[1]


def carried_over(params, x):
    """A unit of entry i meets one of entry i + 1."""

    def step(i, carry):
        hidden, x = carry
        return jnp.tanh(x @ params["up"][i]) + params["bias"][i].reshape(1, -1), x + hidden @ params["down"][i]

    return jax.lax.fori_loop(0, 3, step, (jnp.zeros((ROWS, UNITS)), x))[1]


def in_reverse(params, x):
    return sum(jnp.tanh(x @ params["up"][i] + params["bias"][i]) @ params["down"][2 - i] for i in range(3))


def and_as_a_whole(params, x):
    return by_number(params, x) + jnp.einsum("bi,lij,ljk->bk", x, params["up"], params["down"])


def heads_in_layers(params, x):
    def layer(i):
        heads = jnp.tanh(jnp.einsum("bi,ihd->bhd", x, params["up"][i]))
        return jnp.einsum("bhd,hdo->bo", heads, params["down"][i])

    return layer(0) + layer(1)


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


def every_second():
    return jnp.arange(UNITS) % 2


def autoregressive(params, x):
    """Each unit sees the inputs, and units, up to its number, of which there are three."""
    numbers = [np.arange(FEATURES), np.arange(UNITS) % 3, np.arange(UNITS) % 3, np.arange(2)]
    masks = [(a[:, None] <= b[None]).astype(np.float32) for a, b in itertools.pairwise(numbers)]
    one, two, three = (params[name] * mask for name, mask in zip(("one", "two", "three"), masks, strict=True))
    return jnp.tanh(jnp.tanh(x @ one) @ two) @ three


MASK = np.repeat(np.array([[1, 2, 3]], np.float32), [2, 1, 3], axis=1)  # of six units, two, one and three are alike
NO_NUMBERS = np.array([0x7FC00000, 0x7FC00001] * 3, np.uint32).view(np.float32)  # they differ in their last bit
LAYERS = {"up": (3, FEATURES, UNITS), "bias": (3, UNITS), "down": (3, UNITS, FEATURES)}
EXPERTS = {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "out": (3, UNITS, 2)}
ONE_OUTPUT = {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "last": (UNITS, 2)}
WHOLE = [(UNITS,)]
HEADS = dict.fromkeys("qkv", (2, FEATURES, UNITS)) | {"out": (2, UNITS, FEATURES)}
BY_EXPERT = [(3,), (UNITS,)]

PROGRAMS = {
    "gradient of max pooling": pooled_derivative(lambda energy, x: jax.grad(energy)(x)),
    "tangent of max pooling": pooled_derivative(lambda energy, x: jax.jvp(energy, (x,), (x,))[1]),
    "largest singular value": pooled(lambda h: jnp.linalg.norm(h, ord=2), WHOLE),
    "expert of the whole batch": Program(expert_of_the_batch, ONE_OUTPUT, BY_EXPERT),
    "experts in turn": Program(experts_in_turn, ONE_OUTPUT, BY_EXPERT),
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
    "sparse code": Program(sparse_code, {"up": (FEATURES, UNITS), "down": (UNITS, 2)}, WHOLE),
    "median": pooled(lambda h: jnp.median(h, -1), WHOLE),
    "quantile": pooled(lambda h: jnp.quantile(h, jnp.array([0.2, 0.7]), axis=-1), WHOLE),
    "sort by two keys": pooled(lambda h: jax.lax.sort((h.round(), h), num_keys=2)[1].cumsum(1), WHOLE),
    "the largest two": pooled(lambda h: jax.lax.top_k(h, 2)[0], WHOLE),
    "trace": pooled(lambda h: jnp.trace(h.T @ h), WHOLE),
    "diagonal": pooled(lambda h: jnp.diagonal(h.T @ jnp.sin(h)).prod(), WHOLE),
    "maximum of each window": pooled(
        lambda h: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3), (1, 3), "VALID").sum(-1), [(2,), (2, 3)]
    ),
    "plus the identity": layer(lambda h, p: h @ (p["w"] + jnp.eye(UNITS)), WHOLE, w=(UNITS, UNITS)),
    "diagonal matrix": layer(lambda h, p: h @ jnp.diag(p["w"]), WHOLE, w=(UNITS,)),
    "interleaved pairs": layer(rotate_pairs, [(3,)]),
    "select": layer(lambda h, p: jnp.select([h > 0, h < -0.5], [h, 2 * h], 0.0), WHOLE),
    "the first two set": layer(lambda h, p: h.at[:, :2].set(0.0), [(2,), (4,)]),
    "the middle added to": layer(lambda h, p: h.at[:, 2:4].add(h[:, :2]), [(2,), (2,)]),
    "updated slice": layer(lambda h, p: jax.lax.dynamic_update_slice(h, h[:, :2], (0, 4)), [(2,), (2,)]),
    "slice in a known place": layer(
        lambda h, p: jnp.concatenate([h, jax.lax.dynamic_slice_in_dim(h, 4, 2, 1)], 1), [(2,), (4,)], down=(8, 2)
    ),
    "written into zeros": Program(
        lambda p, x: jnp.zeros((ROWS, 9)).at[:, 2:8].set(jnp.tanh(x @ p["up"])) @ p["down"],
        {"up": (FEATURES, UNITS), "down": (9, 2)},
        [(2,), (UNITS,)],
    ),
    "stacked": Program(
        lambda p, x: jnp.stack([jnp.tanh(x @ p["one"]), x @ p["two"]], 1).max(1) @ p["down"],
        {"one": (FEATURES, UNITS), "two": (FEATURES, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "query, key and value unstacked": Program(fused, {"qkv": (FEATURES, 18), "down": (UNITS, 2)}, WHOLE * 2),
    "rotary embeddings": Program(rotary, dict.fromkeys("qkv", (FEATURES, 3, 4)) | {"out": (3, 4, 2)}, [(3,), (3, 4)]),
    "class token": Program(class_token, {"class": (1, 1, UNITS), "up": (1, UNITS), "down": (UNITS, 2)}, WHOLE),
    "ensemble of convolutions": Program(ensemble, {"k": (3, UNITS, 2, 3, 3)}, [(3, UNITS)], (ROWS, 2, 4, 4)),
    "derivative of a grouped convolution by its kernel": Program(
        kernel_derivative,
        {"up": (2, 4), "k": (3, 3, 2, UNITS), "down": (UNITS, 2)},
        [(2,), (2, 2), (2, 3)],
        (2, 4, 4, 2),
    ),
    "heads of layers by their number": Program(heads_by_number, HEADS, [(2, 3), (2, 3, 2), (2, 3, 2)]),
    "heads of layers by a counter": Program(heads_by_counter, HEADS, [(2, 3), (2, 3, 2), (2, 3, 2)]),
    "Fourier transform of another axis": Program(
        lambda p, x: jnp.abs(jnp.fft.fft(jnp.einsum("bt,h->bth", x, p["up"]), axis=1)).sum(1) @ p["down"],
        {"up": (UNITS,), "down": (UNITS, 2)},
        WHOLE,
    ),
    "linear equations of hidden units": Program(ridge, {"up": (FEATURES, UNITS)}, WHOLE),
    "linear equations whose rows and columns move apart": Program(
        lambda p, x: p["c"] @ jnp.linalg.solve(jnp.sin(p["a"]), p["b"]),
        {"a": (4, 4), "b": (4, 2), "c": (4,)},
        [(4,), (4,)],
    ),
    "linear equations by conjugate gradients": Program(
        lambda p, x: jax.scipy.sparse.linalg.cg(lambda v: (h := x @ p["up"]).T @ (h @ v) + v, p["b"])[0] @ p["down"],
        {"up": (FEATURES, UNITS), "b": (UNITS,), "down": (UNITS, 2)},
        WHOLE,
    ),
    "a factorisation that is used for more than equations": Program(factorised_too, {"up": (FEATURES, UNITS)}, []),
    "linear equations": Program(solve, {"up": (ROWS, UNITS), "down": (UNITS, 2)}, WHOLE),
    "determinants of a batch": pooled(
        lambda h: jnp.linalg.det(jnp.einsum("bi,bj->jbi", x := h[:3, :3], h[:3]) + jnp.eye(3)).prod() + x.sum(),
        [(3,)],
    ),
    "shards": Program(sharded, {"up": (FEATURES, UNITS), "down": (UNITS, 2)}, WHOLE),
    "experts row by row": Program(experts_row_by_row, EXPERTS, BY_EXPERT),
    "gates that are written to pairs of row and expert": Program(gates_written_to_pairs, EXPERTS, [(3,), (3, UNITS)]),
    "experts by descending scores": Program(experts_by_descending_scores, ONE_OUTPUT, BY_EXPERT),
    "rows sorted by expert and put back": Program(sorted_by_expert(put_back), EXPERTS, BY_EXPERT),
    "rows sorted by expert and written back": Program(
        sorted_by_expert(lambda y, order, p: jnp.zeros_like(y).at[order].set(y)), EXPERTS, [(3,), (UNITS,)]
    ),
    "rows sorted by expert and added up": Program(
        sorted_by_expert(lambda y, order, p: y.sum(0)), EXPERTS, [(3,), (UNITS,)]
    ),
    "rows of two experts each": Program(
        best_two_sorted_by_expert(lambda index: jnp.bincount(index.reshape(-1), length=3)), EXPERTS, BY_EXPERT
    ),
    "rows sorted by expert that stay so": Program(sorted_by_expert(lambda y, order, p: y), EXPERTS, [(UNITS,)]),
    "rows sorted by expert, of which the first is used": Program(
        sorted_by_expert(lambda y, order, p: y[0]), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert with weights of their own": Program(
        sorted_by_expert(lambda y, order, p: put_back(y * p["own"], order, p)), EXPERTS | {"own": (ROWS, 1)}, [(UNITS,)]
    ),
    "rows sorted by expert but counted otherwise": Program(
        sorted_by_expert(put_back, lambda index, p: jnp.bincount(jnp.argmax(p["size"], 1), length=3)),
        EXPERTS | {"size": (ROWS, 3)},
        [(ROWS,), (UNITS,)],
    ),
    "rows sorted by expert of which some are counted": Program(
        sorted_by_expert(put_back, lambda index, p: jnp.bincount(index[1:], length=3)), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert and counted by one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: jax.nn.one_hot(index, 3).sum(0).astype(int)), EXPERTS, BY_EXPERT
    ),
    "rows sorted by expert and counted by comparison": Program(
        sorted_by_expert(put_back, lambda index, p: (index[:, None] == jnp.arange(3)).sum(0)), EXPERTS, BY_EXPERT
    ),
    "rows of two experts each, counted by one-hot vectors": Program(
        best_two_sorted_by_expert(lambda index: jax.nn.one_hot(index, 3, dtype=int).sum(1).sum(0)), EXPERTS, BY_EXPERT
    ),
    "rows sorted by expert of which some are counted by one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: jax.nn.one_hot(index, 3)[1:].sum(0).astype(int)),
        EXPERTS,
        [(UNITS,)],
    ),
    "rows sorted by expert but counted by the others' one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: (index[:, None] != jnp.arange(3)).sum(0) // 2), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert and counted too often": Program(
        sorted_by_expert(
            put_back, lambda index, p: (index[:, None, None] == jnp.arange(3) + jnp.zeros((2, 1), int)).sum((0, 1))
        ),
        EXPERTS,
        [(UNITS,)],
    ),
    "rows sorted by expert and counted in too small a type": Program(
        sorted_by_expert(put_back, lambda index, p: sum_as_they_are(jax.nn.one_hot(index, 3, dtype=jnp.int8))),
        EXPERTS,
        [(UNITS,)],
        (300, FEATURES),
    ),
    "rows sorted by expert with what is looked up for theirs": Program(
        sorted_by_expert(put_back, also=lambda p, index: p["bias"][index]),
        EXPERTS | {"bias": (3, UNITS)},
        BY_EXPERT,
    ),
    "rows sorted by expert with what is looked up for others": Program(
        sorted_by_expert(put_back, also=lambda p, index: p["bias"][jnp.roll(index, 1)]),
        EXPERTS | {"bias": (3, UNITS)},
        WHOLE,
    ),
    "experts taken one after the other": Program(experts_one_by_one, EXPERTS, [(3,), (3, UNITS)]),
    "rows sorted by the experts of scanned layers": Program(
        experts_of_scanned_layers,
        {"router": (2, FEATURES, 3), "in": (2, 3, FEATURES, UNITS), "out": (2, 3, UNITS, FEATURES)},
        [(2, 3), (2, UNITS)],
    ),
    "rows sorted by two routers": Program(sorted_twice, ONE_OUTPUT | {"other": (FEATURES, 3)}, [(UNITS,)]),
    "rows sorted in every step": Program(sorted_in_every_step, ONE_OUTPUT | {"shift": (2, 3)}, [(2,), (UNITS,)]),
    "rows sorted in a while loop": Program(
        sorted_in_a_while_loop, {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "shift": (FEATURES,)}, [(UNITS,)]
    ),
    "rows sorted on each device": Program(sorted_on_each_device, ONE_OUTPUT, [(UNITS,)]),
    "experts by one-hot vectors": Program(experts_by_one_hot, EXPERTS, [(3,), (3, UNITS)]),
    "experts by gather": Program(experts_by_gather, EXPERTS, BY_EXPERT),
    "the best expert": Program(switch, ONE_OUTPUT, BY_EXPERT),
    "experts by argsort": Program(best_two, ONE_OUTPUT, BY_EXPERT),
    "code book": Program(code_book, {"in": (FEATURES, UNITS), "codes": (7, UNITS), "out": (UNITS, 2)}, [(6,), (7,)]),
    "layers by their number": Program(by_number, LAYERS, [(3, UNITS)]),
    "layers by a counter": Program(by_counter, LAYERS, [(3, UNITS)]),
    "layers by a counter of a function": Program(by_counter_of_a_function, LAYERS, [(3, UNITS)]),
    "layers by a counter of a while loop": Program(while_counting, LAYERS, [(3, UNITS)]),
    "layers whose units meet those of the next": Program(carried_over, LAYERS, WHOLE),
    "layers in reverse": Program(in_reverse, LAYERS, WHOLE),
    "layers that are also used as a whole": Program(and_as_a_whole, LAYERS, WHOLE),
    "heads in halves": Program(
        heads_in_halves,
        {"q": (2, FEATURES, 3), "kv": (4, FEATURES, 3), "down": (2, 3, 2)},
        [(2,), (2, 3)],
    ),
    "heads in layers": Program(heads_in_layers, {"up": (2, 5, 3, 4), "down": (2, 3, 4, 2)}, [(2, 3), (2, 3, 4)]),
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
    "mask with runs of equal entries": Program(
        lambda p, x: jnp.tanh(x @ (p["up"] * MASK)) @ p["down"],
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [(2,), (3,)],
    ),
    "mask of every second unit": layer(lambda h, p: h * (jnp.arange(UNITS) % 2), [(2, 3)]),
    "mask of every second unit, and of others": layer(lambda h, p: h * (jnp.arange(UNITS) % 2) * MASK, []),
    "autoregressive masks": Program(
        autoregressive, {"one": (FEATURES, UNITS), "two": (UNITS, UNITS), "three": (UNITS, 2)}, [(3, 2), (3, 2)]
    ),
    "units of heads that are told apart": layer(tell_apart, [(2, 3)]),
    "units of groups that are added one by one": layer(add_groups, [(2, 3), (4,)], mid=(2, 3, 4), down=(4, 2)),
    "positions as numbers": pooled(lambda h: h.argmax(-1) + 1.0, []),
    "positions as the result": pooled(lambda h: jax.lax.top_k(h, 2)[1], []),
    "positions as the result of a loop": pooled(
        lambda h: jax.lax.scan(lambda c, _: (c + 1, jnp.argmax(h * c, -1)), 1.0, length=2)[1], []
    ),
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
    "constant that is too large for its type": layer(
        lambda h, p: h * jnp.array([300.0, 44.0] * 3).astype(jnp.uint8), [(2, 3)]
    ),
    "infinite constant as an integer": layer(
        lambda h, p: h * jnp.array([jnp.inf, -jnp.inf] * 3).astype(jnp.int32).astype(jnp.int8), [(2, 3)]
    ),
    "constant of repeated numbers": layer(lambda h, p: h * jnp.repeat(jnp.arange(3.0), 2), [(2,), (2,), (2,)]),
    "choice among two by a number that is too large": layer(
        lambda h, p: h * jax.lax.select_n(jnp.array([0, 1, 2, 2, 1, 0]), jnp.ones(UNITS), jnp.zeros(UNITS)), [(2,)]
    ),
    "equations with a constant side": weights(
        lambda a, w: jnp.sum(solve_triangular(a + 5 * jnp.eye(UNITS), jnp.ones(UNITS), lower=True) * w),
        [],
        (6, 6),
        (6,),
    ),
    "equations with several sides": weights(
        lambda a, b: solve_triangular(a + 5 * jnp.eye(UNITS), b, lower=True).sum(1), [(4,)], (6, 6), (6, 4)
    ),
    "equations from the right": weights(
        lambda a, b: jnp.tanh(
            jax.lax.linalg.triangular_solve(a + 5 * jnp.eye(UNITS), b, left_side=False, lower=True)
        ).sum(0),
        [(4,)],
        (6, 6),
        (4, 6),
    ),
    "singular values of weights": weights(lambda a: jnp.linalg.svd(a, compute_uv=False), [(4,), (6,)], (4, 6)),
    "columns at the largest of all rows": weights(lambda a: a[:, jnp.argmax(a, 1)].sum(), [(4,), (5,)], (4, 5)),
    "columns at the largest of one row": weights(lambda a: a[:, jnp.argmax(a, 1)[0]].sum(), [(3,), (5,)], (4, 5)),
    "written to the largest of all rows": weights(
        lambda a: jnp.square(jnp.tanh(a.at[:, jnp.argmax(a, 1)].add(1.0))).sum(), [(4,), (5,)], (4, 5)
    ),
    "the largest of each row": weights(
        lambda a: jnp.take_along_axis(a, jnp.argmax(a, 1, keepdims=True), 1).sum(), [(4,), (4, 5)], (4, 5)
    ),
    "groups of a stack of which one entry is read": weights(
        lambda w: w.reshape(2, 3, 4).sum((0, 1)) + w[1], [(4, 3)], (6, 4)
    ),
    "equal rows by groups": weights(
        lambda w, v: (jax.lax.ragged_dot(jnp.ones((6, 3)), w, jnp.array([2, 3, 1])) * v.reshape(-1, 1)).sum(0),
        [(3, 4, 3)],
        (3, 3, 4),
        (6,),
    ),
    "normalised over examples of a named axis": layer(
        lambda h, p: jax.vmap(lambda row: row - jax.lax.pmean(row, "rows"), axis_name="rows")(h), WHOLE
    ),
    "units compared along a named axis": layer(
        lambda h, p: jax.vmap(lambda unit: unit / jax.lax.pmax(unit, "units"), 1, 1, axis_name="units")(h), WHOLE
    ),
    "exchanged among devices": weights(exchanged, [(6,)], (4, 6)),
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
    "ranks": Program(
        lambda p, x: jnp.where(jnp.argsort(jnp.argsort(h := x @ p["up"], 1), 1) > 3, h, 0) @ p["down"],
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "ranks in blocks": Program(
        lambda p, x: (
            (jnp.argsort(jnp.argsort(h := (x @ p["up"]).reshape(ROWS, 3, 2))) * h).reshape(ROWS, UNITS) @ p["down"]
        ),
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [(3,), (3, 2)],
    ),
    "ranks of other rows": weights(lambda a, w: (jnp.argsort(jnp.argsort(a, 1), 0) * w).sum(), [], (4, 3), (4, 3)),
    "ranks of reshaped positions": weights(
        lambda a, w: (jnp.argsort(jnp.argsort(a).reshape(2, 3), 1) * w).sum(), [], (6,), (2, 3)
    ),
    "the largest of each row, one by one": Program(
        lambda p, x: jax.vmap(lambda row: jax.lax.dynamic_index_in_dim(row, row.argmax()))(x @ p["up"]),
        {"up": (FEATURES, UNITS)},
        WHOLE,
    ),
    "positions of other rows": weights(
        lambda a, b, c: (jax.nn.one_hot(jnp.argmax(a, 1)[jnp.argmax(b, 1)], 5) * c).sum() + (a * c).sum(),
        [(4,), (5,)],
        (4, 5),
        (4, 4),
        (4, 5),
    ),
    "steps that are added up": weights(
        lambda a, b: jax.lax.scan(lambda c, row: (c + (row * b).sum(), None), 0.0, a)[0], [(4,), (5,)], (4, 5), (5,)
    ),
    "steps that are added up to what is used": weights(
        lambda a, b: jax.lax.scan(lambda c, row: (c + (row * b).sum(), c), 0.0, a)[1] @ b[:4], [], (4, 5), (5,)
    ),
    "steps that are added up and multiplied": weights(
        lambda a: jax.lax.scan(lambda c, w: ((c + w) * w, None), 0.0, a)[0], [], (4,)
    ),
    "positions at least no number": Program(
        lambda p, x: p["codes"][jnp.maximum(jnp.argmax(x @ p["up"], 1).astype(float), jnp.nan).astype(int)],
        {"up": (FEATURES, UNITS), "codes": (UNITS, 2)},
        [],
    ),
    "positions that are copied and counted as they were": Program(counted_as_another, ONE_OUTPUT, WHOLE),
    "rows dispatched to places": Program(dispatched_to_places, EXPERTS, [(3,), (3, UNITS)]),
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
    "layers of another type": Program(layers_of_another_type, LAYERS, [(3, UNITS)]),
    "layers that a function gives back, also used as a whole": Program(
        lambda p, x: (
            by_number(p, x)
            + sum(jnp.square(same(p[name])).sum() for name in ("up", "down"))
            + (same(p["up"]).sum(0) @ p["down"].sum(0)).sum()
        ),
        LAYERS,
        WHOLE,
    ),
    "segments whose product is that of the factors": Program(
        lambda p, x: ((x @ p["w"]).reshape(ROWS, 2, 3) @ p["v"], (x @ p["w"])[:, 1:3]),
        {"w": (FEATURES, UNITS), "v": (3,)},
        [],
    ),
    "equations that are roughly solved": Program(roughly_solved, {"a": (4, 4), "b": (4,), "c": (4,)}, [(4,)]),
    "an array that is written to": Program(written_to, {"w": (UNITS,), "v": (UNITS,)}, []),
    "several updates of one entry": Program(last_of_several, {"w": (UNITS, FEATURES, 3), "c": (3,)}, [(3,)]),
    "the largest of sorted copies": largest_copy(lambda r, x: jnp.sort(r, 1) @ x[1]),
    "the largest of the largest of copies": largest_copy(lambda r, x: jax.lax.top_k(r, 2)[0] @ x[1, :2]),
    "the largest of copies, one by one": largest_copy(lambda r, x: jax.lax.map(lambda row: row @ x[1], r), [(3,)]),
    "the largest of entries of copies": largest_copy(
        lambda r, x: jnp.take_along_axis(r, jnp.argmax(r, 1)[:, None], 1)[:, 0]
    ),
    "the largest of numbers, one by one": weights(
        lambda a, v: v[jnp.argmax(jax.lax.map(lambda w: jnp.where(w > 0.1, 2.0, 1.0), a))], [], (6,), (6,)
    ),
    "the largest of positions": weights(lambda a, v: v[jnp.argmax(jnp.argmax(a, 1).astype(float))], [], (6, 3), (6,)),
    "the largest of solutions": weights(
        lambda a, b, v: v[jnp.argmax(jnp.linalg.solve(a, b[:, None] + jnp.zeros((1, 6))).sum(0))],
        [(4,), (4,)],
        (4, 4),
        (4,),
        (6,),
    ),
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
    "the largest of signs beside others": largest_of(lambda h: jnp.concatenate([jnp.sign(h[:2]), h[2:]])),
    "the largest of signs of some scale": largest_of(lambda h: jnp.sign(h) * jnp.exp(h.sum(1, keepdims=True))),
    "the largest of reshaped signs": largest_of(
        lambda h: jnp.concatenate([(z := jnp.sign(h).reshape(ROWS, 2, 3))[:, 1], z[:, 0]], 1)
    ),
    "the largest of eight bits": largest_of(lambda h: h.astype(jnp.float8_e4m3fn)),
    "the largest of signs that are carried": carried(jnp.sign),
    "the largest of copies that are carried": carried(lambda h: jnp.broadcast_to(h.sum(), h.shape)),
    "what is most often the largest, last": weights(
        lambda a, v: v[jnp.argsort(jax.nn.one_hot(jnp.argmax(a, 1), 3).sum(0), descending=True)[0]],
        [(6,)],
        (6, 3),
        (3,),
    ),
    "the largest of pairs that are carried": weights(
        lambda a, b: jax.lax.fori_loop(
            0, 3, lambda i, s: (s[0] + s[0].T, s[1] + b.reshape(-1)[jnp.argmax(s[0].reshape(-1))]), (a, 0.0)
        )[1],
        [],
        (4, 4),
        (4, 4),
    ),
    "windows of one number in several arrays": Program(
        lambda p, x: (
            jnp.multiply(
                *jax.lax.reduce_window(
                    (h := x @ p["up"], h), (0.0, 0.0), lambda s, t: (s[0] + t[0], s[1] + t[1]), (1, 1), (1, 1), "VALID"
                )
            )
            @ p["down"]
        ),
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "the second largest": weights(
        lambda w, v: v[jnp.argmax(w - 100 * jax.nn.one_hot(jnp.argmax(w), 6))], [(6,)], (6,), (6,)
    ),
    "the largest of copies": weights(lambda w, v: v[jnp.argmax(jnp.tile(w, 2))], [(3,)], (3,), (6,)),
    "repeated rows": weights(
        lambda v, o: (jnp.repeat(v, 2, axis=0) * o).sum(), [(2,), (2, 4), (2, 4, 2)], (2, 4), (4, 4)
    ),  # as keys and values that several queries share
    "the largest of repeated entries": weights(lambda w, v: v[jnp.argmax(jnp.repeat(w, 2))], [(3,)], (3,), (6,)),
    "the largest of entries and zeros": weights(
        lambda w, v: v[jnp.argmax(jnp.concatenate([-jnp.exp(w), jnp.zeros(3)]))], [(3,)], (3,), (6,)
    ),
    "the largest of entries and padding": weights(
        lambda w, v: v[jnp.argsort(jnp.pad(-jnp.exp(w), (0, 3)))[0]], [(3,)], (3,), (6,)
    ),
    "the second of an identity matrix": weights(lambda v: v[jax.lax.top_k(jnp.eye(6), 2)[1][:, 1]].sum(), [], (6,)),
    "the largest of constants": weights(lambda v: v[jnp.argmax(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))], [], (6,)),
    "the largest as one of all positions": weights(
        lambda w, v: ((jnp.argmax(w) == jnp.arange(UNITS)) * v).sum(), [(6,)], (6,), (6,)
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
    "the first of some that are set": weights(lambda w, v: v[jnp.argsort(w.at[:3].set(-9.0))[0]], [(3,)], (6,), (6,)),
    "products of constants that are rounded": weights(
        lambda w: jnp.where(jnp.arange(4096) * 0.1 - np.arange(4096) * np.float32(0.1) > 0, w, 0.0).sum(), [], (4096,)
    ),
    "constants whose sum is rounded": weights(lambda w: (((jnp.arange(8.0) + 1e8) - 1e8) * w).sum(), [], (8,)),
    "constants whose sum is rounded in another order": weights(
        lambda w: jnp.where((jnp.where(every_second(), 0.0, 2.0) - 2.0**24) + 2.0**24 + 0.5 > 0, w, 0.0).sum(),
        [(2, 3)],
        (6,),
    ),
    "numbers that are rounded as they are made": weights(
        lambda w: (jax.lax.iota(jnp.bfloat16, 600).astype(jnp.float32) * w).sum(), [], (600,)
    ),
    "numbers that are taken for zero": weights(
        lambda w: jnp.where(jnp.array([1e-40, 1, 1, 0, 0, 0]) > jax.lax.optimization_barrier(0.0), w, 0.0).sum(),
        [(2,), (3,)],
        (6,),
    ),
    "zeros of both signs plus zero": weights(
        lambda w: (jnp.clip(1 / (jnp.where(every_second(), -0.0, 0.0) + 0.0), -1, 1) * w).sum(), [(2, 3)], (6,)
    ),
    "bits of what is no number": weights(
        lambda w: ((jax.lax.bitcast_convert_type(NO_NUMBERS, jnp.int32) & 1) * w).sum(), [(2, 3)], (6,)
    ),
    "constants of few bits": weights(
        lambda w: (
            (1 + every_second()).astype(jnp.int4).astype(jnp.uint4).astype(jnp.float8_e8m0fnu).astype(float) * w
        ).sum(),
        [(2, 3)],
        (6,),
    ),
    "choice among a hundred": weights(
        lambda w: (jax.lax.select_n(every_second().astype(int), *(jnp.full(6, i) for i in range(100))) * w).sum(),
        [(2, 3)],
        (6,),
    ),
    "positions of no case": weights(
        lambda a, b, c: (
            c[jax.lax.select_n(-1, jnp.argmax(a), jnp.argmax(b))] + c[jax.lax.select_n(7, 0, jnp.argmax(b))]
        ),
        [],
        *[(6,)] * 3,
    ),
    "the largest of a symmetric matrix": weights(
        lambda a, b: b.reshape(-1)[jnp.argmax((a + a.T).reshape(-1))], [], (4, 4), (4, 4)
    ),
    "looked up by two positions": weights(
        lambda a, b, c: c[jnp.argmax(a), jnp.argmax(b)], [(6,), (3,)], (6,), (3,), (6, 3)
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
    "turned round": layer(lambda h, p: h[:, ::-1] * h, []),
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
    "the largest of each block": Program(
        lambda p, x: (
            ((h := (x @ p["up"]).reshape(ROWS, 3, 2)) * jax.nn.one_hot(h.argmax(-1), 2)).reshape(ROWS, UNITS)
            @ p["down"]
        ),
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [(3,), (3, 2)],
    ),
    "all but the largest": weights(lambda w, v: ((jnp.argmax(w) != jnp.arange(UNITS)) * v).sum(), [(6,)], (6,), (6,)),
    "how often each is the largest": weights(
        lambda a, w: (jnp.bincount(jnp.argmax(a, 1), length=3) * w).sum(), [(5,), (3,)], (5, 3), (3,)
    ),
    "positions that are made larger": weights(lambda w, v: v[jnp.maximum(jnp.argmax(w), 2)], [], (6,), (6,)),
    "sums of constants that are infinite": weights(
        lambda w: (jnp.where(jnp.arange(6) < 3, -jnp.inf, 0.0) + 1.0 < w).sum(), [(3,), (3,)], (6,)
    ),
    "a window of one number": weights(
        lambda w: jax.lax.reduce_window(w.sum(), -jnp.inf, jax.lax.max, (), (), "VALID"), [(6,)], (6,)
    ),
    "own rule of mapping": layer(lambda h, p: own_mapping(h), WHOLE),
    "nothing after nothing": layer(lambda h, p: jnp.concatenate([h[:, :0], h[:, :0], h], 1), WHOLE),
    "constant that is reshaped by columns": layer(
        lambda h, p: h * jax.lax.reshape(jnp.array([[1.0] * 3, [2.0] * 3]), (UNITS,), (1, 0)), [(2, 3)]
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_freedom_that_a_person_counts_and_computes_the_same_when_it_is_used(name):
    program = PROGRAMS[name]
    params = {name: Shape(shape, jnp.float32) for name, shape in program.shapes.items()}
    x = Shape(program.input, jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        spec = derive_spec(program.fn, params, x)
        assert sorted(spec.shape(name) for name in spec.sizes) == sorted(program.free), str(spec)
        spec.check(program.fn, random_arrays(params), random_arrays(x), draws=3)


def test_units_of_rows_that_are_shared_out_by_explicit_sharding_are_free():
    def fn(params, x):
        hidden = jnp.tanh(jax.sharding.reshard(x, P("device", None)) @ params["up"])
        return jax.sharding.reshard(hidden, P(None, None)) @ params["down"]

    mesh = Mesh(np.array(jax.devices()[:2]), "device", axis_types=(AxisType.Explicit,))
    params = {"up": Shape((FEATURES, UNITS), jnp.float32), "down": Shape((UNITS, 2), jnp.float32)}
    x = Shape((ROWS, FEATURES), jnp.float32)
    with jax.set_mesh(mesh):
        spec = derive_spec(fn, params, x)
        assert [spec.shape(name) for name in spec.sizes] == WHOLE, str(spec)
        spec.check(fn, random_arrays(params), random_arrays(x))


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_complex_constants_are_converted_as_xla_does():
    mask = np.array([1, 1j, 0, 0, 1, 1])
    fn = lambda p, x: jnp.sum(jnp.tanh(p) * jax.lax.convert_element_type(mask, bool))  # noqa: E731
    spec = derive_spec(fn, Shape((UNITS,), jnp.float32), Shape((), float))
    assert sorted(spec.shape(name) for name in spec.sizes) == [(2,), (3,)]


@pytest.mark.slow
def test_a_chain_of_neighbours_is_as_long_as_it_may_be():
    spec = derive_spec(lambda p, x: jnp.square(p[1:] - p[:-1]).sum(), Shape((3000,), jnp.float32), Shape((), float))
    assert not spec.sizes


def test_what_sorting_freezes_is_blamed_on_it():
    def fn(params, x):
        return jnp.sort(x @ params["up"], axis=-1) * 2 @ params["down"]

    params = {"up": Shape((FEATURES, UNITS), jnp.float32), "down": Shape((UNITS, 2), jnp.float32)}
    spec = derive_spec(fn, params, Shape((ROWS, FEATURES), jnp.float32))
    assert spec.axes == {"up": (None, "up"), "down": (None, None)}
    assert {frozen.reason.split()[0] for frozen in spec.frozen if frozen.leaf == "down"} == {"sort", "the"}


@pytest.mark.parametrize(
    ("fn", "shapes", "words"),
    [
        (
            lambda p, x: jax.lax.ragged_dot(x, p["in"], jnp.array([1, 3])) @ p["out"],
            {"in": (2, FEATURES, UNITS), "out": (UNITS, 2)},
            "ragged_dot_general (groups take the rows in turn)",
        ),
        (
            lambda p, x: (
                jnp.concatenate([x @ p["in"], x @ p["in"]], 1).reshape(ROWS, 4, 3).max(1) @ p["out"]
                + (x @ p["in"]).reshape(ROWS, 3, 2).max(1) @ p["other"]
            ),
            {"in": (FEATURES, UNITS), "out": (3, 2), "other": (2, 2)},
            "reshape (its parts end where those of a product or a concatenation do not)",
        ),
        (sharded_units, {"in": (FEATURES, UNITS)}, "shard_map (devices share the array out by position)"),
        (lambda p, x: jnp.take(x @ p["in"], jnp.array([2, 0]), 1), {"in": (5, 6)}, "gather (entries are looked up by"),
        (lambda p, x: jnp.argmax(x @ p["in"] > 0, 1), {"in": (5, 6)}, "argmax (of equal entries it takes the first)"),
        (lambda p, x: jnp.argmax(x @ p["in"], 1), {"in": (5, 6)}, "argmax (positions are used as numbers)"),
        (
            lambda p, x: jax.lax.approx_max_k(x @ p["in"], 2)[0],
            {"in": (5, 6)},
            "approx_top_k (how it depends on the order is not known)",
        ),
    ],
)
def test_what_is_frozen_is_explained(fn, shapes, words):
    params = {name: Shape(shape, jnp.float32) for name, shape in shapes.items()}
    spec = derive_spec(fn, params, Shape((ROWS, FEATURES), jnp.float32))
    assert any(frozen.leaf == "in" and frozen.reason.startswith(words) for frozen in spec.frozen), str(spec)
