"""Whatever is given to a public function: a correct result, or an error that says in a sentence what is wrong with it.

The short form tries a few dozen inputs of each function, the long one, `pytest -m long`, some thousands.
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
from mcomb.errors import Diverged, UserError

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.arange(6) % 2


def apply(params, x):
    return jax.nn.relu(x @ params["up"]["w"] + params["up"]["b"][None]) @ params["down"]


STATISTICS = {"mean": np.zeros(2, np.float32), "variance": np.ones(2, np.float32)}


def normalised(params, x):
    """The outputs of a network, normalised by running statistics."""
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
    """The tree with one leaf changed."""
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
KEYS = st.one_of(
    st.sampled_from([0, 1, 3]).map(lambda count: jax.random.split(jax.random.key(0), count)),
    st.sampled_from([None, 0, jax.random.key(0), np.arange(3), [jax.random.key(0)] * 3]),
)
PARAMETERS = st.one_of(
    st.sampled_from(
        [np.zeros(1), np.full(3, 0.5), np.array([0, np.nan, 1]), np.full(3, 1e30), -np.ones(3), np.zeros(4)]
    ),
    NUMBERS,
)
DISTRIBUTIONS = (mcomb.linear, mcomb.uniform, mcomb.subcube, mcomb.hyperplane, mcomb.bernoulli, mcomb.centered)
DRAWS = st.sampled_from(DISTRIBUTIONS)
KEY = (jax.random.key(0), st.integers(0, 9).map(jax.random.key))
SHARES = NUMBERS.map(np.float32)


def is_finite(tree):
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


def is_right_matching(found, spec, a, b, *rest, **options):
    spec.check_perms(found.perms)
    aligned = spec.apply(found.perms, b)
    assert np.isfinite(found.objective)
    is_network = jax.tree.structure(b) == jax.tree.structure(A)  # and no tree without leaves, which fits an empty spec
    if is_network and is_finite(apply(b, X)) and np.any(apply(b, X)):
        spec.check(apply, b, X, perms=found.perms)
    assert jax.tree.structure(aligned) == jax.tree.structure(b)


def is_right_combination(found, a, b, v):
    for leaf, one, other in zip(*map(jax.tree.leaves, (found, a, b)), strict=True):
        assert np.shape(leaf) == np.shape(one) == np.shape(other)


def is_right_metrics(found, apply, draw, networks, parameters, keys, inputs, labels, *, loss, metrics=None, **options):
    assert len(found.loss) == len(keys)
    assert found.values.keys() >= {*(metrics or {})}
    if loss is not mcomb.cross_entropy:
        return
    assert ((found.accuracy >= 0) & (found.accuracy <= 1)).all()
    assert (np.isfinite(found.loss) | (found.accuracy < 1)).all()  # what overflows is not right
    assert (found.agreement.sum((1, 2)) == len(labels)).all()


def is_right_score(found, apply, params, inputs, labels, *, loss, **options):
    assert is_finite(found.loss)
    if loss is not mcomb.cross_entropy:
        return
    assert found.predicted.shape == (len(labels),)
    assert found.accuracy == np.mean(found.predicted == labels)


def is_right_alignment(found, spec, networks, **options):
    for perms in found.perms:
        spec.check_perms(perms)


def is_right_merge(found, spec, networks, *rest, **options):
    params = getattr(found, "params", found)
    assert jax.tree.structure(params) == jax.tree.structure(networks[0])
    for leaf, one in zip(*map(jax.tree.leaves, (params, networks[0])), strict=True):
        assert np.shape(leaf) == np.shape(one)


def is_right_partial_merge(found, spec, networks, apply, inputs, *, budget, **options):
    one = sum(np.size(leaf) for leaf in jax.tree.leaves(networks[0]))
    assert one <= found.weights <= budget * one
    assert len(found.apply(found.params, inputs)) == len(inputs)


def is_like(found, apply, params, *rest, **options):
    assert jax.tree.structure(found) == jax.tree.structure(params)


def write_and_read(params, ending, target):
    """What comes back of a tree that is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"network{ending}")
        mcomb.write_checkpoint(path, params)
        return mcomb.read_checkpoint(path, target)


