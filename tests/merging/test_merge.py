from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

import mcomb
from mcomb import PermutationSpec, learn_shares, merge
from mcomb.errors import UserError
from mcomb.merging.average import average_networks
from mcomb.merging.fisher import fisher_average, fisher_information
from mcomb.merging.learned_shares import GRANULARITIES, LearnedShares
from mcomb.merging.refit_regression import refit_average
from mcomb.trees import named_leaves

rng = np.random.default_rng(0)
CENTRES = rng.normal(size=(3, 5)).astype(np.float32)
LABELS = rng.integers(0, 3, 600).astype(np.int32)
INPUTS = (CENTRES[LABELS] + rng.normal(size=(600, 5))).astype(np.float32)


HELD_OUT, TRAINED_ON = slice(540, None), slice(540)


def apply(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"][None])
    return hidden @ params["last"]["kernel"] + params["last"]["bias"][None]


def network(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"first": {"kernel": (5, 8), "bias": (8,)}, "last": {"kernel": (8, 3), "bias": (3,)}}
    return jax.tree.map(
        lambda shape: (scale * rng.normal(size=shape)).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


A, B, C = (network(seed) for seed in (1, 2, 3))
SPEC = mcomb.derive_spec(apply, A, INPUTS)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def loss(params, rows=slice(None)):
    return mcomb.score(apply, params, INPUTS[rows], LABELS[rows]).loss


@cache
def learned(per):
    return learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, per=per, steps=60, batch_size=30)


@pytest.mark.parametrize(
    "per", [pytest.param(per, marks=() if per == "network" else pytest.mark.slow) for per in GRANULARITIES]
)
def test_learn_shares_beats_average_inside_cube(per):
    found = learned(per)
    average = merge(apply, (A, B), INPUTS, LABELS, method="average", spec=SPEC).params
    assert_close(found.losses[0], loss(average, HELD_OUT), roundings=64)
    assert found.loss == min(found.losses) < found.losses[0]
    assert_close(found.loss, loss(found.params, HELD_OUT), roundings=64)
    (shares,) = found.shares
    for name, share in named_leaves(shares).items():
        assert ((share > 0) & (share < 1)).all(), name
    assert_close(found.params, mcomb.combine(A, B, shares), roundings=8)


@pytest.mark.slow
def test_learn_shares_granularity():
    shares = {per: learned(per).shares[0] for per in GRANULARITIES}
    distinct = {per: len(np.unique(flat(tree))) for per, tree in shares.items()}
    assert distinct["network"] == 1
    assert distinct["layer"] == 2
    assert distinct["leaf"] == 4
    assert distinct["unit"] == 8 + 1  # the hidden units, and the bias of the logits
    assert distinct["weight"] > 60
    kernel, bias = shares["unit"]["first"]["kernel"], shares["unit"]["first"]["bias"]
    assert_equal(kernel, np.broadcast_to(bias, (5, 8)))
    assert_equal(shares["unit"]["last"]["kernel"], np.broadcast_to(bias[:, None], (8, 3)))


@pytest.mark.slow
def test_learn_shares_prefers_network_over_noise():
    right = learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, beyond=True, steps=200, learning_rate=0.03).params
    noise = network(9, scale=5.0)
    found = learn_shares(apply, (noise, right), INPUTS, LABELS, spec=SPEC, per="network", steps=200, batch_size=30)
    assert float(found.shares[0]["first"]["kernel"]) > 0.9


@pytest.mark.slow
def test_learn_shares_beyond_cube_fits_better():
    inside, beyond = (
        learn_shares(
            apply, (A, B), INPUTS, LABELS, spec=SPEC, beyond=beyond, steps=200, batch_size=540, learning_rate=0.03
        )
        for beyond in (False, True)
    )
    assert loss(beyond.params, TRAINED_ON) < loss(inside.params, TRAINED_ON)
    assert flat(beyond.shares).min() < 0 or flat(beyond.shares).max() > 1


