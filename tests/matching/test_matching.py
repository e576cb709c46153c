import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal, inner_product, inner_product_scale

from mcomb import Blocks, PermutationSpec, Segments
from mcomb.matching.matching import objective, weight_parts

SPEC = PermutationSpec(
    axes={"fused": ("P", Blocks((2, "Q"))), "joined": (Segments(("P", "Q", 1)),), "scalar": (), "count": ("P",)},
    sizes={"P": 3, "Q": 4},
)
SHAPES = {"fused": (3, 8), "joined": (8,), "scalar": ()}


def weights(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()} | {
        "count": rng.integers(0, 9, 3)
    }


def test_weight_parts_have_at_most_one_permutation_per_axis():
    a, b = weights(0), weights(1)
    fused, *joined, scalar = weight_parts(SPEC, a, b)
    assert fused.labels == ("P", 2, "Q")
    assert_equal((fused.a, fused.b), (a["fused"].reshape(3, 2, 4), b["fused"].reshape(3, 2, 4)))
    assert [part.labels for part in joined] == [("P",), ("Q",), (1,)]
    assert_equal(np.concatenate([part.b for part in joined]), b["joined"])
    assert scalar.labels == ()  # and none of `count`, which is not a weight


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("permuted", [False, True])
def test_objective_is_inner_product_in_float32(dtype, permuted):
    a, b = weights(0, dtype), weights(1, dtype)
    perms = SPEC.random(jax.random.key(0)) if permuted else None
    expected = inner_product(a, SPEC.apply(perms, b) if permuted else b)
    assert_close(objective(SPEC, a, b, perms), expected, roundings=4, scale=inner_product_scale(a, b))