def is_what_was_written(found, params, ending, target):
    """In the target's dtypes, where there is one: what was written as float32 may be asked for as bfloat16."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params if target is None else target)]
    for leaf, one, dtype in zip(*map(jax.tree.leaves, (found, params)), dtypes, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(np.asarray(one, dtype), np.float32))


def is_a_draw(found, key, parameter, *networks):
    for leaf, one in zip(*map(jax.tree.leaves, (found, networks[0])), strict=True):
        assert np.shape(leaf) == np.shape(one)


def is_a_sum_and_a_count(found, output, label):
    assert [np.shape(number) for number in found] == [(), ()]


def is_right_between(found, i, j):
    SPEC.check_perms(found)


def is_right_training(found, apply, params, *rest, **options):
    assert jax.tree.structure(found[0]) == jax.tree.structure(params)
    assert np.isfinite(found[1])


def anything(found, *args, **options):
    """That it has come back is enough."""


LOSS = (
    mcomb.cross_entropy,
    st.sampled_from(
        [
            *(mcomb.token_cross_entropy, mcomb.squared_error, mcomb.accuracy, "mse", None, len, {}),
            lambda output, label: (output.sum(), 1),
            lambda output, label: output,
            lambda output, label: (output, 1),
            lambda output, label: (0.0, 0),
        ]
    ),
)
METRICS = (None, st.sampled_from([{}, {"mine": mcomb.accuracy}, {"loss": mcomb.accuracy}, {3: len}, [len], "accuracy"]))
MIXES = DRAWS.map(mix)
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

ALIGNMENT = mcomb.align_many(SPEC, [A, B])
INDICES = st.sampled_from([0, 1, 2, -1, 9, "A", None, 0.5])

# For each function what its result must be, and for each of its arguments a right value and others, right or wrong.
CALLS = {
    mcomb.combine: (
        is_right_combination,
        [*NETWORKS, (0.5, st.one_of(TREES, NUMBERS, st.just({"up": 0.5, "down": 1.0})))],
        {},
    ),
    mcomb.match: (
        is_right_matching,
        [(SPEC, SPECS), *NETWORKS, (apply, st.none()), (X, ARRAYS), (Y, LABELS)],
        {"matcher": ("weights", st.sampled_from(["weights", "activations", "x", ""])), "seed": SEED},
    ),
    match_weights: (
        is_right_matching,
        [(SPEC, SPECS), *NETWORKS],
        {
            "start": (None, PERMS),
            "seed": SEED,
            "restarts": (1, st.sampled_from([2, 4, 0, -1, 1.5, "2"])),
            "coarse": (False, st.booleans()),
        },
    ),
    match_activations: (
        is_right_matching,
        [(SPEC, SPECS), *NETWORKS, APPLY, (X, ARRAYS)],
        {"batch_size": (4, WHOLE), "inner_products": (False, st.booleans())},
    ),
    match_straight_through: (
        is_right_matching,
        [(SPEC, SPECS), *NETWORKS, APPLY, (X, ARRAYS), (Y, LABELS)],
        {
            "loss": LOSS,
            "steps": (1, STEPS),
            "learning_rate": (0.01, NUMBERS),
            "batch_size": (4, SIZES),
            "seed": SEED,
        },
    ),
    mcomb.align_many: (
        is_right_alignment,
        [(SPEC, SPECS), ([A, B, A], LISTS)],
        {"reference": (0, st.sampled_from([1, 5, -1, None, 1.0, "A"])), "seed": SEED},
    ),
    mcomb.merge: (
        is_right_merge,
        [(SPEC, SPECS), ((A, B), st.one_of(PAIRS, LISTS)), APPLY, (X, ARRAYS), (Y, LABELS)],
        {"method": ("average", st.sampled_from(["fisher", "refit", "average", "x", None])), "loss": LOSS},
    ),
    mcomb.learn_shares: (
        is_right_merge,
        [(SPEC, SPECS), ((A, B), st.one_of(PAIRS, LISTS)), APPLY, (X, ARRAYS), (Y, LABELS)],
        {
            "per": ("unit", st.sampled_from(["network", "weight", "x", None])),
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
    evaluate: (
        is_right_metrics,
        [
            *(APPLY, (mix(mcomb.linear), MIXES), ((A, B), PAIRS), (np.zeros(3), PARAMETERS)),
            *((jax.random.split(jax.random.key(0), 3), KEYS), (X, ARRAYS), (Y, LABELS)),
        ],
        {
            "loss": LOSS,
            "metrics": METRICS,
            "temperatures": (None, st.sampled_from([(), (0.0,), (-1.0, 2.0), (float("nan"),), [0.5, 2.0], 2.0, "x"])),
            "references": (
                None,
                st.sampled_from([np.zeros((2, 6), int), np.zeros((2, 5), int), np.zeros((6, 2), int), X, "AB"]),
            ),
            "statistics_from": (None, ARRAYS),
            "batch_size": (4, SIZES),
            "vmap_size": (None, st.sampled_from([1, 2, 0, -3, 1.5, "1"])),
        },
    ),
    mcomb.score: (
        is_right_score,
        [APPLY, (A, TREES), (X, ARRAYS), (Y, LABELS)],
        {
            "loss": LOSS,
            "metrics": METRICS,
            "batch_size": (4, SIZES),
            "temperatures": (None, st.sampled_from([(), (0.0,), (float("inf"),)])),
        },
    ),
    mcomb.check_spec: (
        anything,
        [APPLY, (A, TREES), (SPEC, SPECS), (X, ARRAYS)],
        {"perms": (None, PERMS), "draws": (1, st.sampled_from([0, -1]))},
    ),
    mcomb.derive_spec: (anything, [APPLY, (A, TREES), (X, ARRAYS)], {}),
    repaired: (
        anything,
        [(SPEC, SPECS), APPLY, (mix(mcomb.uniform), MIXES), ((A, B), PAIRS), (X, ARRAYS)],
        {"batch_size": (4, SIZES)},
    ),
    merge_partly: (
        is_right_partial_merge,
        [(SPEC, SPECS), ((A, B), st.one_of(PAIRS, LISTS, st.none())), APPLY, (X, ARRAYS)],
        {"budget": (1.5, st.one_of(NUMBERS, st.just("2"))), "per": ("unit", st.sampled_from(["layer", "x", None]))},
    ),
    mcomb.estimate_statistics: (is_like, [APPLY, (A, TREES), (X, ARRAYS)], {"batch_size": (4, SIZES)}),
    write_and_read: (
        is_what_was_written,
        [(A, TREES), (".npz", st.sampled_from(["", ".npz", ".safetensors", ".msgpack"])), (None, TREES)],
        {},
    ),
    **{
        mix(distribution): (is_a_draw, [KEY, (np.float32(0.5), SHARES), *NETWORKS], {})
        for distribution in DISTRIBUTIONS
    },
    mcomb.cross_entropy: (is_a_sum_and_a_count, [(X[0], ARRAYS), (np.int32(1), LABELS)], {}),
    mcomb.token_cross_entropy: (is_a_sum_and_a_count, [(X, ARRAYS), (Y, LABELS)], {}),
    mcomb.accuracy: (is_a_sum_and_a_count, [(X, ARRAYS), (Y, LABELS)], {}),
    mcomb.squared_error: (is_a_sum_and_a_count, [(X, ARRAYS), (X, ARRAYS)], {}),
    ALIGNMENT.between: (is_right_between, [(0, INDICES), (1, INDICES)], {}),
    SPEC.apply: (anything, [(SPEC.identity(), PERMS), (A, TREES)], {}),
    SPEC.invert: (anything, [(SPEC.identity(), PERMS)], {}),
    SPEC.compose: (anything, [(SPEC.identity(), PERMS)] * 2, {}),
    SPEC.validate: (anything, [(A, TREES)], {}),
}


@st.composite
def calls(draw, positional, options):
    """Arguments of which about one in four is another than the right one."""

    def one(right, others):
        return draw(others) if draw(st.integers(0, 3)) == 0 else right

    return [one(*argument) for argument in positional], {name: one(*option) for name, option in options.items()}


def try_inputs(function, count):
    """How often a function gave a result and how often it refused, of the right input and so many others."""
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
    """Without the checks of shapes and ranks that there are only under pytest; warnings are no errors."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    with jax.numpy_rank_promotion("allow"), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    jaxtyping.config.update("jaxtyping_disable", before)


