"""Every function that returns parameters keeps leaves that are not floats bit for bit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal
from zoo import random_arrays

import mcomb
from mcomb.__main__ import LoadedModel, main
from mcomb.combination import blend, hyperplane, minmax, mix, stitch
from mcomb.evaluation.repair import repaired
from mcomb.io.checkpoints import read_checkpoint, write_checkpoint
from mcomb.trees import is_inexact, map_named, named_leaves

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(6, name="first")(x)))
        return nn.Dense(3, name="head")(x)


SHAPES = jax.eval_shape(Net().init, jax.random.key(0), X)


def apply(params, x):
    """Compute a network whose units can be masked; it does not use the counters."""
    variables = {name: params[name] for name in ("params", "batch_stats")}
    first = variables["params"]["first"]
    first = first | {"bias": jnp.where(params["mask"] > 0, first["bias"], 0)}
    return Net().apply(variables | {"params": variables["params"] | {"first": first}}, x)


def network(seed):
    wide = {"tracked": np.int64(2**40 + seed), "table": np.array([2**63 + seed, 1], np.uint64)}
    others = {"mask": 2**33 * np.arange(7 + seed, 1 + seed, -1), "used": np.array([seed > 1]), "steps": np.int32(seed)}
    return random_arrays(SHAPES, seed) | wide | others


A, B, C = (network(seed) for seed in (1, 2, 3))
SPEC = mcomb.derive_spec(apply, A, X)
PERMS = SPEC.random(jax.random.key(3))
KEY, HALF = jax.random.key(0), jnp.float32(0.5)


def repair():
    return repaired(apply, (A, B), X, mcomb.linear, spec=SPEC)


def repaired_midpoint():
    found = repair()
    return found.draw(KEY, HALF, *found.networks).params


def merged(method):
    return lambda: mcomb.merge(apply, (A, B), X, Y, method=method, spec=SPEC).params


MAKERS = {
    "estimate_statistics": lambda: mcomb.estimate_statistics(apply, A, X),
    "average": merged("average"),
    "fisher": merged("fisher"),
    "refit": merged("refit"),
    "learned": merged(mcomb.learned(steps=2, batch_size=12)),
    "fine_tune": lambda: mcomb.fine_tune(apply, A, X, Y, steps=2, batch_size=12).params,
    "combine": lambda: mcomb.combine(A, B, 0.5),
    "sample": lambda: mcomb.sample(A, B, mcomb.uniform, 0.5),
    "mix": lambda: mix(hyperplane)(KEY, HALF, A, B),
    "minmax": lambda: minmax(KEY, HALF, A, B),
    "blend": lambda: blend(KEY, jnp.array([0.5, 0.2]), A, B, C),
    "stitch": lambda: stitch(lambda name: 2)(KEY, jnp.float32(1), A, B),
    "repaired": repaired_midpoint,
    "repaired, networks": lambda: repair().networks[0].params,
}


def assert_same(found, expected):
    """Fail unless all leaves that are not floats are equal, and of the same dtype."""
    found, expected = named_leaves(found), named_leaves(expected)
    for name, leaf in expected.items():
        if not is_inexact(leaf):
            assert found[name].dtype == leaf.dtype, name
            assert_equal(found[name], leaf)


@pytest.mark.parametrize("maker", MAKERS)
def test_leaves_of_integers_keep_their_bits(maker):
    assert_same(MAKERS[maker](), A)


@pytest.mark.parametrize("budget", [1.5, 2])
def test_leaves_of_partial_merge_keep_their_bits(budget):
    """Units that are kept apart come last, and the mask moves with them."""
    found = merged(mcomb.partial(budget=budget))()["first"]
    assert sorted(found["mask"]) == sorted(A["mask"])
    assert_same(found, A | {"mask": found["mask"]})


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_leaves_of_permuted_integers_keep_their_bits(convert):
    assert [name for name, _ in SPEC.axes_of(min(SPEC.sizes)) if name == "mask"]
    perms = {name: convert(perm) for name, perm in PERMS.items()}
    assert_same(SPEC.apply(perms, A), A | {"mask": A["mask"][next(iter(PERMS.values()))]})


def test_leaves_of_aligned_networks_keep_their_bits():
    other = SPEC.apply(PERMS, A) | {"tracked": np.int64(2**41)}
    expected = A | {"tracked": other["tracked"]}
    assert_same(mcomb.align_many(apply, (A, other), X).params[1], expected)
    assert_same(mcomb.align(apply, A, other, X).params, expected)


def test_leaves_of_integers_stay_on_device_with_floats():
    """A function of all leaves compiles, because all arrays are on the same device."""
    there = map_named(lambda name, leaf: leaf if name == "tracked" else jax.device_put(leaf, jax.devices()[-1]), A)
    found = mcomb.estimate_statistics(apply, there, X)
    assert found["tracked"] == A["tracked"]
    assert np.isfinite(jax.jit(apply)(found, X)).all()


@pytest.mark.parametrize("name", ["net", "net.safetensors", "net.npz", "net.msgpack"])
def test_leaves_of_checkpoints_keep_their_bits(tmp_path, name):
    plain = {key: leaf for key, leaf in A.items() if key not in ("params", "batch_stats")}
    write_checkpoint(tmp_path / name, plain)
    assert_same(read_checkpoint(tmp_path / name), plain)
    assert_same(read_checkpoint(tmp_path / name, target=plain), plain)


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_leaves_of_commands_keep_their_bits(tmp_path, monkeypatch, ending):
    # A file without "params" at its top is read as a whole.
    model = LoadedModel(lambda params, x: apply(params["net"], x), X, Y)
    monkeypatch.setattr("mcomb.__main__.load_model", lambda text: model)
    a, b, combined, aligned = (str(tmp_path / f"{name}{ending}") for name in ("a", "b", "combined", "aligned"))
    write_checkpoint(a, {"net": A})
    write_checkpoint(b, {"net": B})
    main(["combine", a, b, combined, "--share", "0.5", "--model", "mine:model", "--quiet"])
    assert_same(read_checkpoint(combined)["net"], A)
    main(["align", b, a, aligned, "--model", "mine:model", "--quiet"])
    found = read_checkpoint(aligned)["net"]
    assert sorted(found["mask"]) == sorted(A["mask"])
    assert_same(found, A | {"mask": found["mask"]})


def test_leaves_of_combined_files_keep_bits_and_dtypes(tmp_path):
    """Without a model, no statistics are estimated."""
    a, b, to = (str(tmp_path / f"{name}.safetensors") for name in ("a", "b", "c"))
    for path, own in ((a, A), (b, B)):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if is_inexact(leaf) else leaf, own)
        write_checkpoint(path, {"net": {name: leaf for name, leaf in half.items() if name != "batch_stats"}})
    main(["combine", a, b, to, "--distribution", "hyperplane", "--share", "0.3", "--quiet"])
    found = named_leaves(read_checkpoint(to))
    assert {leaf.dtype for leaf in found.values() if is_inexact(leaf)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(found, named_leaves(read_checkpoint(a)))
