import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close, assert_equal, inner_product, inner_product_scale

from mcomb import Blocks, PermutationSpec, Segments
from mcomb.matching.core import objective, solve_assignment, weight_parts

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


def test_parts_have_one_permutation_or_none_on_each_axis():
    a, b = weights(0), weights(1)
    fused, *joined, scalar = weight_parts(SPEC, a, b)
    assert fused.labels == ("P", 2, "Q")
    assert_equal((fused.a, fused.b), (a["fused"].reshape(3, 2, 4), b["fused"].reshape(3, 2, 4)))
    assert [part.labels for part in joined] == [("P",), ("Q",), (1,)]
    assert_equal(np.concatenate([part.b for part in joined]), b["joined"])
    assert scalar.labels == ()  # and none of `count`, which is not a weight


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_objective_is_the_inner_product_in_single_precision(dtype, permuted):
    a, b = weights(0, dtype), weights(1, dtype)
    perms = SPEC.random(jax.random.key(0)) if permuted else None
    expected = inner_product(a, SPEC.apply(perms, b) if permuted else b)
    assert_close(objective(SPEC, a, b, perms), expected, roundings=4, scale=inner_product_scale(a, b))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_each_assignment_problem_of_a_batch_is_solved(seed, batch):
    scores = np.random.default_rng(seed).standard_normal((batch, 2, 4, 4))
    found = solve_assignment(scores)
    for index in np.ndindex(batch, 2):
        best = max(
            itertools.permutations(range(4)), key=lambda order, index=index: scores[index][range(4), order].sum()
        )
        assert found[index].tolist() == list(best)
