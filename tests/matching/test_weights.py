import itertools
import tracemalloc
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import EPS, assert_close, assert_equal, assert_never_falls, inner_product, inner_product_scale
from programs import Program
from scipy.optimize import linear_sum_assignment
from zoo import spec_of

from benchmarks.recovery import grouped_queries, grouped_query_shapes
from mcomb import Blocks, PermutationSpec, Segments, derive_spec
from mcomb.errors import UserError
from mcomb.matching import weights
from mcomb.matching.matching import inner_product as matching_inner_product
from mcomb.matching.matching import weight_parts
from mcomb.matching.weights import coordinate_descent, match_weights, visit_orders
from mcomb.trees import named_leaves

ROUNDINGS = 16  # of the largest possible inner product


def add_noise(params, amount, seed=5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + amount * leaf.std() * rng.standard_normal(leaf.shape, np.float32), params)


@cache
def cached_spec(model, shapes, inputs):
    """Derive a spec once for all tests of a model, because it takes longer than most of them."""
    return spec_of(model, jax.tree.unflatten(*shapes), inputs)


@pytest.fixture
def problem(network):
    """Return the spec and the weights of a network."""
    _, model, params, inputs = network
    leaves, tree = jax.tree.flatten(params)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return cached_spec(model, (tree, shapes), jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)), params


def check_objective(objective, a, b):
    assert_close(objective, inner_product(a, b), roundings=ROUNDINGS, scale=inner_product_scale(a, b))


def test_weights_objective_is_inner_product_and_never_falls(problem):
    spec, a = problem
    b = add_noise(a, 3.0)
    matching = match_weights(spec, a, b)
    check_objective(matching.objective, a, spec.apply(matching.perms, b))
    check_objective(matching.trace[0], a, b)
    assert matching.trace[-1] == matching.objective > matching.trace[0]
    assert_never_falls(matching.trace)


def test_weights_is_deterministic_and_pure(problem):
    spec, a = problem
    b = add_noise(a, 3.0)
    before = jax.tree.map(np.copy, (a, b))
    first, again = (match_weights(spec, a, b, seed=3) for _ in range(2))
    assert_equal((a, b), before)
    assert_equal(first.perms, again.perms)
    assert first.trace == again.trace


