"""Losses and metrics of any task: language models with padding, regression, trees of outputs and labels."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb import accuracy, combine, cross_entropy, derive_spec, linear, score, squared_error
from mcomb.combination import mix
from mcomb.errors import Diverged, UserError
from mcomb.evaluation.evaluate import evaluate
from mcomb.evaluation.objectives import classify
from mcomb.evaluation.repair import repaired
from mcomb.matching import straight_through
from mcomb.matching.activations import match_activations
from mcomb.matching.straight_through import match_straight_through

VOCABULARY, LENGTH, PAD = 7, 5, 0
SHARES, KEYS = np.array([0.0, 0.3, 1.0], np.float32), jax.random.split(jax.random.key(0), 3)
ROUNDINGS = 32  # of the largest loss, which is a mean over some dozen tokens


def language_model(params, inputs):
    """Logits of each next token. Of a row that is padding alone, as at the end of a last batch, they are NaN."""
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
    """Two networks, and sequences of different lengths with the next tokens, those of padding below zero."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, 6), "up": (6, 8), "down": (8, VOCABULARY)}
    networks = tuple({name: rng.standard_normal(s, np.float32) for name, s in shapes.items()} for _ in range(2))
    tokens = rng.integers(1, VOCABULARY, (n, LENGTH + 1)).astype(np.int32)
    tokens[np.arange(LENGTH + 1) >= rng.integers(2, LENGTH + 2, (n, 1))] = PAD
    return networks, {"tokens": tokens[:, :-1]}, np.where(tokens[:, 1:] == PAD, -1, tokens[:, 1:])


def in_float64(params, inputs, labels):
    """The mean loss and the share of tokens with the largest logit, over all positions that are not padding."""
    logits, (rows, positions) = logits_in_float64(params, inputs["tokens"]), np.nonzero(labels >= 0)
    assert 0 < len(rows) < labels.size
    logits, labels = logits[rows, positions], labels[rows, positions]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), labels]
    return losses.mean(), np.mean(logits.argmax(1) == labels)


def evaluate_sequences(n=13, **options):
    networks, inputs, labels = sequences(n)
    options = {"loss": token_cross_entropy, "metrics": {"accuracy": accuracy}} | options
    return evaluate(language_model, networks, inputs, labels, mix(linear), SHARES, KEYS, **options)


@pytest.mark.parametrize(
    ("n", "options"), [(LENGTH, {}), (13, {"batch_size": 4}), (13, {"batch_size": 4, "vmap_size": 3})]
)
def test_the_loss_of_tokens_leaves_padding_out(n, options):
    """Also where there are as many sequences as positions, and where the last batch is not full."""
    networks, inputs, labels = sequences(n)
    found = evaluate_sequences(n, **options)
    combinations = [combine(*networks, 1 - share) for share in SHARES]
    losses, accuracies = zip(*(in_float64(params, inputs, labels) for params in combinations), strict=True)
    assert_close(np.exp(found.loss), np.exp(losses), roundings=ROUNDINGS * max(losses))
    assert_close(found.accuracy, np.array(accuracies), roundings=1)
    own = score(language_model, networks[0], inputs, labels, loss=token_cross_entropy, metrics={"accuracy": accuracy},
                batch_size=options.get("batch_size", 200))  # fmt: skip
    assert_close((own.loss, own.accuracy), (losses[0], accuracies[0]), roundings=ROUNDINGS)


def test_one_device_measures_what_all_do(request):
    on_all = evaluate_sequences(batch_size=4)
    request.getfixturevalue("one_device")
    assert_close(evaluate_sequences(batch_size=4), on_all, roundings=ROUNDINGS)


def test_more_padding_changes_nothing():
    networks, inputs, labels = sequences()
    longer = {"tokens": np.pad(inputs["tokens"], ((0, 0), (0, 3)), constant_values=PAD)}
    more = np.pad(labels, ((0, 0), (0, 3)), constant_values=-100)
    found = score(language_model, networks[0], longer, more, loss=token_cross_entropy)
    assert_close(found.loss, in_float64(networks[0], inputs, labels)[0], roundings=ROUNDINGS)


@pytest.mark.slow
def test_a_token_model_is_matched_and_repaired():
    """Its inputs are a dict of integers, and its loss is not that of a classifier."""
    networks, inputs, labels = sequences(40)
    a, b = networks
    spec = derive_spec(language_model, a, inputs)
    assert sorted(spec.sizes.values()) == [6, 8]
    moved = spec.apply(spec.random(jax.random.key(1)), a)
    back = spec.apply(match_activations(spec, a, moved, language_model, inputs).perms, moved)
    assert_equal(back, a)
    found = match_straight_through(spec, a, b, language_model, inputs, labels, loss=token_cross_entropy, steps=2,
                                   learning_rate=0.1, batch_size=7)  # fmt: skip
    middle = combine(a, spec.apply(match(spec, a, b).perms, b), 0.5)
    held_out = {"tokens": inputs["tokens"][36:]}, labels[36:]
    assert_close(found.losses[0], in_float64(middle, *held_out)[0], roundings=ROUNDINGS)
    assert len(found.losses) == 3
    step = straight_through._midpoint_loss(language_model, token_cross_entropy)
    step_loss, _ = step(a, jnp.array([3, -1, 1, 38]), (a, b, *jax.device_put((inputs, labels))), jax.random.key(0))
    of_rows = {"tokens": inputs["tokens"][[3, 1, 38]]}, labels[[3, 1, 38]]
    assert_close(step_loss, in_float64(combine(a, b, 0.5), *of_rows)[0], roundings=ROUNDINGS)
    repair = repaired(language_model, networks, inputs, mix(linear), spec=spec)
    ends = evaluate(*repair, SHARES, KEYS, inputs, labels, loss=token_cross_entropy).loss[[0, 2]]
    assert_close(ends, np.array([in_float64(one, inputs, labels)[0] for one in networks]), roundings=8 * ROUNDINGS)


