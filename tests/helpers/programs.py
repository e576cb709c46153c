"""Random small programs, for testing that no derived permutation ever changes a function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, np.ndarray]
SIZES = (2, 3, 4, 6)


class Program:
    """A function of parameters and one input, composed at random; the same for the same seed."""

    def __init__(self, seed: int, steps: int):
        self.seed, self.steps = seed, steps
        self.input = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
        self.shapes: dict[str, tuple[int, ...]] = {}
        jax.eval_shape(lambda x: self._run(None, x), self.input)

    def params(self) -> Params:
        """Random parameters."""
        rng = np.random.default_rng(self.seed)
        return {name: rng.standard_normal(shape, np.float32) for name, shape in self.shapes.items()}

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """The program's result."""
        return self._run(params, x)

    def _run(self, params: Params | None, x: jax.Array) -> jax.Array:
        rng = np.random.default_rng(self.seed)
        names: list[str] = []

        def param(*shape: int) -> jax.Array:
            """A parameter: a new one, or at times one of this shape that is used elsewhere too."""
            same_shape = [name for name in names if self.shapes[name] == shape]
            if same_shape and rng.random() < 0.3:
                name = same_shape[rng.integers(len(same_shape))]
            else:
                name = f"p{len(names)}"
                names.append(name)
                self.shapes[name] = shape
            return jnp.ones(shape) if params is None else params[name]

        values = [dense(rng, param, [x])]
        for _ in range(self.steps):
            value = OPERATIONS[rng.integers(len(OPERATIONS))](rng, param, values)
            if value is not None and 0 < value.size <= 600 and value.ndim >= 2:
                values = [*values[-3:], jnp.tanh(value)]
        flat = jnp.concatenate([value.reshape(2, -1) for value in values[-2:]], 1)
        return flat @ param(flat.shape[1], 2)


Operation = Callable[[np.random.Generator, Any, list[jax.Array]], jax.Array | None]


def pick(rng: np.random.Generator, values: list[jax.Array]) -> jax.Array:
    return values[-1] if rng.random() < 0.6 else values[rng.integers(len(values))]


def random_axis(rng: np.random.Generator, value: jax.Array) -> int:
    return int(rng.integers(1, value.ndim))


def random_size(rng: np.random.Generator) -> int:
    return int(rng.choice(SIZES))


def dense(rng: np.random.Generator, param: Any, values: list[jax.Array]) -> jax.Array:
    value = pick(rng, values)
    return jnp.moveaxis(jnp.tensordot(value, param(value.shape[-1], random_size(rng)), 1), -1, random_axis(rng, value))


def dense_over_two(rng, param, values):
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    return jnp.tensordot(value, param(*value.shape[-2:], random_size(rng)), 2)


def local(rng, param, values):
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    return jnp.einsum("bsi,sij->bsj", value, param(*value.shape[1:], random_size(rng)))


def attention(rng, param, values):
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    heads, dims = random_size(rng), random_size(rng)
    q, k, v = (jnp.einsum("bti,ihd->bthd", value, param(value.shape[-1], heads, dims)) for _ in range(3))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return jnp.einsum("bqhd,hdo->bqo", mixed, param(heads, dims, value.shape[-1])) if rng.random() < 0.7 else mixed


def bias(rng, param, values):
    value = pick(rng, values)
    shape = tuple(n if rng.random() < 0.6 else 1 for n in value.shape[1:])
    return value + param(1, *shape)


def scale_by_own_sum(rng, param, values):
    value = pick(rng, values)
    return value / (1 + jnp.abs(value.sum(random_axis(rng, value), keepdims=True)))


def combine_two(rng, param, values):
    a, b = pick(rng, values), pick(rng, values)
    if a.shape != b.shape:
        return None
    return a + b if rng.random() < 0.5 else a * jax.nn.sigmoid(b)


def concatenate(rng, param, values):
    a, b = pick(rng, values), pick(rng, values)
    axis = random_axis(rng, a)
    if a.ndim != b.ndim or any(n != m for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if i != axis):
        return None
    return jnp.concatenate([a, b], axis)


def transpose(rng, param, values):
    value = pick(rng, values)
    return value.transpose(0, *(1 + rng.permutation(value.ndim - 1)))


