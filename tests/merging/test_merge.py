from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

import mcomb
from mcomb import PermutationSpec, learn_shares, merge
from mcomb.errors import UserError
from mcomb.merging.fisher import fisher_information
from mcomb.merging.learned import GRANULARITIES
from mcomb.trees import named_leaves

rng = np.random.default_rng(0)
CENTRES = rng.normal(size=(3, 5)).astype(np.float32)
LABELS = rng.integers(0, 3, 600).astype(np.int32)
INPUTS = (CENTRES[LABELS] + rng.normal(size=(600, 5))).astype(np.float32)


HELD_OUT, LEARNT_FROM = slice(540, None), slice(540)


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
def learnt(per):
    return learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, per=per, steps=60, batch_size=30)


OF_EVERY_DAY = ("network",)


@pytest.mark.parametrize(
    "per", [pytest.param(per, marks=() if per in OF_EVERY_DAY else pytest.mark.slow) for per in GRANULARITIES]
)
def test_learnt_shares_are_better_than_the_average_on_held_out_data_and_inside_the_cube(per):
    found = learnt(per)
    average = merge(apply, (A, B), INPUTS, LABELS, method="average", spec=SPEC).params
    assert_close(found.losses[0], loss(average, HELD_OUT), roundings=64)
    assert found.loss == min(found.losses) < found.losses[0]
    assert_close(found.loss, loss(found.params, HELD_OUT), roundings=64)
    (shares,) = found.shares
    for name, share in named_leaves(shares).items():
        assert ((share > 0) & (share < 1)).all(), name
    # The combination is the one with these shares.
    v = jax.tree.map(lambda share: 1 - share, shares)
    assert_close(found.params, mcomb.combine(A, B, 1 - (v)), roundings=8)


@pytest.mark.slow
def test_shares_are_as_many_as_the_granularity_says():
    shares = {per: learnt(per).shares[0] for per in GRANULARITIES}
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
def test_where_one_network_is_right_and_the_other_noise_its_share_is_learnt():
    right = learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, beyond=True, steps=200, learning_rate=0.03).params
    noise = network(9, scale=5.0)
    found = learn_shares(apply, (noise, right), INPUTS, LABELS, spec=SPEC, per="network", steps=200, batch_size=30)
    assert float(found.shares[0]["first"]["kernel"]) > 0.9


@pytest.mark.slow
def test_beyond_the_cube_the_loss_on_the_data_it_learns_from_is_lower():
    inside, beyond = (
        learn_shares(
            apply, (A, B), INPUTS, LABELS, spec=SPEC, beyond=beyond, steps=200, batch_size=540, learning_rate=0.03
        )
        for beyond in (False, True)
    )
    assert loss(beyond.params, LEARNT_FROM) < loss(inside.params, LEARNT_FROM)
    assert flat(beyond.shares).min() < 0 or flat(beyond.shares).max() > 1


def test_three_networks_share_each_weight():
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
def test_the_same_seed_gives_the_same_shares_and_another_does_not():
    first, again, other = (
        learn_shares(apply, (A, B), INPUTS, LABELS, spec=SPEC, steps=20, batch_size=30, seed=seed) for seed in (0, 0, 1)
    )
    assert_equal(first.params, again.params)
    assert first.losses == again.losses != other.losses


def test_it_ends_where_the_held_out_loss_no_longer_falls():
    labels = LABELS.copy()
    labels[HELD_OUT] = (labels[HELD_OUT] + 1) % 3  # what is learnt does not help on these
    found = learn_shares(apply, (A, B), INPUTS, labels, spec=SPEC, steps=400, batch_size=270, beyond=True)
    assert len(found.losses) < 21
    assert found.loss == min(found.losses)


@pytest.mark.parametrize("method", ["average", "fisher"])
def test_a_network_merged_with_itself_is_itself(method):
    assert_close(merge(apply, (A, A), INPUTS, LABELS, method=method, spec=SPEC).params, A, roundings=4)


def test_networks_on_different_devices_are_merged():
    there = [jax.device_put(own, device) for own, device in ((A, jax.devices()[0]), (B, jax.devices()[-1]))]
    for method in ("average", "fisher", "refit"):
        merged, expected = (
            merge(apply, both, INPUTS, LABELS, method=method, spec=SPEC).params for both in (there, (A, B))
        )
        assert_close(merged, expected, roundings=2**12 if method == "refit" else 64)
    found = learn_shares(apply, there, INPUTS, LABELS, spec=SPEC, per="network", steps=60, batch_size=30)
    assert_equal(found.losses, learnt("network").losses)


