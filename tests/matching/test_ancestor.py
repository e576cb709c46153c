"""Networks that share an ancestor are recognised, and all others are matched."""

import jax
import numpy as np
import pytest
from numerics import assert_equal

import mcomb
from mcomb.matching import matching
from mcomb.matching.ancestor import least_similarity, match_unless_related


def case(name):
    """A spec and a network with random weights."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    if name == "dense":
        params = {"up": draw(30, 8), "bias": draw(8), "down": draw(8, 20)}
        return mcomb.PermutationSpec.from_axes(params, {"up": (None, "P"), "bias": ("P",), "down": ("P", None)}), params
    if name == "heads":
        axes = {"query": (None, "heads", "dims"), "out": ("heads", "dims", None)}
        return mcomb.PermutationSpec(axes, {"heads": 3, "dims": 6}, {"dims": ("heads",)}), {
            "query": draw(9, 3, 6),
            "out": draw(3, 6, 10),
        }
    axes = {"wide": (mcomb.Blocks(("P", 2)), mcomb.Segments(("Q", 3))), "square": ("Q", "Q")}
    return mcomb.PermutationSpec(axes, {"P": 5, "Q": 7}), {"wide": draw(10, 10), "square": draw(7, 7)}


@pytest.mark.parametrize("rows", [3, 1024])
@pytest.mark.parametrize("name", ["dense", "heads", "parts"])
def test_least_similarity_equals_its_definition(name, rows, monkeypatch):
    monkeypatch.setattr(matching, "WIDENED_ROWS", rows)
    spec, a = case(name)
    rng = np.random.default_rng(1)
    b = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), a)
    half = [jax.tree.map(lambda x: x.astype(np.float16), own) for own in (a, b)]
    for both in ((a, b), half):
        wide = [jax.tree.map(lambda x: x.astype(np.float64), own) for own in both]
        sums = [spec.sum_weights(jax.tree.map(np.multiply, *pair)) for pair in (wide, wide[:1] * 2, wide[1:] * 2)]
        cosines = [sums[0][perm] / np.sqrt(sums[1][perm] * sums[2][perm]) for perm in spec.sizes]
        assert least_similarity(spec, *both) == pytest.approx(min(own.min() for own in cosines), abs=1e-5)


@pytest.mark.parametrize("name", ["dense", "heads", "parts"])
def test_related_networks_are_not_matched(name):
    spec, a = case(name)
    rng = np.random.default_rng(1)
    b = jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32), a)
    match = match_unless_related(mcomb.weights(), spec, a, b)
    assert match.is_skipped
    assert match.similarity > 0.9
    assert_equal(match.matching.perms, spec.identity())
    forced = match_unless_related(mcomb.weights(), spec, a, b, force=True)
    assert not forced.is_skipped
    assert forced.matching.objective == pytest.approx(match.matching.objective, rel=1e-5)


@pytest.mark.parametrize("name", ["dense", "heads", "parts"])
def test_match_unless_related_matches_one_swapped_pair(name):
    """Cosines of whole networks would stay high."""
    spec, a = case(name)
    perms = spec.identity()
    first = next(iter(perms))
    perms[first][..., [0, 1]] = perms[first][..., [1, 0]]
    match = match_unless_related(mcomb.weights(), spec, a, spec.apply(perms, a))
    assert not match.is_skipped
    assert match.similarity < 0.8
    assert_equal(spec.apply(match.matching.perms, spec.apply(perms, a)), a)


def test_units_without_weights_do_not_count():
    spec, a = case("dense")
    for name, place in (("up", (slice(None), 2)), ("bias", 2), ("down", 2)):
        a[name][place] = 0
    assert least_similarity(spec, a, a) == pytest.approx(1)