KEYS_OF_THREE = jax.random.split(jax.random.key(0), 3)
EVALUATE = (apply, mix(mcomb.linear), (A, B), np.zeros(3, np.float32), KEYS_OF_THREE, X, Y)
WITH_DATA = (SPEC, A, B, apply, X, Y)
LINEAR = (jax.random.key(0), np.float32(0.5))


@pytest.mark.parametrize("value", [2.5, 2.0, "2", [2], float("nan")])
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (evaluate, EVALUATE, "batch_size"),
        (evaluate, EVALUATE, "vmap_size"),
        (mcomb.score, (apply, A, X, Y), "batch_size"),
        (match_weights, (SPEC, A, B), "restarts"),
        (match_weights, (SPEC, A, B), "seed"),
        (match_straight_through, WITH_DATA, "steps"),
        (match_straight_through, WITH_DATA, "batch_size"),
        (mcomb.align_many, (SPEC, [A, B]), "reference"),
        (mcomb.fine_tune, (apply, A, X, Y), "steps"),
        (mcomb.fine_tune, (apply, A, X, Y), "batch_size"),
        (mcomb.fine_tune, (apply, A, X, Y), "seed"),
        (repaired, (SPEC, apply, mix(mcomb.linear), (A, B), X), "batch_size"),
        (mcomb.check_spec, (apply, A, SPEC, X), "draws"),
    ],
    ids=lambda value: getattr(value, "__name__", value) if isinstance(value, str) or callable(value) else "",
)
def test_a_size_is_a_whole_number(function, args, name, value):
    with pytest.raises(UserError, match=rf"({name} |no network ).*give (a whole number|an index)"):
        function(*args, **{name: value})


