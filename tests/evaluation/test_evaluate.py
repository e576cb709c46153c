from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numerics import assert_close, assert_equal

from mcomb import combine, linear, score, squared_error, uniform
from mcomb.combination import hyperplane, mix
from mcomb.errors import Diverged, UserError
from mcomb.evaluation import evaluate as evaluation
from mcomb.evaluation.evaluate import Metrics, evaluate, measure_examples
from mcomb.evaluation.objectives import (
    accuracy,
    agreement,
    cross_entropy,
    on_label,
    predicted,
    tempered_cross_entropy,
)

KEYS = jax.random.split(jax.random.key(0), 7)
SHARES = jnp.linspace(0, 0.5, 7)
N = len(jax.devices())
ROUNDINGS = 16  # of the largest loss, which is a mean over 53 inputs


def apply(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def random_weights(rng, **shapes):
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@cache
def problem(n=53):
    """Return two networks, and inputs with labels."""
    rng = np.random.default_rng(0)
    networks = tuple(random_weights(rng, w1=(5, 8), w2=(8, 4)) for _ in range(2))
    return networks, rng.standard_normal((n, 5), np.float32), rng.integers(0, 4, n).astype(np.int32)


LOSS, METRICS = on_label(cross_entropy), {"accuracy": on_label(accuracy), "agreement": agreement}


@cache
def with_predictions():
    """Labels beside the predictions of both networks, for METRICS."""
    networks, x, y = problem()
    return {"label": y, "predicted": np.stack([score_in_float64(network, x, y)[2] for network in networks], 1)}


def evaluate_problem(k=7, fn=apply, metrics=METRICS, **options):
    networks, x, _ = problem()
    options |= {"loss": LOSS, "metrics": metrics}
    return evaluate(fn, networks, x, with_predictions(), mix(uniform), SHARES[:k], KEYS[:k], **options)


def score_in_float64(params, x, y):
    """Return the mean loss, the accuracy and the predictions of one network, by NumPy."""
    w1, w2 = (np.asarray(params[name], np.float64) for name in ("w1", "w2"))
    logits = np.tanh(x @ w1) @ w2
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    return loss.mean(), np.mean(logits.argmax(1) == y), logits.argmax(1)


@cache
def drawn_networks():
    draw = jax.jit(mix(uniform))
    return [draw(key, share, *problem()[0]) for key, share in zip(KEYS, SHARES, strict=True)]


def check_same(actual, expected):
    assert_close(actual.loss, expected.loss, roundings=ROUNDINGS)
    assert actual.values.keys() == expected.values.keys()
    assert_equal(dict(actual.values) | {"loss": 0}, dict(expected.values) | {"loss": 0})


def shares_units_out(params, x):
    """Compute the same function with the hidden units shared out among the devices."""
    devices = jax.devices()
    units = np.pad(np.arange(8), (0, -8 % len(devices)), constant_values=8)
    w1 = jnp.pad(params["w1"], ((0, 0), (0, 1)))[:, units]
    w2 = jnp.pad(params["w2"], ((0, 1), (0, 0)))[units]

    def inner(w1, w2, x):
        return jax.lax.psum(jnp.tanh(x @ w1) @ w2, "units")

    specs = (P(None, "units"), P("units"), P())
    return jax.shard_map(inner, mesh=Mesh(np.array(devices), "units"), in_specs=specs, out_specs=P())(w1, w2, x)


@pytest.mark.slow
def test_evaluate_function_with_shard_map_inside():
    check_same(evaluate_problem(fn=shares_units_out, batch_size=10, vmap_size=3), evaluate_problem())


def test_evaluate_rejects_shard_map_over_some_devices():
    def fn(params, x):
        mesh = Mesh(np.array(jax.devices()[:1]), "one")
        return jax.shard_map(apply, mesh=mesh, in_specs=P(), out_specs=P())(params, x)

    if len(jax.devices()) == 1:
        pytest.skip("there is one device only")
    networks, x, y = problem()
    with pytest.raises(UserError, match=r"a shard_map over 1 of \d devices: use a mesh of all devices"):
        evaluate(fn, networks, x, y, mix(uniform), SHARES, KEYS)


def test_evaluate_measures_drawn_networks():
    _, x, y = problem()
    losses, accuracies, _ = zip(*(score_in_float64(params, x, y) for params in drawn_networks()), strict=True)
    metrics = evaluate_problem(batch_size=10)
    assert_close(metrics.loss, np.array(losses), roundings=ROUNDINGS)
    assert_equal(metrics.accuracy, np.array(accuracies))


def test_tempered_cross_entropy_divides_logits():
    _, x, y = problem()
    temperatures = (0.25, 1.0, 8.0)
    tempered = {"tempered": on_label(tempered_cross_entropy(temperatures))}
    metrics = evaluate_problem(batch_size=10, metrics=tempered)
    assert metrics.tempered.shape == (7, 3)
    assert_close(metrics.tempered[:, 1], metrics.loss, roundings=ROUNDINGS)
    for column, temperature in enumerate(temperatures):
        divided = [{"w1": params["w1"], "w2": params["w2"] / temperature} for params in drawn_networks()]
        expected = np.array([score_in_float64(params, x, y)[0] for params in divided])
        assert_close(metrics.tempered[:, column], expected, roundings=ROUNDINGS)
        own = score(apply, drawn_networks()[0], x, y, metrics={"tempered": tempered_cross_entropy(temperatures)})
        assert_close(own.tempered[column], score(apply, divided[0], x, y).loss, roundings=ROUNDINGS)


def test_evaluate_linear_ends_are_the_networks():
    networks, x, y = problem()
    metrics = evaluate(apply, networks, x, y, mix(linear), jnp.array([0.0, 1.0]), KEYS[:2])
    for i, network in enumerate(networks):
        loss, correct, _ = score_in_float64(network, x, y)
        assert_close(metrics.loss[i], loss, roundings=ROUNDINGS)
        assert metrics.accuracy[i] == correct


@pytest.mark.parametrize("batch_size", [1, 10])
def test_evaluate_is_independent_of_batch_size(batch_size):
    """The last batch is not full; its padding does not count."""
    check_same(evaluate_problem(batch_size=batch_size), evaluate_problem())


@pytest.mark.parametrize("vmap_size", [3, 7])
def test_evaluate_is_independent_of_vmap_size(vmap_size):
    check_same(evaluate_problem(vmap_size=vmap_size), evaluate_problem(vmap_size=1))


def by_matrices(params, x):
    """Compute the same function by an operation that JAX cannot batch over the matrices."""
    rows = jnp.array([len(x)])
    return jax.lax.ragged_dot(jnp.tanh(x @ params["w1"]), params["w2"][None], rows)


def convolve_rows(params, x):
    hidden = jax.lax.conv_general_dilated(
        x[:, None], params["w1"][None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.tanh(hidden[:, 0]) @ params["w2"]


def with_effect(params, x):
    jax.debug.callback(lambda x: None, x)
    return apply(params, x)


ALONE = {
    "convolution": convolve_rows,
    "branch": lambda params, x: jax.lax.cond(params["w1"][0, 0] > 0, apply, lambda *args: -apply(*args), params, x),
    "effect": with_effect,
    "ragged": by_matrices,
    "large": lambda params, x: apply(params, x) + jnp.ones((len(x), 4, 2**14)).mean(-1),
}


@pytest.fixture
def sizes(monkeypatch):
    """Record the sizes that programs are compiled for."""
    wanted, real = [], evaluation.compile_to_fit
    monkeypatch.setattr(evaluation, "compile_to_fit", lambda lower, size: wanted.append(size) or real(lower, size))
    return wanted


@pytest.mark.parametrize("count", [7, 100])
def test_evaluate_batches_small_dense_networks(count, sizes, monkeypatch):
    networks, x, y = problem()
    keys, shares = jax.random.split(jax.random.key(0), count * N), np.linspace(0, 0.5, count * N, dtype=np.float32)
    args = apply, networks, x, y, mix(uniform), shares, keys
    monkeypatch.setattr(evaluation, "CACHE", 60 * (4 * (5 * 8 + 8 * 4) + 4 * 53 * 8))
    metrics = evaluate(*args)
    assert sizes.pop().combinations == 60
    check_same(metrics, evaluate(*args, vmap_size=1))


def test_evaluate_takes_draw_without_networks():
    networks, x, y = problem()
    drawn = evaluate(apply, (), x, y, lambda key, share: networks[0], SHARES, KEYS)
    assert_close(drawn.loss, np.full(7, score(apply, networks[0], x, y).loss), roundings=ROUNDINGS)


@pytest.mark.parametrize("name", ALONE)
def test_evaluate_runs_other_networks_one_by_one(name, sizes):
    networks, x, y = problem()
    args = ALONE[name], networks, x, y, mix(uniform), np.zeros(3 * N, np.float32), jax.random.split(KEYS[0], 3 * N)
    assert np.isfinite(evaluate(*args).loss).all()
    assert [size.combinations for size in sizes] == [1]


@pytest.mark.parametrize("k", [1, 2])
def test_evaluate_shards_any_number_of_combinations(k):
    few, all_ = evaluate_problem(k), evaluate_problem()
    check_same(few, Metrics({name: values[:k] for name, values in all_.values.items()}))


def test_evaluate_shards_images_of_few_combinations():
    """All devices together evaluate each image just once."""
    networks, x, y = problem()
    seen = []

    def spy(params, x):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
        return apply(params, x)

    score(spy, networks[0], x, y)
    evaluate(spy, networks, x, y, mix(uniform), SHARES[:1], KEYS[:1])
    jax.effects_barrier()
    assert len(seen) == 2 * N
    for one in seen:
        assert len(one) == -(-len(x) // N)
    rows = np.concatenate(seen)
    assert_equal(np.sort(rows[rows.any(1)], axis=0), np.sort(np.concatenate([x, x]), axis=0))


def convolve(params, x):
    for kernel in (params["k1"], params["k2"]):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    return x.mean((1, 2))


@pytest.mark.slow
def test_evaluate_batches_convolutions_by_vmap():
    rng = np.random.default_rng(0)
    networks = tuple(random_weights(rng, k1=(3, 3, 2, 4), k2=(3, 3, 4, 5)) for _ in range(2))
    images, labels = rng.standard_normal((6, 8, 8, 2), np.float32), np.arange(6, dtype=np.int32) % 5
    one, two = (
        evaluate(convolve, networks, images, labels, mix(uniform), SHARES[:4], KEYS[:4], batch_size=4, vmap_size=size)
        for size in (1, 2)
    )
    check_same(two, one)


def combinations_seen(k, **options):
    """Return the bits of all weights of each combination that `apply` gets, on any device."""
    networks, x, y = problem()
    seen = set()

    def spy(params, x):
        flat = jnp.concatenate([params["w1"].ravel(), params["w2"].ravel()])
        jax.debug.callback(lambda flat: seen.add(np.asarray(flat).tobytes()), flat)
        return apply(params, x)

    evaluate(spy, networks, x, y, mix(uniform), SHARES[:k], KEYS[:k], **options)
    jax.effects_barrier()
    return seen


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_evaluate_draws_same_on_any_devices_and_chunks(k, request):
    drawn = {np.concatenate([p["w1"].ravel(), p["w2"].ravel()]).tobytes() for p in drawn_networks()[:k]}
    assert len(drawn) == k
    ways = [{}, {"batch_size": 10}, {"vmap_size": 2}, {"vmap_size": 7, "batch_size": 10}]
    assert [combinations_seen(k, **way) for way in ways] == [drawn] * len(ways)
    request.getfixturevalue("one_device")
    assert combinations_seen(k) == drawn


def test_evaluate_reports_metrics_as_measured():
    reports = []
    metrics = evaluate_problem(vmap_size=2, report=reports.append)
    assert [len(report.loss) for report in reports] == [min(2 * N, 7 - i) for i in range(0, 7, 2 * N)]
    assert metrics.values.keys() == {"loss", "accuracy", "agreement"}
    for name, values in metrics.values.items():
        assert_equal(values, np.concatenate([report.values[name] for report in reports]))


def test_evaluate_out_of_memory_continues_with_less(monkeypatch, capsys):
    expected, real, sizes = evaluate_problem(vmap_size=1), evaluation.compile_to_fit, []

    def compile_to_fit(lower, wanted):
        chosen, program = real(lower, wanted)
        sizes.append(chosen)

        def run(*args):
            if chosen.combinations > 1 or chosen.examples > 30:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: as if")
            return program(*args)

        return chosen, run

    monkeypatch.setattr(evaluation, "compile_to_fit", compile_to_fit)
    check_same(evaluate_problem(vmap_size=2), expected)
    assert sizes == [(2, 53), (1, 53), (1, 27)]
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["Out of memory: continuing with one combination on 27 examples at once."]


def test_evaluate_one_device_equals_all(request):
    on_all = evaluate_problem()
    request.getfixturevalue("one_device")
    check_same(evaluate_problem(), on_all)


def test_agreement_counts_by_network_and_correctness():
    _, x, y = problem()
    of_a, of_b = with_predictions()["predicted"].T
    fractions = evaluate_problem(batch_size=10).agreement
    assert fractions.shape == (7, 4, 2)
    for i, params in enumerate(drawn_networks()):
        own = score_in_float64(params, x, y)[2]
        is_a, is_b = own == of_a, own == of_b
        for row, agrees in enumerate((is_a & ~is_b, ~is_a & is_b, is_a & is_b, ~is_a & ~is_b)):
            counts = [(agrees & (own == y)).sum(), (agrees & (own != y)).sum()]
            assert_equal(fractions[i, row], np.array(counts) / len(y))


@pytest.mark.parametrize("batch_size", [10, 53, 200])
def test_score_is_independent_of_batch_size(batch_size):
    (network, _), x, y = problem()
    loss, correct, classes = score_in_float64(network, x, y)
    found = score(apply, network, x, y, batch_size=batch_size)
    assert_close(found.loss, loss, roundings=ROUNDINGS)
    assert found.accuracy == correct
    of_examples = measure_examples(apply, network, x, y, (("predicted", predicted),), batch_size=batch_size)
    assert_equal(of_examples["predicted"], (classes, np.ones(len(y))))


def test_evaluate_takes_any_trees_to_draw_from():
    (a, _), x, y = problem()
    draw = lambda key, share, by, params: jax.tree.map(lambda leaf: by["scale"] * leaf, params)  # noqa: E731
    found = evaluate(apply, ({"scale": jnp.float32(1)}, a), x, y, draw, SHARES[:1], KEYS[:1])
    assert_close(found.loss[0], score(apply, a, x, y).loss, roundings=ROUNDINGS)


def test_evaluate_function_draw_of_three_networks():
    """The parameter of the draw is an array."""
    networks, x, y = problem()

    def draw(key, weights, a, b, c):
        return jax.tree.map(lambda a, b, c: weights[0] * a + weights[1] * b + weights[2] * c, a, b, c)

    weights = jnp.array([[1.0, 0, 0], [0.2, 0.3, 0.5]])
    three = (*networks, combine(*networks, 0.3))
    metrics = evaluate(apply, three, x, y, draw, weights, KEYS[:2])
    for i in range(2):
        assert_close(metrics.loss[i], score_in_float64(draw(None, weights[i], *three), x, y)[0], roundings=ROUNDINGS)


def test_score_rejects_loss_that_is_not_finite():
    (a, _), x, y = problem()
    broken = x.copy()
    broken[7] = np.nan
    with pytest.raises(Diverged, match="The loss of example 7 is nan: check weights, inputs and labels"):
        score(apply, a, broken, y)
    with pytest.raises(Diverged, match="The loss of example 7 is nan: check weights, inputs and labels"):
        score(apply, a, broken, np.zeros((len(x), 4), np.float32), loss=squared_error)
    with pytest.raises(Diverged, match="The loss is nan: check"):
        score(apply, a, x, y, loss=lambda logits, label: (logits.sum(), jnp.nan))


def test_score_adds_up_losses_beyond_float32():
    (a, _), x, y = problem()
    huge = score(lambda params, x: 3e38 * jnp.eye(4)[:1] + apply(params, x), a, x, np.ones_like(y))
    assert_close(huge.loss, 3e38, roundings=ROUNDINGS)


def test_evaluate_overflowing_combination_is_never_correct():
    networks, x, _ = problem()
    labels = {"label": np.zeros(len(x), np.int32), "predicted": np.zeros((len(x), 2), np.int32)}
    overflows = lambda params, x: jnp.inf * apply(params, x)  # noqa: E731
    found = evaluate(*(overflows, networks, x, labels, mix(uniform), SHARES[:2], KEYS[:2]), loss=LOSS, metrics=METRICS)
    assert np.isnan(found.loss).all()
    assert_equal(found.accuracy, np.zeros(2))
    assert_equal(found.agreement[:, 3, 1], np.ones(2))


def test_evaluate_rejects_points_out_of_range():
    networks, x, y = problem()
    shares = np.array([0.5, 1.25], np.float32)
    with pytest.raises(UserError, match=r"share = 1\.25 is out of range for hyperplane: pass a number from 0 to 1"):
        evaluate(apply, networks, x, y, hyperplane, shares, KEYS[:2])
