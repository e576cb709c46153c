"""REPAIR: units get the statistics that they should have, networks by themselves stay, and damage is undone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES, Shape, drawn

from experiments import linear as line
from experiments import robustness
from mcomb import bernoulli, cli, combine, evaluate, linear, mix, permutation_spec, repaired, uniform
from mcomb.combination import blend, stitch
from mcomb.devices import footprint
from mcomb.lab.experiment import command, run
from mcomb.repair import layers, shares
from experiments.report_page import settings
from mcomb.symmetry.intermediates import with_intermediates
from mcomb.lab.workspace import Workspace

KEYS = jax.random.split(jax.random.key(0), 5)
SHARES = jnp.linspace(0, 0.5, 5)
SHAPES = {"w1": (5, 6), "b1": (6,), "w2": (6, 7), "w3": (7, 4)}


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"].reshape(1, -1))
    return jax.nn.relu(hidden @ params["w2"]) @ params["w3"]


def problem(count=2, n=40):
    nets = tuple(drawn({name: Shape(shape, jnp.float32) for name, shape in SHAPES.items()}, i) for i in range(count))
    x = drawn(Shape((n, 5), jnp.float32), 7)
    return permutation_spec(mlp, nets[0], x), nets, x, np.arange(n, dtype=np.int32) % 4


def one(repair, parameter, key=KEYS[0]):
    """The repaired network that `evaluate` would draw."""
    return jax.jit(repair.draw)(key, jnp.asarray(parameter, jnp.float32), *repair.networks)


def statistics(apply, found, params, x, corrections=None):
    """The means and standard deviations of each layer's units, corrected or as they are."""
    edits = {layer.output: one.corrected for layer, one in zip(found, corrections or [], strict=bool(corrections))}
    values = jax.jit(with_intermediates(apply, {layer.output for layer in found}, edits))(params, x)[1]
    of = [np.asarray(values[layer.output], np.float64) for layer in found]
    return [(v.mean(layer.samples), v.std(layer.samples)) for v, layer in zip(of, found, strict=True)]


def check_unchanged(net):
    for scale, shift in net.corrections:
        np.testing.assert_allclose(scale, np.ones_like(scale), rtol=1e-4)
        np.testing.assert_allclose(shift, np.zeros_like(shift), atol=1e-4)


def check_line(spec, apply, a, b, x):
    """The layers, of which half way all units have the mean statistics of the networks, which stay as they are."""
    repair = repaired(spec, apply, mix(linear), (a, b), x)
    for share in (0, 1):
        check_unchanged(one(repair, share))
    net = one(repair, 0.5)
    found = layers(spec, apply, a, x)
    of_a, of_b = (statistics(apply, found, params, x) for params in (a, b))
    for mine, *ends in zip(statistics(apply, found, net.params, x, net.corrections), of_a, of_b, strict=True):
        for value, goal in zip(mine, np.mean(ends, axis=0), strict=True):
            np.testing.assert_allclose(value, goal, rtol=2e-3, atol=2e-3 * np.abs(goal).max())
    return found


def two_of(network):
    """The spec and the function of an untrained network, two sets of parameters, and images."""
    _, model, a, images = network
    b = jax.tree.map(lambda leaf: np.random.default_rng(2).permutation(leaf.ravel()).reshape(leaf.shape), a)
    apply = lambda params, x: model.apply({"params": params}, x)  # noqa: E731
    return permutation_spec(apply, a, images), apply, a, b, images


def test_half_way_units_have_the_mean_statistics_of_the_networks(network):
    found = check_line(*two_of(network))
    # The stem, 18 convolutions and two shortcuts; eight convolutions; three hidden layers: never the logits.
    assert len(found) == {"ResNet20": 21, "Tiny10": 8, "MLP": 3}[type(network[1]).__name__]


@pytest.mark.parametrize(
    ("name", "count"),
    [("mixer", 7), ("grouped convolution", 3), ("untied over positions", 1), ("transformer encoder", 12)],
)
def test_other_families_of_models_are_repaired_too(name, count):
    with jax.numpy_rank_promotion("allow"):
        case = CASES[name]()
        a, b = drawn(case.params, 1), drawn(case.params, 2)
        spec = permutation_spec(case.fn, a, drawn(case.input))
        assert len(check_line(spec, case.fn, a, b, drawn(case.input))) == count


def test_layers_inside_scans_stay_as_they_are():
    case = CASES["scanned transformer"]()
    a, x = drawn(case.params, 1), drawn(case.input)
    assert len(check_line(permutation_spec(case.fn, a, x), case.fn, a, drawn(case.params, 2), x)) == 1  # the stem