@pytest.mark.parametrize(
    ("args", "options", "problem"),
    [
        ({4: None}, {}, "the keys are of type NoneType: give an array"),
        ({4: jax.random.key(0)}, {}, "the keys are of type .*Array: give an array"),
        ({2: None}, {}, "the networks are of type NoneType: give a tuple"),
        ({2: A}, {}, "the networks are of type dict: give a tuple"),
        ({}, {"references": np.zeros((2, 5), int)}, r"references have the shape \(2, 5\) .* of shape \(2, 6\)"),
        ({}, {"references": np.zeros((6, 2), int)}, r"references have the shape \(6, 2\) .* of shape \(2, 6\)"),
        ({}, {"references": np.zeros((2, 600), int)}, r"references have the shape \(2, 600\) .* of shape \(2, 6\)"),
        ({}, {"references": np.zeros((2, 6))}, "references have .* dtype float64: give"),
        ({}, {"references": "AB"}, r"references have the shape \(\) .*: give"),
        ({}, {"temperatures": 2.0}, r"temperatures are 2\.0: give a tuple of numbers"),
        ({}, {"temperatures": ("warm",)}, "temperature 0 is warm: give more than 0"),
    ],
)
def test_what_cannot_be_evaluated_is_named(args, options, problem):
    with pytest.raises(UserError, match=problem):
        evaluate(*(args.get(i, arg) for i, arg in enumerate(EVALUATE)), **options)