SIZES = {"P": 2, "Q": 3, "R": 4}
LAYOUTS = [None, "P", "Q", "R", Blocks((2, "P")), Blocks(("Q", 2)), Segments(("P", "R")), Segments((1, "Q"))]
leaf_layouts = st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(st.lists(leaf_layouts, min_size=1, max_size=5), st.integers(0, 2**32), st.integers(0, 3))
def test_weights_ends_at_local_optimum(leaves, weights, seed):
    """Brute force over one permutation, with the others fixed, finds nothing better."""
    spec = PermutationSpec({f"leaf{i}": tuple(layouts) for i, layouts in enumerate(leaves)}, SIZES)
    shapes = {name: [spec.length(axis) if axis else 2 for axis in layouts] for name, layouts in spec.axes.items()}
    rng = np.random.default_rng(weights)
    a, b = ({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in "ab")
    matching = match_weights(spec, a, b, seed=seed)
    assert_never_falls(matching.trace)
    check_objective(matching.trace[0], a, b)
    check_objective(matching.objective, a, spec.apply(matching.perms, b))
    parts = list(weight_parts(spec, a, b))
    for name, size in SIZES.items():
        if any(part.labels.count(name) > 1 for part in parts):
            continue  # on two axes of a part it is not an assignment problem
        values = [np.array(order) for order in itertools.permutations(range(size))]
        best = max(matching_inner_product(spec, parts, matching.perms | {name: value}) for value in values)
        assert best - matching.objective <= ROUNDINGS * EPS * inner_product_scale(a, b)


def check_every_sweep(spec, a, b):
    """Check that descents of more sweeps end higher."""
    parts, objectives = list(weight_parts(spec, a, b)), []
    for count in range(len(match_weights(spec, a, b).trace)):
        stopped = coordinate_descent(spec, parts, None, itertools.islice(visit_orders(list(spec.sizes), 0), count))
        objectives.append(inner_product(a, spec.apply(stopped.perms, b)))
        check_objective(stopped.objective, a, spec.apply(stopped.perms, b))
        assert len(stopped.trace) == len(objectives)
    assert_never_falls(objectives, slack=ROUNDINGS * EPS * inner_product_scale(a, b))
    assert objectives[-1] > objectives[0]


def test_weights_every_sweep_raises_objective(problem):
    spec, a = problem
    check_every_sweep(spec, a, add_noise(a, 5.0))


@pytest.mark.parametrize("seed", [8, 9, 11, 13, 14, 21, 28, 37])  # nested permutations; the same one on two axes
def test_weights_every_sweep_raises_random_objective(seed):
    program = Program(seed, 8)
    a = program.params()
    spec = derive_spec(program, a, program.input)
    check_every_sweep(spec, a, add_noise(spec.apply(spec.random(jax.random.key(seed)), a), 1.0))


def test_weights_count_scalars_but_not_integers():
    a = {"w": np.eye(4, dtype=np.float32), "temperature": np.float32(2), "count": np.int32(3)}
    spec = PermutationSpec.from_axes(a, {"w": (None, "P"), "temperature": (), "count": ()})
    b = spec.apply({"P": np.array([2, 0, 3, 1])}, a)
    matching = match_weights(spec, a, b)
    assert matching.objective == 4 + 2**2
    assert_equal(spec.apply(matching.perms, b), a)


def test_weights_rejects_no_restarts():
    a = {"w": np.eye(4)}
    with pytest.raises(UserError, match="restarts is 0: pass an integer"):
        match_weights(PermutationSpec.from_axes(a, {"w": (None, "P")}), a, a, restarts=0)


def plain_descent(spec, a, b, seed):
    """Descend with all scores computed anew at every visit, in float64."""
    leaves = {name: (np.float64(named_leaves(a)[name]), np.float64(named_leaves(b)[name])) for name in spec.axes}
    perms, solved = spec.identity(), 0
    for order in visit_orders(list(spec.sizes), seed):
        changed = False
        for name in order:
            n = spec.sizes[name]
            scores = np.zeros((n, n))
            for leaf, axis in spec.axes_of(name):
                x, y = leaves[leaf]
                for other, label in enumerate(spec.axes[leaf]):
                    if other != axis and label is not None:
                        y = y.take(perms[label], other)
                scores += np.moveaxis(x, axis, 0).reshape(n, -1) @ np.moveaxis(y, axis, 0).reshape(n, -1).T
            best = linear_sum_assignment(scores, maximize=True)[1]
            changed = changed or (best != perms[name]).any()
            perms[name], solved = best, solved + 1
        if not changed:
            return perms, solved


def test_weights_shortcuts_change_no_permutation(problem):
    """Cached scores, skipped visits and parallel problems give the result of the plain algorithm."""
    spec, a = problem
    b = add_noise(a, 5.0)
    matching, (expected, solved) = match_weights(spec, a, b, seed=3), plain_descent(spec, a, b, seed=3)
    assert_equal(matching.perms, expected)
    assert matching.skipped > 0
    assert matching.solved < solved


def test_weights_continue_from_start(problem):
    spec, a = problem
    b = add_noise(a, 3.0)
    first = match_weights(spec, a, b)
    again = match_weights(spec, a, b, start=first.perms)
    assert_equal(again.perms, first.perms)
    check_objective(again.trace[0], a, spec.apply(first.perms, b))
    assert again.solved == len(spec.sizes)
    planted = spec.random(jax.random.key(1))
    assert_equal(match_weights(spec, a, a, start=planted).perms, spec.identity())


def test_weights_coarse_ends_at_local_optimum(problem):
    spec, a = problem
    b = add_noise(a, 3.0)
    coarse = match_weights(spec, a, b, coarse=True)
    check_objective(coarse.objective, a, spec.apply(coarse.perms, b))
    assert_equal(match_weights(spec, a, b, start=coarse.perms).perms, coarse.perms)


def test_weights_keep_best_of_twelve_restarts():
    rng = np.random.default_rng(0)
    shapes = {"in": (4, 9), "mid": (9, 9), "out": (9, 2)}
    a, b = ({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in "ab")
    spec = PermutationSpec.from_axes(a, {"in": (None, "P"), "mid": ("P", "Q"), "out": ("Q", None)})
    best = match_weights(spec, a, b, restarts=12)
    assert len(best.tried) == 12
    assert len(set(best.tried)) > 1
    assert best.objective == max(best.tried)
    assert best.tried[0] == match_weights(spec, a, b).objective
    check_objective(best.objective, a, spec.apply(best.perms, b))


def test_weights_match_one_hidden_layer_optimally():
    """One visit solves the whole problem of a single permutation, so brute force finds nothing better."""
    rng = np.random.default_rng(0)
    a, b = ({"in": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))} for _ in "ab")
    spec = PermutationSpec.from_axes(a, {"in": (None, "P"), "out": ("P", None)})
    best = max(itertools.permutations(range(5)), key=lambda p: inner_product(a, spec.apply({"P": np.array(p)}, b)))
    assert match_weights(spec, a, b).perms["P"].tolist() == list(best)


