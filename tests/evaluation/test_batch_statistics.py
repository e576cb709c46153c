import itertools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal
from zoo import CASES, random_arrays

import mcomb
from mcomb import estimate_statistics, merge
from mcomb.errors import UserError
from mcomb.evaluation.batch_statistics import names_of_statistics, normalise_by_batch, statistics_of
from mcomb.evaluation.evaluate import Metrics, evaluate
from mcomb.evaluation.repair import repaired
from mcomb.merging import fine_tuning
from mcomb.merging.partial import _streams
from mcomb.trees import map_named, named_leaves

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)


class Net(nn.Module):
    train: bool = False

    def norm(self, name):
        return nn.BatchNorm(not self.train, momentum=0.0, name=name)

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.norm("norm0")(nn.Dense(5, name="first")(x)))
        x = nn.relu(self.norm("norm1")(nn.Dense(6, name="second")(x)))
        return nn.Dense(3, name="head")(x)


class Convolutional(Net):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.norm("norm0")(nn.Conv(4, (3, 3), name="conv")(x)))
        return nn.Dense(3, name="head")(self.norm("norm1")(nn.Dense(6, name="dense")(x.mean((1, 2)))))


def apply(variables, x):
    return Net().apply(variables, x)


def batch_statistics(variables, x):
    """What Flax itself finds on one batch."""
    return Net(train=True).apply(variables, x, mutable="batch_stats")[1]["batch_stats"]


SHAPES = jax.eval_shape(Net().init, jax.random.key(0), X[:1])
STATISTICS = [name for name in named_leaves(SHAPES) if name.startswith("batch_stats")]


def network(seed):
    """Return a network whose statistics are those of its own activations."""
    variables = random_arrays(SHAPES, seed)
    return {"params": variables["params"], "batch_stats": batch_statistics(variables, X)}


A, B = network(1), network(2)
SPEC = mcomb.derive_spec(apply, A, X[:2])
RANDOM = SPEC.random(jax.random.key(0))


def test_estimate_statistics_of_one_batch_equals_flax():
    wrong = {"params": A["params"], "batch_stats": random_arrays(SHAPES["batch_stats"], 3)}
    found = estimate_statistics(apply, wrong, X, batch_size=len(X))
    assert_close(found["batch_stats"], A["batch_stats"], roundings=2**8)
    assert_equal(found["params"], A["params"])
    assert_close(estimate_statistics(apply, A, X, batch_size=len(X)), A, roundings=2**8)


def test_estimate_statistics_of_channels_spans_positions():
    x = RNG.normal(size=(20, 6, 6, 2)).astype(np.float32)
    variables = random_arrays(jax.eval_shape(Convolutional().init, jax.random.key(0), x), 1)
    found = estimate_statistics(Convolutional().apply, variables, x)["batch_stats"]
    own = Convolutional(train=True).apply(variables, x, mutable="batch_stats")[1]["batch_stats"]
    assert_close(found, own, roundings=2**8)


def test_estimate_statistics_averages_batches():
    found = estimate_statistics(apply, A, X, batch_size=150)["batch_stats"]  # three batches of 133
    each = [batch_statistics(A, X[i * 133 : (i + 1) * 133]) for i in range(3)]
    assert_close(found, jax.tree.map(lambda *own: np.mean(own, axis=0), *each), roundings=2**8)


def test_normalise_by_batch_equals_training_mode():
    outputs, found = normalise_by_batch(apply, B, X[:50])
    expected, _ = Net(train=True).apply(B, X[:50], mutable="batch_stats")
    assert_close(outputs, expected, roundings=2**8)
    assert sorted(found) == sorted(STATISTICS)


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("fisher", "refit")]
LEARNED = pytest.param("learned", marks=pytest.mark.slow)