def test_learn_shares_of_three_networks():
    found = learn_shares(apply, (A, B, C), INPUTS, LABELS, spec=SPEC, per="leaf", steps=40, batch_size=30)
    assert len(found.shares) == 2
    assert found.loss < found.losses[0]
    b, c = (named_leaves(share) for share in found.shares)
    for name, leaf in named_leaves(found.params).items():
        of_all = (named_leaves(own)[name] for own in (A, B, C))
        expected = sum(
            share * own for share, own in zip((1 - b[name] - c[name], b[name], c[name]), of_all, strict=True)
        )
        assert_close(leaf, expected, roundings=8)


@pytest.mark.slow
def test_learn_shares_depends_on_seed_only():
    first, again, other = (
        learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, steps=20, batch_size=30, seed=seed) for seed in (0, 0, 1)
    )
    assert_equal(first.params, again.params)
    assert first.losses == again.losses != other.losses


def test_learn_shares_stops_early():
    labels = LABELS.copy()
    labels[HELD_OUT] = (labels[HELD_OUT] + 1) % 3  # learning does not help on these
    found = learn_shares(apply, (A, B), INPUTS, labels, spec=SPEC, steps=400, batch_size=270, beyond=True)
    assert len(found.losses) < 21
    assert found.loss == min(found.losses)


@pytest.mark.parametrize("method", ["average", "fisher"])
def test_merge_of_network_with_itself_is_itself(method):
    assert_close(merge(apply, (A, A), INPUTS, LABELS, method=method, spec=SPEC).params, A, roundings=4)


def test_merge_aligns_networks_if_asked():
    flipped = jax.tree.map(np.copy, A)  # half of the tanh units with the other sign
    for leaf, units in (
        (flipped["first"]["kernel"].T, 4),
        (flipped["first"]["bias"], 4),
        (flipped["last"]["kernel"], 4),
    ):
        leaf[:units] *= -1
    shuffled = SPEC.apply(SPEC.random(jax.random.key(0)), flipped)
    assert_equal(merge(apply, (A, shuffled), INPUTS, method="average", groups="all").params, A)
    only_permuted = merge(apply, (A, shuffled), INPUTS, method="average", groups="permutations").params
    assert np.abs(flat(only_permuted) - flat(A)).max() > 0.1
    with pytest.raises(
        UserError, match="ties merges networks with a common base, which need no alignment: drop groups"
    ):
        merge(apply, (A, B), INPUTS, method=mcomb.ties(A), groups="all")


def test_merge_of_networks_on_different_devices():
    there = [jax.device_put(own, device) for own, device in ((A, jax.devices()[0]), (B, jax.devices()[-1]))]
    for method in ("average", "fisher", "refit"):
        merged, expected = (
            merge(apply, both, INPUTS, LABELS, method=method, spec=SPEC).params for both in (there, (A, B))
        )
        assert_close(merged, expected, roundings=2**12 if method == "refit" else 64)
    found = learn_shares(apply, there, INPUTS, LABELS, spec=SPEC, per="network", steps=60, batch_size=30)
    assert_equal(found.losses, learned("network").losses)


def test_merge_of_plain_number_leaves():
    a, b = ({**own, "scale": number} for own, number in ((A, 1.0), (B, 3.0)))
    run = lambda params, x: params["scale"] * apply(params, x)  # noqa: E731
    spec = mcomb.derive_spec(run, a, INPUTS)
    assert merge(run, (a, b), INPUTS, LABELS, method="average", spec=spec).params["scale"] == 2
    assert np.isfinite(learn_shares(run, (a, b), INPUTS, LABELS, spec=spec, per="network", steps=2).loss)


