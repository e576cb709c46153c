"""Losses and metrics of any task: language models with padding, regression, trees of outputs and labels."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb import (
    align,
    combine,
    cross_entropy,
    derive_spec,
    linear,
    score,
    squared_error,
    straight_through,
    tempered_cross_entropy,
)
from mcomb.errors import Diverged, UserError
from mcomb.evaluation.evaluate import evaluate
from mcomb.evaluation.objectives import agreement, predict
from mcomb.evaluation.repair import repaired
from mcomb.matching.straight_through import _midpoint_loss

VOCABULARY, LENGTH, PAD = 7, 5, 0
SHARES, KEYS = np.array([0.0, 0.3, 1.0], np.float32), jax.random.split(jax.random.key(0), 3)
ROUNDINGS = 32  # of the largest loss, which is a mean over some dozen tokens


def language_model(params, inputs):
    """Return the logits of each next token; NaN for a row of padding alone, as at the end of a last batch."""
    tokens = inputs["tokens"]
    is_real = (tokens != PAD)[..., None]
    x = params["embed"][tokens]
    x = x + jnp.cumsum(jnp.where(is_real, x, 0), 1) / is_real.sum(1, keepdims=True)
    return jnp.tanh(x @ params["up"]) @ params["down"]


def logits_in_float64(params, tokens):
    embed, up, down = (np.asarray(params[name], np.float64) for name in ("embed", "up", "down"))
    is_real = (tokens != PAD)[..., None]
    x = embed[tokens] + np.cumsum(np.where(is_real, embed[tokens], 0), 1) / is_real.sum(1, keepdims=True)
    return np.tanh(x @ up) @ down


@cache
def sequences(n=13):
    """Return two networks, and sequences of different lengths with their next tokens; padding is negative."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, 6), "up": (6, 8), "down": (8, VOCABULARY)}
    networks = tuple({name: rng.standard_normal(s, np.float32) for name, s in shapes.items()} for _ in range(2))
    tokens = rng.integers(1, VOCABULARY, (n, LENGTH + 1)).astype(np.int32)
    tokens[np.arange(LENGTH + 1) >= rng.integers(2, LENGTH + 2, (n, 1))] = PAD
    return networks, {"tokens": tokens[:, :-1]}, np.where(tokens[:, 1:] == PAD, -1, tokens[:, 1:])


def in_float64(params, inputs, labels):
    """Return the mean loss and the accuracy over all positions that are not padding, by NumPy."""
    logits, (rows, positions) = logits_in_float64(params, inputs["tokens"]), np.nonzero(labels >= 0)
    assert 0 < len(rows) < labels.size
    logits, labels = logits[rows, positions], labels[rows, positions]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), labels]
    return losses.mean(), np.mean(logits.argmax(1) == labels)


def evaluate_sequences(n=13, **options):
    networks, inputs, labels = sequences(n)
    return evaluate(language_model, networks, inputs, labels, linear, SHARES, KEYS, **options)


@pytest.mark.parametrize(
    ("n", "options"), [(LENGTH, {}), (13, {"batch_size": 4}), (13, {"batch_size": 4, "vmap_size": 3})]
)
def test_cross_entropy_of_tokens_skips_padding(n, options):
    """There may be as many sequences as positions, and the last batch may not be full."""
    networks, inputs, labels = sequences(n)
    found = evaluate_sequences(n, **options)
    combinations = [combine(*networks, share) for share in SHARES]
    losses, accuracies = zip(*(in_float64(params, inputs, labels) for params in combinations), strict=True)
    assert_close(np.exp(found.loss), np.exp(losses), roundings=ROUNDINGS * max(losses))
    assert_close(found.accuracy, np.array(accuracies), roundings=1)
    own = score(language_model, networks[0], inputs, labels, batch_size=options.get("batch_size", 200))
    assert_close((own.loss, own.accuracy), (losses[0], accuracies[0]), roundings=ROUNDINGS)


def test_cross_entropy_of_tokens_one_device_equals_all(request):
    on_all = evaluate_sequences(batch_size=4)
    request.getfixturevalue("one_device")
    assert_close(dict(evaluate_sequences(batch_size=4).values), dict(on_all.values), roundings=ROUNDINGS)