def test_a_network_is_repaired_as_by_hand():
    spec, (a, b), x, _ = problem()
    repair = repaired(spec, mlp, mix(uniform), (a, b), x)
    net = one(repair, 0.4)

    def repair_layer(value, weights, of_a, of_b):
        step = b[weights] - a[weights]
        share = (step * (p[weights] - a[weights])).sum() / (step**2).sum()
        goal = [(1 - share) * statistic(of_a, 0) + share * statistic(of_b, 0) for statistic in (np.mean, np.std)]
        return (value - value.mean(0)) / value.std(0) * goal[1] + goal[0]

    def first(params, x=x):
        return x @ params["w1"] + params["b1"]

    def second(params, hidden):
        return np.maximum(hidden, 0) @ params["w2"]

    p = jax.tree.map(np.asarray, net.params)
    hidden = repair_layer(first(p), "w1", first(a), first(b))
    hidden = repair_layer(second(p, hidden), "w2", second(a, first(a)), second(b, first(b)))
    expected = np.maximum(hidden, 0) @ p["w3"]
    np.testing.assert_allclose(repair.apply(net, x), expected, rtol=1e-3, atol=1e-4)


def test_networks_by_themselves_stay_as_they_are_whatever_the_batches():
    spec, nets, x, _ = problem()
    repair = repaired(spec, mlp, mix(linear), nets, x, batch_size=4)
    for share in (0, 1):
        check_unchanged(one(repair, share))


def test_networks_that_the_draw_changes_first_stay_as_they_are():
    spec, (a, b), x, _ = problem()
    draw, ends = robustness.lines(spec)
    repair = repaired(spec, mlp, draw, (a, b), x, ends=ends, batch_size=10)
    for share in (0.0, 1.0):
        check_unchanged(jax.jit(repair.draw)(KEYS[0], (share, spec.random(KEYS[1])), *repair.networks))


def test_batches_are_averaged_and_none_is_ragged():
    spec, nets, x, _ = problem(n=41)
    whole, in_two = (repaired(spec, mlp, mix(linear), nets, x, batch_size=size) for size in (41, 40))
    assert in_two.networks[-1].batches.shape == (2, 20, 5)
    for mine, other in zip(one(whole, 0.5).corrections, one(in_two, 0.5).corrections, strict=True):
        np.testing.assert_allclose(mine.scale, other.scale, rtol=0.2)
        assert (mine.scale != other.scale).any()


def test_side_by_side_equals_one_by_one():
    spec, nets, x, y = problem()
    repair = repaired(spec, mlp, mix(uniform), nets, x, batch_size=20)
    together = evaluate(*repair, SHARES, KEYS, x, y, batch_size=15, vmap_size=2)
    alone = evaluate(*repair, SHARES, KEYS, x, y, batch_size=40)
    np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-4)
    by_hand = repair.apply(one(repair, SHARES[3], KEYS[3]), x)
    np.testing.assert_allclose(-jax.nn.log_softmax(by_hand)[np.arange(40), y].mean(), alone.loss[3], rtol=1e-4)


def test_one_device_equals_two(request):
    spec, nets, x, y = problem()
    two = evaluate(*repaired(spec, mlp, mix(uniform), nets, x), SHARES, KEYS, x, y)
    request.getfixturevalue("one_device")
    one = evaluate(*repaired(spec, mlp, mix(uniform), nets, x), SHARES, KEYS, x, y)
    np.testing.assert_allclose(one.loss, two.loss, rtol=1e-5)


def test_nothing_is_compiled_twice():
    spec, nets, x, _ = problem()
    again = permutation_spec(mlp, nets[0], x)
    first, second = repaired(spec, mlp, mix(linear), nets, x), repaired(again, mlp, mix(linear), nets, x)
    assert first.apply is second.apply
    assert first.draw is second.draw
    assert footprint(first.apply, first.networks[0], x) > 0  # which decides how many are compiled side by side


def test_arguments_stay_as_they_are():
    spec, nets, x, y = problem()
    before = jax.tree.map(np.copy, (nets, x))
    evaluate(*repaired(spec, mlp, mix(uniform), nets, x), SHARES, KEYS, x, y)
    jax.tree.map(np.testing.assert_array_equal, (nets, x), before)


def shares_of(params, nets):
    spec, _, x, _ = problem()
    return np.asarray(shares(mlp, layers(spec, mlp, nets[0], x), params, nets, x))


