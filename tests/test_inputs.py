"""Public functions return a correct result for any arguments, or raise an error of one sentence.

The short form tries a few inputs of each function; the long form, `pytest -m long`, tries a thousand.
"""

import tempfile
import warnings
from functools import partial
from pathlib import Path

import flax.linen
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis.extra import numpy as hnp

import mcomb
from mcomb.combination import mix
from mcomb.errors import Diverged, UserError
from mcomb.evaluation.evaluate import evaluate
from mcomb.evaluation.repair import repaired
from mcomb.matching.activations import match_activations
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.arange(6) % 2


def apply(params, x):
    return jax.nn.relu(x @ params["up"]["w"] + params["up"]["b"][None]) @ params["down"]


STATISTICS = {"mean": np.zeros(2, np.float32), "variance": np.ones(2, np.float32)}


def normalised(params, x):
    """Return the outputs of a network, normalised by running statistics."""
    centred = apply(params["net"], x) - params["mean"][None]
    return centred * jax.lax.rsqrt(params["variance"][None] + 1e-5)


def network(seed, units=4):
    rng = np.random.default_rng(seed)
    shapes = {"up": {"w": (3, units), "b": (units,)}, "down": (units, 2)}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


A, B = network(0), network(1)
SPEC = mcomb.derive_spec(apply, A, X)
FOREIGN = mcomb.derive_spec(apply, network(0, units=5), X)
NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 2**31, -(2**40), 2**32, 0.5, -1.5, 1e38, float("inf"), float("nan")])
INTEGERS = st.sampled_from([0, 1, 2, 3, 7, -1, 2**31 - 1, 2**32 - 1])


def changed(tree, where, how):
    """Return the tree with one leaf changed."""
    leaves, structure = jax.tree.flatten(tree)
    leaves[where % len(leaves)] = how(leaves[where % len(leaves)])
    return jax.tree.unflatten(structure, leaves)


def with_nan(leaf):
    leaf = np.array(leaf)
    leaf.flat[0] = np.nan
    return leaf


LEAVES = {
    "as it is": lambda leaf: leaf,
    "nan": with_nan,
    "infinite": lambda leaf: np.full_like(leaf, np.inf),
    "huge": lambda leaf: leaf * np.float32(1e38),
    "zero": np.zeros_like,
    "half": lambda leaf: leaf.astype(np.float16),
    "double": lambda leaf: leaf.astype(np.float64),
    "bfloat16": lambda leaf: jnp.asarray(leaf, jnp.bfloat16),
    "whole numbers": lambda leaf: leaf.astype(np.int32),
    "transposed": lambda leaf: leaf.T,
    "longer": lambda leaf: np.concatenate([leaf, leaf]),
    "empty": lambda leaf: leaf[:0],
    "scalar": lambda leaf: np.float32(1),
    "number": lambda leaf: 0.5,
    "text": lambda leaf: "weights",
    "list": lambda leaf: leaf.tolist(),
    "nothing": lambda leaf: None,
    "object": lambda leaf: object(),
}
TREES = st.one_of(
    st.builds(changed, st.sampled_from([A, B]), st.integers(0, 2), st.sampled_from(list(LEAVES.values()))),
    st.sampled_from(
        [{}, [], None, A["down"], {"down": A["down"]}, A | {"more": X}, network(2, units=5), [A, B], 1.0, "x"]
    ),
)
ARRAYS = st.one_of(
    st.sampled_from(
        [X, X[:1], X[:0], X.T, X[0], X.astype(np.float64), np.float32(1), {"x": X}, [X, X], None, with_nan(X)]
    ),
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)),
)
LABELS = st.one_of(
    st.sampled_from([Y, Y[:1], Y[:0], Y - 1, Y + 5, Y[:, None], Y.astype(np.float32), Y.astype(np.uint8), None, 1]),
)
PERMS = st.one_of(
    st.integers(0, 9).map(lambda seed: SPEC.random(jax.random.key(seed))),
    st.sampled_from([{}, FOREIGN.identity(), {"x": np.arange(4)}, SPEC.identity() | {"y": np.arange(4)}, None]),
    st.sampled_from([np.zeros(4, int), np.arange(1, 5), np.arange(4.0), np.arange(4)[None], np.arange(3), "x", 1]).map(
        lambda perm: dict.fromkeys(SPEC.sizes, perm)
    ),
)
SPECS = st.sampled_from([SPEC, SPEC, SPEC, FOREIGN, mcomb.PermutationSpec({}, {})])
OPTIONAL_SPEC = (SPEC, st.one_of(SPECS, st.sampled_from([None, None, "spec", A])))
DISTRIBUTIONS = (mcomb.linear, mcomb.uniform, mcomb.subcube, mcomb.hyperplane, mcomb.bernoulli, mcomb.centered)
DRAWS = st.sampled_from(DISTRIBUTIONS)


def is_finite(tree):
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