def test_cross_entropy_of_tokens_ignores_more_padding():
    networks, inputs, labels = sequences()
    longer = {"tokens": np.pad(inputs["tokens"], ((0, 0), (0, 3)), constant_values=PAD)}
    more = np.pad(labels, ((0, 0), (0, 3)), constant_values=-100)
    found = score(language_model, networks[0], longer, more)
    assert_close(found.loss, in_float64(networks[0], inputs, labels)[0], roundings=ROUNDINGS)


@pytest.mark.slow
def test_align_and_repair_of_language_model():
    """Its inputs are a dict of integers."""
    networks, inputs, labels = sequences(40)
    a, b = networks
    spec = derive_spec(language_model, a, inputs)
    assert sorted(spec.sizes.values()) == [6, 8]
    moved = spec.apply(spec.random(jax.random.key(1)), a)
    assert_equal(align(language_model, a, moved, inputs, matcher="activations").params, a)
    matcher = straight_through(steps=2, learning_rate=0.1, batch_size=7)
    found = align(language_model, a, b, inputs, labels, matcher=matcher).matching
    middle = combine(a, align(language_model, a, b, inputs).params, 0.5)
    held_out = {"tokens": inputs["tokens"][36:]}, labels[36:]
    assert_close(found.losses[0], in_float64(middle, *held_out)[0], roundings=ROUNDINGS)
    assert len(found.losses) == 3
    step = _midpoint_loss(language_model, cross_entropy)
    step_loss, _ = step(a, jnp.array([3, -1, 1, 38]), (a, b, *jax.device_put((inputs, labels))), jax.random.key(0))
    of_rows = {"tokens": inputs["tokens"][[3, 1, 38]]}, labels[[3, 1, 38]]
    assert_close(step_loss, in_float64(combine(a, b, 0.5), *of_rows)[0], roundings=ROUNDINGS)
    fn, draw, with_statistics = repaired(language_model, networks, inputs, linear, spec=spec)
    ends = evaluate(fn, with_statistics, inputs, labels, draw, SHARES, KEYS).loss[[0, 2]]
    assert_close(ends, np.array([in_float64(one, inputs, labels)[0] for one in networks]), roundings=8 * ROUNDINGS)


def regressor(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return {"mean": hidden @ params["down"], "size": (hidden**2).sum(1)}


def weighted_error(output, label):
    total, count = squared_error(output["mean"], label["target"])
    return label["weight"] * total, label["weight"] * count


def test_score_of_regression_with_trees():
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((4, 6), np.float32), "down": rng.standard_normal((6, 2), np.float32)}
    x, target = rng.standard_normal((11, 4), np.float32), rng.standard_normal((11, 2), np.float32)
    labels = {"target": target, "weight": rng.uniform(0.1, 2, 11).astype(np.float32)}
    options = {"loss": weighted_error, "batch_size": 3}
    options["metrics"] = {"size": lambda output, label: (output["size"], 1), "none": lambda output, label: (0.0, 0)}
    found = score(regressor, params, x, labels, **options)
    hidden = np.tanh(np.float64(x) @ params["up"])
    squares = np.square(hidden @ params["down"] - target).mean(1)
    expected = np.average(squares, weights=labels["weight"]), (hidden**2).sum(1).mean()
    assert_close((found.loss, found.values["size"]), expected, roundings=ROUNDINGS)
    assert np.isnan(found.values["none"])
    swept = evaluate(regressor, (params, params), x, labels, linear, SHARES, KEYS, **options)
    assert_close(
        (swept.loss, swept.values["size"]), tuple(np.full(3, value) for value in expected), roundings=ROUNDINGS
    )
    with pytest.raises(AttributeError, match="There is no metric 'accuracy', only loss, size, none"):
        assert swept.accuracy


def test_score_rejects_nan_that_evaluate_returns():
    networks, inputs, labels = sequences()
    broken = networks[0] | {"down": np.full_like(networks[0]["down"], np.nan)}
    found = evaluate(language_model, (networks[0], broken), inputs, labels, linear, SHARES[:1], KEYS[:1])
    assert np.isnan(found.loss).all()
    with pytest.raises(Diverged, match="The loss of example 0 is nan"):
        score(language_model, broken, inputs, labels)