def test_shares_are_found_from_the_weights():
    _, (a, b, c), _, _ = problem(3)
    np.testing.assert_allclose(shares_of(combine(a, b, 0.7), (a, b)), [[0.7, 0.3]] * 2, rtol=1e-5)
    stitched = stitch(lambda name: int(name[1]))(KEYS[0], np.ones(()), a, b)
    np.testing.assert_allclose(shares_of(stitched, (a, b)), [[0, 1], [1, 0]], atol=1e-6)
    for three in ([0.2, 0.5, 0.3], [1.5, -1, 0.5], [0, 0, 1]):
        blended = blend(KEYS[0], np.array(three[1:], np.float32), a, b, c)
        np.testing.assert_allclose(shares_of(blended, (a, b, c)), [three] * 2, atol=1e-5)


def test_the_share_of_a_random_mixture_is_about_its_mean():
    nets = [{"w": drawn(Shape((300, 100), jnp.float32), i), "v": drawn(Shape((100, 2), jnp.float32))} for i in (1, 2)]
    apply = lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"]  # noqa: E731
    x = np.ones((2, 300), np.float32)
    found = layers(permutation_spec(apply, nets[0], x), apply, nets[0], x)
    for distribution, parameter, mean in ((uniform, 0.5, 0.5), (bernoulli, 0.2, 0.2)):
        mixed = mix(distribution)(KEYS[0], np.array(parameter), *nets)
        np.testing.assert_allclose(shares(apply, found, mixed, nets, x), [[1 - mean, mean]], atol=0.02)


def test_equal_networks_have_shares():
    _, (a, b), _, _ = problem()
    assert shares_of(a, (a, a)).tolist() == [[1, 0]] * 2
    np.testing.assert_allclose(shares_of(combine(a, b, 0.4), (a, b, b)).sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(shares_of(combine(a, b, 0.4), (a, b, b))[:, 0], 0.4, rtol=1e-4)
    assert shares_of(a, (a,)).tolist() == [[1]] * 2


def test_constant_units_are_only_shifted():
    spec, (a, b), x, y = problem()
    # A's first unit is constant, and in the middle of A and B the second one is.
    a["w1"][:, 0], a["w1"][:, 1], b["w1"][:, 1] = 0, 1, -1
    net = one(repaired(spec, mlp, mix(linear), (a, b), x), 0.5)
    scale, shift = (np.ravel(values) for values in net.corrections[0])
    assert scale[1] == 1
    goal = np.mean([x.sum(1).mean() + a["b1"][1], -x.sum(1).mean() + b["b1"][1]])
    np.testing.assert_allclose(shift[1] + net.params["b1"][1], goal, rtol=1e-4, atol=1e-5)
    metrics = evaluate(*repaired(spec, mlp, mix(linear), (a, b), x), jnp.linspace(-1, 2, 5), KEYS, x, y)
    assert np.isfinite(metrics.loss).all()


def test_a_network_without_hidden_units_stays_as_it_is():
    _, nets, x, _ = problem()
    apply = lambda params, x: x @ params["w1"]  # noqa: E731
    repair = repaired(permutation_spec(apply, nets[0], x), apply, mix(linear), nets, x)
    np.testing.assert_allclose(repair.apply(one(repair, 0.5), x), x @ combine(*nets, 0.5)["w1"], rtol=1e-5)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """The line through two trained networks as it is and repaired, each from its own folder."""
    out = tmp_path_factory.mktemp("runs")
    small = ["--setup", "mlp-digits", "--width", "8", "--epochs", "20", "--train-images", "397", "--points", "3"]

    def of(*flags):
        config = cli.parse(line.EXPERIMENT.config, "", [*small, *flags, "--out", str(out)])
        run(line.EXPERIMENT, config)
        assert cli.parse(type(config), "", command("linear", config).split()[3:]) == config
        return Workspace(config).folder("linear")

    plain, fixed = of(), of("--repair")
    assert fixed.name == "linear,train-images=397,epochs=20,repair,points=3"
    assert plain != fixed
    return [json.loads((folder / "results.json").read_text()) for folder in (plain, fixed)]


def test_repair_undoes_most_of_the_damage_of_a_naive_mixture(curves):
    plain, fixed = (np.array(found["curves"]["naive"]["test"]["loss"])[:, 0] for found in curves)
    np.testing.assert_allclose(plain[[0, 2]], fixed[[0, 2]], rtol=1e-3)
    assert fixed[1] < 0.65 * plain[1]
    accuracy = [found["curves"]["naive"]["test"]["accuracy"][1][0] for found in curves]
    assert accuracy[1] > accuracy[0] + 0.1


def test_a_repaired_run_says_so(curves):
    assert [found["config"]["repair"] for found in curves] == [False, True]
    assert ["repair" in settings(found["config"]).split(", ") for found in curves] == [False, True]
    assert "--repair" in curves[1]["command"]
    assert curves[1]["title"].startswith("MLP on digits, width 8, repaired: ")