def is_right_alignment(found, apply, a, b, *rest, spec, **options):
    assert spec in (None, found.spec)
    matching = found.matching
    found.spec.check_perms(matching.perms)
    assert np.isfinite(matching.objective)
    is_network = jax.tree.structure(b) == jax.tree.structure(A)  # and no tree without leaves, which fits an empty spec
    if is_network and is_finite(apply(b, X)) and np.any(apply(b, X)):
        found.spec.check(apply, b, X, perms=matching.perms)
    assert jax.tree.structure(found.params) == jax.tree.structure(b)
    assert repr(found)


def is_right_combination(found, a, b, *rest, **options):
    for leaf, one, other in zip(*map(jax.tree.leaves, (found, a, b)), strict=True):
        assert np.shape(leaf) == np.shape(one) == np.shape(other)


def is_right_sweep(found, apply, networks, inputs, labels, draw, *, points, samples, loss, metrics, **options):
    shape = (points if np.ndim(points) == 0 else len(points), 1 if draw is mcomb.linear else 10)
    assert found.loss.shape == (shape if samples is None else (shape[0], samples))
    assert len(found.points) == shape[0]
    assert found.values.keys() >= {*(metrics or {})}
    assert len(found.ends) == len(networks)
    assert repr(found)
    if metrics is None and "accuracy" in found.values:
        assert ((found.accuracy >= 0) & (found.accuracy <= 1)).all()
        if loss is mcomb.cross_entropy:
            assert (np.isfinite(found.loss) | (found.accuracy < 1)).all()  # an overflow is not correct
        np.testing.assert_allclose(found.agreement.sum((2, 3)), 1)


def is_right_score(found, apply, params, inputs, labels, *, loss, metrics, **options):
    assert is_finite(found.loss)
    if loss is mcomb.cross_entropy and metrics is None:
        assert 0 <= found.accuracy <= 1


def is_right_multi_alignment(found, apply, networks, *rest, **options):
    assert len(found.params) == len(networks)
    for perms in found.perms:
        found.spec.check_perms(perms)


def is_right_merge(found, apply, networks, inputs, *rest, method=None, **options):
    if isinstance(method, mcomb.Method) and method.name == "partial":
        one = sum(np.size(leaf) for leaf in jax.tree.leaves(networks[0]))
        assert one <= found.details.weights <= method.options["budget"] * one
        assert len(found.apply(found.params, inputs)) == len(inputs)
        return
    assert jax.tree.structure(found.params) == jax.tree.structure(networks[0])
    for leaf, one in zip(*map(jax.tree.leaves, (found.params, networks[0])), strict=True):
        assert np.shape(leaf) == np.shape(one)


def is_like(found, apply, params, *rest, **options):
    assert jax.tree.structure(found) == jax.tree.structure(params)


def write_and_read(params, ending, target):
    """Write a tree and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"network{ending}")
        mcomb.write_checkpoint(path, params)
        return mcomb.read_checkpoint(path, target)


def is_what_was_written(found, params, ending, target):
    """Compare in the dtypes of the target, which may be narrower than those written."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params if target is None else target)]
    for leaf, one, dtype in zip(*map(jax.tree.leaves, (found, params)), dtypes, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(np.asarray(one, dtype), np.float32))


def is_a_sum_and_a_count(found, output, label):
    assert [np.shape(number) for number in found] == [(), ()]


def is_right_between(found, i, j):
    SPEC.check_perms(found)


def is_right_training(found, apply, params, *rest, **options):
    assert jax.tree.structure(found.params) == jax.tree.structure(params)
    assert np.isfinite(found.loss)


def anything(found, *args, **options):
    """Accept any result."""


LOSS = (
    mcomb.cross_entropy,
    st.sampled_from(
        [
            *(mcomb.squared_error, mcomb.accuracy, "mse", None, len, {}),
            lambda output, label: (output.sum(), 1),
            lambda output, label: output,
            lambda output, label: (output, 1),
            lambda output, label: (0.0, 0),
        ]
    ),
)
METRICS = (None, st.sampled_from([{}, {"mine": mcomb.accuracy}, {"loss": mcomb.accuracy}, {3: len}, [len], "accuracy"]))
PAIRS = st.tuples(TREES, TREES)
LISTS = st.lists(st.sampled_from([A, B, network(2, units=5), {}, changed(A, 0, with_nan)]), max_size=3)
WHOLE = st.sampled_from([1, 4, 7, 0, -1])
SIZES = st.one_of(WHOLE, st.sampled_from([np.int64(4), 2.5, 4.0, "4", float("nan"), [4]]))
STEPS = st.sampled_from([0, 2, -2, 1.5, "2", None])
SEED = (0, st.sampled_from([0, 1, 2**32 - 1, 2**32, -1, 2**64, 0.5, "0", np.int64(3)]))
FOLDER = tempfile.TemporaryDirectory()
KEEP = (None, st.sampled_from([Path(FOLDER.name, "kept.npz"), f"{FOLDER.name}/nowhere/kept.npz", ""]))
NETWORKS = ((A, TREES), (B, TREES))
APPLY = (apply, st.just(apply))

