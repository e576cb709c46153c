import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numerics import assert_close, assert_equal, inner_product, inner_product_scale

from mcomb import combine, derive_spec, score
from mcomb.errors import Diverged, UserError
from mcomb.evaluation.objectives import cross_entropy
from mcomb.keys import stream
from mcomb.matching import straight_through
from mcomb.matching.straight_through import match_straight_through
from mcomb.matching.weights import match_weights
from mcomb.runtime.training_loop import fit, initial_state, shuffled_rows

STEPS = 12
OPTIONS = {"steps": STEPS, "learning_rate": 0.03}
OPTIMIZER = optax.adam(0.01)


def mlp(params, images):
    x = images.reshape(len(images), -1).astype(jnp.float32) / 16
    for name in ("1", "2"):
        x = jax.nn.relu(x @ params["w" + name] + params["b" + name][None])
    return x @ params["w3"]


def training_loss(params, rows, data, key):
    images, labels = data
    losses, _ = jax.vmap(cross_entropy)(mlp(params, images[rows]), labels[rows])
    return jnp.mean(losses, where=rows >= 0), None


def train(seed, data, epochs):
    """Train a network of 64, 16, 16 and 10 units."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (64, 16), "b1": (16,), "w2": (16, 16), "b2": (16,), "w3": (16, 10)}
    params = {name: rng.standard_normal(s, np.float32) * np.float32(s[0] ** -0.5) for name, s in shapes.items()}
    batches = ((shuffled_rows(seed, epoch, len(data.labels), 100), tuple(data)) for epoch in range(epochs))
    *_, (state, _, _) = fit(training_loss, initial_state(params, OPTIMIZER), batches, OPTIMIZER, stream(seed))
    return jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def pair(digits):
    """Return the matcher's arguments: spec, two networks that are not fully trained, function, inputs, labels."""
    a, b = (train(seed, digits.train, epochs=10) for seed in (0, 1))
    return derive_spec(mlp, a, digits.train.inputs[:1]), a, b, mlp, *digits.train


@pytest.fixture(scope="module")
def found(pair):
    return match_straight_through(*pair, **OPTIONS)


def held_out_loss(pair, perms):
    """Return the loss of the midpoint on the last tenth of the data."""
    spec, a, b, apply, images, labels = pair
    return score(apply, combine(a, spec.apply(perms, b), 0.5), images[-140:], labels[-140:]).loss


def test_straight_through_beats_weights_on_held_out_data(pair, found):
    spec, a, b, *_ = pair
    plain = match_weights(spec, a, b)
    assert_close(found.losses[0], held_out_loss(pair, plain.perms), roundings=16)
    assert_close(min(found.losses), held_out_loss(pair, found.perms), roundings=16)
    assert min(found.losses) < 0.9 * found.losses[0]


def test_straight_through_objective_is_inner_product(pair, found):
    spec, a, b, *_ = pair
    aligned, scale = spec.apply(found.perms, b), inner_product_scale(a, b)
    assert_close(found.objective, inner_product(a, aligned), roundings=16, scale=scale)
    assert_close(found.trace[0], match_weights(spec, a, b).objective, roundings=16, scale=scale)
    assert len(found.trace) == len(found.losses) == STEPS + 1
    assert found.objective == found.trace[np.argmin(found.losses)]


def test_straight_through_rejects_leaves_without_floats(pair):
    spec, a, b, *rest = pair
    with pytest.raises(UserError, match="count is not a float"):
        match_straight_through(spec, a | {"count": np.int32(1)}, b, *rest)


def test_straight_through_of_no_steps_is_weight_matching(pair):
    spec, a, b, *_ = pair
    assert_equal(match_straight_through(*pair, steps=0).perms, match_weights(spec, a, b).perms)


def test_straight_through_is_deterministic_and_pure(pair, found):
    before = jax.tree.map(np.copy, pair[1:3])
    on_device = jax.device_put(pair[1:3])
    again = match_straight_through(pair[0], *on_device, *pair[3:], **OPTIONS)
    assert_equal(on_device, before)
    assert_equal(again.perms, found.perms)
    assert (again.trace, again.losses) == (found.trace, found.losses)
    assert match_straight_through(*pair, **OPTIONS, seed=1).losses != found.losses