@pytest.mark.parametrize("method", ["average", *SLOW])
def test_merge_of_network_with_itself_permuted_is_itself(method):
    a = estimate_statistics(apply, A, X)
    aligned = mcomb.align(apply, a, SPEC.apply(RANDOM, a), X, spec=SPEC)
    merged = merge(apply, (a, aligned.params), X, Y, method=method, spec=SPEC)
    assert_close(apply(merged.params, X), apply(a, X), roundings=2**12)


@pytest.mark.parametrize("method", ["average", LEARNED, *SLOW])
def test_merge_estimates_statistics_of_result(method):
    seen = X
    if method == "learned":
        method, seen = mcomb.learned(steps=3, batch_size=180, learning_rate=0.3), X[:360]
    merged = merge(apply, (A, B), X, Y, method=method, spec=SPEC).params
    assert_close(merged, estimate_statistics(apply, merged, seen), roundings=2**8)
    own, *theirs = (one["batch_stats"]["norm1"]["var"] for one in (merged, A, B))
    assert np.abs(own - (theirs[0] + theirs[1]) / 2).max() > 0.01


@pytest.mark.slow
def test_learn_shares_improves_with_own_statistics():
    found = mcomb.learn_shares(apply, (A, B), X, Y, spec=SPEC, steps=40, batch_size=60)
    assert found.loss < found.losses[0]
    assert_close(found.loss, mcomb.score(apply, found.params, X[360:], Y[360:]).loss, roundings=64)


def test_evaluate_estimates_statistics_of_combinations():
    shares, keys = jnp.array([0.0, 0.5, 1.0]), jax.random.split(jax.random.key(0), 3)
    found = evaluate(apply, (A, B), X, Y, mcomb.linear, shares, keys, statistics_from=X)
    for i, share in enumerate(shares):
        combination = estimate_statistics(apply, mcomb.combine(A, B, share), X)
        assert_close(found.loss[i], mcomb.score(apply, combination, X, Y).loss, roundings=2**8)
    averaged = mcomb.score(apply, mcomb.combine(A, B, 0.5), X, Y).loss
    assert abs(averaged - found.loss[1]) > 0.01 * averaged


def test_estimate_statistics_of_extrapolated_networks():
    """Their averaged variances are negative."""
    beyond = mcomb.combine(A, B, -3.0)
    assert min(np.min(beyond["batch_stats"][norm]["var"]) for norm in ("norm0", "norm1")) < 0
    found = estimate_statistics(apply, beyond, X, batch_size=len(X))
    assert_close(found["batch_stats"], batch_statistics(beyond, X), roundings=2**10)


@pytest.mark.slow
def test_learn_shares_minibatch_excludes_device_padding(monkeypatch):
    """The held-out last example would be the padding, because the devices do not divide seven rows."""
    outlier, losses = X.copy(), itertools.count()
    outlier[-1] = 1e4
    monkeypatch.setattr(fine_tuning, "score", lambda *args, **options: Metrics({"loss": -float(next(losses))}))
    options = {"per": "layer", "steps": 4, "batch_size": 7}
    plain, other = (mcomb.learn_shares(apply, (A, B), x, Y, spec=SPEC, **options).shares for x in (X, outlier))
    assert_close(plain, other, roundings=64)


def test_sweep_requires_statistics_from_for_batch_norm():
    with pytest.raises(UserError, match=r"Running statistics such as batch_stats/norm0/mean .* as statistics_from"):
        mcomb.sweep(apply, (A, B), X, Y, mcomb.linear, points=2)


@pytest.mark.slow
def test_repair_estimates_statistics_of_combinations():
    given = repaired(apply, (A, B), X, mcomb.linear, spec=SPEC)._asdict() | {"inputs": X, "labels": Y}
    given |= {"points": jnp.zeros(1), "keys": jax.random.split(jax.random.key(0), 1)}
    with pytest.raises(UserError, match="statistics_from"):
        evaluate(**given)
    found = evaluate(**given, statistics_from=X)
    own = mcomb.score(apply, estimate_statistics(apply, A, X), X, Y).loss
    assert_close(found.loss[0], own, roundings=2**10)


