"""REPAIR: units of combinations get the networks' mean statistics, and the networks themselves do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numerics import assert_close, assert_equal
from zoo import CASES, Shape, random_arrays

from mcomb import bernoulli, combine, derive_spec, linear, uniform
from mcomb.combination import blend, mix, stitch
from mcomb.errors import UserError
from mcomb.evaluation.evaluate import evaluate
from mcomb.evaluation.repair import layer_finder, repaired, shares

KEYS = jax.random.split(jax.random.key(0), 5)
SHARES = jnp.linspace(0, 0.5, 5)
ROUNDINGS = 128  # of the largest pre-activation: a correction adds a dozen, and more in deep networks
SHAPES = {"w1": (5, 6), "b1": (6,), "w2": (6, 7), "w3": (7, 4)}


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"].reshape(1, -1))
    return jax.nn.relu(hidden @ params["w2"]) @ params["w3"]


def problem(count=2, n=40):
    """Return the spec of an MLP, random networks, inputs and labels."""
    shapes = {name: Shape(shape, jnp.float32) for name, shape in SHAPES.items()}
    networks = tuple(random_arrays(shapes, i) for i in range(count))
    x = random_arrays(Shape((n, 5), jnp.float32), 7)
    return derive_spec(mlp, networks[0], x), networks, x, np.arange(n, dtype=np.int32) % 4


def evaluate_repaired(repair, inputs, labels, points=SHARES, keys=KEYS, **options):
    return evaluate(repair.apply, repair.networks, inputs, labels, repair.draw, points, keys, **options)


def draw_one(repair, parameter, key=KEYS[0]):
    """Draw the repaired network that `evaluate` would draw."""
    return jax.jit(repair.draw)(key, jnp.asarray(parameter, jnp.float32), *repair.networks)


def measure(spec, apply, repair, x):
    """Return the layers, and a function from a repaired network to its pre-activations in each layer."""
    intermediates, layers = layer_finder(spec, apply)(repair.networks[0].params, x)

    @jax.jit
    def run(network):
        edits = {layer.output: one.apply for layer, one in zip(layers, network.corrections, strict=True)}
        values = intermediates.tap({layer.output for layer in layers}, edits)(network.params, x)[1]
        return [values[layer.output] for layer in layers]

    return layers, lambda network: [np.asarray(values, np.float64) for values in run(network)]


def check_unchanged(layers, values, network):
    """Check that corrections change pre-activations only by rounding, relative to each unit's largest one."""
    for layer, value, (scale, shift) in zip(layers, values, network.corrections, strict=True):
        corrected = value * np.asarray(scale, np.float64) + np.asarray(shift, np.float64)
        largest = np.abs(value).max(layer.sample_axes, keepdims=True)
        assert_close(corrected / largest, value / largest, roundings=ROUNDINGS, scale=1)


def check_line(spec, apply, a, b, x):
    """Check that the ends do not change and that units of the midpoint have mean statistics; return the layers."""
    repair = repaired(apply, (a, b), x, mix(linear), spec=spec)
    layers, pre_activations = measure(spec, apply, repair, x)
    ends = [pre_activations(network) for network in repair.networks[:2]]
    for share, values in enumerate(ends):
        check_unchanged(layers, values, draw_one(repair, share))
    middle = pre_activations(draw_one(repair, 0.5))
    for layer, value, *of_ends in zip(layers, middle, *ends, strict=True):
        largest = np.max([np.abs(end).max(layer.sample_axes) for end in of_ends], axis=0)
        for statistic in (np.mean, np.std):
            goal = np.mean([statistic(end, layer.sample_axes) for end in of_ends], axis=0)
            assert_close(statistic(value, layer.sample_axes) / largest, goal / largest, roundings=ROUNDINGS, scale=1)
    return layers