def test_fisher_information_of_bfloat16_is_in_float32():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), A)
    inputs, labels = np.tile(INPUTS[:1], (3000, 1)).astype(jnp.bfloat16), np.tile(LABELS[:1], 3000)
    one, many = (fisher_information(apply, half, inputs[:n], labels[:n]) for n in (1, 3000))
    assert_close(many, one, roundings=2**12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_average_of_half_precision_rounds_once(dtype):
    halves = [jax.tree.map(lambda leaf: leaf.astype(dtype), own) for own in (A, B, C)]
    found = merge(apply, halves, INPUTS, method="average", spec=SPEC).params
    exact = jax.tree.map(lambda *leaves: np.mean([leaf.astype(np.float32) for leaf in leaves], axis=0), *halves)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == dtype
        rounding = jnp.finfo(dtype).eps / 2 * np.abs(expected)  # at least half a unit in the last place
        assert (np.abs(np.float32(leaf) - expected) <= 1.01 * rounding).all()


def test_average_is_midpoint():
    merged = merge(apply, (A, B), INPUTS, LABELS, method="average", spec=SPEC).params
    assert_close(merged, mcomb.combine(A, B, 0.5), roundings=2)


def test_fisher_information_is_mean_squared_gradient():
    found = fisher_information(apply, A, INPUTS[:11], LABELS[:11])

    def one(params, i):
        return loss_of_one(apply(params, INPUTS[i][None])[0], jnp.asarray(LABELS[i]))

    gradients = [jax.grad(one)(A, i) for i in range(11)]
    expected = jax.tree.map(lambda *leaves: np.mean(np.square(leaves), axis=0), *gradients)
    assert_close(found, expected, roundings=64)


def loss_of_one(logits, label):
    return mcomb.cross_entropy(logits, label)[0]


def test_fisher_ignores_units_without_effect():
    # Units without outgoing weights carry no information, so the other network's units are taken.
    blind = jax.tree.map(np.copy, B)
    blind["last"]["kernel"][:4] = 0
    merged = merge(apply, (A, blind), INPUTS, LABELS, method="fisher", spec=SPEC).params
    assert_close(merged["first"]["bias"][:4], A["first"]["bias"][:4], roundings=8)
    assert np.abs(merged["first"]["bias"][4:] - A["first"]["bias"][4:]).min() > 0


def test_merge_keeps_integers_of_first_network():
    a, b = ({**own, "steps": np.array(2**40 + i), "key": jax.random.key(i)} for i, own in enumerate((A, B)))
    spec = mcomb.derive_spec(apply, a, INPUTS)
    for method in ("average", "fisher", "refit", "learned"):
        chosen = mcomb.learned(steps=4) if method == "learned" else method
        merged = merge(apply, (a, b), INPUTS, LABELS, method=chosen, spec=spec).params
        assert merged["steps"] == 2**40
        assert merged["key"] == a["key"]


def test_add_units_sums_values_of_connected_units():
    spec = PermutationSpec(
        {"w": (mcomb.Segments(("P", 2)), mcomb.Blocks(("H", "D"))), "v": (None, "P")},
        {"P": 3, "H": 2, "D": 4},
        batched_over={"D": ("H",)},
    )
    values = {"P": np.arange(3.0), "H": 10 * np.arange(2.0), "D": 100 * np.arange(8.0).reshape(2, 4)}
    of_rows = np.concatenate([values["P"], [0, 0]])
    of_columns = (values["H"][:, None] + values["D"]).ravel()
    assert_equal(spec.add_units(values, "w", (5, 8)), of_rows[:, None] + of_columns[None])
    assert_equal(spec.add_units(values, "v", (2, 3)), np.broadcast_to(values["P"], (2, 3)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"method": "magic"},
            "Unknown method 'magic': choose from average, slerp, fisher, refit, learned, or configure one",
        ),
        ({"method": "partial"}, r"Method \"partial\" has no default budget: pass mcomb.partial\(budget=1.5\)"),
        ({"method": "ties"}, r"Method \"ties\" needs the networks' base: pass mcomb.ties\(base\)"),
        ({"method": mcomb.ties({"first": A["first"]})}, "The networks and their base differ"),
        ({"method": mcomb.ties(jax.tree.map(lambda x: x * np.inf, A))}, "in the base are not finite"),
        ({"method": "slerp", "networks": (A, B, C)}, "slerp merges two networks, not 3: merge by average"),
        (
            {"method": mcomb.learned(per="neuron")},
            "Cannot learn shares per 'neuron': choose from network, layer, leaf, unit, weight",
        ),
        ({"method": mcomb.learned(steps=0)}, "steps is 0"),
        ({"labels": None}, "Cannot merge by learned without labels: pass them, or merge by refit or average"),
        ({"labels": None, "method": "fisher"}, "Cannot merge by fisher without labels"),
        ({"networks": (A,)}, r"fewer than two networks \(got 1\): pass a tuple"),
        ({"networks": (A, {"first": A["first"]})}, "The networks to merge differ"),
        ({"labels": LABELS[:5]}, "the labels 5"),
        ({"inputs": INPUTS[:1], "labels": LABELS[:1]}, "1 examples are too few"),
    ],
)
def test_merge_rejects_misuse(change, words):
    given = {"networks": (A, B), "apply": apply, "inputs": INPUTS, "labels": LABELS} | change
    with pytest.raises(UserError, match=words):
        merge(**given, spec=SPEC)


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("average", lambda: average_networks(apply, (A, B), INPUTS)),
        ("fisher", lambda: fisher_average(apply, (A, B), INPUTS, labels=LABELS, loss=mcomb.cross_entropy)),
        (mcomb.refit(ridge=0.5), lambda: refit_average(apply, (A, B), INPUTS, spec=SPEC, ridge=0.5)),
        (
            mcomb.learned(per="network", steps=5, batch_size=30, seed=3),
            lambda: learn_shares(apply, (A, B), INPUTS, LABELS, per="network", steps=5, batch_size=30, seed=3),
        ),
    ],
    ids=["average", "fisher", "refit", "learned"],
)
def test_merge_by_each_method_equals_its_function(method, function):
    """The spec is derived by default."""
    found, expected = merge(apply, (A, B), INPUTS, LABELS, method=method), function()
    assert found.apply is apply
    if isinstance(expected, LearnedShares):
        assert found.details.losses == expected.losses
        assert_equal(found.details.shares, expected.shares)
        expected = expected.params
    assert_equal(found.params, expected)
    name = method if isinstance(method, str) else method.name
    assert repr(found).startswith(f"Merged(by {name}(")


