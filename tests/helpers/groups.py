"""Small networks with known symmetry groups, written by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcomb import derive_spec
from mcomb.symmetry.matrix_groups import SymmetrySpec

HEADS, HEAD_SIZE = 2, 3


@dataclass(frozen=True)
class Network:
    """A function, its weights and inputs, and the groups that a person derives.

    `groups` has the kind of each space of matrices, and `scalings` the values of each scaling. `extra` counts
    continuous symmetries of other kinds. A LayerNorm ignores the mean of its input, so that each row of a writer can be
    translated. Its output without gain has mean zero, so that each column of a reader can be, too, along the inverse of
    the gain. With a bias, this needs a bias that compensates it.
    """

    apply: Callable[[Any, Any], Any]
    params: dict[str, np.ndarray]
    inputs: np.ndarray
    groups: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    extra: int = 0


def weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return random weights with about the scale of a trained network; gains are positive."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) / np.sqrt(shape[0] if len(shape) > 1 else 4)
        made[name] = (1 + 0.3 * np.abs(values) if name.startswith("gain") else values).astype(np.float32)
    return made


def examples(*shape: int) -> np.ndarray:
    """Return random inputs."""
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def mlp(activation: Callable[[Any], Any], scalings: tuple[str, ...] = (), **others: Any) -> Network:
    """Return an MLP with one hidden layer of three units."""
    params = weights(0, up=(5, 3), bias=(3,), down=(3, 4))
    apply = lambda p, x: activation(x @ p["up"] + p["bias"]) @ p["down"]  # noqa: E731
    return Network(apply, params, examples(64, 5), scalings=scalings, **others)


def gated() -> Network:
    """Return a gated feed-forward layer, whose linear factor can be rescaled."""
    params = weights(1, gate=(5, 4), up=(5, 4), down=(4, 4))
    apply = lambda p, x: (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]  # noqa: E731
    return Network(apply, params, examples(64, 5), scalings=("nonzero",))


def deep_mlp() -> Network:
    """Return an MLP with two hidden layers, which has no dead units."""
    params, act = weights(2, first=(5, 4), second=(4, 6), last=(6, 3)), jax.nn.leaky_relu
    apply = lambda p, x: act(act(x @ p["first"]) @ p["second"]) @ p["last"]  # noqa: E731
    return Network(apply, params, examples(64, 5), scalings=("positive", "positive"))


def root_mean_square(x: Any) -> Any:
    """Normalise by the root mean square."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-2)