DESCENT = {
    "steps": (1, STEPS),
    "batch_size": (4, SIZES),
    "learning_rate": (0.01, st.one_of(NUMBERS, st.sampled_from(["0.01", [0.01]]))),
    "seed": SEED,
    "keep": KEEP,
}

ALIGNMENT = mcomb.align_many(apply, [A, B], X)
INDICES = st.sampled_from([0, 1, 2, -1, 9, "A", None, 0.5])
RESTARTS = st.sampled_from([2, 4, 0, -1, 1.5, "2"])
MATCHERS = st.one_of(
    st.sampled_from(["weights", "activations", "ste", "x", "", None, len, match_weights]),
    st.builds(mcomb.weights, restarts=RESTARTS, seed=SEED[1], start=st.none() | PERMS, coarse=st.booleans()),
    st.builds(mcomb.activations, inner_products=st.booleans(), batch_size=SIZES),
    st.builds(mcomb.straight_through, steps=STEPS, learning_rate=NUMBERS, batch_size=SIZES, seed=SEED[1]),
)
BUDGETS = st.one_of(NUMBERS, st.sampled_from([1.5, "2"]))
METHODS = st.one_of(
    st.sampled_from(["fisher", "refit", "average", "partial", "x", None, len]),
    st.builds(mcomb.partial, budget=BUDGETS, per=st.sampled_from(["unit", "layer", "x", None])),
    st.builds(mcomb.refit, ridge=st.one_of(NUMBERS, st.just("1"))),
    st.builds(mcomb.learned, per=st.sampled_from(["network", "unit"]), steps=STEPS, batch_size=SIZES, keep=KEEP[1]),
)
POINTS = st.sampled_from(
    [
        *(np.zeros(1), np.full(3, 0.5), np.array([0, np.nan, 1]), np.full(3, 1e30), -np.ones(3)),
        *(2, 1, 0, 0.5, float("inf"), "2", None, [0.5], [], [[0.5]], ["x"]),
    ]
)

# For each function: the check of its result, and for each argument a correct value and others, correct or wrong.
CALLS = {
    mcomb.combine: (
        is_right_combination,
        [*NETWORKS, (0.5, st.one_of(TREES, NUMBERS, st.just({"up": 0.5, "down": 1.0})))],
        {},
    ),
    mcomb.sample: (
        is_right_combination,
        [*NETWORKS, (mcomb.uniform, st.one_of(DRAWS, st.sampled_from(["uniform", None]))), (0.5, NUMBERS)],
        {"seed": SEED},
    ),
    mcomb.align: (
        is_right_alignment,
        [APPLY, *NETWORKS, (X, ARRAYS), (Y, LABELS)],
        {"matcher": ("weights", MATCHERS), "spec": OPTIONAL_SPEC, "loss": LOSS},
    ),
    mcomb.align_many: (
        is_right_multi_alignment,
        [APPLY, ([A, B, A], LISTS), (X, ARRAYS)],
        {"spec": OPTIONAL_SPEC, "reference": (0, st.sampled_from([1, 5, -1, None, 1.0, "A"])), "seed": SEED},
    ),
    mcomb.merge: (
        is_right_merge,
        [APPLY, ((A, B), st.one_of(PAIRS, LISTS, st.none())), (X, ARRAYS), (Y, LABELS)],
        {"method": ("average", METHODS), "spec": OPTIONAL_SPEC, "loss": LOSS},
    ),
    mcomb.learn_shares: (
        is_right_merge,
        [APPLY, ((A, B), st.one_of(PAIRS, LISTS)), (X, ARRAYS), (Y, LABELS)],
        {
            "per": ("unit", st.sampled_from(["network", "weight", "x", None])),
            "spec": OPTIONAL_SPEC,
            "beyond": (False, st.booleans()),
            "loss": LOSS,
            **DESCENT,
        },
    ),
    mcomb.fine_tune: (
        is_right_training,
        [APPLY, (A, TREES), (X, ARRAYS), (Y, LABELS)],
        {"loss": LOSS, **DESCENT},
    ),
    mcomb.sweep: (
        is_right_sweep,
        [
            *(APPLY, ((A, B), st.one_of(PAIRS, LISTS, st.sampled_from([None, A]))), (X, ARRAYS), (Y, LABELS)),
            (mcomb.linear, st.one_of(DRAWS, st.sampled_from(["uniform", None, len, A]))),
        ],
        {
            "points": ([0.0, 0.5], POINTS),
            "samples": (None, st.sampled_from([1, 2, 0, -1, 1.5, "1"])),
            "loss": LOSS,
            "metrics": METRICS,
            "repair": (False, st.booleans()),
            "spec": OPTIONAL_SPEC,
            "statistics_from": (None, ARRAYS),
            "seed": SEED,
            "batch_size": (4, SIZES),
            "vmap_size": (None, st.sampled_from([1, 2, 0, -3, 1.5, "1"])),
        },
    ),
    mcomb.score: (
        is_right_score,
        [APPLY, (A, TREES), (X, ARRAYS), (Y, LABELS)],
        {"loss": LOSS, "metrics": METRICS, "batch_size": (4, SIZES)},
    ),
    SPEC.check: (
        anything,
        [APPLY, (A, TREES), (X, ARRAYS)],
        {"perms": (None, PERMS), "draws": (1, st.sampled_from([0, -1]))},
    ),
    mcomb.derive_spec: (anything, [APPLY, (A, TREES), (X, ARRAYS)], {}),
    mcomb.estimate_statistics: (is_like, [APPLY, (A, TREES), (X, ARRAYS)], {"batch_size": (4, SIZES)}),
    write_and_read: (
        is_what_was_written,
        [(A, TREES), (".npz", st.sampled_from(["", ".npz", ".safetensors", ".msgpack"])), (None, TREES)],
        {},
    ),
    mcomb.cross_entropy: (is_a_sum_and_a_count, [(X, ARRAYS), (Y, LABELS)], {}),
    mcomb.accuracy: (is_a_sum_and_a_count, [(X, ARRAYS), (Y, LABELS)], {}),
    mcomb.squared_error: (is_a_sum_and_a_count, [(X, ARRAYS), (X, ARRAYS)], {}),
    mcomb.tempered_cross_entropy: (
        anything,
        [((1.0, 2.0), st.sampled_from([(), (0.0,), (-1.0, 2.0), (float("nan"),), [0.5, 2.0], 2.0, "x", None]))],
        {},
    ),
    ALIGNMENT.between: (is_right_between, [(0, INDICES), (1, INDICES)], {}),
    SPEC.apply: (anything, [(SPEC.identity(), PERMS), (A, TREES)], {}),
    SPEC.invert: (anything, [(SPEC.identity(), PERMS)], {}),
    SPEC.compose: (anything, [(SPEC.identity(), PERMS)] * 2, {}),
    SPEC.validate: (anything, [(A, TREES)], {}),
}