def test_temperatures_may_be_a_list_or_an_array():
    expected = mcomb.score(apply, A, X, Y, temperatures=(1.0, 2.0)).tempered
    for temperatures in ([1.0, 2.0], np.array([1.0, 2.0])):
        np.testing.assert_array_equal(mcomb.score(apply, A, X, Y, temperatures=temperatures).tempered, expected)


@pytest.mark.parametrize(("a", "b"), [({}, []), ({"w": [1.0]}, {"w": (1.0,)}), ({}, None)], ids=str)
@pytest.mark.parametrize("function", [partial(mcomb.combine, v=0.5), partial(mix(mcomb.linear), *LINEAR)])
def test_networks_of_other_containers_are_not_combined(function, a, b):
    with pytest.raises(UserError, match=r"the networks to \w+ differ in their branches .*: give trees of the same"):
        function(a, b)


@pytest.mark.parametrize("how", ["empty", "longer"])
@pytest.mark.parametrize("matcher", ["weights", "activations", "ste"])
def test_networks_of_other_shapes_are_not_matched(matcher, how):
    wrong = changed(B, 2, LEAVES[how])  # along an axis of inputs, of which the spec says nothing
    with pytest.raises(UserError, match=r"the networks to match differ \(up/w is \(3, 4\) in A and \(\d, 4\) in B"):
        mcomb.match(*(SPEC, A, wrong, apply, X, Y), matcher=matcher)


@pytest.mark.parametrize(
    "function",
    [
        lambda apply, x: match_activations(SPEC, A, B, apply, x),
        lambda apply, x: merge_partly(apply, (A, B), x, spec=SPEC, budget=1.5),
    ],
    ids=["match_activations", "merge_partly"],
)
def test_activations_are_those_of_each_example_by_itself(function):
    def apply_rows(params, x):
        return apply(params, x.reshape(-1, 3))  # it takes six numbers, but not one

    with pytest.raises(UserError, match=r"apply_rows raised TypeError on these arguments .*: give"):
        function(apply_rows, X[:2].ravel())


@pytest.mark.parametrize("logits", [X[:0, :0], X[:, :0], X[0, 0]], ids=np.shape)
@pytest.mark.parametrize("objective", [mcomb.accuracy, mcomb.token_cross_entropy])
def test_there_are_no_objectives_of_no_logits(objective, logits):
    with pytest.raises(UserError, match="no logits: let it return one or more"):
        objective(logits, np.zeros(logits.shape[:-1], int))


def test_networks_in_other_containers_are_matched():
    def apply_list(params, x):
        return jax.nn.relu(x @ params[0]) @ params[1]

    a, b = ([network(seed)["up"]["w"], network(seed)["down"]] for seed in (0, 1))
    spec = mcomb.derive_spec(apply_list, a, X)
    assert match_weights(spec, a, tuple(b)).objective == match_weights(spec, a, b).objective


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.__name__)
def test_plain_numbers_are_mixed_as_arrays_are(distribution):
    draw = mix(distribution)
    expected = draw(*LINEAR, {"w": np.float32(0.5)}, {"w": np.float32(2.5)})["w"]
    assert draw(*LINEAR, {"w": 0.5}, {"w": 2.5})["w"] == expected


@pytest.mark.parametrize("v", [2**32, -(2**40)])
def test_coefficients_may_be_whole_numbers_beyond_32_bits(v):
    a, b = ({"w": jnp.full(2, value)} for value in (1.0, 0.5))
    np.testing.assert_array_equal(mcomb.combine(a, b, 1 - (v))["w"], mcomb.combine(a, b, 1 - (float(v)))["w"])


