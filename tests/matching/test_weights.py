import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program
from zoo import spec_of

from benchmarks.matching import reference
from mcomb import Blocks, PermutationSpec, Segments, match_weights, permutation_spec
from mcomb.base import UserError
from mcomb.matching.core import weight_parts
from mcomb.matching.weights import _descend, visit_orders


def noisy(params, amount, seed=5):
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [leaf + amount * leaf.std() * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    )


def inner(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(np.vdot(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)


@pytest.mark.parametrize("amount", [0.0, 0.3])
def test_a_planted_permutation_is_recovered(network, amount):
    _, model, params, images = network
    spec = spec_of(model, params, images)
    planted = spec.random(jax.random.key(7))
    shuffled = noisy(spec.apply(planted, params), amount)
    found = match_weights(spec, params, shuffled).perms
    jax.tree.map(np.testing.assert_array_equal, found, spec.invert(planted))


def test_the_objective_is_the_inner_product_and_never_falls(network):
    _, model, a, images = network
    b = noisy(a, 3.0)
    spec = spec_of(model, a, images)
    matching = match_weights(spec, a, b)
    assert matching.objective == pytest.approx(inner(a, spec.apply(matching.perms, b)), rel=1e-5)
    assert matching.trace[-1] == matching.objective
    assert all(later >= earlier for earlier, later in itertools.pairwise(matching.trace))
    assert matching.objective > matching.trace[0]


def test_arguments_are_left_alone_and_equal_seeds_give_equal_results(network):
    _, model, a, images = network
    b = jax.tree.map(np.array, noisy(a, 3.0))
    before = jax.tree.map(np.copy, (a, b))
    first, again = (match_weights(spec_of(model, a, images), a, b, seed=3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (a, b), before)
    jax.tree.map(np.testing.assert_array_equal, first.perms, again.perms)
    assert first.trace == again.trace


SIZES = {"P": 2, "Q": 3, "R": 4}
axes = st.lists(
    st.sampled_from(
        [None, "P", "Q", "R", Blocks((2, "P")), Blocks(("Q", 2)), Segments(("P", "R")), Segments((1, "Q"))]
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(axes, min_size=1, max_size=5), st.integers(0, 2**32), st.integers(0, 3))
def test_the_objective_never_falls_and_no_permutation_alone_betters_it_at_the_end(leaves, weights, seed):
    spec = PermutationSpec({f"leaf{i}": tuple(layouts) for i, layouts in enumerate(leaves)}, SIZES)
    rng = np.random.default_rng(weights)
    a, b = ({name: rng.standard_normal(shape(spec, name), np.float32) for name in spec.axes} for _ in "ab")
    matching = match_weights(spec, a, b, seed=seed)
    assert all(later >= earlier for earlier, later in itertools.pairwise(matching.trace))
    assert matching.trace[0] == pytest.approx(inner(a, b), rel=1e-4, abs=1e-4)
    assert matching.objective == pytest.approx(inner(a, spec.apply(matching.perms, b)), rel=1e-4, abs=1e-4)
    for name, size in SIZES.items():
        if any(sum(part == name for part in labels) > 1 for labels in pieces(spec)):
            continue  # on two axes of a leaf it is no assignment problem
        orders = (matching.perms | {name: np.array(order)} for order in itertools.permutations(range(size)))
        best = max(inner(a, spec.apply(perms, b)) for perms in orders)
        assert matching.objective == pytest.approx(best, rel=1e-4, abs=1e-4)


def shape(spec, name):
    return [spec.length(axis) if axis else 2 for axis in spec.axes[name]]


def pieces(spec):
    for name, layouts in spec.axes.items():
        yield from (labels for labels, _ in spec.simple_parts(layouts, np.zeros(shape(spec, name))))


def after_each_sweep(spec, a, b):
    """The objective, computed anew from the weights, of descents that end after one sweep, two sweeps, and so on."""
    pieces = list(weight_parts(spec, a, b))
    for count in range(len(match_weights(spec, a, b).trace)):
        yield _descend(spec, pieces, None, itertools.islice(visit_orders(spec, 0), count))


def check_every_sweep(spec, a, b):
    heights = []
    for descent in after_each_sweep(spec, a, b):
        heights.append(inner(a, spec.apply(descent.perms, b)))
        assert descent.objective == pytest.approx(heights[-1], rel=1e-5)
        assert len(descent.trace) == len(heights)
    assert all(later >= earlier - 1e-6 * abs(earlier) for earlier, later in itertools.pairwise(heights))


def test_the_weights_come_closer_in_every_sweep(network):
    _, model, a, images = network
    check_every_sweep(spec_of(model, a, images), a, noisy(a, 5.0))


@pytest.mark.parametrize("seed", range(8))
def test_the_weights_come_closer_in_every_sweep_for_derived_specs(seed):
    program = Program(seed, 8)
    spec, a = permutation_spec(program, program.params(), program.input), program.params()
    if spec.sizes:
        check_every_sweep(spec, a, noisy(spec.apply(spec.random(jax.random.key(seed)), a), 1.0))


def test_scalars_and_what_is_no_float_are_carried_along():
    a = {"w": np.eye(4, dtype=np.float32), "temperature": np.float32(2), "count": np.int32(3)}
    spec = PermutationSpec.from_axes(a, {"w": (None, "P"), "temperature": (), "count": ()})
    b = spec.apply({"P": np.array([2, 0, 3, 1])}, a)
    matching = match_weights(spec, a, b)
    assert matching.objective == 8
    np.testing.assert_array_equal(spec.apply(matching.perms, b)["w"], a["w"])


def test_no_restart_is_refused():
    a = {"w": np.eye(4)}
    with pytest.raises(UserError, match="0 restarts"):
        match_weights(PermutationSpec.from_axes(a, {"w": (None, "P")}), a, a, restarts=0)


def test_the_descent_is_that_of_the_reference(network):
    """With the same visits, what is kept, skipped and solved meanwhile changes no permutation."""
    setup, model, a, images = network
    if setup.title.startswith("ResNet"):
        pytest.skip("the reference compiles for every shape: two networks are enough")
    spec, b = spec_of(model, a, images), noisy(a, 5.0)
    ours, theirs = match_weights(spec, a, b, seed=3), reference(spec, a, b, seed=3)
    jax.tree.map(np.testing.assert_array_equal, ours.perms, theirs.perms)
    assert ours.objective == pytest.approx(theirs.objective, rel=1e-5)
    assert ours.skipped > 0
    assert ours.solved < theirs.solved


def test_a_descent_goes_on_from_where_it_is_told_to(network):
    _, model, a, images = network
    spec, b = spec_of(model, a, images), noisy(a, 3.0)
    first = match_weights(spec, a, b)
    again = match_weights(spec, a, b, start=first.perms)
    jax.tree.map(np.testing.assert_array_equal, again.perms, first.perms)
    assert again.trace[0] == pytest.approx(first.objective, rel=1e-5)
    assert again.solved == len(spec.sizes)
    planted = spec.random(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, match_weights(spec, a, a, start=planted).perms, spec.identity())


def test_a_coarse_first_phase_ends_where_no_permutation_can_be_bettered_either(network):
    _, model, a, images = network
    spec, b = spec_of(model, a, images), noisy(a, 3.0)
    coarse = match_weights(spec, a, b, coarse=True)
    assert coarse.objective == pytest.approx(inner(a, spec.apply(coarse.perms, b)), rel=1e-5)
    again = match_weights(spec, a, b, start=coarse.perms)
    jax.tree.map(np.testing.assert_array_equal, again.perms, coarse.perms)


def test_of_several_orders_the_best_is_kept():
    rng = np.random.default_rng(0)
    a, b = (
        {"in": rng.normal(size=(4, 9)), "mid": rng.normal(size=(9, 9)), "out": rng.normal(size=(9, 2))} for _ in "ab"
    )
    spec = PermutationSpec.from_axes(a, {"in": (None, "P"), "mid": ("P", "Q"), "out": ("Q", None)})
    many = match_weights(spec, a, b, restarts=12)
    assert len(set(many.tried)) > 1
    assert many.objective == max(many.tried)
    assert many.tried[0] == match_weights(spec, a, b).objective
    assert many.objective == pytest.approx(inner(a, spec.apply(many.perms, b)))


def test_one_hidden_layer_is_matched_optimally():
    """With a single permutation a visit solves the whole problem: brute force finds nothing better."""
    rng = np.random.default_rng(0)
    a, b = ({"in": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))} for _ in range(2))
    spec = PermutationSpec.from_axes(a, {"in": (None, "P"), "out": ("P", None)})
    best = max(
        np.vdot(a["in"], b["in"][:, order]) + np.vdot(a["out"], b["out"][list(order)])
        for order in itertools.permutations(range(5))
    )
    assert match_weights(spec, a, b).objective == pytest.approx(best, rel=1e-6)


def test_a_permutation_on_both_axes_of_a_leaf_never_lowers_the_objective():
    rng = np.random.default_rng(0)
    for seed in range(10):
        a, b = ({"recurrent": rng.normal(size=(6, 6)), "bias": rng.normal(size=6)} for _ in range(2))
        spec = PermutationSpec.from_axes(a, {"recurrent": ("P", "P"), "bias": ("P",)})
        trace = match_weights(spec, a, b, seed=seed).trace
        assert all(later >= earlier for earlier, later in itertools.pairwise(trace))


def test_networks_that_do_not_fit_the_spec_are_refused(network):
    _, model, a, images = network
    wide = jax.tree.map(lambda leaf: leaf.repeat(2, axis=-1), a)
    with pytest.raises(UserError, match="entries, but permutation"):
        match_weights(spec_of(model, a, images), a, wide)


def test_weights_that_are_not_numbers_are_refused(network):
    _, model, a, images = network
    broken = jax.tree.map(lambda leaf: leaf * np.nan, a)
    with pytest.raises(UserError, match="not a number"):
        match_weights(spec_of(model, a, images), a, broken)