def layer_norm(x: Any) -> Any:
    """Normalise by mean and variance."""
    x = x - x.mean(-1, keepdims=True)
    return root_mean_square(x)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Return causal attention of heads on the second last axis."""
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k)
    length = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((1, 1, length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v)


def attention() -> Network:
    """Return attention with two heads, without any norm."""
    shape = (8, HEADS, HEAD_SIZE)
    params = weights(3, q=shape, k=shape, v=shape, out=(HEADS, HEAD_SIZE, 8))

    def apply(p, x):
        q, k, v = (jnp.einsum("ntc,chd->nthd", x, p[name]) for name in "qkv")
        return jnp.einsum("nqhd,hdc->nqc", attend(q, k, v), p["out"])

    return Network(apply, params, examples(16, 6, 8), groups=("invertible matrix",) * 2)


def fused_attention() -> Network:
    """Return attention with query, key and value in one matrix, as in GPT-2."""
    width = HEADS * HEAD_SIZE
    params = weights(4, qkv=(8, 3 * width), out=(width, 8))

    def apply(p, x):
        q, k, v = (y.reshape(*x.shape[:2], HEADS, HEAD_SIZE) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
        return attend(q, k, v).reshape(*x.shape[:2], width) @ p["out"]

    return Network(apply, params, examples(16, 6, 8), groups=("invertible matrix",) * 2)


def stream(norm: Callable[[Any], Any], kind: str, bias: bool = False, tied: bool = False, **others: Any) -> Network:
    """Return a residual stream of four units with two normed feed-forward layers of GELU units."""
    biases = {"bias1": (4,), "bias2": (4,), "bias3": (4,)} if bias else {}
    shapes = {"embed": (9, 4), "up1": (4, 5), "down1": (5, 4), "up2": (4, 5), "down2": (5, 4), "read": (4, 9)}
    params = weights(5, **shapes, gain1=(4,), gain2=(4,), gain3=(4,), **biases)
    if tied:
        del params["read"]

    def apply(p, x):
        def normed(h, i):
            scaled = norm(h) * p[f"gain{i}"]
            return scaled + p[f"bias{i}"] if bias else scaled

        h = x @ p["embed"]
        h = h + jax.nn.gelu(normed(h, 1) @ p["up1"]) @ p["down1"]
        h = h + jax.nn.gelu(normed(h, 2) @ p["up2"]) @ p["down2"]
        return normed(h, 3) @ (p["embed"].T if tied else p["read"])

    return Network(apply, params, examples(64, 9), groups=(kind,) if kind else (), **others)


def lstm() -> Network:
    """Return an LSTM with its gates in one matrix."""
    params = weights(6, read=(4, 12), recur=(3, 12), bias=(12,), out=(3, 4))

    def apply(p, x):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["read"] + h @ p["recur"] + p["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((x.shape[0], 3), x.dtype)
        return jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))[0][0] @ p["out"]

    return Network(apply, params, examples(64, 5, 4), scalings=("sign",))


ROTATION, CENTRED = "rotation", "mean-keeping rotation"
FOLDED = ("nonzero",) * 3

NETWORKS: dict[str, Callable[[], Network]] = {
    "MLP, ReLU": lambda: mlp(jax.nn.relu, ("positive",)),
    "MLP, leaky ReLU": lambda: mlp(jax.nn.leaky_relu, ("positive",)),
    "MLP, squared ReLU": lambda: mlp(lambda x: jax.nn.relu(x) ** 2, ("positive",)),
    "MLP, GELU": lambda: mlp(jax.nn.gelu),
    "MLP, SiLU": lambda: mlp(jax.nn.silu),
    "MLP, tanh": lambda: mlp(jnp.tanh, ("sign",)),
    "MLP, sin": lambda: mlp(jnp.sin, ("sign",)),
    "MLP, cos": lambda: mlp(jnp.cos, ("sign",)),
    "MLP, linear": lambda: mlp(lambda x: x, groups=("invertible matrix",)),
    "gated MLP": gated,
    "deep MLP, leaky ReLU": deep_mlp,
    "attention": attention,
    "attention, query, key and value in one": fused_attention,
    "stream, RMSNorm": lambda: stream(root_mean_square, ROTATION, scalings=FOLDED),
    "stream, RMSNorm with bias": lambda: stream(root_mean_square, ROTATION, bias=True, scalings=FOLDED),
    "stream, LayerNorm": lambda: stream(layer_norm, CENTRED, scalings=FOLDED, extra=2 * (9 + 5 + 5)),
    "stream, LayerNorm with bias": lambda: stream(
        layer_norm, CENTRED, bias=True, scalings=FOLDED, extra=9 + 5 + 5 + 4 + 4 + 4
    ),
    "stream, RMSNorm, tied": lambda: stream(root_mean_square, "", tied=True, scalings=("nonzero", "nonzero", "sign")),
    "stream, LayerNorm, tied": lambda: stream(layer_norm, "", tied=True, scalings=("nonzero", "nonzero")),
    "LSTM": lstm,
}


@cache
def case(name: str) -> tuple[Network, SymmetrySpec]:
    """Return a network and its derived spec with all groups."""
    network = NETWORKS[name]()
    return network, derive_spec(network.apply, network.params, network.inputs, groups="all")
