"""Small random programs, to test that no derived permutation changes a function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

Params = dict[str, np.ndarray]
SIZES = (2, 3, 4, 6)


class Program:
    """A random function of parameters and one input, determined by its seed and number of steps."""

    def __init__(self, seed: int, steps: int):
        self.seed, self.steps = seed, steps
        self.input = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
        self.shapes: dict[str, tuple[int, ...]] = {}
        jax.eval_shape(lambda x: self._run(None, x), self.input)

    def params(self, seed: int | None = None) -> Params:
        """Return random parameters."""
        rng = np.random.default_rng(self.seed if seed is None else seed)
        return {name: rng.standard_normal(shape, np.float32) for name, shape in self.shapes.items()}

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Return the program's result."""
        return self._run(params, x)

    def _run(self, params: Params | None, x: jax.Array) -> jax.Array:
        rng = np.random.default_rng(self.seed)
        names: list[str] = []

        def param(*shape: int) -> jax.Array:
            """Return a new parameter, or sometimes reuse one of the same shape."""
            same_shape = [name for name in names if self.shapes[name] == shape]
            if same_shape and rng.random() < 0.3:
                name = same_shape[rng.integers(len(same_shape))]
            else:
                name = f"p{len(names)}"
                names.append(name)
                self.shapes[name] = shape
            return jnp.ones(shape) if params is None else jnp.asarray(params[name])

        values = [dense(rng, param, [x])]
        for _ in range(self.steps):
            value = OPERATIONS[rng.integers(len(OPERATIONS))](rng, param, values)
            if value is not None and 0 < value.size <= 600 and value.ndim >= 2:
                values = [*values[-3:], jnp.tanh(value)]
        flat = jnp.concatenate([value.reshape(2, -1) for value in values[-2:]], 1)
        return flat @ param(flat.shape[1], 2)


Rng = np.random.Generator
Values = list[jax.Array]
Result = jax.Array | None  # None if an operation does not apply to these values
Operation = Callable[[Rng, Any, Values], Result]


def pick(rng: Rng, values: Values) -> jax.Array:
    return values[-1] if rng.random() < 0.6 else values[rng.integers(len(values))]


def random_axis(rng: Rng, value: jax.Array) -> int:
    return int(rng.integers(1, value.ndim))


def random_size(rng: Rng) -> int:
    return int(rng.choice(SIZES))


def dense(rng: Rng, param: Any, values: Values) -> jax.Array:
    value = pick(rng, values)
    return jnp.moveaxis(jnp.tensordot(value, param(value.shape[-1], random_size(rng)), 1), -1, random_axis(rng, value))