def regressor(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return {"mean": hidden @ params["down"], "size": (hidden**2).sum(1)}


def weighted_error(output, label):
    total, count = squared_error(output["mean"], label["target"])
    return label["weight"] * total, label["weight"] * count


def test_regression_with_trees_of_outputs_and_labels():
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
    swept = evaluate(regressor, (params, params), x, labels, mix(linear), SHARES, KEYS, **options)
    assert_close(
        (swept.loss, swept.values["size"]), tuple(np.full(3, value) for value in expected), roundings=ROUNDINGS
    )
    with pytest.raises(AttributeError, match="there is no accuracy, only loss, none, size"):
        assert swept.accuracy


def test_a_loss_that_is_not_finite_is_that_of_a_combination_but_no_networks_score():
    """As with a classifier."""
    networks, inputs, labels = sequences()
    broken = networks[0] | {"down": np.full_like(networks[0]["down"], np.nan)}
    found = evaluate(language_model, (networks[0], broken), inputs, labels, mix(linear), SHARES[:1], KEYS[:1], loss=token_cross_entropy)  # fmt: skip
    assert np.isnan(found.loss).all()
    with pytest.raises(Diverged, match="the loss of example 0 is nan"):
        score(language_model, broken, inputs, labels, loss=token_cross_entropy)


def classifier(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def classes(n):
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((4, 6), np.float32), "down": rng.standard_normal((6, 3), np.float32)}
    return params, rng.standard_normal((n, 4), np.float32), rng.integers(0, 3, n).astype(np.int32)


def test_the_default_is_the_direct_computation_bit_for_bit():
    n = len(jax.devices())
    params, x, y = classes(10 * n)
    direct = jax.jit(lambda params, x, y: classify(classifier(params, x), y))
    parts = [direct(params, *part) for part in zip(np.split(x, n), np.split(y, n), strict=True)]
    losses, predicted, correct = (np.concatenate(values) for values in zip(*parts, strict=True))
    found = score(classifier, params, x, y, metrics={"own": cross_entropy})
    assert found.loss == float(losses.mean())
    assert_equal(found.predicted, predicted)
    assert found.accuracy == correct.mean()
    assert_close(found.values["own"], found.loss, roundings=ROUNDINGS)
    swept = evaluate(classifier, (params, params), x, y, mix(linear), SHARES, KEYS, loss=cross_entropy)
    assert_close(swept.loss, np.full(3, found.loss), roundings=ROUNDINGS)
    assert_equal(swept.accuracy, np.full(3, found.accuracy))
    assert swept.values.keys() == {"accuracy", "agreement", "tempered"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": cross_entropy}, r"returns \(5, 7\) for an example, and the loss takes .* mcomb.token_cross_entropy"),
        ({"labels": np.zeros((13, 4), int)}, r"returns \(5, 7\) for an example, whose labels are of .* shape \(4,\)"),
        ({"labels": np.zeros((13, 5))}, "whose labels are of dtype float"),
        ({"labels": np.full((13, 5), 7)}, "labels from 7 to 7 and 7 logits"),
        ({"labels": np.full((13, 5), -1)}, "the loss counts nothing"),
        ({"labels": np.zeros((12, 5), int)}, "tokens 13, the labels 12"),
        ({"labels": {"tokens": np.zeros((13, 5), int)}}, "are a dict|raised TypeCheckError on these"),
        ({"labels": [1] * 13}, r"returns \(5, 7\) for an example, whose labels are of dtype int32 and shape \(\)"),
        ({"labels": [[1] * i for i in range(1, 14)]}, "the labels 0/0 none"),
        ({"loss": squared_error}, r"returns \(5, 7\) for an example, whose label is \(5,\)"),
        ({"loss": lambda output, label: output.sum()}, "the loss returns float32 .* two numbers, a sum and a count"),
        ({"loss": lambda output, label: (output.sum(-1), 1)}, r"float32 of shape \(5,\), int32 of shape \(\) for an"),
        ({"loss": lambda output, label: (output.sum() * 1j, 1)}, "the loss returns complex64"),
        ({"loss": lambda output, label: output @ label}, "<lambda> raised TypeError on these arguments"),
        ({"metrics": {"size": lambda output, label: None}}, "the metric 'size' returns nothing"),
        ({"metrics": {"loss": squared_error}}, "there is a metric 'loss' already"),
        ({"temperatures": (1.0,)}, "temperatures are for classifiers, with the default loss"),
        ({"apply": lambda params, x: language_model(params, x).reshape(-1, 7)}, r"\(65, 7\) for 13 examples"),
        ({"apply": lambda params, x: None}, "no array for 13 examples"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(options, problem):
    networks, inputs, labels = sequences()
    options = {"loss": token_cross_entropy, "apply": language_model, "labels": labels} | options
    apply, labels = options.pop("apply"), options.pop("labels")
    with pytest.raises(UserError, match=problem):
        score(apply, networks[0], inputs, labels, **options)
    with pytest.raises(UserError, match=problem):
        evaluate(apply, networks, inputs, labels, mix(linear), SHARES, KEYS, **options)


def test_references_are_for_classifiers():
    with pytest.raises(UserError, match="references are for classifiers"):
        evaluate_sequences(references=np.zeros((2, 13), int))