def test_repair_midpoint_units_have_mean_statistics(network):
    _, model, a, images = network
    b = jax.tree.map(lambda leaf: np.random.default_rng(2).permutation(leaf.ravel()).reshape(leaf.shape), a)
    apply = lambda params, x: model.apply({"params": params}, x)  # noqa: E731
    layers = check_line(derive_spec(apply, a, images), apply, a, b, images)
    # The stem, 18 convolutions and two shortcuts; eight convolutions; three hidden layers; six in each of three blocks,
    # and the patches: never the logits.
    counts = {"ResNet20": 21, "Tiny10": 8, "MLP": 3, "ViT": 19, "Decoder": 18}
    assert len(layers) == counts[type(model).__name__]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("grouped convolution", 3), ("untied over positions", 1)),
        pytest.param("mixer", 7, marks=pytest.mark.slow),
        pytest.param("transformer encoder", 12, marks=pytest.mark.slow),
    ],
)
def test_repair_of_other_architectures(name, count):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        a, b, x = random_arrays(case.params, 1), random_arrays(case.params, 2), random_arrays(case.input)
        assert len(check_line(derive_spec(case.fn, a, x), case.fn, a, b, x)) == count


def test_repair_skips_layers_inside_scans():
    case = CASES["scanned transformer"]()
    a, b, x = random_arrays(case.params, 1), random_arrays(case.params, 2), random_arrays(case.input)
    assert len(check_line(derive_spec(case.fn, a, x), case.fn, a, b, x)) == 1  # the stem


def test_repair_equals_computation_by_hand():
    spec, (a, b), x, _ = problem()
    repair = repaired(mlp, (a, b), x, mix(uniform), spec=spec)
    network = draw_one(repair, 0.4)

    def repair_layer(values, weights, values_a, values_b):
        step = b[weights] - a[weights]
        share = (step * (p[weights] - a[weights])).sum() / (step**2).sum()
        mean, std = ((1 - share) * f(values_a, 0) + share * f(values_b, 0) for f in (np.mean, np.std))
        return (values - values.mean(0)) / values.std(0) * std + mean

    def first(params, x=x):
        return x @ params["w1"] + params["b1"]

    def second(params, hidden):
        return np.maximum(hidden, 0) @ params["w2"]

    p = jax.tree.map(np.asarray, network.params)
    hidden = repair_layer(first(p), "w1", first(a), first(b))
    hidden = repair_layer(second(p, hidden), "w2", second(a, first(a)), second(b, first(b)))
    assert_close(jax.jit(repair.apply)(network, x), np.maximum(hidden, 0) @ p["w3"], roundings=64)


def test_repair_keeps_ends_for_any_batches():
    spec, networks, x, _ = problem()
    repair = repaired(mlp, networks, x, mix(linear), spec=spec, batch_size=4)
    layers, pre_activations = measure(spec, mlp, repair, x)
    for share in (0, 1):
        check_unchanged(layers, pre_activations(repair.networks[share]), draw_one(repair, share))


def test_repair_keeps_ends_that_the_draw_permutes():
    spec, networks, x, _ = problem()

    def ends(parameter, a, b):
        return a, spec.apply(parameter[1], b)

    def draw(key, parameter, a, b):
        return combine(*ends(parameter, a, b), parameter[0])

    repair = repaired(mlp, networks, x, draw, spec=spec, ends=ends, batch_size=10)
    layers, pre_activations = measure(spec, mlp, repair, x)
    perms = spec.random(KEYS[1])
    for share in (0.0, 1.0):
        network = jax.jit(repair.draw)(KEYS[0], (share, perms), *repair.networks)
        end = repair.networks[0]._replace(params=ends((share, perms), *networks)[int(share)])
        check_unchanged(layers, pre_activations(end), network)


def test_repair_averages_equal_batches():
    spec, networks, x, _ = problem(n=41)
    one, two = (repaired(mlp, networks, x, mix(linear), spec=spec, batch_size=size) for size in (41, 40))
    assert two.networks[-1].batches.shape == (2, 20, 5)
    for of_one, of_two in zip(draw_one(one, 0.5).corrections, draw_one(two, 0.5).corrections, strict=True):
        np.testing.assert_allclose(of_one.scale, of_two.scale, rtol=0.2)  # batches differ by about n ** -½
        assert (of_one.scale != of_two.scale).any()