def test_weights_of_square_permutation_never_fall():
    rng = np.random.default_rng(0)
    for seed in range(10):
        a, b = ({"recurrent": rng.normal(size=(6, 6)), "bias": rng.normal(size=6)} for _ in "ab")
        spec = PermutationSpec.from_axes(a, {"recurrent": ("P", "P"), "bias": ("P",)})
        matching = match_weights(spec, a, b, seed=seed)
        assert_never_falls(matching.trace)
        check_objective(matching.objective, a, spec.apply(matching.perms, b))


def test_weights_reject_networks_that_do_not_fit(problem):
    spec, a = problem
    wide = jax.tree.map(lambda leaf: leaf.repeat(2, axis=-1), a)
    with pytest.raises(UserError, match="The networks to match differ"):
        match_weights(spec, a, wide)
    with pytest.raises(UserError, match=r"entries, but permutation .* derive the spec from these parameters"):
        match_weights(spec, wide, wide)


def test_weights_reject_nan(problem):
    spec, a = problem
    with pytest.raises(UserError, match="not finite"):
        match_weights(spec, a, jax.tree.map(lambda leaf: leaf * np.nan, a))


def test_weights_match_complex_as_pairs_of_reals():
    def fn(params, x):
        return jnp.abs(jnp.tanh(x @ params["in"]) @ params["out"])

    rng = np.random.default_rng(0)
    a = {
        name: (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
        for name, shape in (("in", (3, 6)), ("out", (6, 2)))
    }
    spec = derive_spec(fn, a, np.ones((4, 3), np.float32))
    planted = spec.random(jax.random.key(1))
    matching = match_weights(spec, a, spec.apply(planted, a))
    assert_equal(matching.perms, spec.invert(planted))
    norm = sum(np.vdot(leaf, leaf).real for leaf in a.values())
    assert_close(matching.objective, norm, roundings=8)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_weights_second_restart_recovers_grouped_queries(seed):
    rng = np.random.default_rng(seed)
    a = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), grouped_query_shapes())
    spec = derive_spec(grouped_queries, a, np.zeros((2, 5), np.int32))
    assert {(4,), (4, 4), (4, 8), (8,), (24,)} == {spec.shape(name) for name in spec.sizes}
    planted = spec.random(jax.random.key(seed))
    b = add_noise(spec.apply(planted, a), 0.05)
    assert_equal(match_weights(spec, a, b, restarts=2).perms, spec.invert(planted))


def test_weights_second_restart_recovers_rows_and_columns():
    def fn(params, x):
        return x * jnp.trace(jnp.tanh(params))

    a = np.random.default_rng(0).standard_normal((20, 20), np.float32)
    spec = derive_spec(fn, a, np.ones(3, np.float32))
    planted = spec.random(jax.random.key(0))
    b = add_noise(spec.apply(planted, a), 0.001)
    assert_equal(match_weights(spec, a, b, restarts=2).perms, spec.invert(planted))


def test_weights_restarts_differ_and_best_is_kept(problem):
    spec, a = problem
    b = add_noise(spec.apply(spec.random(jax.random.key(1)), a), 1.0)
    matching = match_weights(spec, a, b, restarts=4)
    assert len(matching.tried) == 4
    assert matching.objective == max(matching.tried) >= match_weights(spec, a, b).objective == matching.tried[0]