def test_merge_options_change_result():
    held, loose = (merge(apply, (A, B), INPUTS, method=mcomb.refit(ridge=ridge)).params for ridge in (1e6, 1e-3))
    average = mcomb.combine(A, B, 0.5)
    assert np.abs(flat(held) - flat(average)).max() < 1e-3 < np.abs(flat(loose) - flat(average)).max()


@pytest.mark.parametrize("method", ["average", "refit", mcomb.partial(budget=1.5)])
def test_merge_without_labels(method):
    merged = merge(apply, (A, B), INPUTS, method=method)
    assert np.isfinite(merged.apply(merged.params, INPUTS)).all()


def test_merge_passes_loss_on():
    target = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
    by_labels = merge(apply, (A, B), INPUTS, LABELS, method="fisher").params
    found = merge(apply, (A, B), INPUTS, target, method="fisher", loss=mcomb.squared_error).params
    expected = fisher_average(apply, (A, B), INPUTS, labels=target, loss=mcomb.squared_error)
    assert_equal(found, expected)
    assert np.abs(flat(found) - flat(by_labels)).max() > 0.01


def test_merge_accepts_a_users_method():
    """Any function that returns parameters can merge."""

    def scale_first(apply, networks, inputs, *, scale):
        return jax.tree.map(lambda leaf: scale * leaf, networks[0])

    found = merge(apply, (A, B), INPUTS, method=mcomb.Method("first", scale_first, options={"scale": 2}))
    assert_equal(found.params, jax.tree.map(lambda leaf: 2 * leaf, A))
    assert repr(found) == "Merged(by first(scale=2))"