def dense_over_two(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    return jnp.tensordot(value, param(*value.shape[-2:], random_size(rng)), 2)


def local(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    return jnp.einsum("bsi,sij->bsj", value, param(*value.shape[1:], random_size(rng)))


def attention(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    heads, dims = random_size(rng), random_size(rng)
    q, k, v = (jnp.einsum("bti,ihd->bthd", value, param(value.shape[-1], heads, dims)) for _ in range(3))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return jnp.einsum("bqhd,hdo->bqo", mixed, param(heads, dims, value.shape[-1])) if rng.random() < 0.7 else mixed


def halves(rng: Rng, param: Any, values: Values) -> Result:
    """Apply heads whose keys and values are the two halves of one parameter."""
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    heads, dims = random_size(rng), random_size(rng)
    keys, others = jnp.split(param(2 * heads, value.shape[-1], dims), 2)
    mixed = jnp.einsum("bti,hid->bthd", value, keys) * jnp.cos(jnp.einsum("bti,hid->bthd", value, others))
    return jnp.einsum("bthd,hdo->bto", mixed, param(heads, dims, random_size(rng)))


def bias(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    shape = tuple(n if rng.random() < 0.6 else 1 for n in value.shape[1:])
    return value + param(1, *shape)


def scale_by_own_sum(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    return value / (1 + jnp.abs(value.sum(random_axis(rng, value), keepdims=True)))


def compare_with_all(rng: Rng, param: Any, values: Values) -> Result:
    """Multiply each entry of a named axis by the mean or maximum over the axis."""
    value = pick(rng, values)
    axis = random_axis(rng, value)
    combine = (jax.lax.pmean, jax.lax.pmax)[rng.integers(2)]
    return jax.vmap(lambda one: one * combine(one, "all"), axis, axis, axis_name="all")(value)


def combine_two(rng: Rng, param: Any, values: Values) -> Result:
    a, b = pick(rng, values), pick(rng, values)
    if a.shape != b.shape:
        return None
    return a + b if rng.random() < 0.5 else a * jax.nn.sigmoid(b)


def concatenate(rng: Rng, param: Any, values: Values) -> Result:
    a, b = pick(rng, values), pick(rng, values)
    axis = random_axis(rng, a)
    if a.ndim != b.ndim or any(n != m for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if i != axis):
        return None
    return jnp.concatenate([a, b], axis)


def transpose(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    return value.transpose(0, *(1 + rng.permutation(value.ndim - 1)))


def split_axis(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    outer = next((n for n in rng.permutation((2, 3, 4)) if value.shape[axis] % n == 0), None)
    if outer is None or value.ndim > 3:
        return None
    return value.reshape(*value.shape[:axis], outer, -1, *value.shape[axis + 1 :])


def merge_axes(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if axis + 1 >= value.ndim:
        return None
    return value.reshape(*value.shape[:axis], -1, *value.shape[axis + 2 :])


def reshape(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    total = value.size // 2
    outer = next(n for n in (*rng.permutation(SIZES), 1) if total % n == 0)
    return value.reshape(2, outer, total // outer)


def slice_axis(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    start = int(rng.integers(0, value.shape[axis]))
    return jax.lax.slice_in_dim(value, start, None, int(rng.choice((1, 1, 2))), axis)


def gate(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if value.shape[axis] % 2:
        return None
    a, b = jnp.split(value, 2, axis)
    return a * jax.nn.sigmoid(b)


def split_fused(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    width = random_size(rng)
    fused = jnp.tensordot(value, param(value.shape[-1], 3 * width), 1).reshape(*value.shape[:-1], 3, width)
    if rng.random() < 0.5:
        fused = jnp.moveaxis(fused, -2, 0)
        return fused[0] * fused[1] + fused[2]
    return jnp.concatenate([fused[..., 0, :] + fused[..., 1, :], fused[..., 2, :]], -1)


def pad(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jnp.pad(value, [(int(i == axis), int(rng.integers(2)) if i == axis else 0) for i in range(value.ndim)])


def group_norm(rng: Rng, param: Any, values: Values) -> Result:
    """Operate on groups of channels of two concatenated arrays; a group may contain channels of both."""
    value, other = pick(rng, values), pick(rng, values)
    if value.shape[:-1] != other.shape[:-1] or value.ndim > 3:
        return None
    wider = jnp.tensordot(value, param(value.shape[-1], random_size(rng) + random_size(rng)), 1)
    parts = jnp.concatenate([wider if rng.random() < 0.7 else value, other], -1)
    width = parts.shape[-1]
    size = int(rng.choice([n for n in range(2, width + 1) if width % n == 0]))
    groups = parts.reshape(*parts.shape[:-1], -1, size)
    ways: list[Any] = [
        lambda: parts - jnp.repeat(groups.mean(-1), size, axis=-1),
        lambda: (groups - groups.mean(-1, keepdims=True)).reshape(parts.shape),
        lambda: (groups * param(size).reshape([1] * (groups.ndim - 1) + [size])).reshape(parts.shape),
        lambda: jax.nn.softmax(groups.swapaxes(-1, -2), -2).reshape(parts.shape),
        lambda: jnp.einsum("...gi,gij->...gj", groups, param(width // size, size, 3)).sum(-2),
        lambda: groups * jnp.cos(wider.sum()),
    ]
    return ways[rng.integers(len(ways))]()


def positional(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    operations: list[Any] = [
        jnp.cumsum,
        jnp.sort,
        jnp.flip,
        lambda v, axis: jnp.roll(v, 1, axis),
        lambda v, axis: jnp.fft.fft(v, axis=axis).real,
        jnp.cumprod,
        jax.lax.cummax,
        lambda v, axis: jnp.moveaxis(jnp.linalg.qr(full_rank(jnp.moveaxis(v, axis, -1)))[0], -1, axis),
    ]
    return operations[rng.integers(len(operations))](value, axis=axis)


def full_rank(matrices: Any) -> Any:
    """Add a random matrix, because a factorisation of equal rows would consist of rounding errors."""
    shape = (1,) * (matrices.ndim - 2) + matrices.shape[-2:]
    return matrices + np.random.default_rng(0).standard_normal(shape, np.float32)


def distinct(param: Any, value: Any, axis: int) -> Any:
    """Add a parameter along an axis, because the argmax of equal entries would depend on their order."""
    return value + param(value.shape[axis]).reshape([-1 if i == axis else 1 for i in range(value.ndim)])


def one_hot_maximum(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jax.nn.one_hot(distinct(param, value, axis).argmax(axis), 3)


def reduce(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    operations: list[Any] = [jnp.max, jnp.sum, jnp.mean, jax.nn.logsumexp]
    return operations[rng.integers(len(operations))](value, axis=random_axis(rng, value))


def softmax(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    return jax.nn.softmax(3 * value, axis=random_axis(rng, value))


def self_product(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim == 2:
        return jnp.einsum("bi,bj->bij", value, value)
    return jnp.einsum("b...ij,b...kj->b...ik", value, value)


def look_up(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jnp.take(value, rng.integers(0, value.shape[axis], random_size(rng)), axis)


def embed(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    table, axis = param(5, random_size(rng)), random_axis(rng, value)
    return jnp.take(table, distinct(param, value, axis).argmax(axis).astype(int) % 5, axis=0)


def update(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    return value.at[:, 0].set(1.0) if rng.random() < 0.5 else value.at[..., :1].add(value[..., -1:])


def scale_by_constant(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    count = np.arange(value.shape[axis])
    constants: list[Any] = [
        lambda: count,
        lambda: count % 2,
        lambda: count * 0 + 1,
        lambda: jnp.where(count % 2, 300.0, 44.0).astype(jnp.uint8),  # XLA clips values to the range of the dtype
        lambda: jnp.where(count % 2, jnp.inf, -jnp.inf).astype(jnp.int8),
        lambda: (jnp.arange(len(count), dtype=jnp.float32) + 1e8) - 1e8,  # XLA does not round the sum
        lambda: ((jax.lax.iota(jnp.bfloat16, len(count)) + 256) - 256).astype(jnp.float32),
        lambda: jnp.clip(1 / (jnp.where(jnp.arange(len(count)) % 2, -0.0, 0.0) + 0.0), -1, 1),
        lambda: jnp.asarray(count % 2).astype(jnp.int4).astype(jnp.uint4).astype(jnp.int32),
        lambda: jax.lax.reshape(jnp.stack([0.0 * count, count // 2 + 1.0])[:, ::2], count.shape, (1, 0)),
        lambda: jnp.copysign(1.0, np.where(count % 2, 0.0, -0.0)),
        lambda: jnp.repeat(count[::2], 2),
    ]
    known = constants[rng.integers(len(constants) if len(count) % 2 == 0 else 9)]()
    return value * known.reshape([-1 if i == axis else 1 for i in range(value.ndim)])


def symmetrise(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    kernel = param(value.shape[-1], value.shape[-1])
    return value @ (kernel + kernel.T if rng.random() < 0.5 else kernel @ kernel)


def scan_layers(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    width, hidden, layers = value.shape[-1], random_size(rng), random_size(rng)
    up, down = param(layers, width, hidden), param(layers, hidden, width)

    def layer(carry: Any, kernels: Any) -> Any:
        inner = jnp.tanh(jnp.tensordot(carry, kernels[0], 1))
        return carry + jnp.tensordot(inner, kernels[1], 1), inner

    if rng.random() < 0.3:
        add: list[Any] = [
            lambda carry, kernels: (carry + layer(value, kernels)[0], None),
            lambda carry, kernels: (carry + layer(value, kernels)[0], carry.sum()),
            lambda carry, kernels: (carry * 0.5 + layer(value, kernels)[0], None),
            lambda carry, kernels: (jnp.maximum(layer(value, kernels)[0], carry), None),
        ]
        sums, extra = jax.lax.scan(add[rng.integers(4)], jnp.zeros_like(value), (up, down))
        return sums if extra is None else sums + (extra * param(layers)).sum()
    last, inner = jax.lax.scan(jax.checkpoint(layer), value, (up, down))
    return last if rng.random() < 0.8 else jnp.moveaxis(inner, 0, 1)


def recurrent_layer(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    hidden = random_size(rng)
    kernel, recurrent = param(value.shape[-1], hidden), param(hidden, hidden)

    def step(carry: Any, one: Any) -> Any:
        carry = jnp.tanh(one @ kernel + carry @ recurrent)
        return carry, carry

    last, every = jax.lax.scan(step, jnp.zeros((2, hidden)), value.swapaxes(0, 1))
    return last if rng.random() < 0.5 else every.swapaxes(0, 1)


def loop(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    kernel = param(value.shape[-1], value.shape[-1])
    return jax.lax.fori_loop(0, 2, lambda i, v: jnp.tanh(jnp.tensordot(v, kernel, 1)), value)


def branch(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    offset = param(*[1] * (value.ndim - 1), value.shape[-1])
    return jax.lax.cond(value.sum() > 0, lambda v: v + offset, lambda v: v * 2, value)


def convolve(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    channels = value.shape[-1]
    groups = int(rng.choice([n for n in (1, 2, 3, channels) if channels % n == 0]))
    kernel = param(int(rng.choice((1, 3))), channels // groups, groups * int(rng.choice((1, 2))))

    def run(kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            value, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )

    if rng.random() < 0.2:
        return run(kernel) * jax.grad(lambda kernel: (run(kernel) ** 3).sum())(kernel).sum((0, 1)).reshape(1, 1, -1)
    return run(kernel)


def pool(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    window = [2 if i == axis else 1 for i in range(value.ndim)]
    return jax.lax.reduce_window(value, -jnp.inf, jax.lax.max, window, [1] * value.ndim, "VALID")


def stack(rng: Rng, param: Any, values: Values) -> Result:
    a, b = pick(rng, values), pick(rng, values)
    if a.shape != b.shape or a.ndim > 3:
        return None
    stacked = jnp.stack([a, b], random_axis(rng, a))
    return stacked if rng.random() < 0.5 else stacked.reshape(2, -1, stacked.shape[-1])


def unstack(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    first, *rest = jnp.unstack(value, axis=random_axis(rng, value))
    return sum((jnp.sin(entry) for entry in rest), first)


def unstack_fused(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    width = random_size(rng)
    fused = jnp.tensordot(value, param(value.shape[-1], 3 * width), 1).reshape(*value.shape[:-1], 3, width)
    q, k, v = jnp.unstack(fused, axis=-2)
    return q * jax.nn.sigmoid(k) if rng.random() < 0.5 else jnp.concatenate([q + k, v], -1)


def tile(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jnp.tile(value, [2 if i == axis else 1 for i in range(value.ndim)])


def order_blind(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    axis = random_axis(rng, value)
    operations = [
        lambda v: jnp.median(v, axis),
        lambda v: jnp.quantile(v, 0.3, axis=axis),
        lambda v: jax.lax.top_k(v, 1, axis=axis)[0],
        lambda v: jnp.moveaxis(jnp.sort(v, axis), axis, -1),
    ]
    return operations[rng.integers(len(operations))](value)


def route(rng: Rng, param: Any, values: Values) -> Result:
    """Select experts or code words by index, with one-hot vectors or lookups."""
    value = pick(rng, values)
    experts, width = random_size(rng), random_size(rng)
    scores = jnp.tensordot(value, param(value.shape[-1], experts), 1)
    scores = distinct(param, scores, scores.ndim - 1)
    if rng.random() < 0.2:  # rounding makes some scores equal
        few = (jnp.sign, jnp.round, lambda s: (s > 0).astype(s.dtype), lambda s: s.sum() * jnp.floor(s))
        scores = few[rng.integers(4)](scores)
    index = [
        lambda s: s.argmax(-1),
        lambda s: jax.lax.top_k(s, 2)[1][..., 0],
        lambda s: jnp.argsort(s, axis=-1)[..., 1],
        lambda s: jnp.argsort(s, axis=-1, descending=True)[..., 0],
    ][rng.integers(4)](scores)
    table = param(experts, width)
    if rng.random() < 0.5:
        return jax.nn.one_hot(index, experts) @ table
    if rng.random() < 0.5:
        chosen = index.reshape(-1)
        gates = jnp.zeros((len(chosen), experts), value.dtype).at[np.arange(len(chosen)), chosen].set(2.0)
        each = jax.vmap(lambda gate, k: gate @ table * table[k])(gates, chosen)
        return each.reshape(*index.shape, width)
    if rng.random() < 0.3:
        chosen = index.reshape(-1)
        counted = jnp.cumsum(jax.nn.one_hot(chosen, experts, dtype=int), 0)
        place = jnp.take_along_axis(counted, chosen[:, None], 1)[:, 0] - 1
        room = jnp.zeros((experts, len(chosen), width), value.dtype)
        room = room.at[chosen, place].add(jnp.tensordot(value, param(value.shape[-1], width), 1).reshape(-1, width))
        return (room * table[:, None])[chosen, place].reshape(*index.shape, width)
    looked_up = table[index] if rng.random() < 0.5 else jnp.take(table, index, axis=0)
    return looked_up * jnp.take_along_axis(jax.nn.softmax(scores), index[..., None], -1)


def sort_by_expert(rng: Rng, param: Any, values: Values) -> Result:
    """Sort rows by expert, apply the experts, and restore the order, sometimes incorrectly."""
    value = pick(rng, values)
    experts, width, out = random_size(rng), value.shape[-1], random_size(rng)
    rows = value.reshape(-1, width)
    scores = distinct(param, rows @ param(width, experts), 1)
    index = scores.argmax(-1)
    order = jnp.argsort(index)
    counted = (index, index, index, (-scores).argmax(-1), jnp.roll(index, 1))[rng.integers(5)]
    sizes = [
        lambda: jnp.bincount(counted, length=experts),
        lambda: jax.nn.one_hot(counted, experts).sum(0),
        lambda: (counted[:, None] == np.arange(experts)[None]).sum(0),
        lambda: (counted[:, None] != np.arange(experts)[None]).sum(0),
        lambda: jax.nn.one_hot(counted, experts)[1:].sum(0),
    ][rng.choice(5, p=(0.4, 0.2, 0.2, 0.1, 0.1))]()
    sizes = sizes.astype((jnp.int32, jnp.uint8)[rng.integers(2)])
    sorted_rows = rows[order] if rng.random() < 0.7 else rows[order] * param(len(rows), 1)
    product = (jax.lax.ragged_dot, jax.jit(jax.lax.ragged_dot))[rng.integers(2)]
    result = jnp.tanh(product(sorted_rows, jnp.sin(param(experts, width, out)), sizes.astype(jnp.int32)))
    if rng.random() < 0.3:
        result = jax.lax.ragged_dot(result, param(experts, out, out), sizes.astype(jnp.int32))
    if rng.random() < 0.3:
        result = result + param(experts, out)[index[order] if rng.random() < 0.7 else index[order[::-1]]]
    zeros = jnp.zeros((len(rows), out), result.dtype)
    ways: list[Any] = [
        lambda: result[jnp.argsort(order)],
        lambda: result[jnp.argsort(jnp.argsort(jnp.argsort(order)))],
        lambda: zeros.at[order].set(result),
        lambda: zeros.at[order].add(result * jnp.take_along_axis(scores, index[:, None], 1)[order]),
        lambda: zeros.at[order // 2].add(result),
        lambda: zeros.at[order // 2].set(result),
        lambda: result,
        lambda: jnp.cumsum(result, 0)[jnp.argsort(order)],
        lambda: result[jnp.argsort(order)] + result[jnp.argsort(jnp.argsort(counted))],
        lambda: result[::-1][jnp.argsort(order)],
        lambda: zeros + result.max(0, keepdims=True),
        lambda: zeros + param(experts, 1, out)[jnp.argmax(sizes)],
        lambda: zeros + param(experts, 1, out)[jnp.argsort(sizes, descending=True)[0]],
        lambda: zeros + jnp.argsort(index[order]).reshape(-1, 1),
        lambda: zeros + jax.lax.fori_loop(0, rng.integers(1, 3), lambda i, sums: sums * 0.5 + result, zeros),
    ]
    return ways[rng.integers(len(ways))]().reshape(*value.shape[:-1], -1)


def use_positions(rng: Rng, param: Any, values: Values) -> Result:
    """Compute with positions, such as those of the largest entries, some of which may be equal."""
    value = pick(rng, values)
    width, last = value.shape[-1], value.ndim - 1
    if width < 2:
        return None
    rows = value.reshape(-1, width)
    rows = distinct(param, rows @ param(width, width) if rng.random() < 0.7 else rows, 1)  # because rows may be zero
    with_equal: list[Any] = [
        lambda: jnp.concatenate([jnp.zeros((1, width), value.dtype), rows[:-1]]),
        lambda: rows.at[0].set(0.0),
        lambda: np.tri(len(rows), k=-1, dtype=value.dtype) @ rows,
        lambda: jax.lax.scan(lambda before, row: (row, before), jnp.zeros(width, value.dtype), rows)[1],
        lambda: jax.lax.map(jnp.round, rows),
        lambda: jnp.sign(rows) * param(len(rows), 1),
        lambda: jax.lax.cond(value.sum() > 0, jnp.sign, lambda r: r, rows),
        lambda: jax.lax.fori_loop(0, 2, lambda i, r: r.at[i].set(r.sum()), rows),
        lambda: jnp.pad(rows, ((1, 0), (0, 0)))[:-1].T.T,
    ]
    if rng.random() < 0.3:
        rows = with_equal[rng.integers(len(with_equal))]()
    largest = rows.argmax(-1)

    def along_last(entries: Any) -> Any:
        return entries.reshape([1] * last + [width])

    def sparse(row: Any) -> Any:
        values, index = jax.lax.top_k(row, min(2, width))
        return jnp.zeros(width, value.dtype).at[index].set(values)

    ways: list[Any] = [
        lambda: value @ param(width, width, random_size(rng))[rows.mean(0).argmax()],
        lambda: value + (largest + np.array([-2]) < 0).sum(),
        lambda: value + jnp.take(largest, np.array([1, 0])).sum(),
        lambda: value * jnp.take_along_axis(jnp.argsort(rows, axis=-1), np.array([[1, 0]] * len(rows)), 1).sum(),
        lambda: jax.vmap(lambda row: jax.lax.dynamic_slice_in_dim(row, row.argmax(), 2))(rows),
        lambda: jnp.take(param(width, random_size(rng)), (rows > 0).argmax(-1), axis=0),
        lambda: jnp.take(param(width, random_size(rng)), jnp.argsort(rows > 0, axis=-1)[:, 1], axis=0),
        lambda: jnp.take(param(width, random_size(rng)), jax.lax.top_k(rows.round().astype(int), 1)[1][:, 0], axis=0),
        lambda: value * along_last(jnp.zeros(width, value.dtype).at[largest].add(1.0)),
        lambda: value * along_last(jnp.zeros(width, value.dtype).at[largest].set(rows[:, 0])),
        lambda: jax.vmap(sparse)(rows),
        lambda: value * jnp.take(param(len(rows)), largest.argmax()),
        lambda: rows * jnp.argsort(jnp.argsort(rows, axis=-1), axis=-1),
        lambda: rows * jnp.argsort(jnp.argsort(rows, axis=-1, descending=True)[:, ::-1], axis=-1),
        lambda: rows * jnp.argsort(jnp.argsort(rows, axis=-1), axis=0),
        lambda: jax.vmap(lambda row: jax.lax.dynamic_index_in_dim(row, row.argmax()))(rows),
        lambda: rows * jax.nn.one_hot(largest[(rows @ rows.T + param(1, len(rows))).argmax(-1)], width),
        lambda: jnp.take(param(width, random_size(rng)), largest[(rows @ param(width, len(rows))).argmax(-1)], axis=0),
        lambda: rows[:, largest[:2]],
        lambda: rows.at[:, largest[:2]].multiply(2.0),
        lambda: jnp.take(param(2 * width, random_size(rng)), jnp.tile(rows, 2).argmax(-1), axis=0),
        lambda: value * jnp.take(param(width**2), (rows.T @ rows).argmax()),
        lambda: value * jnp.take(param(len(rows)), jnp.take(param(width), largest).argmax()),
        lambda: value * jnp.take(param(width), jax.lax.map(lambda one: rows.sum() + one, jnp.ones(width)).argmax()),
        lambda: value * along_last(jnp.bincount(largest, length=width) + (largest[0] != np.arange(width))),
        lambda: value * (jnp.take(param(width), jnp.append(largest[:1], largest[-1:])) @ param(2)),
        lambda: value * (param(width, 3)[largest[0], np.array([2, 0, 1])] @ param(3)),
        lambda: value * param(width, width)[largest, (-rows).argmax(-1)].sum(),
        lambda: value * (jnp.zeros((3, width)).at[np.arange(3), largest[0]].add(param(3)).sum(1) @ param(3)),
        lambda: value * (jnp.zeros(3).at[largest % 3].add(rows.sum(1)) @ param(3)),
        lambda: rows * jax.lax.select_n(-1, largest, (-rows).argmax(-1)).reshape(-1, 1),
    ]
    result = ways[rng.integers(len(ways))]()
    return result.reshape(*value.shape[:-1], -1)


def identity_matrix(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    size = value.shape[-1]
    kernel = param(size, size)
    if rng.random() < 0.3:
        return value * jnp.trace(kernel)
    if rng.random() < 0.5:
        return value @ (kernel + jnp.eye(size))
    return value @ jnp.diag(jnp.diagonal(kernel))


def strided(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if value.shape[axis] % 2:
        return None
    even, odd = (jax.lax.slice_in_dim(value, start, None, 2, axis) for start in (0, 1))
    return jnp.concatenate([even - odd, even * odd], axis) if rng.random() < 0.5 else even + jnp.cos(odd)


def write(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    width = value.shape[-1]
    start = int(rng.integers(width))
    operations = [
        lambda v: v.at[..., start:].set(0.5),
        lambda v: v.at[..., start:].multiply(2.0),
        lambda v: jax.lax.dynamic_update_slice(v, v[..., : width - start], (0,) * (v.ndim - 1) + (start,)),
        lambda v: jnp.zeros((*v.shape[:-1], width + 2)).at[..., 1 : width + 1].set(v),
        lambda v: jax.lax.dynamic_slice_in_dim(v, start, width - start, v.ndim - 1),
    ]
    return operations[rng.integers(len(operations))](value)


def pool_tiles(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if value.shape[axis] % 2:
        return None
    window = [2 if i == axis else 1 for i in range(value.ndim)]
    reducer, start = ((jax.lax.max, -jnp.inf), (jax.lax.add, 0.0))[rng.integers(2)]
    return jax.lax.reduce_window(value, start, reducer, window, window, "VALID")


def linear_algebra(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    gram = jnp.einsum("bsi,bti->bst", value, value) + 2 * jnp.eye(value.shape[1])[None]
    ways: list[Any] = [
        lambda: jnp.linalg.solve(gram, value),
        lambda: jnp.linalg.solve(gram, value) @ jnp.linalg.inv(value.mT @ value + 2 * jnp.eye(value.shape[2])[None]),
        lambda: jnp.linalg.cholesky(gram),
        lambda: jnp.linalg.svd(value, compute_uv=False),
        lambda: jax.lax.linalg.triangular_solve(gram, jnp.ones_like(value), left_side=True, lower=True) * value,
    ]
    return ways[rng.integers(len(ways))]()


def generic_reduction(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    return jax.lax.reduce(
        value, np.float32(0).astype(value.dtype), lambda a, b: a + jnp.sin(b), (random_axis(rng, value),)
    )


def ensemble(rng: Rng, param: Any, values: Values) -> Result:
    """Map a convolution over several kernels."""
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    kernels = param(3, 1, value.shape[-1], random_size(rng))
    one = partial(
        jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    members = jax.vmap(lambda kernel: one(value, kernel))(kernels)
    return members.sum(0) if rng.random() < 0.5 else jnp.moveaxis(members.sum(-1), 0, 1)


def grouped(rng: Rng, param: Any, values: Values) -> Result:
    """Multiply each row by the matrix of its group."""
    value = pick(rng, values)
    width = value.shape[-1]
    rows = value.reshape(-1, width)
    sizes = jnp.array([len(rows) // 2, len(rows) - len(rows) // 2], jnp.int32)
    return jax.lax.ragged_dot(rows, param(2, width, random_size(rng)), sizes).reshape(*value.shape[:-1], -1)


def loop_over_stack(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    width, layers, groups, inner = value.shape[-1], 3, random_size(rng), random_size(rng)
    kernels = param(layers, width, width)
    if rng.random() < 0.5:
        up, down = param(layers, width, groups * inner), param(layers, groups * inner, width)
        change = (lambda k: k, lambda k: 0.5 * k, lambda k: k.astype(value.dtype), jnp.sin)[rng.integers(4)]

        def layer(value: Any, up: Any, down: Any) -> Any:
            hidden = jax.nn.softmax((value @ up).reshape(*value.shape[:-1], groups, inner))
            return jnp.tanh(hidden.reshape(*value.shape[:-1], -1) @ down)

        up = change(up)
        if rng.random() < 0.5:
            return jax.lax.fori_loop(0, layers, lambda i, v: layer(v, up[i], down[i]), value)
        parts = [
            jnp.unstack(k) if rng.random() < 0.5 else [part[0] for part in jnp.split(k, layers)] for k in (up, down)
        ]
        for pair in zip(*parts, strict=True):
            value = layer(value, *pair)
        return value
    if rng.random() < 0.5:
        for i in range(layers):
            value = jnp.tanh(value @ kernels[i])
        return value
    return jax.lax.fori_loop(0, layers, lambda i, v: jnp.tanh(v @ kernels[i]), value)


def sharded(rng: Rng, param: Any, values: Values) -> Result:
    """Apply a layer to the rows of each device, and sum over devices."""
    value = pick(rng, values)
    kernel = param(value.shape[-1], random_size(rng))
    mesh = Mesh(np.array(jax.devices()[:1]), "device")

    def inner(kernel: Any, value: Any) -> Any:
        hidden = jnp.tanh(jnp.tensordot(value, kernel, 1))
        return hidden * jax.lax.psum(hidden.sum(), "device")

    specs = (PartitionSpec(), PartitionSpec("device"))
    return jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("device"))(kernel, value)


def convert(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    integers = jnp.int64 if value.dtype == jnp.float64 else jnp.int32
    ways = [
        lambda v: (v * 1j).imag,
        jax.lax.stop_gradient,
        jax.lax.optimization_barrier,
        lambda v: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(v, integers), v.dtype),
        lambda v: (
            v * jax.lax.iota(v.dtype, 2**21)[: v.shape[-1]].reshape([1] * (v.ndim - 1) + [-1])
        ),  # too long to treat as a known constant
    ]
    return ways[rng.integers(len(ways))](value)


def derivative(rng: Rng, param: Any, values: Values) -> Result:
    value = pick(rng, values)
    kernel = param(value.shape[-1], random_size(rng))
    pooled = value.ndim == 3 and rng.random() < 0.5
    window = (1, 2, 1)

    def energy(v: Any) -> Any:
        hidden = jnp.tanh(v @ kernel)
        if pooled:
            hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, window, window, "VALID")
        return jnp.sin(hidden).sum()

    return jax.grad(energy)(value) if rng.random() < 0.5 else jax.jvp(jax.grad(energy), (value,), (value,))[1]


def nested(rng: Rng, param: Any, values: Values) -> Result:
    """Apply another operation inside a transformation or control flow."""
    operation = nested if rng.random() < 0.15 else SIMPLE[rng.integers(len(SIMPLE))]
    seed, recorded = int(rng.integers(2**32)), list(values)
    kernels: list[jax.Array] = []

    def run(values: Values, given: Values) -> Any:
        queue = list(given)
        return operation(np.random.default_rng(seed), lambda *shape: queue.pop(0), values)

    def record(*shape: int) -> jax.Array:
        kernels.append(param(*shape))
        return kernels[-1]

    plain = operation(np.random.default_rng(seed), record, recorded)
    if plain is None:
        return None
    own_tangent, own_gradient = jax.custom_jvp(run), jax.custom_vjp(run)
    own_tangent.defjvp(lambda primals, tangents: (run(*primals), jnp.zeros_like(plain)))
    own_gradient.defvjp(lambda *args: (run(*args), None), lambda _, gradient: (None, None))
    wraps: list[Any] = [
        lambda: own_tangent(recorded, kernels),
        lambda: own_gradient(recorded, kernels),
        lambda: jax.jit(run)(recorded, kernels),
        lambda: jax.checkpoint(run)(recorded, kernels),
        lambda: jax.lax.cond(plain.sum() > 0, run, lambda v, k: plain * 0.5, recorded, kernels),
        lambda: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, run(recorded, kernels)), (0, plain))[1],
        lambda: jax.lax.scan(lambda c, _: (c + run(recorded, kernels), None), plain, length=2)[0],
        lambda: jax.vmap(lambda s: run([s * v for v in recorded], kernels))(jnp.array([0.5, 1.0])).sum(0),
    ]
    try:
        return wraps[rng.integers(len(wraps))]()
    except NotImplementedError:  # JAX cannot batch the operation, such as `ragged_dot`
        return None


SIMPLE: list[Operation] = [
    *(dense, dense, dense, dense_over_two, local, attention, halves, bias, symmetrise, embed, convolve),
    *(transpose, split_axis, merge_axes, reshape, slice_axis, gate, split_fused, pad, concatenate, combine_two),
    *(scale_by_own_sum, compare_with_all, reduce, softmax, self_product, scale_by_constant, pool, convert),
    *(positional, one_hot_maximum, look_up, update, write, strided, pool_tiles, generic_reduction),
    *(stack, unstack, unstack_fused, tile, order_blind, route, sort_by_expert, use_positions, use_positions),
    *(identity_matrix, linear_algebra, group_norm, group_norm),
]
OPERATIONS: list[Operation] = [
    *SIMPLE,
    *(scan_layers, recurrent_layer, loop, branch, loop_over_stack, ensemble, derivative, sharded, grouped),
    *(nested, nested, nested, nested, nested, nested),
]
