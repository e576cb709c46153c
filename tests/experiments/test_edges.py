import numpy as np
import pytest

from experiments import edges
from mcomb.lab.cache.store import Store


def test_edges_count_every_weight_once(results, config_of, draws_pairs):
    found = results(edges)
    assert draws_pairs(edges, found)
    weights = 64 * 32 + 2 * 32 * 32 + 32 * 10 + 3 * 32 + 10
    for variant in ("naive", "aligned"):
        assert sum(found["overall"][variant]) == weights
        assert np.sum([layer for layer in found["layers"][variant].values()]) == weights
    assert list(found["layers"]["naive"]) == ["1", "2", "3", "4"]
    assert found["mean"]["aligned"] < found["mean"]["naive"]
    store = Store(config_of(edges))
    a, b = (edges.flat(store.networks.get(letter)[letter].params).astype(np.float64) for letter in "AB")
    scale, lengths = np.sqrt(np.mean(a**2)), np.abs(a - b)
    low = np.maximum(np.abs(a), np.abs(b)) < edges.LOW * scale
    near = lengths < edges.NEAR_ZERO * scale
    slack = weights * float(np.finfo(np.float32).eps)  # rounding of a float32 mean; a length may equal a limit
    assert found["mean"]["naive"] == pytest.approx(lengths.mean(), rel=slack)
    for name, share in (
        ("near_zero", near.mean()),
        ("long", (lengths > edges.LONG * scale).mean()),
        ("low", low.mean()),
        ("low_of_near_zero", low[near].mean()),
    ):
        assert found[name]["naive"] == pytest.approx(share, abs=2 / near.sum())
