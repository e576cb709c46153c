"""Constants.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular
from rule_programs import FEATURES, UNITS, Program, check_freedom, layer, weights


def autoregressive(params, x):
    """Each unit sees the inputs, and units, up to its number, of which there are three."""
    numbers = [np.arange(FEATURES), np.arange(UNITS) % 3, np.arange(UNITS) % 3, np.arange(2)]
    masks = [(a[:, None] <= b[None]).astype(np.float32) for a, b in itertools.pairwise(numbers)]
    one, two, three = (params[name] * mask for name, mask in zip(("one", "two", "three"), masks, strict=True))
    return jnp.tanh(jnp.tanh(x @ one) @ two) @ three


MASK = np.repeat(np.array([[1, 2, 3]], np.float32), [2, 1, 3], axis=1)  # of six units, two, one and three are alike


NO_NUMBERS = np.array([0x7FC00000, 0x7FC00001] * 3, np.uint32).view(np.float32)  # they differ in their last bit


PROGRAMS = {
    "plus the identity": layer(lambda h, p: h @ (p["w"] + jnp.eye(UNITS)), [], w=(UNITS, UNITS)),
    "mask with runs of equal entries": Program(
        lambda p, x: jnp.tanh(x @ (p["up"] * MASK)) @ p["down"],
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        [(2,), (3,)],
    ),
    "mask of every second unit": layer(lambda h, p: h * (jnp.arange(UNITS) % 2), []),
    "autoregressive masks": Program(
        autoregressive, {"one": (FEATURES, UNITS), "two": (UNITS, UNITS), "three": (UNITS, 2)}, [(3, 2), (3, 2)]
    ),
    "equations with a constant side": weights(
        lambda a, w: jnp.sum(solve_triangular(a + 5 * jnp.eye(UNITS), jnp.ones(UNITS), lower=True) * w),
        [],
        (6, 6),
        (6,),
    ),
    "the largest of constants": weights(lambda v: v[jnp.argmax(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))], [], (6,)),
    "bits of what is no number": weights(
        lambda w: ((jax.lax.bitcast_convert_type(NO_NUMBERS, jnp.int32) & 1) * w).sum(), [(2, 3)], (6,)
    ),
    "constant that is reshaped by columns": layer(
        lambda h, p: h * jax.lax.reshape(jnp.array([[1.0] * 3, [2.0] * 3]), (UNITS,), (1, 0)), []
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])
