"""Published architectures that a special case of the rules is for, each written as its authors do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from zoo import Shape, random_arrays

from mcomb import derive_spec

TOKENS, FEATURES, UNITS, EXPERTS = 7, 5, 6, 3
SWIGLU = {"gate": (EXPERTS, FEATURES, UNITS), "up": (EXPERTS, FEATURES, UNITS), "down": (EXPERTS, UNITS, FEATURES)}
ROUTER = {"router": (FEATURES, EXPERTS)}


class Architecture(NamedTuple):
    """A function of parameters of these shapes and of tokens, and the shapes of its permutations' index arrays."""

    fn: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    free: list[tuple[int, ...]]


def mixtral(params, x):
    """Mixtral (Jiang et al., 2024): the two best experts of each token, weighted by a softmax over these two."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    weights = weights / weights.sum(-1, keepdims=True)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, EXPERTS))
    hidden = jnp.einsum("ti,eih->teh", x, params["up"])
    hidden = hidden * jax.nn.silu(jnp.einsum("ti,eih->teh", x, params["gate"]))
    return jnp.einsum("te,teh,eho->to", gates, hidden, params["down"])


def maxtext_sparse(params, x):
    """MaxText's dropless experts: tokens are sorted by expert, multiplied in groups, and put back."""
    weights, chosen = jax.lax.top_k(x @ params["router"], 2)
    weights = jax.nn.softmax(weights)
    experts = jnp.ravel(chosen)
    order = jnp.argsort(experts)
    inputs = jnp.take(x, order // 2, axis=0)
    sizes = jnp.bincount(experts, length=EXPERTS)
    hidden = jax.lax.ragged_dot(inputs, params["up"], sizes)
    hidden = hidden * jax.nn.silu(jax.lax.ragged_dot(inputs, params["gate"], sizes))
    outputs = jnp.take(jax.lax.ragged_dot(hidden, params["down"], sizes), jnp.argsort(order), axis=0)
    return jnp.einsum("tko,tk->to", outputs.reshape(TOKENS, 2, FEATURES), weights)


def maxtext_dense(params, x):
    """MaxText's other way: gates are written to pairs of token and expert, and all experts are computed."""
    weights, chosen = jax.lax.top_k(x @ params["router"], 2)
    gates = jnp.zeros((TOKENS, EXPERTS)).at[jnp.arange(TOKENS)[:, None], chosen].set(jax.nn.softmax(weights))
    hidden = jax.nn.silu(jnp.einsum("ti,eih->teh", x, params["gate"])) * jnp.einsum("ti,eih->teh", x, params["up"])
    return jnp.einsum("te,teh,eho->to", gates, hidden, params["down"])


def switch(params, x):
    """Switch Transformer (Fedus et al., 2022): the best expert has room for some tokens, in the order of tokens."""
    gates = jax.nn.softmax(x @ params["router"])
    mask = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = (jnp.cumsum(mask, 0) - 1) * mask
    dispatch = jnp.einsum("te,tec->tec", mask, jax.nn.one_hot(place.astype(int), 3))
    inputs = jnp.einsum("tec,ti->eci", dispatch, x)
    hidden = jax.nn.silu(jnp.einsum("eci,eih->ech", inputs, params["gate"]))
    hidden = hidden * jnp.einsum("eci,eih->ech", inputs, params["up"])
    outputs = jnp.einsum("ech,eho->eco", hidden, params["down"])
    load = (mask.mean(0) * gates.mean(0)).sum()
    return jnp.einsum("tec,te,eco->to", dispatch, gates, outputs), load


def scanned_mixtral(params, x):
    """The same layers in a scan, as in every large model: each has experts of its own."""

    def layer(x, params):
        return x + mixtral(params, x), None

    return jax.lax.scan(layer, x, params)[0]


def scanned_maxtext(params, x):
    def layer(x, params):
        return x + maxtext_sparse(params, x), None

    return jax.lax.scan(layer, x, params)[0]


def gpt_oss(params, x):
    """The reference code of gpt-oss (OpenAI, 2025): each token gathers the weights of its experts."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    hidden = jnp.tanh(jnp.einsum("ti,tkih->tkh", x, params["up"][chosen]))
    return jnp.einsum("tk,tkh,tkho->to", weights, hidden, jnp.take(params["down"], chosen, axis=0))


def vq_vae(params, x):
    """VQ-VAE (van den Oord et al., 2017): the nearest code word, and gradients straight through."""
    z = jnp.tanh(x @ params["encoder"])
    distances = (z**2).sum(1, keepdims=True) - 2 * z @ params["codes"].T + (params["codes"] ** 2).sum(1)
    quantised = jnp.take(params["codes"], jnp.argmin(distances, 1), axis=0)
    return (z + jax.lax.stop_gradient(quantised - z)) @ params["decoder"]


def top_k_autoencoder(params, x):
    """Sparse autoencoder (Gao et al., 2024): only the largest units of each token are active."""
    values, index = jax.lax.top_k(x @ params["encoder"] + params["bias"], 2)
    codes = jax.vmap(lambda values, index: jnp.zeros(UNITS).at[index].set(jax.nn.relu(values)))(values, index)
    return codes @ params["decoder"]


def grouped_queries(params, x):
    """Grouped queries (Ainslie et al., 2023): two keys and values, of which each has three queries."""
    q = jnp.einsum("ti,ihd->thd", x, params["q"])
    k, v = (jnp.repeat(jnp.einsum("ti,ihd->thd", x, params[name]), 3, axis=1) for name in "kv")
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.einsum("hqk,khd,hdo->qo", weights, v, params["out"])


def vision_transformer(params, x):
    """ViT (Dosovitskiy et al., 2021): a class token, and query, key and value in one product."""
    x = jnp.concatenate([params["class"], x @ params["stem"]]) + params["position"]
    q, k, v = (x @ params["qkv"]).reshape(TOKENS + 1, 3, 2, 4).transpose(1, 2, 0, 3)
    weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k))
    x = x + jnp.einsum("hqk,hkd->qhd", weights, v).reshape(TOKENS + 1, 8) @ params["out"]
    return x[0] @ params["head"]


LAYERS = {name: (2, *shape) for name, shape in (ROUTER | SWIGLU).items()}
ARCHITECTURES = {
    "Mixtral": Architecture(mixtral, ROUTER | SWIGLU, [(EXPERTS,), (EXPERTS, UNITS)]),
    "MaxText, sparse": Architecture(maxtext_sparse, ROUTER | SWIGLU, [(EXPERTS,), (UNITS,)]),
    "MaxText, dense": Architecture(maxtext_dense, ROUTER | SWIGLU, [(EXPERTS,), (EXPERTS, UNITS)]),
    "Switch Transformer": Architecture(switch, ROUTER | SWIGLU, [(EXPERTS,), (EXPERTS, UNITS)]),
    "scanned Mixtral": Architecture(scanned_mixtral, LAYERS, [(2, EXPERTS), (2, EXPERTS, UNITS)]),
    "scanned MaxText, sparse": Architecture(scanned_maxtext, LAYERS, [(2, EXPERTS), (2, UNITS)]),
    "gpt-oss": Architecture(gpt_oss, ROUTER | SWIGLU, [(EXPERTS,), (UNITS,)]),
    "VQ-VAE": Architecture(vq_vae, {"encoder": (FEATURES, 4), "codes": (9, 4), "decoder": (4, 2)}, [(4,), (9,)]),
    "TopK autoencoder": Architecture(
        top_k_autoencoder, {"encoder": (FEATURES, UNITS), "bias": (UNITS,), "decoder": (UNITS, 2)}, [(UNITS,)]
    ),
    "grouped queries": Architecture(
        grouped_queries,
        {"q": (FEATURES, 6, 4), "k": (FEATURES, 2, 4), "v": (FEATURES, 2, 4), "out": (6, 4, 2)},
        [(2,), (2, 3), (2, 4), (2, 4)],
    ),
    "ViT": Architecture(
        vision_transformer,
        {"class": (1, 8), "stem": (FEATURES, 8), "position": (TOKENS + 1, 8), "qkv": (8, 24), "out": (8, 8)}
        | {"head": (8, 2)},
        [(2,), (2, 4), (2, 4), (8,)],
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_architecture_keeps_its_freedom(name):
    architecture = ARCHITECTURES[name]
    params = {name: Shape(shape, jnp.float32) for name, shape in architecture.shapes.items()}
    x = Shape((TOKENS, FEATURES), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        spec = derive_spec(architecture.fn, params, x)
        assert sorted(map(spec.shape, spec.sizes)) == sorted(architecture.free), str(spec)
        spec.check(architecture.fn, random_arrays(params), random_arrays(x), draws=3)