def test_straight_through_does_not_train_on_held_out(pair, found):
    *networks, labels = pair
    wrong = np.concatenate([labels[:-140], (labels[-140:] + 1) % 10])
    other = match_straight_through(*networks, wrong, **OPTIONS)
    assert other.trace == found.trace
    assert other.losses != found.losses


def test_straight_through_evaluates_only_changed_matchings(pair, found, monkeypatch):
    calls = []
    monkeypatch.setattr(
        straight_through, "score", lambda *args, **options: calls.append(args) or score(*args, **options)
    )
    match_straight_through(*pair, steps=3, learning_rate=0.0)
    assert len(calls) == 1
    match_straight_through(*pair, **OPTIONS)
    changes = sum(x != y for x, y in itertools.pairwise(found.trace))
    assert len(calls) == 1 + 1 + changes


@pytest.mark.parametrize("falls", [True, False])
def test_straight_through_says_when_loss_still_falls(pair, monkeypatch, capsys, falls):
    losses = iter([2.0, 1.0] if falls else [1.0, 2.0])
    monkeypatch.setattr(straight_through, "score", lambda *args, **options: SimpleNamespace(loss=next(losses)))
    found = match_straight_through(*pair, steps=1, learning_rate=1.0)
    assert len(set(found.losses)) == 2
    assert ("the held-out loss is lowest after step 1 of 1; more steps" in capsys.readouterr().err) == falls


def test_straight_through_starts_from_last_matching(pair, monkeypatch):
    starts, ends = [], []

    def record(*args, start=None, **options):
        matching = match_weights(*args, start=start, **options)
        starts.append(start)
        ends.append(matching.perms)
        return matching

    monkeypatch.setattr(straight_through, "match_weights", record)
    match_straight_through(*pair, steps=3)
    assert len(starts) == 4
    assert starts[0] is None
    assert all(start is end for start, end in zip(starts[1:], ends, strict=False))


@pytest.mark.slow
def test_straight_through_one_device_equals_all(pair, request):
    """Most numbers of devices do not divide a minibatch of seven; its padding must not count."""
    on_all = match_straight_through(*pair, **OPTIONS, batch_size=7)
    request.getfixturevalue("one_device")
    on_one = match_straight_through(*pair, **OPTIONS, batch_size=7)
    assert len(set(on_all.trace)) > 1
    assert on_one.trace == on_all.trace


@pytest.mark.parametrize(
    ("part", "words"),
    [(slice(1200), "not a number in step 1"), (slice(1300, None), "not a number on the held-out data")],
)
def test_straight_through_raises_diverged(pair, part, words):
    *networks, images, labels = pair
    broken = images.astype(np.float32)
    broken[part] = np.nan
    with pytest.raises(Diverged, match=words):
        match_straight_through(*networks, broken, labels, steps=2)


@pytest.mark.parametrize("count", [0, 1, 1399])
def test_straight_through_requires_label_for_each_input(pair, count):
    *networks, labels = pair
    with pytest.raises(UserError, match=f"the labels {count}"):
        match_straight_through(*networks, labels[:count])


def test_straight_through_learns_bfloat16_in_float32(pair, monkeypatch):
    """Steps of a hundredth of a percent of the weights' norm, which bfloat16 would round away, have an effect."""
    spec, a, b, *rest = pair
    halves, seen = [jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), own) for own in (a, b)], []

    def spy(spec, weights, *args, **options):
        seen.append(weights)
        return match_weights(spec, weights, *args, **options)

    monkeypatch.setattr(straight_through, "match_weights", spy)
    found = match_straight_through(spec, *halves, *rest, steps=2, learning_rate=1e-4)
    assert np.isfinite(found.losses).all()
    start, *_, last = seen
    assert (last["w1"] != np.float32(start["w1"])).mean() > 0.5
