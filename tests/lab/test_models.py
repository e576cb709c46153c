from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import raw_inputs

from mcomb.lab.data.datasets import TextDataset
from mcomb.lab.data.digits import DIGITS
from mcomb.lab.models import MLP, ResNet20, Tiny10, network_function
from mcomb.symmetry.jaxpr_walk import all_equations
from mcomb.trees import named_leaves


def shapes(model, image):
    return named_leaves(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, *image), np.float32))["params"])


def test_models_return_one_logit_per_class(network):
    setup, model, params, inputs = network
    logits = model.apply({"params": params}, inputs)
    positions = setup.dataset.shape if isinstance(setup.dataset, TextDataset) else ()
    assert logits.shape == (6, *positions, setup.dataset.classes)
    assert np.isfinite(logits).all()
    assert np.ptp(np.asarray(logits)) > 0


def test_tiny10_has_layers_of_paper():
    kernels = [s.shape for name, s in sorted(shapes(Tiny10(1, 10), (32, 32, 3)).items()) if "conv" in name]
    assert kernels == [
        (3, 3, 3, 16),
        (3, 3, 16, 16),
        (3, 3, 16, 32),
        (3, 3, 32, 32),
        (3, 3, 32, 32),
        (3, 3, 32, 64),
        (3, 3, 64, 64),
        (1, 1, 64, 64),
    ]


def test_resnet20_has_twenty_layers_and_two_strided_shortcuts():
    leaves = shapes(ResNet20(1, 10), (32, 32, 3))
    kernels = [name for name in leaves if name.endswith("kernel")]
    assert sum("shortcut" not in name for name in kernels) == 20
    assert sorted(name for name in kernels if "shortcut" in name) == [
        "block2_1/shortcut_conv/kernel",
        "block3_1/shortcut_conv/kernel",
    ]
    assert not any("conv" in name and name.endswith("bias") for name in leaves)


def test_width_multiplies_units_of_every_layer():
    for model, image in ((MLP, (8, 8, 1)), (Tiny10, (32, 32, 3)), (ResNet20, (32, 32, 3))):
        narrow, wide = shapes(model(1, 10), image), shapes(model(3, 10), image)
        for name in narrow:
            out = 1 if name.startswith("logits") else 3
            assert wide[name].shape[-1] == out * narrow[name].shape[-1]
    assert shapes(MLP(32, 10), (8, 8, 1))["dense1/kernel"].shape == (64, 512)


@pytest.mark.parametrize(("model", "image"), [(MLP, (8, 8, 1)), (Tiny10, (32, 32, 3)), (ResNet20, (32, 32, 3))])
def test_models_depend_on_classes_only_in_last_layer(model, image):
    ten, seven = shapes(model(1, 10), image), shapes(model(1, 7), image)
    assert {name for name in ten if ten[name] != seven[name]} == {"logits/kernel", "logits/bias"}
    assert seven["logits/kernel"].shape[-1] == 7


def test_network_function_normalises_each_channel():
    class Same(nn.Module):
        def __call__(self, x):
            return x.reshape(len(x), -1)

    pixels = np.array([10, 40], np.uint8).reshape(1, 1, 1, 2)
    dataset = replace(DIGITS, mean=(4.0, 20.0), std=(2.0, 10.0))
    np.testing.assert_array_equal(network_function(Same(), dataset)({}, pixels), [[3, 2]])


def test_bfloat16_models_keep_float32_params_and_logits(network):
    setup, _, params, inputs = network
    model, apply = setup.module(1, "bfloat16"), setup.apply(1, "bfloat16")
    created = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), created) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )
    raw = raw_inputs(setup.dataset, 6)
    exact, found = setup.apply(1)(params, raw), apply(params, raw)
    assert found.dtype == np.float32
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    difference = np.abs(found - exact).max() / np.abs(exact).max()
    assert eps / 100 < difference < 16 * eps  # a decoder has the most roundings
    jaxpr = jax.make_jaxpr(apply)(params, raw)
    products = [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated")]
    assert len(products) >= setup.model.depth
    assert {var.aval.dtype.name for eqn in products for var in eqn.invars} == {"bfloat16"}
    roots = [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == "rsqrt"]  # in the norms
    assert {var.aval.dtype.name for eqn in roots for var in eqn.invars} <= {"float32"}
    spec = setup.spec(1, "bfloat16")
    assert spec == setup.spec(1)
    spec.check(apply, params, raw)


def test_layer_of_follows_forward_pass(network):
    setup, model, params, _ = network
    layers = {name: model.layer_of(name) for name in named_leaves(params)}
    assert set(layers.values()) == set(range(1, setup.model.depth + 1))
    assert {layers[name] for name in layers if name.startswith("logits")} == {setup.model.depth}


def test_layer_of_groups_norms_and_shortcuts():
    layer = ResNet20.layer_of
    assert [layer(name) for name in ("conv0/kernel", "norm0/scale", "block1_1/conv1/kernel")] == [1, 1, 2]
    assert layer("block2_1/conv1/kernel") == layer("block2_1/norm1/bias") == 8
    assert layer("block2_1/conv2/kernel") == layer("block2_1/shortcut_conv/kernel") == 9
    assert layer("block3_3/norm2/scale") == 19
    assert Tiny10.layer_of("conv3/kernel") == Tiny10.layer_of("norm3/scale") == 3
