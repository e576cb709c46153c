"""Derive random keys from a seed and names, and generate random numbers faster on CPU."""

import math
import numbers
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import PRNGKeyArray, UInt32

from mcomb.errors import UserError
from mcomb.trees import Array

LARGEST_SEED = 2**32 - 1  # JAX reduces larger seeds modulo 2³²


def fold_name(key: PRNGKeyArray, name: str | int) -> PRNGKeyArray:
    """Fold a name into a key; the result is the same on every machine."""
    return jax.random.fold_in(key, name if isinstance(name, int) else zlib.crc32(name.encode()))


def fold_names(key: PRNGKeyArray, names: Iterable[str]) -> dict[str, PRNGKeyArray]:
    """Return a different key for each name: the key from `fold_name`, unless two names collide.

    "buckeroo" and "plumless" share a CRC-32. The alphabetically first of such names gets the key from `fold_name`. For
    every other name, its position among them is folded into that key.
    """
    keys: dict[str, PRNGKeyArray] = {}
    seen: Counter[int] = Counter()
    for name in sorted(names):
        code = zlib.crc32(name.encode())
        keys[name] = fold_name(fold_name(key, name), seen[code]) if seen[code] else fold_name(key, name)
        seen[code] += 1
    return keys


def stream(seed: int, *names: str | int) -> PRNGKeyArray:
    """Return the key of a seed, folded with the names of its purpose: `stream(0, "order", epoch)`."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed is {seed!s:.50}: pass an integer from 0 to {LARGEST_SEED}.")
    return reduce(fold_name, names, jax.random.key(seed))


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def unrolled(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return a key that generates the same numbers in one pass; return keys of other generators unchanged."""
    is_threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    if not is_threefry or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_UNROLLED)


def _hash(key: UInt32[Array, "2"], high: Any, low: Any) -> tuple[Array, Array]:
    """Return Threefry's two random numbers for each pair of counters."""
    keys = key[0], key[1], key[0] ^ key[1] ^ PARITY
    x, y = high + keys[0], low + keys[1]
    for i in range(5):
        for distance in ROTATIONS[i % 2]:
            x = x + y
            y = (y << distance | y >> (32 - distance)) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def _counters(shape: tuple[int, ...]) -> tuple[np.uint32, Array]:
    """Return the high and low halves of each entry's index."""
    return np.uint32(0), jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape)


@partial(jax.jit, static_argnums=1)
def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Array:
    return jnp.stack(_hash(key, *_counters(shape)), axis=-1)


@jax.jit
def _fold_in(key: UInt32[Array, "2"], data: Any) -> UInt32[Array, "2"]:
    return jnp.stack(_hash(key, np.uint32(0), jnp.asarray(data, np.uint32)))


@partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key: UInt32[Array, "2"], width: int, shape: tuple[int, ...]) -> Array:
    if width == 64 or math.prod(shape) >= 2**32:
        return threefry_prng_impl.random_bits(key, width, shape)
    x, y = _hash(key, *_counters(shape))
    return (x ^ y).astype(f"uint{width}")


_UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32, unrolled",
    tag="unrolled",
)