def classifier(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def classes(n):
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((4, 6), np.float32), "down": rng.standard_normal((6, 3), np.float32)}
    return params, rng.standard_normal((n, 4), np.float32), rng.integers(0, 3, n).astype(np.int32)


def test_score_equals_direct_computation_bit_for_bit():
    n = len(jax.devices())
    params, x, y = classes(10 * n)
    direct = jax.jit(lambda params, x, y: jax.vmap(cross_entropy)(classifier(params, x), y)[0])
    losses = np.concatenate([direct(params, *part) for part in zip(np.split(x, n), np.split(y, n), strict=True)])
    found = score(classifier, params, x, y)
    assert found.loss == losses.mean(dtype=np.float64)
    assert found.accuracy == np.mean(predict(classifier(params, x)) == y)
    assert list(found.values) == ["loss", "accuracy"]
    named = score(classifier, params, x, y, metrics={"own": cross_entropy})
    assert named.values == {"loss": found.loss, "own": found.loss}
    swept = evaluate(classifier, (params, params), x, y, linear, SHARES, KEYS)
    assert_close(swept.loss, np.full(3, found.loss), roundings=ROUNDINGS)
    assert_equal(swept.accuracy, np.full(3, found.accuracy))
    assert list(swept.values) == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"labels": np.zeros((13, 4), int)}, r"returns \(5, 7\) for an example whose labels .* shape \(4,\)"),
        ({"labels": np.zeros((13, 5))}, "whose labels .* float"),
        ({"labels": np.full((13, 5), 7)}, "Labels range from 7 to 7 for 7 logits"),
        ({"labels": np.full((13, 5), -1)}, "The loss counts no example"),
        ({"labels": np.zeros((12, 5), int)}, "tokens 13, the labels 12"),
        ({"labels": {"tokens": np.zeros((13, 5), int)}}, "are a dict|raised TypeCheckError on these"),
        ({"labels": [1] * 13}, r"returns \(5, 7\) for an example whose labels have dtype int32 and shape \(\)"),
        ({"labels": [[1] * i for i in range(1, 14)]}, "the labels 0/0 none"),
        ({"loss": squared_error}, r"returns \(5, 7\) for an example whose label is \(5,\)"),
        ({"loss": lambda output, label: output.sum()}, "The loss returns float32 .* two numbers, a sum and a count"),
        ({"loss": lambda output, label: (output.sum(-1), 1)}, r"float32 of shape \(5,\), int32 of shape \(\) for an"),
        ({"loss": lambda output, label: (output.sum() * 1j, 1)}, "The loss returns complex64"),
        ({"loss": lambda output, label: output @ label}, "<lambda> raised TypeError on these arguments"),
        ({"metrics": {"size": lambda output, label: None}}, "The metric 'size' returns nothing"),
        ({"metrics": {"loss": squared_error}}, "A metric cannot be called 'loss'"),
        ({"metrics": {"agreement": agreement}}, "agreement raised .* on these"),
        ({"apply": lambda params, x: language_model(params, x).reshape(-1, 7)}, r"\(65, 7\) for 13 examples"),
        ({"apply": lambda params, x: None}, "no array for 13 examples"),
    ],
)
def test_score_and_evaluate_name_misfits(options, problem):
    networks, inputs, labels = sequences()
    options = {"apply": language_model, "labels": labels} | options
    apply, labels = options.pop("apply"), options.pop("labels")
    with pytest.raises(UserError, match=problem):
        score(apply, networks[0], inputs, labels, **options)
    with pytest.raises(UserError, match=problem):
        evaluate(apply, networks, inputs, labels, linear, SHARES, KEYS, **options)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_tempered_cross_entropy_rejects_temperature(wrong):
    with pytest.raises(UserError, match=f"temperature 1 is {wrong}: pass a finite number above 0"):
        tempered_cross_entropy((1.0, wrong))


def test_tempered_cross_entropy_of_tokens():
    (params, _), inputs, labels = sequences()
    found = score(language_model, params, inputs, labels, metrics={"tempered": tempered_cross_entropy((1.0, 3.0))})
    cooler = params | {"down": params["down"] / np.float32(3)}
    expected = [in_float64(one, inputs, labels)[0] for one in (params, cooler)]
    assert_close(found.tempered, np.array(expected), roundings=ROUNDINGS)