def test_evaluate_keeps_statistics_of_one_network():
    keys = jax.random.split(jax.random.key(0), 1)
    found = evaluate(apply, (A,), X, Y, lambda key, parameter, own: own, jnp.ones(1), keys)
    assert_close(found.loss[0], mcomb.score(apply, A, X, Y).loss, roundings=16)


@pytest.mark.slow
def test_partial_merge_estimates_statistics_of_result():
    some, every = (merge(apply, (A, B), X, method=mcomb.partial(budget=budget), spec=SPEC) for budget in (1.5, 2))
    assert_close(every.apply(every.params, X), (apply(A, X) + apply(B, X)) / 2, roundings=2**8)
    units = some.params["apart"]["params.first"]
    merged, apart = slice(5 - len(units)), slice(5 - len(units), 5)
    assert 0 < len(units) < 5
    streams = [own["batch_stats"]["norm0"]["mean"] for own in _streams(SPEC, some.params)]
    assert_equal(streams[0][merged], streams[1][merged])
    # Units of the first layer that are kept apart see the networks' own inputs, so they keep their statistics.
    for stream, own in zip(streams, (A, B), strict=True):
        mean = estimate_statistics(apply, own, X)["batch_stats"]["norm0"]["mean"]
        assert_close(stream[apart], mean[units], roundings=2**8)


def test_statistics_found_in_handwritten_norms():
    def plain(params, x):
        hidden = x @ params["w"]
        first = (hidden - params["m"][None]) / jnp.sqrt(params["v"][None] + 1e-3) * params["g"][None]
        inverse = params["g"] / jnp.sqrt(1e-5 + params["v2"].reshape(-1))
        return (jnp.tanh(first) - params["m2"].reshape(1, -1)) * inverse[None] + params["b"][None]

    shapes = {"w": (5, 4), "m": (4,), "v": (4,), "m2": (1, 4), "v2": (1, 4), "g": (4,), "b": (4,)}
    params = {name: np.abs(RNG.normal(size=shape)).astype(np.float32) + 0.1 for name, shape in shapes.items()}
    x = RNG.normal(size=(30, 5)).astype(np.float32)
    assert statistics_of(plain, params, x) == ["m", "v", "m2", "v2"]
    found = estimate_statistics(plain, params, x)
    hidden = x @ params["w"]
    assert_close(found["m"], hidden.mean(0), roundings=64)
    assert_close(found["v"], hidden.var(0), roundings=64)
    outputs = plain(found, x)
    assert_close(outputs.mean(0), params["b"], roundings=2**10)
    assert_close(outputs.std(0), params["g"], roundings=2**12)


def test_estimate_statistics_of_bfloat16_in_float32():
    def single(params, x):
        return apply(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x)

    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), A)
    found = estimate_statistics(single, half, X, batch_size=20)
    exact = estimate_statistics(apply, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half), X, batch_size=20)
    for name in STATISTICS:
        own, expected = (np.asarray(named_leaves(tree)[name]) for tree in (found, exact))
        assert own.dtype == jnp.bfloat16
        # A float32 result is rounded to bfloat16 once, whatever the number of batches.
        ends = [(expected * scale).astype(jnp.bfloat16) for scale in (1 - 2.0**-13, 1 + 2.0**-13)]
        assert ((own == ends[0]) | (own == ends[1])).all()


