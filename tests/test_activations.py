import jax
import numpy as np
import pytest
from zoo import spec_of

from mcomb.activations import correlations, modules_of


def test_every_permutation_has_a_module_with_its_units(network):
    _setup, model, params, images = network
    spec = spec_of(model, params, images)
    modules = modules_of(model, spec)
    assert modules.keys() == spec.sizes.keys()
    assert len(set(modules.values())) == len(modules)
    assert len({model.layer_of(module) for module in modules.values()}) == len(modules)
    _, state = model.apply({"params": params}, images, capture_intermediates=True, mutable=["intermediates"])
    for perm, path in modules.items():
        node = state["intermediates"]
        for part in path.split("/"):
            node = node[part]
        assert node["__call__"][0].shape[-1] == spec.sizes[perm]


def test_a_permuted_network_correlates_with_itself_unit_by_unit(network):
    _setup, model, params, images = network
    spec = spec_of(model, params, images)
    perms = spec.random(jax.random.key(0))
    modules = modules_of(model, spec)
    same = correlations(model, params, params, images, modules)
    undone = correlations(model, params, spec.apply(spec.invert(perms), spec.apply(perms, params)), images, modules)
    other = correlations(model, params, spec.apply(perms, params), images, modules)
    for name, values in same.items():
        alive = values != 0
        np.testing.assert_allclose(values[alive], 1, atol=1e-2)
        np.testing.assert_allclose(undone[name], values, atol=1e-2)
        assert other[name].mean() < 0.9


def test_correlations_are_those_of_numpy(network):
    setup, model, params, images = network
    if setup.title != "MLP on digits":
        pytest.skip("one network is enough: all are measured by the same code")
    other = jax.tree.map(lambda leaf: leaf + 0.1, params)
    spec = spec_of(model, params, images)
    found = correlations(model, params, other, images, modules_of(model, spec))

    def hidden(tree):
        return np.maximum(images.reshape(6, -1) @ tree["dense1"]["kernel"] + tree["dense1"]["bias"], 0)

    x, y = hidden(params), hidden(other)
    perm = spec.axes["dense1/bias"][0]
    for unit in range(16):
        if x[:, unit].std() > 1e-3 and y[:, unit].std() > 1e-3:
            expected = np.corrcoef(x[:, unit], y[:, unit])[0, 1]
            np.testing.assert_allclose(found[perm][unit], expected, atol=1e-3)