@st.composite
def calls(draw, positional, options):
    """Draw arguments; about one in four differs from its default."""

    def one(right, others):
        return draw(others) if draw(st.integers(0, 3)) == 0 else right

    return [one(*argument) for argument in positional], {name: one(*option) for name, option in options.items()}


def try_inputs(function, count):
    """Call a function with its correct arguments and so many others; count results and errors."""
    is_right, positional, options = CALLS[function]
    right = [argument for argument, _ in positional], {name: option for name, (option, _) in options.items()}
    outcomes = {"right": 0, "refused": 0}

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(calls(positional, options))
    @example(right)
    def call(drawn):
        args, options = drawn
        try:
            found = function(*args, **options)
        except UserError as error:
            outcomes["refused"] += 1
            problem = str(error)
        else:
            outcomes["right"] += 1
            is_right(found, *args, **options)
            return
        assert "\n" not in problem
        assert 20 < len(problem) < 600

    call()
    print(f"{function.__name__}: {outcomes}")
    assert outcomes["right"]
    return outcomes


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Turn off the checks of shapes, ranks and warnings that exist only under pytest."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    with jax.numpy_rank_promotion("allow"), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    jaxtyping.config.update("jaxtyping_disable", before)


KEYS_OF_THREE = jax.random.split(jax.random.key(0), 3)
EVALUATE = (apply, (A, B), X, Y, mcomb.linear, np.zeros(3, np.float32), KEYS_OF_THREE)
SWEEP = (apply, (A, B), X, Y, mcomb.linear)
WITH_DATA = (SPEC, A, B, apply, X, Y)
LINEAR = (jax.random.key(0), np.float32(0.5))