@pytest.mark.parametrize("learn", [mcomb.learn_shares, match_straight_through, mcomb.fine_tune])
def test_learning_rates_may_be_whole_numbers_beyond_32_bits(learn):
    networks = {mcomb.learn_shares: (SPEC, (A, A)), mcomb.fine_tune: ()}.get(learn, (SPEC, A, A))
    args = (*networks, apply, X, Y) if networks else (apply, A, X, Y)
    outcomes = []
    for rate in (2**32, float(2**32)):
        try:
            learn(*args, steps=1, learning_rate=rate)
        except Diverged as error:
            outcomes.append(str(error))
        else:
            outcomes.append("learnt")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("x", [X[:0], np.full_like(X, np.nan), np.zeros_like(X)], ids=["none", "nan", "zero"])
def test_a_spec_is_not_checked_on_examples_that_tell_nothing(x):
    without_bias = changed(A, 1, np.zeros_like)  # so that zeros give zeros
    wrong = mcomb.PermutationSpec({"up/w": (None, None), "up/b": (None,), "down": ("P", None)}, {"P": 4})
    with pytest.raises(UserError, match="computes another function"):
        wrong.check(apply, without_bias, X)
    with pytest.raises(UserError, match="tells nothing of permutations: give"):
        wrong.check(apply, without_bias, x)


LONG_X = np.tile(X, (50, 1))
LONG_Y = np.tile(Y, 50)
TO_LABELS = {
    "score": lambda y: mcomb.score(apply, A, LONG_X, y),
    "evaluate": lambda y: evaluate(*EVALUATE[:5], LONG_X, y),
    "fine_tune": lambda y: mcomb.fine_tune(apply, A, LONG_X, y, steps=1),
    "learn_shares": lambda y: mcomb.learn_shares(apply, (A, B), LONG_X, y, spec=SPEC, steps=1),
    "merge": lambda y: mcomb.merge(apply, (A, B), LONG_X, y, method="fisher", spec=SPEC).params,
    "match": lambda y: match_straight_through(SPEC, A, B, apply, LONG_X, y, steps=1),
}


@pytest.mark.parametrize("name", TO_LABELS)
def test_labels_may_be_a_list(name):
    found, expected = (TO_LABELS[name](y) for y in (LONG_Y.tolist(), LONG_Y))
    compared = (jax.tree.leaves(vars(tree) if name == "match" else tree) for tree in (found, expected))
    for leaf, other in zip(*compared, strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.__name__)
@pytest.mark.parametrize("shares", [[0, 1, 0], (0.0, 1.0, 0.0), np.array([0, 1, 0]), [False, True, False]], ids=str)
def test_shares_may_be_a_list_or_whole_numbers(distribution, shares):
    args = list(EVALUATE)
    args[1:4] = mix(distribution), (A, B), np.array([0, 1, 0], np.float32)
    expected = evaluate(*args)
    args[3] = shares
    np.testing.assert_array_equal(evaluate(*args).loss, expected.loss)


def draws(parameters=EVALUATE[3], networks=(A, B), draw=EVALUATE[1], run=apply, labels=LONG_Y):
    return evaluate(run, networks, LONG_X, labels, draw, parameters, KEYS_OF_THREE)


class Tensor:
    """An array of another framework, whose dtypes NumPy does not know."""

    shape, dtype = (4, 2), "torch.float32"