def test_a_leaf_may_be_a_plain_number():
    a, b = ({**own, "scale": number} for own, number in ((A, 1.0), (B, 3.0)))
    run = lambda params, x: params["scale"] * apply(params, x)  # noqa: E731
    spec = mcomb.derive_spec(run, a, INPUTS)
    assert merge(run, (a, b), INPUTS, LABELS, method="average", spec=spec).params["scale"] == 2
    assert np.isfinite(learn_shares(run, (a, b), INPUTS, LABELS, spec=spec, per="network", steps=2).loss)


def test_fisher_information_of_half_precision_is_added_up_in_single():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), A)
    inputs, labels = np.tile(INPUTS[:1], (3000, 1)).astype(jnp.bfloat16), np.tile(LABELS[:1], 3000)
    one, many = (fisher_information(apply, half, inputs[:n], labels[:n]) for n in (1, 3000))
    assert_close(many, one, roundings=2**12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_average_of_half_precision_is_rounded_once(dtype):
    halves = [jax.tree.map(lambda leaf: leaf.astype(dtype), own) for own in (A, B, C)]
    found = merge(apply, halves, INPUTS, method="average", spec=SPEC).params
    exact = jax.tree.map(lambda *leaves: np.mean([leaf.astype(np.float32) for leaf in leaves], axis=0), *halves)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == dtype
        rounding = jnp.finfo(dtype).eps / 2 * np.abs(expected)  # half a unit in the last place is at most this
        assert (np.abs(np.float32(leaf) - expected) <= 1.01 * rounding).all()


def test_the_average_is_half_way():
    merged = merge(apply, (A, B), INPUTS, LABELS, method="average", spec=SPEC).params
    assert_close(merged, mcomb.combine(A, B, 0.5), roundings=2)


def test_fisher_information_is_the_mean_squared_gradient_of_each_example():
    found = fisher_information(apply, A, INPUTS[:11], LABELS[:11])

    def one(params, i):
        return loss_of_one(apply(params, INPUTS[i][None])[0], jnp.asarray(LABELS[i]))

    gradients = [jax.grad(one)(A, i) for i in range(11)]
    expected = jax.tree.map(lambda *leaves: np.mean(np.square(leaves), axis=0), *gradients)
    assert_close(found, expected, roundings=64)


def loss_of_one(logits, label):
    return mcomb.cross_entropy(logits, label)[0]


def test_fisher_weighs_by_what_the_loss_depends_on():
    # The units of one network that lead nowhere have no information: the other's are taken.
    blind = jax.tree.map(np.copy, B)
    blind["last"]["kernel"][:4] = 0
    merged = merge(apply, (A, blind), INPUTS, LABELS, method="fisher", spec=SPEC).params
    assert_close(merged["first"]["bias"][:4], A["first"]["bias"][:4], roundings=8)
    assert np.abs(merged["first"]["bias"][4:] - A["first"]["bias"][4:]).min() > 0


def test_leaves_that_are_no_floats_are_the_first_networks():
    a, b = ({**own, "steps": np.array(2**40 + i), "key": jax.random.key(i)} for i, own in enumerate((A, B)))
    spec = mcomb.derive_spec(apply, a, INPUTS)
    for method in ("average", "fisher", "refit", "learned"):
        options = {"steps": 4} if method == "learned" else {}
        merged = merge(apply, (a, b), INPUTS, LABELS, method=method, spec=spec, **options).params
        assert merged["steps"] == 2**40
        assert merged["key"] == a["key"]


def test_values_of_units_are_added_where_a_weight_connects_them():
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
        ({"method": "magic"}, "there is no method 'magic' to merge by: choose from average, fisher, refit, learned"),
        ({"method": "fisher", "per": "unit"}, "the method fisher has no option per: leave it out"),
        ({"per": "neuron"}, "there are no shares per 'neuron': choose from network, layer, leaf, unit, weight"),
        ({"steps": 0}, "steps is 0"),
        ({"networks": (A,)}, "fewer than two networks"),
        ({"networks": (A, {"first": A["first"]})}, "the networks to merge differ"),
        ({"labels": LABELS[:5]}, "the labels 5"),
        ({"inputs": INPUTS[:1], "labels": LABELS[:1]}, "1 examples are too few"),
    ],
)
def test_what_cannot_be_merged_is_said(change, words):
    given = {"networks": (A, B), "apply": apply, "inputs": INPUTS, "labels": LABELS} | change
    with pytest.raises(UserError, match=words):
        merge(SPEC, **given)