@pytest.mark.slow
def test_repair_vmapped_equals_one_by_one():
    spec, networks, x, y = problem()
    repair = repaired(mlp, networks, x, mix(uniform), spec=spec, batch_size=20)
    vmapped = evaluate_repaired(repair, x, y, batch_size=15, vmap_size=2)
    alone = evaluate_repaired(repair, x, y, batch_size=40)
    assert_close(vmapped.loss, alone.loss, roundings=64)
    logits = jax.jit(repair.apply)(draw_one(repair, SHARES[3], KEYS[3]), x)
    assert_close(-jax.nn.log_softmax(logits)[np.arange(40), y].mean(), alone.loss[3], roundings=64)


@pytest.mark.slow
def test_repair_one_device_equals_all(request):
    spec, networks, x, y = problem()
    expected = evaluate_repaired(repaired(mlp, networks, x, mix(uniform), spec=spec), x, y)
    request.getfixturevalue("one_device")
    one = evaluate_repaired(repaired(mlp, networks, x, mix(uniform), spec=spec), x, y)
    assert_close(one.loss, expected.loss, roundings=64)


@pytest.mark.slow
def test_repair_of_function_with_shard_map_inside():
    spec, networks, x, y = problem()

    def ending_in_shards(params, x):
        mesh = Mesh(np.array(jax.devices()), "device")
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"].reshape(1, -1))
        last = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=P(), out_specs=P())
        return last(jax.nn.relu(hidden @ params["w2"]), params["w3"])

    inside, expected = (
        evaluate_repaired(repaired(fn, networks, x, mix(uniform), spec=spec), x, y) for fn in (ending_in_shards, mlp)
    )
    assert_close(inside.loss, expected.loss, roundings=64)


def test_repair_compiles_once():
    spec, networks, x, _ = problem()
    again = derive_spec(mlp, networks[0], x)
    first, second = (
        repaired(mlp, networks, x, mix(linear), spec=spec),
        repaired(mlp, networks, x, mix(linear), spec=again),
    )
    assert first.apply is second.apply
    assert first.draw is second.draw


def test_repair_does_not_change_arguments():
    spec, networks, x, y = problem()
    before = jax.tree.map(np.copy, (networks, x))
    evaluate_repaired(repaired(mlp, networks, x, mix(uniform), spec=spec), x, y)
    assert_equal((networks, x), before)


def mlp_shares(params, networks):
    spec, _, x, _ = problem()
    return np.asarray(shares(layer_finder(spec, mlp), params, networks, x))


def test_repair_finds_shares_from_weights():
    _, (a, b, c), _, _ = problem(3)
    assert_close(mlp_shares(combine(a, b, 0.3), (a, b)), np.array([[0.7, 0.3]] * 2), roundings=16)
    stitched = stitch(lambda name: int(name[1]))(KEYS[0], np.ones(()), a, b)
    assert_close(mlp_shares(stitched, (a, b)), np.eye(2)[::-1], roundings=16)
    for three in ([0.2, 0.5, 0.3], [1.5, -1, 0.5], [0, 0, 1]):
        blended = blend(KEYS[0], np.array(three[1:], np.float32), a, b, c)
        assert_close(mlp_shares(blended, (a, b, c)), np.array([three] * 2), roundings=64)


