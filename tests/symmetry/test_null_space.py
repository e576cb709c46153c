"""The groups of spaces: those that a person derives, and no continuous symmetry missing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from groups import NETWORKS, case, examples, weights

from mcomb import UserError, derive_spec
from mcomb.symmetry.null_space import nullity

pytestmark = pytest.mark.usefixtures("any_rank")


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_are_those_a_person_derives(name):
    network, spec = case(name)
    assert sorted(group.kind for group in spec.groups.values()) == sorted(network.groups)
    assert sorted(own.values for own in spec.scalings.values()) == sorted(network.scalings)
    spec.check(network.apply, network.params, network.inputs)


@pytest.mark.parametrize("name", [name for name in NETWORKS if "tied" not in name])
def test_dimension_is_the_nullity_of_the_jacobian(name):
    network, spec = case(name)
    assert spec.dimension + network.extra == nullity(network.apply, network.params, network.inputs)


def test_permutations_stay_those_of_the_default():
    network, spec = case("stream, RMSNorm")
    assert spec.permutations == derive_spec(network.apply, network.params, network.inputs)


def test_groups_do_not_depend_on_the_weights():
    network, spec = case("stream, LayerNorm with bias")
    initial = {name: np.ones_like(x) if "gain" in name else x for name, x in network.params.items()}
    initial |= {name: np.zeros_like(x) for name, x in network.params.items() if "bias" in name}
    assert spec == derive_spec(network.apply, initial, network.inputs, groups="all")


def test_groups_of_a_function_in_float32_are_found_in_float64():
    network = NETWORKS["MLP, ReLU"]()
    apply = lambda p, x: network.apply({name: jnp.float32(leaf) for name, leaf in p.items()}, x)  # noqa: E731
    spec = derive_spec(apply, network.params, network.inputs, groups="all")
    assert [own.values for own in spec.scalings.values()] == ["positive"]
    spec.check(apply, network.params, network.inputs)


def test_biases_of_keys_move_with_their_kernels():
    params = weights(8, **{"q/kernel": (5, 3), "k/kernel": (5, 3), "k/bias": (3,), "v": (5, 4)})

    def apply(p, x):
        keys = x @ p["k/kernel"] + p["k/bias"]
        return jax.nn.softmax(x @ p["q/kernel"] @ keys.swapaxes(-1, -2)) @ x @ p["v"]

    spec = derive_spec(apply, params, examples(16, 6, 5), groups="all")
    (group,) = spec.groups.values()
    powers = {place.leaf: power for place, power in group.powers.items()}
    assert powers["k/bias"] == powers["k/kernel"] == -powers["q/kernel"]


def test_scales_have_the_powers_of_a_squared_relu():
    _, spec = case("MLP, squared ReLU")
    (scaling,) = spec.scalings.values()
    assert {place.leaf: power for place, power in scaling.powers.items()} == {"up": 1, "bias": 1, "down": -2}


def test_groups_need_values():
    network = NETWORKS["MLP, ReLU"]()
    shapes = jax.eval_shape(lambda: network.params)
    with pytest.raises(UserError, match="pass an array with values"):
        derive_spec(network.apply, shapes, network.inputs, groups="all")


def test_groups_have_two_names():
    network = NETWORKS["MLP, ReLU"]()
    with pytest.raises(UserError, match="Unknown groups 'some': choose from permutations, all"):
        derive_spec(network.apply, network.params, network.inputs, groups="some")


def test_loops_without_a_reverse_derivative_are_refused():
    network = NETWORKS["MLP, ReLU"]()
    apply = lambda p, x: jax.lax.while_loop(lambda y: y.sum() < 1, jnp.exp, network.apply(p, x))  # noqa: E731
    with pytest.raises(UserError, match="Cannot differentiate the function"):
        derive_spec(apply, network.params, network.inputs, groups="all")


def test_every_network_is_in_the_documents_table():
    page = (Path(__file__).parents[2] / "docs" / "symmetries.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert not [name for name in NETWORKS if f"| {name}" not in rows]


def test_groups_are_found_in_functions_that_mix_dtypes():
    params = weights(0, up=(5, 3), down=(3, 4))

    def apply(p, x):
        double = lambda h, _: (h * jnp.full(3, 2.0), None)  # noqa: E731 (float64 under x64: another dtype than h)
        hidden, _ = jax.lax.scan(double, x @ p["up"], None, length=2)
        return jax.nn.relu(hidden) @ p["down"]

    spec = derive_spec(apply, params, examples(32, 5), groups="all")
    assert [own.values for own in spec.scalings.values()] == ["positive"]
    spec.check(apply, params, examples(32, 5))