def split_axis(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    outer = next((n for n in rng.permutation((2, 3, 4)) if value.shape[axis] % n == 0), None)
    if outer is None or value.ndim > 3:
        return None
    return value.reshape(*value.shape[:axis], outer, -1, *value.shape[axis + 1 :])


def merge_axes(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if axis + 1 >= value.ndim:
        return None
    return value.reshape(*value.shape[:axis], -1, *value.shape[axis + 2 :])


def reshape(rng, param, values):
    value = pick(rng, values)
    total = value.size // 2
    outer = next(n for n in (*rng.permutation(SIZES), 1) if total % n == 0)
    return value.reshape(2, outer, total // outer)


def slice_axis(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    start = int(rng.integers(0, value.shape[axis]))
    return jax.lax.slice_in_dim(value, start, None, int(rng.choice((1, 1, 2))), axis)


def gate(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    if value.shape[axis] % 2:
        return None
    a, b = jnp.split(value, 2, axis)
    return a * jax.nn.sigmoid(b)


def split_fused(rng, param, values):
    value = pick(rng, values)
    width = random_size(rng)
    fused = jnp.tensordot(value, param(value.shape[-1], 3 * width), 1).reshape(*value.shape[:-1], 3, width)
    if rng.random() < 0.5:
        fused = jnp.moveaxis(fused, -2, 0)
        return fused[0] * fused[1] + fused[2]
    return jnp.concatenate([fused[..., 0, :] + fused[..., 1, :], fused[..., 2, :]], -1)


def pad(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jnp.pad(value, [(int(i == axis), int(rng.integers(2)) if i == axis else 0) for i in range(value.ndim)])


def positional(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    operations = [
        jnp.cumsum,
        jnp.sort,
        jnp.flip,
        lambda v, axis: jnp.roll(v, 1, axis),
        lambda v, axis: jnp.fft.fft(v, axis=axis).real,
    ]
    return operations[rng.integers(len(operations))](value, axis=axis)


def one_hot_maximum(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jax.nn.one_hot(value.argmax(axis), 3)


def reduce(rng, param, values):
    value = pick(rng, values)
    if value.ndim < 3:
        return None
    return [jnp.max, jnp.sum, jnp.mean, jax.nn.logsumexp][rng.integers(4)](value, axis=random_axis(rng, value))


def softmax(rng, param, values):
    value = pick(rng, values)
    return jax.nn.softmax(3 * value, axis=random_axis(rng, value))


def self_product(rng, param, values):
    value = pick(rng, values)
    if value.ndim == 2:
        return jnp.einsum("bi,bj->bij", value, value)
    return jnp.einsum("b...ij,b...kj->b...ik", value, value)


def look_up(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    return jnp.take(value, rng.integers(0, value.shape[axis], random_size(rng)), axis)


def embed(rng, param, values):
    value = pick(rng, values)
    return jnp.take(param(5, random_size(rng)), value.argmax(random_axis(rng, value)).astype(int) % 5, axis=0)


def update(rng, param, values):
    value = pick(rng, values)
    return value.at[:, 0].set(1.0) if rng.random() < 0.5 else value.at[..., :1].add(value[..., -1:])


def scale_by_constant(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    known = np.arange(value.shape[axis]) if rng.random() < 0.5 else np.ones(value.shape[axis])
    return value * known.reshape([-1 if i == axis else 1 for i in range(value.ndim)])


def symmetrise(rng, param, values):
    value = pick(rng, values)
    kernel = param(value.shape[-1], value.shape[-1])
    return value @ (kernel + kernel.T if rng.random() < 0.5 else kernel @ kernel)


def scan_layers(rng, param, values):
    value = pick(rng, values)
    width, hidden, layers = value.shape[-1], random_size(rng), random_size(rng)
    up, down = param(layers, width, hidden), param(layers, hidden, width)

    def layer(carry, kernels):
        inner = jnp.tanh(jnp.tensordot(carry, kernels[0], 1))
        return carry + jnp.tensordot(inner, kernels[1], 1), inner

    last, inner = jax.lax.scan(jax.checkpoint(layer), value, (up, down))
    return last if rng.random() < 0.8 else jnp.moveaxis(inner, 0, 1)


def recurrent_layer(rng, param, values):
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    hidden = random_size(rng)
    kernel, recurrent = param(value.shape[-1], hidden), param(hidden, hidden)

    def step(carry, one):
        carry = jnp.tanh(one @ kernel + carry @ recurrent)
        return carry, carry

    last, every = jax.lax.scan(step, jnp.zeros((2, hidden)), value.swapaxes(0, 1))
    return last if rng.random() < 0.5 else every.swapaxes(0, 1)


def loop(rng, param, values):
    value = pick(rng, values)
    kernel = param(value.shape[-1], value.shape[-1])
    return jax.lax.fori_loop(0, 2, lambda i, v: jnp.tanh(jnp.tensordot(v, kernel, 1)), value)


def branch(rng, param, values):
    value = pick(rng, values)
    offset = param(*[1] * (value.ndim - 1), value.shape[-1])
    return jax.lax.cond(value.sum() > 0, lambda v: v + offset, lambda v: v * 2, value)


def convolve(rng, param, values):
    value = pick(rng, values)
    if value.ndim != 3:
        return None
    channels = value.shape[-1]
    groups = int(rng.choice([n for n in (1, 2, 3, channels) if channels % n == 0]))
    kernel = param(int(rng.choice((1, 3))), channels // groups, groups * int(rng.choice((1, 2))))
    return jax.lax.conv_general_dilated(
        value, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )


def pool(rng, param, values):
    value = pick(rng, values)
    axis = random_axis(rng, value)
    window = [2 if i == axis else 1 for i in range(value.ndim)]
    return jax.lax.reduce_window(value, -jnp.inf, jax.lax.max, window, [1] * value.ndim, "VALID")


OPERATIONS: list[Operation] = [
    *(dense, dense, dense, dense_over_two, local, attention, bias, symmetrise, embed, convolve),
    *(transpose, split_axis, merge_axes, reshape, slice_axis, gate, split_fused, pad, concatenate, combine_two),
    *(scale_by_own_sum, reduce, softmax, self_product, scale_by_constant, pool),
    *(positional, one_hot_maximum, look_up, update),
    *(scan_layers, recurrent_layer, loop, branch),
]
