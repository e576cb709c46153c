import dataclasses

import jax
import numpy as np
import pytest
from zoo import spec_of

from mcomb import combine, match, match_weights, score
from mcomb.matching import straight_through
from mcomb.base import UserError
from mcomb.matching import MATCHERS
from mcomb.lab.models import MLP, classifier
from mcomb.lab.setups import SETUPS
from mcomb.matching.straight_through import match_straight_through
from mcomb.base import Diverged
from mcomb.lab.training import initial_state, train

STEPS = 12
OPTIONS = {"steps": STEPS, "learning_rate": 0.03}


def networks(digits, *seeds, epochs):
    """Small trained networks: their spec, their parameters, how to apply them, and the images."""
    model, data = MLP(1, 10), digits.train
    apply = classifier(model, digits.mean, digits.std)
    recipe = dataclasses.replace(SETUPS["mlp-digits"].recipe, epochs=epochs)

    def trained(seed):
        params = model.init(jax.random.key(seed), data.images[:1].astype(np.float32))["params"]
        *_, (_, state, _) = train(apply, initial_state(params, recipe, len(data.labels)), data, recipe, seed)
        return jax.tree.map(np.asarray, state.params)

    params = [trained(seed) for seed in seeds]
    return spec_of(model, params[0], data.images[:1].astype(np.float32)), *params, apply, *data


@pytest.fixture(scope="module")
def pair(digits):
    """Two networks that could still be better."""
    return networks(digits, 0, 1, epochs=10)


@pytest.fixture(scope="module")
def fitted(digits):
    """A network whose loss no other order of units would lower."""
    return networks(digits, 0, epochs=60)


@pytest.fixture(scope="module")
def found(pair):
    return match_straight_through(*pair, **OPTIONS)


def held_out_loss(pair, perms):
    spec, a, b, apply, images, labels = pair
    return score(apply, combine(a, spec.apply(perms, b), 0.5), images[-140:], labels[-140:]).loss


def test_it_betters_the_weight_matching_on_data_that_no_gradient_sees(pair, found):
    spec, a, b, *_ = pair
    plain = match_weights(spec, a, b)
    assert found.losses[0] == pytest.approx(held_out_loss(pair, plain.perms))
    assert min(found.losses) == pytest.approx(held_out_loss(pair, found.perms))
    assert min(found.losses) < 0.9 * found.losses[0]


def test_the_objective_is_the_inner_product_and_comparable_with_that_of_weight_matching(pair, found):
    spec, a, b, *_ = pair
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(spec.apply(found.perms, b)), strict=True)
    assert found.objective == pytest.approx(sum(float(np.vdot(x, y)) for x, y in pairs), rel=1e-5)
    assert found.trace[0] == pytest.approx(match_weights(spec, a, b).objective, rel=1e-5)
    assert len(found.trace) == len(found.losses) == STEPS + 1
    assert found.objective == found.trace[np.argmin(found.losses)]


@pytest.mark.parametrize("matcher", MATCHERS)
def test_a_planted_permutation_is_recovered_in_spite_of_noise(fitted, matcher):
    spec, a, *rest = fitted
    planted, rng = spec.random(jax.random.key(5)), np.random.default_rng(1)
    shuffled = jax.tree.map(
        lambda leaf: leaf + 0.1 * leaf.std() * rng.standard_normal(leaf.shape, np.float32), spec.apply(planted, a)
    )
    found = match(spec, a, shuffled, *rest, matcher=matcher).perms
    jax.tree.map(np.testing.assert_array_equal, found, spec.invert(planted))


def test_what_is_no_float_cannot_be_learnt(pair):
    spec, a, b, *rest = pair
    counted = a | {"count": np.int32(1)}
    with pytest.raises(UserError, match="count is no float"):
        match_straight_through(spec, counted, b, *rest)


def test_no_steps_are_weight_matching(pair):
    spec, a, b, *_ = pair
    jax.tree.map(
        np.testing.assert_array_equal, match_straight_through(*pair, steps=0).perms, match_weights(spec, a, b).perms
    )


def test_arguments_are_left_alone_and_equal_seeds_give_equal_results(pair, found):
    before = jax.tree.map(np.copy, pair[1:3])
    on_device = jax.device_put(pair[1:3])
    again = match_straight_through(pair[0], *on_device, *pair[3:], **OPTIONS)
    jax.tree.map(np.testing.assert_array_equal, on_device, before)
    jax.tree.map(np.testing.assert_array_equal, again.perms, found.perms)
    assert (again.trace, again.losses) == (found.trace, found.losses)
    assert match_straight_through(*pair, **OPTIONS, seed=1).losses != found.losses


def test_held_out_labels_judge_and_do_not_teach(pair, found):
    *networks, labels = pair
    wrong = np.concatenate([labels[:-140], (labels[-140:] + 1) % 10])
    other = match_straight_through(*networks, wrong, **OPTIONS)
    assert other.trace == found.trace
    assert other.losses != found.losses


def test_it_looks_at_held_out_data_only_when_a_permutation_has_changed(pair, found, monkeypatch):
    calls = []
    monkeypatch.setattr(straight_through, "score", lambda *args: calls.append(args) or score(*args))
    match_straight_through(*pair, steps=3, learning_rate=0.0)
    assert len(calls) == 1
    match_straight_through(*pair, **OPTIONS)
    assert len(calls) - 1 == len(set(found.trace))


def test_each_matching_starts_from_the_last(pair, monkeypatch):
    starts, ends = [], []

    def recorded(*args, start=None, **options):
        matching = match_weights(*args, start=start, **options)
        starts.append(start)
        ends.append(matching.perms)
        return matching

    monkeypatch.setattr(straight_through, "match_weights", recorded)
    match_straight_through(*pair, steps=3)
    assert starts[0] is None
    assert all(start is end for start, end in zip(starts[1:], ends, strict=False))


def test_one_device_finds_what_two_find(pair, monkeypatch):
    """A batch of seven is padded on two devices; the padding must count for nothing."""
    two = match_straight_through(*pair, **OPTIONS, batch_size=7)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    one = match_straight_through(*pair, **OPTIONS, batch_size=7)
    assert len(set(two.trace)) > 1
    assert one.trace == two.trace


@pytest.mark.parametrize(
    ("part", "words"),
    [(slice(1200), "not a number in step 1"), (slice(1300, None), "not a number on the held-out data")],
)
def test_a_loss_that_is_not_finite_stops_it_loudly(pair, part, words):
    spec, a, b, apply, images, labels = pair
    broken = images.astype(np.float32)
    broken[part] = np.nan
    with pytest.raises(Diverged, match=words):
        match_straight_through(spec, a, b, apply, broken, labels, steps=2)


@pytest.mark.parametrize("count", [0, 1, 1399])
def test_every_input_needs_a_label(pair, count):
    *networks, labels = pair
    with pytest.raises(UserError, match=f"{count} labels"):
        match_straight_through(*networks, labels[:count])