@pytest.mark.parametrize("value", [2.5, 2.0, "2", [2], float("nan")])
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (evaluate, EVALUATE, "batch_size"),
        (evaluate, EVALUATE, "vmap_size"),
        (mcomb.sweep, SWEEP, "samples"),
        (mcomb.sweep, SWEEP, "batch_size"),
        (mcomb.sweep, SWEEP, "vmap_size"),
        (mcomb.sweep, SWEEP, "seed"),
        (mcomb.score, (apply, A, X, Y), "batch_size"),
        (match_weights, (SPEC, A, B), "restarts"),
        (match_weights, (SPEC, A, B), "seed"),
        (match_straight_through, WITH_DATA, "steps"),
        (match_straight_through, WITH_DATA, "batch_size"),
        (mcomb.align_many, (apply, [A, B], X), "reference"),
        (mcomb.fine_tune, (apply, A, X, Y), "steps"),
        (mcomb.fine_tune, (apply, A, X, Y), "batch_size"),
        (mcomb.fine_tune, (apply, A, X, Y), "seed"),
        (partial(repaired, spec=SPEC), (apply, (A, B), X, mcomb.linear), "batch_size"),
        (SPEC.check, (apply, A, X), "draws"),
    ],
    ids=lambda value: getattr(value, "__name__", value) if isinstance(value, str) or callable(value) else "",
)
def test_inputs_sizes_must_be_whole_numbers(function, args, name, value):
    with pytest.raises(UserError, match=rf"({name} |no network ).*pass an (integer|index)"):
        function(*args, **{name: value})


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({6: None}, "The keys are a NoneType: pass an array"),
        ({6: jax.random.key(0)}, "The keys are a .*Array: pass an array"),
        ({1: None}, "The networks are a NoneType: pass a tuple"),
        ({1: A}, "The networks are a dict: pass a tuple"),
    ],
)
def test_evaluate_names_wrong_arguments(args, problem):
    with pytest.raises(UserError, match=problem):
        evaluate(*(args.get(i, arg) for i, arg in enumerate(EVALUATE)))


@pytest.mark.parametrize("points", [2.5, "2", None, 1, float("nan")])
def test_sweep_number_of_points_must_be_whole(points):
    with pytest.raises(UserError, match=r"points is .*: pass an integer of at least 2"):
        mcomb.sweep(*SWEEP, points=points)


@pytest.mark.parametrize("points", [["x"], ["0.5", "y"]], ids=str)
def test_sweep_points_must_be_numbers(points):
    with pytest.raises(UserError, match=r"share = .* is (not a number|out of range for linear): pass a finite number"):
        mcomb.sweep(*SWEEP, points=points)
    with pytest.raises(UserError, match=r"The points are .*: pass an array of numbers"):
        mcomb.sweep(apply, (A, B), X, Y, lambda key, point, a, b: a, points=points)


@pytest.mark.parametrize("point", ["x", [0.1, 0.2], {}], ids=str)
def test_sample_point_must_be_one_number(point):
    with pytest.raises(UserError, match=r"(s = .* is not a number|Cannot sample at 2 values of s): pass "):
        mcomb.sample(A, B, mcomb.uniform, point)


def test_sweep_needs_networks():
    with pytest.raises(UserError, match="There are no networks to sweep: pass a tuple"):
        mcomb.sweep(apply, (), X, Y, lambda key, point: A, points=[0.5])


@pytest.mark.parametrize("networks", [None, A, A["down"]], ids=["none", "dict", "array"])
def test_sweep_names_wrong_networks(networks):
    with pytest.raises(UserError, match=r"The networks are a \w+: pass a tuple of parameter trees"):
        mcomb.sweep(apply, networks, X, Y, mcomb.linear)


@pytest.mark.parametrize("temperatures", [2.0, "warm", ("warm",), None, ()], ids=str)
def test_tempered_cross_entropy_names_wrong_temperatures(temperatures):
    with pytest.raises(
        UserError, match=r"(The temperatures are .*: pass a tuple|temperature 0 is warm: pass a finite number above 0)"
    ):
        mcomb.tempered_cross_entropy(temperatures)


@pytest.mark.parametrize("temperatures", [[1.0, 2.0], np.array([1.0, 2.0])], ids=["list", "array"])
def test_tempered_cross_entropy_takes_lists_and_arrays(temperatures):
    assert mcomb.tempered_cross_entropy(temperatures) is mcomb.tempered_cross_entropy((1.0, 2.0))


@pytest.mark.parametrize(("a", "b"), [({}, []), ({"w": [1.0]}, {"w": (1.0,)}), ({}, None)], ids=str)
@pytest.mark.parametrize("function", [partial(mcomb.combine, share=0.5), partial(mix(mcomb.linear), *LINEAR)])
def test_combine_rejects_networks_of_other_containers(function, a, b):
    with pytest.raises(UserError, match=r"The networks to \w+ differ in their branches .*: pass trees of the same"):
        function(a, b)


@pytest.mark.parametrize("how", ["empty", "longer"])
@pytest.mark.parametrize("matcher", ["weights", "activations", "ste"])
def test_align_rejects_networks_of_other_shapes(matcher, how):
    wrong = changed(B, 2, LEAVES[how])  # along an axis of inputs, which the spec does not cover
    with pytest.raises(UserError, match=r"The networks to match differ \(up/w is \(3, 4\) in A and \(\d, 4\) in B"):
        mcomb.align(apply, A, wrong, X, Y, matcher=matcher)