def test_repair_share_of_random_mixture_is_near_mean():
    a, b = (
        {"w": random_arrays(Shape((300, 100), jnp.float32), i), "v": random_arrays(Shape((100, 2), jnp.float32))}
        for i in (1, 2)
    )
    apply = lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"]  # noqa: E731
    x = np.ones((2, 300), np.float32)
    spec = derive_spec(apply, a, x)
    squares = (b["w"] - a["w"]) ** 2  # the weight of each weight's share
    for distribution, parameter, mean, std in ((uniform, 0.5, 0.5, 12**-0.5), (bernoulli, 0.2, 0.2, 0.4)):
        mixed = mix(distribution)(KEYS[0], np.array(parameter), a, b)
        tolerance = 5 * std * np.linalg.norm(squares) / squares.sum()
        np.testing.assert_allclose(
            shares(layer_finder(spec, apply), mixed, (a, b), x), [[1 - mean, mean]], rtol=0, atol=tolerance
        )


def test_repair_finds_shares_of_equal_networks():
    _, (a, b), _, _ = problem()
    assert mlp_shares(a, (a, a)).tolist() == [[1, 0]] * 2
    of_three = mlp_shares(combine(a, b, 0.6), (a, b, b))
    assert_close(of_three.sum(1), np.ones(2), roundings=16)
    assert_close(of_three[:, 0], np.full(2, 0.4), roundings=64)
    assert mlp_shares(a, (a,)).tolist() == [[1]] * 2


def test_repair_only_shifts_constant_units():
    spec, (a, b), x, y = problem()
    # A's first unit is constant, and so is the midpoint's second unit.
    a["w1"][:, 0], a["w1"][:, 1], b["w1"][:, 1] = 0, 1, -1
    repair = repaired(mlp, (a, b), x, mix(linear), spec=spec)
    network = draw_one(repair, 0.5)
    scale, shift = (np.ravel(values) for values in network.corrections[0])
    assert scale[1] == 1
    goal = np.mean([x.sum(1).mean() + a["b1"][1], -x.sum(1).mean() + b["b1"][1]])
    assert_close(shift[1] + network.params["b1"][1], goal, roundings=16, scale=np.abs(x).sum(1).max())
    metrics = evaluate_repaired(repair, x, y, jnp.linspace(-1, 2, 5), KEYS)
    assert np.isfinite(metrics.loss).all()


def test_repair_keeps_network_without_hidden_units():
    _, networks, x, _ = problem()
    apply = lambda params, x: x @ params["w1"]  # noqa: E731
    repair = repaired(apply, networks, x, mix(linear), spec=derive_spec(apply, networks[0], x))
    assert_close(jax.jit(repair.apply)(draw_one(repair, 0.5), x), x @ combine(*networks, 0.5)["w1"], roundings=16)


def test_repair_of_mixed_dtypes_and_tree_inputs():
    def fn(params, x):
        return mlp(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x["image"])

    spec, (a, b), x, y = problem()
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), b)
    same = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), halves)
    found = []
    for other in (halves, same):
        repair = repaired(fn, (a, other), {"image": x}, mix(linear), spec=spec)
        parameters = np.linspace(0, 1, 2, dtype=np.float32)
        found.append(evaluate_repaired(repair, {"image": x}, y, parameters, KEYS[:2]).loss)
    assert_close(found[0], found[1], roundings=ROUNDINGS)


def test_repair_rejects_layers_in_another_order():
    def fn(params, x):
        first = lambda: jnp.tanh(x @ params["w1"].astype(jnp.float32))  # noqa: E731
        second = lambda: jnp.cos(x @ params["w2"].astype(jnp.float32))  # noqa: E731
        if params["w1"].dtype == jnp.float32:
            return first() @ params["w3"] + second() @ params["w4"]
        after = second() @ params["w4"]
        return first() @ params["w3"] + after

    rng = np.random.default_rng(0)
    shapes = {"w1": (3, 5), "w2": (3, 5), "w3": (5, 2), "w4": (5, 2)}
    a, b = ({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(2))
    x = rng.normal(size=(8, 3)).astype(np.float32)
    spec, halves = derive_spec(fn, a, x), b | {"w1": b["w1"].astype(jnp.bfloat16)}
    with pytest.raises(UserError, match="use one dtype for all networks"):
        repaired(fn, (a, halves), x, mix(linear), spec=spec)