def dense_pair(n, seed=0):
    """Return the spec and the weights of two networks whose middle leaf is by far the largest."""
    rng = np.random.default_rng(seed)
    shapes = {"in": (8, n), "mid": (n, n), "out": (n, 4)}
    a, b = ({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in "ab")
    return PermutationSpec.from_axes(a, {"in": (None, "P"), "mid": ("P", "Q"), "out": ("Q", None)}), a, b


def test_weights_use_memory_of_four_largest_leaves(monkeypatch):
    """Two cached scores, and an assignment problem in double precision."""
    monkeypatch.setattr(weights, "BLOCK_SIZE", 64)  # in proportion as for 8192 units
    spec, a, b = dense_pair(512)
    parts, orders = list(weight_parts(spec, a, b)), list(itertools.islice(visit_orders(list(spec.sizes), 0), 3))
    match_weights(*dense_pair(8))  # caches that are filled once do not count
    tracemalloc.start()
    matching = coordinate_descent(spec, parts, None, orders)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert matching.solved > len(spec.sizes)  # later visits are among them
    assert peak < 4.7 * a["mid"].nbytes


def test_weights_blocks_change_no_permutation(monkeypatch):
    spec, a, b = dense_pair(100)
    whole = match_weights(spec, a, b)
    monkeypatch.setattr(weights, "BLOCK_SIZE", 32)
    blocks = match_weights(spec, a, b)
    assert_equal(blocks.perms, whole.perms)
    assert len(whole.trace) > 3


def test_weights_show_progress_of_long_descents(monkeypatch, capsys):
    spec, a, b = dense_pair(20)
    match_weights(spec, a, b)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "SILENCE", 0.0)
    matching = match_weights(spec, a, b)
    shown = capsys.readouterr().err
    assert f"{matching.solved} visits" in shown
    assert f"sweep {len(matching.trace) - 1}, done, objective {matching.objective:.6g}" in shown


@pytest.mark.parametrize("name", ["dense", "attention"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weight_matching_of_half_precision_equals_float32(monkeypatch, dtype, name):
    """Products are computed in float32, in blocks that are sums in another order."""
    monkeypatch.setattr(weights, "BLOCK_SIZE", 16)
    rng = np.random.default_rng(0)
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    if name == "dense":
        draw = lambda: {"up": np.asarray(half(50, 40)), "bias": np.asarray(half(40)), "down": np.asarray(half(40, 3))}  # noqa: E731
        spec = PermutationSpec.from_axes(draw(), {"up": (None, "P"), "bias": ("P",), "down": ("P", None)})
    else:
        draw = lambda: {"query": np.asarray(half(9, 4, 6)), "out": np.asarray(half(4, 6, 5))}  # noqa: E731
        axes = {"query": (None, "heads", "dims"), "out": ("heads", "dims", None)}
        spec = PermutationSpec(axes, {"heads": 4, "dims": 6}, {"dims": ("heads",)})
    a, b = draw(), draw()
    found = weights.match_weights(spec, a, b)
    wide = [jax.tree.map(lambda leaf: leaf.astype(np.float32), own) for own in (a, b)]
    wanted = weights.match_weights(spec, *wide)
    assert_equal(found.perms, wanted.perms)
    assert found.objective == pytest.approx(wanted.objective, rel=1e-5)


def test_weight_matching_without_cached_scores_is_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    draw = lambda: {f"w{i}": rng.normal(size=(30, 30)).astype(np.float32) for i in range(4)}  # noqa: E731
    a, b = draw(), draw()
    axes = {f"w{i}": (f"P{i - 1}" if i else None, f"P{i}" if i < 3 else None) for i in range(4)}
    spec = PermutationSpec.from_axes(a, axes)
    wanted = weights.match_weights(spec, a, b)
    monkeypatch.setattr(weights, "CACHED_SCORES", 1000)  # room for one of three
    found = weights.match_weights(spec, a, b)
    assert found.solved > 3
    assert_equal(found.perms, wanted.perms)
