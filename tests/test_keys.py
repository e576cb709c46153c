import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

from mcomb import uniform
from mcomb.combination import mix
from mcomb.keys import fold_name, fold_names, unrolled
from mcomb.lab.setups import SETUPS
from mcomb.trees import named_leaves

KEYS = [jax.random.key(0), jax.random.key(2**31 + 5), jax.random.fold_in(jax.random.key(7), 9)]
DRAWS = {
    "uniform": lambda key: jax.random.uniform(key, (3, 5, 7), minval=-0.25, maxval=0.75),
    "one": jax.random.uniform,
    "none": lambda key: jax.random.uniform(key, (0, 3)),
    "half": lambda key: jax.random.uniform(key, (33,), jnp.bfloat16),
    "bits": lambda key: jax.random.bits(key, (40,), jnp.uint8),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (4, 9)),
    "normal": lambda key: jax.random.normal(key, (17,)),
    "integers": lambda key: jax.random.randint(key, (21,), 0, 1000),
    "permutation": lambda key: jax.random.permutation(key, 30),
    "folded": lambda key: jax.random.uniform(jax.random.fold_in(key, 2**32 - 1), (5,)),
    "split": lambda key: jax.vmap(lambda one: jax.random.uniform(one, (4,)))(jax.random.split(key, (2, 3)).ravel()),
}


DAILY = ("uniform", "none", "bernoulli", "normal", "split")


@pytest.mark.parametrize(
    "draw",
    [pytest.param(DRAWS[name], marks=() if name in DAILY else pytest.mark.slow, id=name) for name in DRAWS],
)
def test_unrolled_keys_draw_same_numbers_as_jax(draw):
    for key in KEYS:
        assert_equal(draw(unrolled(key)), draw(key))
    keys = jnp.stack(KEYS)
    assert_equal(jax.jit(jax.vmap(lambda key: draw(unrolled(key))))(keys), jax.vmap(draw)(keys))


def test_unrolled_keeps_keys_of_other_generators():
    key = jax.random.key(0, impl="rbg")
    assert unrolled(key) is key


def test_mix_never_stores_shares():
    leaf = jax.ShapeDtypeStruct((300, 100), np.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = (
        jax.jit(mix(uniform)).lower(key, jax.ShapeDtypeStruct((), np.float32), {"w": leaf}, {"w": leaf}).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < leaf.size


def test_fold_names_gives_each_name_its_own_key():
    names = ["b", "plumless", "a", "buckeroo"]
    key = jax.random.key(0)
    keys = fold_names(key, names)
    assert {*keys} == {*names}
    data = {name: tuple(jax.random.key_data(own).tolist()) for name, own in keys.items()}
    assert len({*data.values()}) == len(names)
    alone = {name: tuple(jax.random.key_data(fold_name(key, name)).tolist()) for name in names}
    assert alone["buckeroo"] == alone["plumless"]
    assert {name for name in names if data[name] != alone[name]} == {"plumless"}
    assert fold_names(key, names[::-1]).keys() == keys.keys()
    assert fold_names(key, names[::-1])["plumless"] == keys["plumless"]


@pytest.mark.parametrize("name", SETUPS)
def test_fold_names_hashes_of_setups_are_distinct(name):
    """Experiments fold keys by the name of a weight alone."""
    weights, perms = named_leaves(SETUPS[name].shapes(1)), SETUPS[name].spec(1).sizes
    for names in (weights, perms):
        assert len({zlib.crc32(own.encode()) for own in names}) == len(names)