class Module(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


MODULE = Module()
VARIABLES = MODULE.init(jax.random.key(0), X)
MATCHING = mcomb.match(SPEC, A, B)
WIDE = network(2, units=5)
NAN_X = changed(LONG_X, 0, with_nan)
MISUSE = {
    "inputs in lists": (
        lambda: mcomb.score(apply, A, LONG_X.tolist(), LONG_Y),
        r"have: 0/0 none, .* and \d+ more; give arrays, as np\.asarray",
    ),
    "labels of several lengths": (lambda: draws(labels=[[1, 2], [3]] * 150), r"the labels 0/0 none.*more; give arrays"),
    "labels of words": (lambda: draws(labels=["cat"] * 300), "0 is no array but 'cat': leave it out"),
    "tensors to combine": (lambda: mcomb.combine(A | {"down": Tensor()}, B, 0.5), "down is a .*Tensor: give an array"),
    "tensors to score": (lambda: mcomb.score(apply, A | {"down": Tensor()}, X, Y), "down is a .*Tensor: give an array"),
    "tensors to derive": (lambda: mcomb.derive_spec(apply, A, Tensor()), "is a .*Tensor: give an array"),
    "too few shares": (lambda: draws([0, 1]), r"3 keys and parameters of shape \(2,\): give an array with one"),
    "one share": (lambda: draws(0.5), r"3 keys and parameters of shape \(\): give an array with one"),
    "no labels to learn": (
        lambda: mcomb.merge(apply, (A, B), X, spec=SPEC).params,
        '"learned" needs labels: give them, or merge by',
    ),
    "no labels for gradients": (
        lambda: mcomb.merge(apply, (A, B), X, method="fisher", spec=SPEC).params,
        '"fisher" needs labels: give them, or merge by "average"',
    ),
    "no labels": (lambda: mcomb.score(apply, A, X, None), "there are no labels.*: give labels"),
    "three networks": (lambda: draws(networks=(A, B, A)), r"mix\(linear\) cannot draw from 3 networks: give two"),
    "one network": (lambda: draws(networks=(A,)), r"mix\(linear\) cannot draw from 1 networks: give two"),
    "three networks to repair": (
        lambda: repaired(apply, (A, B, A), X, EVALUATE[1], spec=SPEC),
        r"mix\(linear\) cannot draw from 3 networks: give two",
    ),
    "a distribution": (lambda: draws(draw=mcomb.uniform), r"uniform cannot draw .*: give mcomb\.mix\(uniform\)$"),
    "a distribution to repair": (
        lambda: repaired(apply, (A, B), X, mcomb.uniform, spec=SPEC),
        r"uniform cannot draw .*: give mcomb\.mix\(uniform\)$",
    ),
    "a combination": (lambda: draws(draw=A), r"a dict cannot draw .*: give mcomb\.mix\(mcomb\.uniform\)"),
    "a name to mix": (lambda: mix("uniform"), "a str is no distribution: give a function"),
    "a draw to mix": (lambda: mix(EVALUATE[1]), r"mix\(linear\) is no distribution: give a function"),
    "parameters of Flax": (
        lambda: draws(run=MODULE.apply, networks=(VARIABLES["params"],) * 2),
        r'apply raised .*: give lambda params, x: model\.apply\(\{"params": params\}, x\)$',
    ),
    "a module of Flax": (
        lambda: mcomb.derive_spec(MODULE, VARIABLES["params"], X),
        r'raised .*: give lambda params, x: model\.apply\(\{"params": params\}, x\)$',
    ),
    "variables of Flax": (
        lambda: mcomb.score(lambda params, x: MODULE.apply({"params": params}, x), VARIABLES, X, Y),
        r'raised .*: give the parameters alone, variables\["params"\]$',
    ),
    "no function": (lambda: mcomb.score(None, A, X, Y), "the function is None: give a function"),
    "a matching to apply": (lambda: SPEC.apply(MATCHING, B), "object of type Matching: give its perms$"),
    "a matching to start from": (
        lambda: match_weights(SPEC, A, B, start=MATCHING),
        "object of type Matching: give its perms$",
    ),
    "an alignment to apply": (lambda: SPEC.apply(ALIGNMENT, B), r"object of type Alignment: give its perms\[i\]"),
    "several permutations": (lambda: SPEC.apply(ALIGNMENT.perms, B), "object of type tuple: give a dict"),
    "parameters before permutations": (lambda: SPEC.apply(B, MATCHING.perms), "permutations are given for down, up,"),
    "widths to match": (lambda: mcomb.match(SPEC, A, WIDE), r"down is \(4, 2\) in A and \(5, 2\) in B"),
    "widths to match to": (lambda: mcomb.match(SPEC, WIDE, A), r"down is \(5, 2\) in A and \(4, 2\) in B"),
    "widths to draw": (lambda: draws(networks=(A, WIDE)), r"down is \(4, 2\) in A and \(5, 2\) in B"),
    "widths to align": (
        lambda: mcomb.align_many(SPEC, [A, B, WIDE]),
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 2\): give networks of one architecture and width",
    ),
    "widths to merge": (
        lambda: mcomb.merge(apply, (A, B, WIDE), X, Y, spec=SPEC).params,
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 2\): give networks of one architecture and width",
    ),
    "widths to repair": (
        lambda: repaired(apply, (A, WIDE), X, EVALUATE[1], spec=SPEC),
        r"down is \(4, 2\) in network 0 and \(5, 2\) in network 1\): give networks of one architecture and width",
    ),
    "networks before the spec": (lambda: mcomb.match(A, B, SPEC), "spec is an object of type dict: derive it with"),
    "no spec to check": (lambda: A.check(apply, SPEC, X), "spec is an object of type dict: derive it with"),
    "no spec to align": (lambda: mcomb.align_many([A, B], SPEC), "spec is an object of type list: derive it with"),
    "no spec to merge": (
        lambda: mcomb.merge(apply, (A, B), X, Y, spec=(A, B)).params,
        "spec is an object of type tuple: derive it with",
    ),
    "no spec to repair": (
        lambda: repaired(apply, (A, B), X, EVALUATE[1], spec=None),
        "spec is an object of type NoneType: derive it with",
    ),
    "no list to align": (lambda: mcomb.align_many(SPEC, A), "nothing to align in 1 networks: give a list"),
    "the spec of another width": (lambda: SPEC.apply(MATCHING.perms, WIDE), "permutation up has 4: derive the spec"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_named_with_its_remedy(name):
    call, problem = MISUSE[name]
    with pytest.raises(UserError, match=problem) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: mcomb.merge(apply, (a, B), x, method="refit", spec=SPEC).params,
        lambda a, x: mcomb.merge(apply, (a, B), x, LONG_Y, method="fisher", spec=SPEC).params,
        lambda a, x: repaired(apply, (a, B), x, EVALUATE[1], spec=SPEC),
        lambda a, x: match_activations(SPEC, a, B, apply, x),
        lambda a, x: merge_partly(apply, (a, B), x, spec=SPEC, budget=1.5),
        lambda a, x: mcomb.estimate_statistics(normalised, STATISTICS | {"net": a}, x),
    ],
    ids=["refit", "fisher", "repaired", "activations", "merge_partly", "estimate_statistics"],
)
def test_inputs_that_are_not_finite_are_counted(function, capfd):
    with pytest.raises(UserError, match=r"^1 of 900 entries of the inputs are not finite: replace them$"):
        function(A, NAN_X)
    assert "illegal value" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("method", ["refit", "fisher"])
def test_weights_that_overflow_are_not_merged(method):
    huge = jax.tree.map(lambda leaf: leaf * np.float32(1e30), A)
    with pytest.raises(Diverged, match=r"overflow on these inputs: scale inputs or weights down$"):
        mcomb.merge(apply, (huge, B), LONG_X, LONG_Y, method=method, spec=SPEC).params


def test_trees_of_many_arrays_give_short_errors():
    many = {f"{'very ' * 30}long name {i}": X[: 1 + i % 2] for i in range(500)}
    with pytest.raises(UserError, match=r"very +1, .* and 497 more; give as many of each$") as caught:
        mcomb.score(apply, A, many, Y)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_an_input_gives_a_right_result_or_one_sentence(function):
    try_inputs(function, 6)


@pytest.mark.long
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_many_an_input_gives_a_right_result_or_one_sentence(function):
    assert try_inputs(function, 1000)["refused"]
