import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

from mcomb import uniform
from mcomb.combination import mix
from mcomb.keys import unrolled

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


OF_EVERY_DAY = ("uniform", "none", "bernoulli", "normal", "split")


@pytest.mark.parametrize(
    "draw",
    [pytest.param(DRAWS[name], marks=() if name in OF_EVERY_DAY else pytest.mark.slow, id=name) for name in DRAWS],
)
def test_the_numbers_are_those_of_jax_bit_for_bit(draw):
    for key in KEYS:
        assert_equal(draw(unrolled(key)), draw(key))
    keys = jnp.stack(KEYS)
    assert_equal(jax.jit(jax.vmap(lambda key: draw(unrolled(key))))(keys), jax.vmap(draw)(keys))


def test_a_key_of_another_generator_stays_as_it_is():
    key = jax.random.key(0, impl="rbg")
    assert unrolled(key) is key


def test_the_shares_of_a_combination_are_never_stored():
    leaf = jax.ShapeDtypeStruct((300, 100), np.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = (
        jax.jit(mix(uniform)).lower(key, jax.ShapeDtypeStruct((), np.float32), {"w": leaf}, {"w": leaf}).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < leaf.size