@pytest.mark.parametrize(
    "function",
    [
        lambda apply, x: match_activations(SPEC, A, B, apply, x),
        lambda apply, x: mcomb.merge(apply, (A, B), x, spec=SPEC, method=mcomb.partial(budget=1.5)),
    ],
    ids=["activations", "partial"],
)
def test_activations_reject_function_of_whole_batches(function):
    def apply_rows(params, x):
        return apply(params, x.reshape(-1, 3))  # it takes six numbers but not one

    with pytest.raises(UserError, match=r"apply_rows raised TypeError on these arguments .*: pass"):
        function(apply_rows, X[:2].ravel())


@pytest.mark.parametrize("logits", [X[:0, :0], X[:, :0], X[0, 0]], ids=np.shape)
@pytest.mark.parametrize("objective", [mcomb.accuracy, mcomb.cross_entropy])
def test_objectives_reject_missing_logits(objective, logits):
    with pytest.raises(UserError, match="no logits: return at least one"):
        objective(logits, np.zeros(logits.shape[:-1], int))


def test_weights_match_networks_in_other_containers():
    def apply_list(params, x):
        return jax.nn.relu(x @ params[0]) @ params[1]

    a, b = ([network(seed)["up"]["w"], network(seed)["down"]] for seed in (0, 1))
    spec = mcomb.derive_spec(apply_list, a, X)
    assert match_weights(spec, a, tuple(b)).objective == match_weights(spec, a, b).objective


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=repr)
def test_mix_of_plain_numbers_equals_arrays(distribution):
    draw = mix(distribution)
    expected = draw(*LINEAR, {"w": np.float32(0.5)}, {"w": np.float32(2.5)})["w"]
    assert draw(*LINEAR, {"w": 0.5}, {"w": 2.5})["w"] == expected


@pytest.mark.parametrize("share", [2**32, -(2**40)])
def test_combine_takes_integers_beyond_32_bits(share):
    a, b = ({"w": jnp.full(2, value)} for value in (1.0, 0.5))
    np.testing.assert_array_equal(mcomb.combine(a, b, share)["w"], mcomb.combine(a, b, float(share))["w"])


LEARN = {
    "learn_shares": partial(mcomb.learn_shares, apply, (A, A), X, Y, spec=SPEC),
    "straight_through": lambda **options: mcomb.align(apply, A, A, X, Y, matcher=mcomb.straight_through(**options)),
    "fine_tune": partial(mcomb.fine_tune, apply, A, X, Y),
}


@pytest.mark.parametrize("learn", LEARN)
def test_learning_rates_may_be_integers_beyond_32_bits(learn):
    outcomes = []
    for rate in (2**32, float(2**32)):
        try:
            LEARN[learn](steps=1, learning_rate=rate)
        except Diverged as error:
            outcomes.append(str(error))
        else:
            outcomes.append("learned")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("x", [X[:0], np.full_like(X, np.nan), np.zeros_like(X)], ids=["none", "nan", "zero"])
def test_spec_check_rejects_uninformative_examples(x):
    without_bias = changed(A, 1, np.zeros_like)  # so that zeros give zeros
    wrong = mcomb.PermutationSpec({"up/w": (None, None), "up/b": (None,), "down": ("P", None)}, {"P": 4})
    with pytest.raises(UserError, match="computes another function"):
        wrong.check(apply, without_bias, X)
    with pytest.raises(UserError, match="cannot reveal a wrong permutation: pass"):
        wrong.check(apply, without_bias, x)


LONG_X = np.tile(X, (50, 1))
LONG_Y = np.tile(Y, 50)
TO_LABELS = {
    "score": lambda y: mcomb.score(apply, A, LONG_X, y).values,
    "sweep": lambda y: mcomb.sweep(apply, (A, B), LONG_X, y, mcomb.linear, points=2).values,
    "fine_tune": lambda y: mcomb.fine_tune(apply, A, LONG_X, y, steps=1).params,
    "learn_shares": lambda y: mcomb.learn_shares(apply, (A, B), LONG_X, y, spec=SPEC, steps=1).params,
    "merge": lambda y: mcomb.merge(apply, (A, B), LONG_X, y, method="fisher").params,
    "align": lambda y: mcomb.align(apply, A, B, LONG_X, y, matcher=mcomb.straight_through(steps=1)).params,
}


@pytest.mark.parametrize("name", TO_LABELS)
def test_labels_may_be_lists(name):
    found, expected = (TO_LABELS[name](y) for y in (LONG_Y.tolist(), LONG_Y))
    for leaf, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=repr)
def test_sweep_points_may_be_lists_or_integers(distribution):
    floats, others = (
        np.array([0, 1, 0], np.float32),
        ([0, 1, 0], (0.0, 1.0, 0.0), np.array([0, 1, 0]), [False, True, False]),
    )
    expected, *found = (
        mcomb.sweep(apply, (A, B), X, Y, distribution, points=points, samples=1).loss for points in (floats, *others)
    )
    for loss in found:
        np.testing.assert_array_equal(loss, expected)


def draws(points=EVALUATE[5], networks=(A, B), draw=mcomb.linear, run=apply, labels=LONG_Y):
    return evaluate(run, networks, LONG_X, labels, draw, points, KEYS_OF_THREE)


