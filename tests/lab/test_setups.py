"""Setups: models, datasets and recipes."""

import dataclasses

import jax
import numpy as np
import pytest
from numerics import assert_close

from mcomb import score
from mcomb.keys import stream
from mcomb.lab import setups
from mcomb.lab.data.cifar10 import CIFAR10
from mcomb.lab.data.datasets import Split, Splits
from mcomb.lab.data.digits import DIGITS, LARGE_DIGITS
from mcomb.lab.data.text import PYDOC_TOPICS, SHAKESPEARE
from mcomb.lab.models import MLP, Decoder, ResNet20, Tiny10, ViT
from mcomb.lab.setups import SETUPS
from mcomb.lab.training.train import initial_state, train
from mcomb.matching.weights import match_weights

EACH = [pytest.param(name, marks=pytest.mark.slow if "resnet" in name else ()) for name in SETUPS]


@pytest.fixture(params=EACH)
def unloaded(request):
    """Each setup with a dataset that fails on loading."""
    setup = SETUPS[request.param]

    def load(path):
        pytest.fail("the dataset was loaded")

    return dataclasses.replace(setup, dataset=dataclasses.replace(setup.dataset, load=load))


def test_setup_does_not_load_dataset(unloaded):
    shapes, params = unloaded.shapes(1), unloaded.init(1, seed=0)
    assert jax.tree.map(lambda x, y: x.shape == y.shape and x.dtype == y.dtype, shapes, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    spec = unloaded.spec(1)
    assert set(spec.axes) == {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(params)}
    assert spec.sizes
    inputs = np.zeros((2, *unloaded.dataset.shape), np.uint8)
    logits = jax.eval_shape(unloaded.apply(1), params, inputs)
    assert logits.shape in ((2, unloaded.dataset.classes), (*inputs.shape, unloaded.dataset.classes))


def test_init_depends_only_on_seed():
    first, again, other = (SETUPS["mlp-digits"].init(1, seed)["logits"]["kernel"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_init_equals_flax_init():
    setup = SETUPS["mlp-digits"]
    images = np.zeros((1, *setup.dataset.shape), np.float32)
    expected = jax.jit(setup.module(1).init)(stream(3, "init"), images)["params"]
    assert_close(setup.init(1, seed=3), expected, roundings=4)


def test_setup_has_model_and_dataset_of_its_name():
    datasets = {"cifar10": CIFAR10, "digits": DIGITS, "text": PYDOC_TOPICS, "shakespeare": SHAKESPEARE}
    models = {"resnet20": ResNet20, "tiny10": Tiny10, "mlp": MLP, "decoder": Decoder, "vit": ViT}
    for name, setup in SETUPS.items():
        model, dataset = name.removesuffix("-short").split("-")
        expected = LARGE_DIGITS if name == "tiny10-digits" else datasets[dataset]
        assert (setup.model, setup.dataset) == (models[model], expected)


def below_seven(split):
    kept = split.labels < 7
    return Split(split.inputs[kept], split.labels[kept])


@pytest.mark.slow
def test_setup_with_seven_classes_trains_matches_and_scores(digits):
    dataset = dataclasses.replace(
        DIGITS,
        name="seven digits",
        classes=7,
        count=lambda: tuple(int((split.labels < 7).sum()) for split in digits),
        load=lambda path: Splits(*map(below_seven, digits)),
    )
    recipe = dataclasses.replace(SETUPS["mlp-digits"].recipe, epochs=10)
    setup = dataclasses.replace(SETUPS["mlp-digits"], title="seven", dataset=dataset, recipe=recipe)
    data, apply, spec = setup.dataset.load(None), setup.apply(1), setup.spec(1)
    networks = []
    for seed in (0, 1):
        start = initial_state(setup.init(1, seed), recipe, len(data.train.labels))
        for _, state, _ in train(apply, start, data.train, recipe, seed):
            last = jax.device_get(state.params)
        networks.append(last)
        assert score(apply, last, *data.test).accuracy > 0.8
    a, b = networks
    assert a["logits"]["bias"].shape == (7,)
    perms = match_weights(spec, a, b).perms
    assert any((perm != np.arange(len(perm))).any() for perm in perms.values())
    spec.check(apply, b, data.test.inputs[:50], perms=perms)


@pytest.mark.parametrize("name", EACH)
def test_models_accept_seven_classes(name):
    setup = SETUPS[name]
    seven = dataclasses.replace(setup, dataset=dataclasses.replace(setup.dataset, classes=7))
    inputs = np.zeros((2, *setup.dataset.shape), np.uint8)
    assert jax.eval_shape(seven.apply(1), seven.shapes(1), inputs).shape[-1] == 7
    assert seven.spec(1).sizes == setup.spec(1).sizes
    assert seven.shapes(1)["logits"]["kernel"].shape[-1] == 7


def test_setup_caches_apply_per_width():
    setup = SETUPS["mlp-digits"]
    assert setup.apply(2) is setup.apply(2)
    assert setup.spec(2) is setup.spec(2)
    assert setup.module(2) == MLP(2, 10)


def test_data_differing_between_processes_are_detected(monkeypatch):
    compared = {}
    monkeypatch.setattr(setups, "require_agreement", compared.__setitem__)
    setups.load_data.cache_clear()
    _, found = setups.load_data("mlp-digits", None)
    assert compared == {"data": found}


@pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if len(setup.recipe.stages) > 1])
def test_models_with_stages_accept_shrunk_images(name):
    setup = SETUPS[name]
    height, width, channels = setup.dataset.shape
    for stage in setup.recipe.stages:
        inputs = np.ones((1, height // stage.shrink, width // stage.shrink, channels), np.float32)
        logits, inner = jax.eval_shape(
            lambda params, x: setup.module(1).apply({"params": params}, x, capture_intermediates=True),
            setup.shapes(1),
            inputs,
        )
        assert logits.shape == (1, 10)
        assert all(leaf.size for leaf in jax.tree.leaves(inner))
    assert sum(stage.share for stage in setup.recipe.stages) == 1
    assert setup.recipe.epochs_by_stage()[-1].stop == setup.recipe.epochs
