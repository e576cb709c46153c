"""`sweep`: its points, draws, barriers, agreement and plots, against computations by hand in NumPy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

import mcomb
from mcomb.errors import UserError

ROUNDINGS = 32  # of the largest loss, which is a mean over 40 examples


def apply(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def logits_in_float64(params, x):
    w1, w2 = (np.asarray(params[name], np.float64) for name in ("w1", "w2"))
    return np.tanh(x @ w1) @ w2


@cache
def problem():
    """Return two networks, and inputs with labels."""
    rng = np.random.default_rng(0)
    networks = [
        {name: rng.standard_normal(shape, np.float32) for name, shape in (("w1", (5, 8)), ("w2", (8, 4)))}
        for _ in range(2)
    ]
    return tuple(networks), rng.standard_normal((40, 5), np.float32), rng.integers(0, 4, 40).astype(np.int32)


def by_hand(params):
    """Return the loss, the accuracy and the predictions of a network, by NumPy."""
    _, x, y = problem()
    logits = logits_in_float64(params, x)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    return losses.mean(), np.mean(logits.argmax(1) == y), logits.argmax(1)


def line(share):
    (a, b), *_ = problem()
    return {name: (1 - np.float64(share)) * a[name] + share * b[name] for name in a}


def run(draw=mcomb.linear, **options):
    networks, x, y = problem()
    return mcomb.sweep(apply, networks, x, y, draw, **({"points": 5} | options))


@cache
def linear_sweep():
    return run()


def test_sweep_linear_equals_numpy():
    found, shares = linear_sweep(), np.linspace(0, 1, 5)
    assert (found.parameter, found.loss.shape, found.accuracy.shape) == ("share", (5, 1), (5, 1))
    assert_equal(found.points, shares.astype(np.float32))
    losses, accuracies, _ = zip(*map(by_hand, map(line, shares)), strict=True)
    assert_close(found.loss[:, 0], np.array(losses), roundings=ROUNDINGS)
    assert_equal(found.accuracy[:, 0], np.array(accuracies))


def test_sweep_linear_endpoints_are_a_and_b():
    found = linear_sweep()
    for row, end, network in zip((0, -1), found.ends, problem()[0], strict=True):
        assert_close(found.loss[row, 0], by_hand(network)[0], roundings=ROUNDINGS)
        assert_close(found.loss[row, 0], end.loss, roundings=ROUNDINGS)
        assert found.accuracy[row, 0] == end.accuracy == by_hand(network)[1]


def test_sweep_barrier_equals_definition():
    ends, between = [by_hand(line(share)) for share in (0, 1)], [by_hand(line(i / 4)) for i in range(5)]
    found = linear_sweep().barrier
    loss = max(loss for loss, *_ in between) - np.mean([loss for loss, *_ in ends])
    correct = np.mean([correct for _, correct, _ in ends]) - min(correct for _, correct, _ in between)
    assert loss > 0.1
    assert_close(found.loss, loss, roundings=ROUNDINGS, scale=3.0)
    assert found.accuracy == pytest.approx(correct, abs=1e-12)


def test_sweep_agreement_equals_counts():
    _, _, y = problem()
    *_, of_a = by_hand(line(0))
    *_, of_b = by_hand(line(1))
    found = linear_sweep().agreement
    assert found.shape == (5, 1, 4, 2)
    for row, share in enumerate(np.linspace(0, 1, 5)):
        *_, own = by_hand(line(share))
        is_a, is_b = own == of_a, own == of_b
        counts = [
            [(agrees & (own == y)).sum(), (agrees & (own != y)).sum()]
            for agrees in (is_a & ~is_b, is_b & ~is_a, is_a & is_b, ~is_a & ~is_b)
        ]
        assert_equal(found[row, 0], np.array(counts) / len(y))


def test_sweep_repr_shows_size_and_barriers():
    found = linear_sweep()
    barrier = found.barrier
    assert repr(found) == (
        f"Sweep(5 values of share, 1 combination each: loss barrier {barrier.loss:.4f}, "
        f"accuracy barrier {barrier.accuracy:.4f})"
    )
    with pytest.raises(AttributeError, match="There is no metric 'perplexity', only loss, accuracy, agreement"):
        assert found.perplexity


@pytest.mark.parametrize(("draw", "count"), [(mcomb.linear, 1), (mcomb.uniform, 10)])
def test_sweep_samples_default(draw, count):
    found = run(draw, points=3)
    assert found.loss.shape == (3, count)
    assert_equal(found.points, np.linspace(draw.low, draw.high, 3, dtype=np.float32))


def test_sweep_uniform_samples_differ_except_at_zero():
    found = run(mcomb.uniform, points=[0.0, 0.5], samples=4)
    middle = by_hand(line(0.5))[0]
    assert_close(found.loss[0], np.full(4, middle), roundings=ROUNDINGS)
    assert len(set(found.loss[1])) == 4
    assert_equal(run(mcomb.uniform, points=[0.0, 0.5], samples=4).loss, found.loss)
    assert (run(mcomb.uniform, points=[0.0, 0.5], samples=4, seed=1).loss[1] != found.loss[1]).all()


@pytest.mark.slow
def test_sweep_points_beyond_range():
    found = run(points=np.array([-0.5, 1.5]))
    assert_close(found.loss[:, 0], np.array([by_hand(line(share))[0] for share in (-0.5, 1.5)]), roundings=ROUNDINGS)


def test_sweep_function_draw_of_three_networks():
    (a, b), x, y = problem()

    def draw(key, shares, *networks):
        return jax.tree.map(lambda *leaves: sum(share * leaf for share, leaf in zip(shares, leaves)), *networks)  # noqa: B905

    shares = np.array([[0, 1, 0], [0.25, 0.75, 0]], np.float32)
    found = mcomb.sweep(apply, (a, b, a), x, y, draw, points=shares)
    assert found.loss.shape == (2, 10)
    assert len(found.ends) == 3
    assert list(found.values) == ["loss", "accuracy"]  # agreement is defined for two networks
    for row, share in enumerate((1, 0.75)):
        assert_close(found.loss[row], np.full(10, by_hand(line(share))[0]), roundings=ROUNDINGS)


def test_sweep_repair_keeps_ends_and_changes_midpoint():
    found, plain = run(repair=True), linear_sweep()
    assert_close(found.loss[[0, -1]], plain.loss[[0, -1]], roundings=8 * ROUNDINGS)
    assert_equal(found.accuracy[[0, -1]], plain.accuracy[[0, -1]])
    assert abs(found.loss[2] - plain.loss[2]) > 0.01
    (a, _), x, _ = problem()
    assert_equal(run(repair=True, spec=mcomb.derive_spec(apply, a, x)).loss, found.loss)


def test_sweep_wrapped_default_loss_changes_nothing():
    wrapped, plain = run(loss=lambda *example: tuple(mcomb.cross_entropy(*example))), linear_sweep()
    assert list(wrapped.values) == list(plain.values) == ["loss", "accuracy", "agreement"]
    assert_equal(dict(wrapped.values), dict(plain.values))
    assert wrapped.barrier == plain.barrier
    assert [end.values for end in wrapped.ends] == [end.values for end in plain.ends]


def test_sweep_of_regression_has_no_accuracy():
    networks, x, _ = problem()
    target = np.ones((len(x), 4), np.float32)
    found = mcomb.sweep(apply, networks, x, target, mcomb.linear, points=2, loss=mcomb.squared_error)
    assert list(found.values) == ["loss"]
    expected = [np.square(logits_in_float64(network, x) - 1).mean() for network in networks]
    assert_close(found.loss[:, 0], np.array(expected), roundings=ROUNDINGS)
    assert found.barrier.accuracy is None
    assert "accuracy" not in repr(found)


@pytest.mark.slow
def test_sweep_own_accuracy_of_regression():
    """Predictions of classes, which agreement needs, do not exist."""
    networks, x, _ = problem()
    close = lambda output, target: (jnp.sum(jnp.abs(output - target) < 1), 4)  # noqa: E731
    options = {"points": 2, "loss": mcomb.squared_error, "metrics": {"accuracy": close}}
    found = mcomb.sweep(apply, networks, x, np.ones((len(x), 4), np.float32), mcomb.linear, **options)
    expected = [np.mean(np.abs(logits_in_float64(network, x) - 1) < 1) for network in networks]
    assert_equal(found.accuracy[:, 0], np.array(expected))
    assert list(found.values) == ["loss", "accuracy"]


@pytest.mark.slow
def test_sweep_metrics_replace_accuracy():
    found = run(metrics={"tempered": mcomb.tempered_cross_entropy((1.0, 2.0))}, points=2)
    assert list(found.values) == ["loss", "tempered"]
    assert_close(found.tempered[..., 0], found.loss, roundings=ROUNDINGS)


def test_sweep_of_tokens_skips_negative_labels():
    """A language model needs no loss of its own."""
    networks, x, _ = problem()
    x, labels = x.reshape(10, 4, 5), np.random.default_rng(1).integers(-2, 4, (10, 4))
    is_real = labels >= 0
    assert 0 < is_real.sum() < labels.size
    found = mcomb.sweep(apply, networks, x, labels, mcomb.linear, points=2)
    (a, b), classes = (logits_in_float64(network, x)[is_real] for network in networks), labels[is_real]
    losses = [(np.log(np.exp(own).sum(1)) - own[np.arange(len(own)), classes]).mean() for own in (a, b)]
    assert_close(found.loss[:, 0], np.array(losses), roundings=ROUNDINGS)
    assert_equal(found.accuracy[:, 0], np.array([np.mean(own.argmax(1) == classes) for own in (a, b)]))
    same = np.mean(a.argmax(1) == b.argmax(1))
    assert_close(found.agreement[0, 0].sum(1), np.array([1 - same, 0, same, 0]), roundings=4)


@pytest.mark.parametrize("ending", ["png", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pdf", "svg"))])
def test_sweep_plot_writes_file(tmp_path, ending):
    path = tmp_path / f"sweep.{ending}"
    linear_sweep().plot(path, naive=run(mcomb.linear, points=5), title="a title")
    start = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    written = path.read_bytes()
    assert written.startswith(start)
    assert len(written) > 2000
    assert list(tmp_path.iterdir()) == [path]


def test_sweep_plot_rejects_unknown_ending(tmp_path):
    with pytest.raises(
        UserError, match=r"Cannot draw .*sweep\.docx: use a name that ends in one of \.png, \.pdf, \.svg"
    ):
        linear_sweep().plot(tmp_path / "sweep.docx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("draw", "options", "words"),
    [
        (mcomb.linear, {"points": 1}, "points is 1: pass an integer of at least 2"),
        (mcomb.uniform, {"points": [0.1, -0.1]}, "s = -0.1 is out of range for uniform: pass 0 or more"),
        (mcomb.hyperplane, {"points": [1.25], "repair": True}, "share = 1.25 is out of range for hyperplane: pass a"),
        (lambda key, point, a, b: a, {"points": 5}, "A function has no range for 5 points: pass an array"),
        (lambda key, point: point, {"points": [0.0]}, "cannot draw combinations of 2 networks"),
        (mcomb.uniform, {"samples": 0}, "samples is 0: pass an integer of at least 1"),
    ],
)
def test_sweep_rejects_misuse(draw, options, words):
    with pytest.raises(UserError, match=words):
        run(draw, **options)


def test_sweep_rejects_distribution_of_three_networks():
    (a, b), x, y = problem()
    with pytest.raises(UserError, match="Cannot mix 3 networks with uniform: pass two"):
        mcomb.sweep(apply, (a, b, a), x, y, mcomb.uniform)