def repair(networks=(A, B), draw=mcomb.linear, spec=SPEC):
    return mcomb.sweep(apply, networks, X, Y, draw, points=[0.0], repair=True, spec=spec)


class Tensor:
    """An array of another framework, with a dtype that NumPy does not know."""

    shape, dtype = (4, 2), "torch.float32"


class Module(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


MODULE = Module()
VARIABLES = MODULE.init(jax.random.key(0), X)
MATCHING = mcomb.align(apply, A, B, X).matching
WIDE = network(2, units=5)
NAN_X = changed(LONG_X, 0, with_nan)
MISUSE = {
    "inputs in lists": (
        lambda: mcomb.score(apply, A, LONG_X.tolist(), LONG_Y),
        r"have: 0/0 none, .* and \d+ more; convert lists with np\.asarray",
    ),
    "labels of several lengths": (
        lambda: draws(labels=[[1, 2], [3]] * 150),
        r"the labels 0/0 none.*more; convert lists",
    ),
    "labels of words": (lambda: draws(labels=["cat"] * 300), "0 is not an array but 'cat': leave it out"),
    "tensors to combine": (lambda: mcomb.combine(A | {"down": Tensor()}, B, 0.5), "down is a .*Tensor: pass an array"),
    "tensors to score": (lambda: mcomb.score(apply, A | {"down": Tensor()}, X, Y), "down is a .*Tensor: pass an array"),
    "tensors to derive": (lambda: mcomb.derive_spec(apply, A, Tensor()), "is a .*Tensor: pass an array"),
    "too few shares": (lambda: draws([0, 1]), r"There are 3 keys but points of shape \(2,\): pass one for each key"),
    "one share": (lambda: draws(0.5), r"There are 3 keys but points of shape \(\): pass one for each key"),
    "no labels to learn": (
        lambda: mcomb.merge(apply, (A, B), X),
        "Cannot merge by learned without labels: pass them, or merge by refit or average",
    ),
    "no labels for gradients": (
        lambda: mcomb.merge(apply, (A, B), X, method="fisher"),
        "Cannot merge by fisher without labels: pass them, or merge by refit or average",
    ),
    "no labels": (lambda: mcomb.score(apply, A, X, None), "The loss or a metric needs labels: pass labels"),
    "three networks": (lambda: draws(networks=(A, B, A)), "Cannot mix 3 networks with linear: pass two"),
    "one network": (lambda: draws(networks=(A,)), "Cannot mix 1 networks with linear: pass two"),
    "three networks to repair": (lambda: repair((A, B, A)), "Cannot mix 3 networks with linear: pass two"),
    "a combination": (lambda: draws(draw=A), "a dict cannot draw combinations of 2 networks: pass a distribution such"),
    "a name to sweep": (lambda: draws(draw="uniform"), "a str cannot draw .*: pass a distribution such as mcomb.unifo"),
    "a name to sample": (lambda: mcomb.sample(A, B, "uniform", 0.5), "is not a distribution: pass one such as mcomb.u"),
    "parameters of Flax": (
        lambda: draws(run=MODULE.apply, networks=(VARIABLES["params"],) * 2),
        r'apply raised .*: pass lambda params, x: model\.apply\(\{"params": params\}, x\)\.$',
    ),
    "a module of Flax": (
        lambda: mcomb.derive_spec(MODULE, VARIABLES["params"], X),
        r'raised .*: pass lambda params, x: model\.apply\(\{"params": params\}, x\)\.$',
    ),
    "variables of Flax": (
        lambda: mcomb.score(lambda params, x: MODULE.apply({"params": params}, x), VARIABLES, X, Y),
        r'raised .*: pass the parameters alone, variables\["params"\]\.$',
    ),
    "no function": (lambda: mcomb.score(None, A, X, Y), "The function is None: pass a function"),
    "a matching to apply": (lambda: SPEC.apply(MATCHING, B), r"object of type Matching: pass its perms\.$"),
    "a matching to start from": (
        lambda: match_weights(SPEC, A, B, start=MATCHING),
        r"object of type Matching: pass its perms\.$",
    ),
    "an alignment to apply": (lambda: SPEC.apply(mcomb.align(apply, A, B, X), B), "type Alignment: pass its matching"),
    "several to apply": (lambda: SPEC.apply(ALIGNMENT, B), r"object of type MultiAlignment: pass its perms\[i\]"),
    "an alignment to combine": (
        lambda: mcomb.combine(A, mcomb.align(apply, A, B, X), 0.5),
        r"Alignment.*pass its \.params",
    ),
    "a function to match": (
        lambda: mcomb.align(apply, A, B, X, matcher=mcomb.weights),
        r"call it, as in mcomb\.weights",
    ),
    "a function to merge": (lambda: mcomb.merge(apply, (A, B), X, method=mcomb.refit), r"call it, as in mcomb\.refit"),
    "PyTorch's ending to write": (lambda: mcomb.write_checkpoint("a.pt", A), r"does not write \.pt files: use "),
    "several permutations": (lambda: SPEC.apply(ALIGNMENT.perms, B), "object of type tuple: pass a dict"),
    "parameters before permutations": (lambda: SPEC.apply(B, MATCHING.perms), "The permutations are down, up,"),
    "widths to match": (lambda: mcomb.align(apply, A, WIDE, X), r"down is \(4, 2\) in A and \(5, 2\) in B"),
    "widths to match to": (lambda: mcomb.align(apply, WIDE, A, X), r"down is \(5, 2\) in A and \(4, 2\) in B"),
    "widths to draw": (lambda: draws(networks=(A, WIDE)), r"down is \(4, 2\) in A and \(5, 2\) in B"),
    "widths to align": (
        lambda: mcomb.align_many(apply, [A, B, WIDE], X),
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 2\): pass networks of one architecture and width",
    ),
    "widths to merge": (
        lambda: mcomb.merge(apply, (A, B, WIDE), X, Y),
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 2\): pass networks of one architecture and width",
    ),
    "widths to repair": (
        lambda: repaired(apply, (A, WIDE), X, mcomb.linear, spec=SPEC),
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 1\): pass networks of one architecture and width",
    ),
    "no spec to align": (lambda: mcomb.align(apply, A, B, X, spec=A), "spec is an object of type dict: derive it with"),
    "no spec to align many": (
        lambda: mcomb.align_many(apply, [A, B], X, spec=[A, B]),
        "spec is an object of type list: derive it with",
    ),
    "all groups with a spec of permutations": (
        lambda: mcomb.align(apply, A, B, X, spec=SPEC, groups="all"),
        'groups="all" does not apply to a spec of permutations: drop groups or spec',
    ),
    "metadata in a format without metadata": (
        lambda: mcomb.write_checkpoint("a.npz", A, metadata={"seed": "3"}),
        r"Cannot store metadata in a\.npz: use \.safetensors, or drop the metadata",
    ),
    "no spec to merge": (
        lambda: mcomb.merge(apply, (A, B), X, Y, spec=(A, B)),
        "spec is an object of type tuple: derive it with",
    ),
    "no spec to learn": (
        lambda: mcomb.learn_shares(apply, (A, B), X, Y, spec=(A, B)),
        "spec is an object of type tuple: derive it with",
    ),
    "no spec to repair": (lambda: repair(spec="spec"), "spec is an object of type str: derive it with"),
    "no list to align": (
        lambda: mcomb.align_many(apply, A, X),
        r"Cannot align fewer than two networks \(got 1\): pass a list",
    ),
    "the spec of another width": (lambda: SPEC.apply(MATCHING.perms, WIDE), "permutation up has 4: derive the spec"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_named_with_remedy(name):
    call, problem = MISUSE[name]
    with pytest.raises(UserError, match=problem) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: mcomb.merge(apply, (a, B), x, method="refit", spec=SPEC),
        lambda a, x: mcomb.merge(apply, (a, B), x, LONG_Y, method="fisher", spec=SPEC),
        lambda a, x: repaired(apply, (a, B), x, mcomb.linear, spec=SPEC),
        lambda a, x: mcomb.align(apply, a, B, x, matcher="activations"),
        lambda a, x: mcomb.merge(apply, (a, B), x, method=mcomb.partial(budget=1.5)),
        lambda a, x: mcomb.estimate_statistics(normalised, STATISTICS | {"net": a}, x),
    ],
    ids=["refit", "fisher", "repair", "activations", "partial", "estimate_statistics"],
)
def test_inputs_that_are_not_finite_are_counted(function, capfd):
    with pytest.raises(UserError, match=r"^1 of 900 entries of the inputs are not finite: replace them\.$"):
        function(A, NAN_X)
    assert "illegal value" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("method", ["refit", "fisher"])
def test_merge_rejects_weights_that_overflow(method):
    huge = jax.tree.map(lambda leaf: leaf * np.float32(1e30), A)
    with pytest.raises(Diverged, match=r"overflow on these inputs: scale inputs or weights down\.$"):
        mcomb.merge(apply, (huge, B), LONG_X, LONG_Y, method=method, spec=SPEC)


def test_score_errors_of_many_arrays_are_short():
    many = {f"{'very ' * 30}long name {i}": X[: 1 + i % 2] for i in range(500)}
    with pytest.raises(UserError, match=r"very +1, .* and 497 more; pass as many of each\.$") as caught:
        mcomb.score(apply, A, many, Y)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_inputs_give_result_or_one_sentence(function):
    try_inputs(function, 6)


@pytest.mark.long
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_inputs_by_the_thousand_give_result_or_one_sentence(function):
    assert try_inputs(function, 1000)["refused"]