def test_estimate_statistics_of_units_on_any_axes():
    def channels_first(params, x):  # one statistic for each channel and row
        mean, variance = (params[name].T[None, :, :, None] for name in ("m", "v"))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5)

    x = RNG.normal(size=(20, 3, 4, 5)).astype(np.float32)
    params = {"m": np.ones((4, 3), np.float32), "v": np.ones((4, 3), np.float32)}
    found = estimate_statistics(channels_first, params, x)
    assert_close(found["m"], x.mean((0, 3)).T, roundings=64)
    assert_close(found["v"], x.var((0, 3)).T, roundings=64)


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_estimate_statistics_of_equinox(mode):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)[0]

    def make(key):
        return Model(eqx.nn.Linear(5, 4, key=key), eqx.nn.BatchNorm(4, "batch", mode=mode))

    model = eqx.nn.inference_mode(eqx.nn.make_with_state(make)(jax.random.key(0)))
    params, rest = eqx.partition(model, eqx.is_array)
    params = map_named(lambda name, leaf: jnp.array(9, leaf.dtype) if name == "1/0" else leaf, params)  # the steps
    x = RNG.normal(size=(30, 5)).astype(np.float32)

    def fn(params, x):
        model, state = eqx.combine(params, rest)
        return jax.vmap(model, axis_name="batch", in_axes=(0, None))(x, state)

    outputs = fn(estimate_statistics(fn, params, x), x)
    assert_close(outputs.mean(0), np.zeros(4), roundings=64, scale=1.0)
    assert_close(outputs.std(0), np.ones(4), roundings=2**12)


@pytest.mark.parametrize("name", ["BatchNorm ResNet", "DenseNet", "inverted residual", "NNX"])
def test_statistics_found_in_other_architectures(name):
    case = CASES[name]()
    names = [own for own in named_leaves(case.params) if re.search("/(mean|var)(/|$)", own)]
    assert names
    assert sorted(statistics_of(case.fn, case.params, case.input)) == sorted(names)


@pytest.mark.parametrize("name", ["transformer encoder", "grouped convolution", "VGG", "LSTM", "Equinox"])
def test_estimate_statistics_without_any_changes_nothing(name):
    case = CASES[name]()
    params = random_arrays(case.params)
    assert estimate_statistics(case.fn, params, random_arrays(case.input)) is params


def test_statistics_exclude_biases():
    def subtracted(params, x):
        scaled = (x - params["bias"][None]) * params["scale"][None]
        spread = jnp.sqrt(jnp.square(scaled).mean(1, keepdims=True) + 1e-5)
        return (x - params["other"][None]) * jnp.sqrt(params["positive"][None] + 1e-5) + scaled / spread

    params = {name: np.ones(5, np.float32) for name in ("bias", "scale", "other", "positive")}
    assert statistics_of(subtracted, params, RNG.normal(size=(7, 5)).astype(np.float32)) == []


def test_estimate_statistics_names_unsupported_norms():
    def norm(m, v, x):
        return (x - m[None]) * jax.lax.rsqrt(v[None] + 1e-5)

    x = RNG.normal(size=(8, 3)).astype(np.float32)
    twice = {"m": np.zeros(3, np.float32), "v": np.ones(3, np.float32)}
    with pytest.raises(UserError, match="statistics m are used twice"):
        estimate_statistics(lambda p, x: norm(p["m"], p["v"], jnp.tanh(norm(p["m"], p["v"], x))), twice, x)
    stack = {"m": np.zeros((2, 3), np.float32), "v": np.ones((2, 3), np.float32)}

    def scanned(params, x):
        return jax.lax.scan(lambda x, own: (norm(own["m"], own["v"], x), None), x, params)[0]

    with pytest.raises(UserError, match="inside a scan"):
        estimate_statistics(scanned, stack, x)


def test_statistics_found_by_name_without_function():
    assert names_of_statistics(A) == STATISTICS
    theirs = {"bn1.running_mean": X, "layer": {"running_var": X, "mean": X}, "bn/~/mean_ema": {"average": X}}
    assert names_of_statistics(theirs) == ["bn/~/mean_ema/average", "bn1.running_mean", "layer/running_var"]
    assert names_of_statistics(map_named(lambda name, leaf: leaf, A["params"])) == []


def test_statistics_survive_checkpoint(tmp_path):
    mcomb.write_checkpoint(tmp_path / "a.msgpack", A | {"step": np.int32(3)})
    assert_equal(mcomb.read_checkpoint(tmp_path / "a.msgpack"), A)
