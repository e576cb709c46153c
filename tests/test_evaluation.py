import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mcomb import combine, evaluate, linear, mix, score, uniform
from mcomb.devices import choose_vmap_size, footprint
from mcomb.lab.models import ResNet20, Tiny10

KEYS = jax.random.split(jax.random.key(0), 7)
SHARES = jnp.linspace(0, 0.5, 7)


def apply(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def problem(n=53):
    rng = np.random.default_rng(0)
    nets = [
        {"w1": rng.normal(size=(5, 8)).astype(np.float32), "w2": rng.normal(size=(8, 4)).astype(np.float32)}
        for _ in range(2)
    ]
    return tuple(nets), rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 4, n).astype(np.int32)


def by_hand(params, x, y):
    logits = apply(params, x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return float(loss), float((logits.argmax(-1) == y).mean())


def test_metrics_are_those_of_the_combined_networks():
    nets, x, y = problem()
    metrics = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y, batch_size=10)
    for i, (share, key) in enumerate(zip(SHARES, KEYS, strict=True)):
        loss, accuracy = by_hand(mix(uniform)(key, share, *nets), x, y)
        assert metrics.loss[i] == pytest.approx(loss, rel=1e-5)
        assert metrics.accuracy[i] == pytest.approx(accuracy)


def test_the_ends_are_the_networks_themselves():
    nets, x, y = problem()
    metrics = evaluate(apply, mix(linear), nets, jnp.array([0.0, 1.0]), KEYS[:2], x, y)
    for i, net in enumerate(nets):
        assert (metrics.loss[i], metrics.accuracy[i]) == pytest.approx(by_hand(net, x, y), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 53, 100])
def test_a_ragged_last_batch_is_exact(batch_size):
    nets, x, y = problem()
    whole = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y, batch_size=53)
    batched = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y, batch_size=batch_size)
    np.testing.assert_allclose(batched.loss, whole.loss, rtol=1e-5)
    np.testing.assert_array_equal(batched.accuracy, whole.accuracy)


@pytest.mark.parametrize("vmap_size", [1, 2, 3, 7])
def test_side_by_side_equals_one_by_one(vmap_size):
    nets, x, y = problem()
    together = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y, vmap_size=vmap_size)
    for i in range(len(KEYS)):
        alone = evaluate(apply, mix(uniform), nets, SHARES[i : i + 1], KEYS[i : i + 1], x, y, vmap_size=1)
        np.testing.assert_allclose(together.loss[i], alone.loss[0], rtol=1e-5)
        assert together.accuracy[i] == alone.accuracy[0]


def test_convolutions_side_by_side_equal_one_by_one():
    model, rng = Tiny10(1, 10), np.random.default_rng(0)
    images = rng.normal(size=(6, 16, 16, 3)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    nets = tuple(jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes) for _ in range(2))
    one, two = (
        evaluate(model.apply, mix(uniform), nets, SHARES[:4], KEYS[:4], images, np.arange(6), batch_size=4, vmap_size=n)
        for n in (1, 2)
    )
    np.testing.assert_allclose(one.loss, two.loss, rtol=1e-4)
    np.testing.assert_array_equal(one.accuracy, two.accuracy)


def test_one_device_equals_two(request):
    nets, x, y = problem()
    two = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y)
    request.getfixturevalue("one_device")
    one = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y)
    np.testing.assert_allclose(one.loss, two.loss, rtol=1e-6)
    np.testing.assert_array_equal(one.accuracy, two.accuracy)


def test_agreement_counts_every_image_by_match_and_correctness():
    nets, x, y = problem()
    labels = np.stack([score(apply, net, x, y).predicted for net in nets])
    metrics = evaluate(apply, mix(uniform), nets, SHARES, KEYS, x, y, references=labels, batch_size=8)
    assert (metrics.agreement.sum((1, 2)) == len(y)).all()
    np.testing.assert_allclose(metrics.agreement[:, :, 0].sum(1) / len(y), metrics.accuracy)
    for i, (share, key) in enumerate(zip(SHARES, KEYS, strict=True)):
        mine = np.asarray(apply(mix(uniform)(key, share, *nets), x).argmax(-1))
        is_a, is_b = mine == labels[0], mine == labels[1]
        for row, match in enumerate((is_a & ~is_b, ~is_a & is_b, is_a & is_b, ~is_a & ~is_b)):
            assert metrics.agreement[i, row].tolist() == [(match & (mine == y)).sum(), (match & (mine != y)).sum()]


def test_network_a_agrees_with_a_alone_or_with_both():
    nets, x, y = problem()
    labels = np.stack([score(apply, net, x, y).predicted for net in nets])
    counts = evaluate(apply, mix(linear), nets, jnp.zeros(1), KEYS[:1], x, y, references=labels).agreement[0]
    assert counts[1].sum() == counts[3].sum() == 0
    assert counts[0].sum() == (labels[0] != labels[1]).sum()


@pytest.mark.parametrize("batch_size", [10, 53, 200])
def test_a_networks_own_score_does_not_depend_on_the_batch(batch_size):
    (net, _), x, y = problem()
    found = score(apply, net, x, y, batch_size=batch_size)
    assert (found.loss, found.accuracy) == pytest.approx(by_hand(net, x, y), rel=1e-5)
    np.testing.assert_array_equal(found.predicted, apply(net, x).argmax(-1))


def test_any_function_of_networks_can_be_evaluated():
    """Parameters may be of any shape, and networks of any number."""
    nets, x, y = problem()

    def draw(key, weights, a, b, c):
        return jax.tree.map(lambda a, b, c: weights[0] * a + weights[1] * b + weights[2] * c, a, b, c)

    weights = jnp.array([[1.0, 0, 0], [0.2, 0.3, 0.5]])
    third = combine(*nets, 0.3)
    metrics = evaluate(apply, draw, (*nets, third), weights, KEYS[:2], x, y)
    assert metrics.loss[0] == pytest.approx(by_hand(nets[0], x, y)[0], rel=1e-5)


def test_on_cpu_one_combination_runs_at_a_time():
    nets, x, _ = problem()
    assert choose_vmap_size(apply, nets[0], jnp.asarray(x)) == 1


def test_the_footprint_counts_weights_and_the_largest_activation():
    shapes = [jax.eval_shape(ResNet20(w, 10).init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"] for w in (1, 32)]
    images = np.zeros((100, 32, 32, 3), np.float32)
    narrow, wide = (
        footprint(lambda p, x, w=w: ResNet20(w, 10).apply({"params": p}, x), tree, images)
        for w, tree in zip((1, 32), shapes, strict=True)
    )
    activation = 100 * 32 * 32 * 16 * 4
    assert 2 * activation < narrow < 10 * activation
    assert wide > 2 * sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes[1])) + 2 * 32 * activation
