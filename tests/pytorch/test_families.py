"""Models of Hugging Face have the freedom that a person counts, and planted permutations are found."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import pytest

import mcomb
from benchmarks.pytorch_families import FAMILIES
from mcomb.pytorch import align, from_module, to_arrays, to_module
from mcomb.pytorch.modules import _select

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchax", reason="torchax is not installed", exc_type=Exception)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=Exception)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_derived_and_recovered(name):
    family = FAMILIES[name]
    module, example = family.build(), family.example()
    apply, params = from_module(module)
    inputs = to_arrays(example)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(apply)(params, inputs)
    with torch.no_grad():
        wanted = to_arrays(_select(module(**example), None))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(theirs).max())

    spec = mcomb.derive_spec(apply, params, inputs)
    assert sorted(spec.shape(perm) for perm in spec.sizes) == sorted(family.free)
    spec.check(apply, params, inputs)

    planted = to_module(spec.apply(spec.random(jax.random.key(0)), params), module)
    matcher = mcomb.weights(restarts=8 if name == "Swin" else 1)  # one descent can end in a local optimum
    aligned = align(module, planted, example, matcher=matcher).state_dict()
    for key, tensor in module.state_dict().items():
        assert torch.equal(aligned[key], tensor), key
