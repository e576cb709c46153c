"""Shares for layers apply to the leaves that their keys name."""

import pytest

from mcomb.merging.shares import resolve_shares

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}.weight" for i in (0, 1, 9, 10) for part in ("mlp.up", "self_attn.q")),
    "lm_head.weight",
    "block_2/kernel",
    "block_12/kernel",
]


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("lm_head", ["lm_head.weight"]),
        ("layers.0-9", [name for name in NAMES if ".0." in name or ".1." in name or ".9." in name]),
        ("layers.1", ["model.layers.1.mlp.up.weight", "model.layers.1.self_attn.q.weight"]),
        ("layers.9-10.mlp", ["model.layers.9.mlp.up.weight", "model.layers.10.mlp.up.weight"]),
        ("layers/10/self_attn", ["model.layers.10.self_attn.q.weight"]),
        ("self_attn", [name for name in NAMES if "self_attn" in name]),
        ("block_0-9", ["block_2/kernel"]),
        ("*_tokens", ["model.embed_tokens.weight"]),
        ("*", NAMES),
    ],
)
def test_keys_name_consecutive_parts(key, wanted):
    found = resolve_shares({key: 0.25}, NAMES, 2)
    assert [name for name, shares in found.items() if shares == (0.75, 0.25)] == wanted
    assert {shares for name, shares in found.items() if name not in wanted} <= {(0.5, 0.5)}


def test_resolve_shares_applies_first_matching_key():
    found = resolve_shares({"layers.0-1": 0, "mlp": 1, "layers": 0.25}, NAMES, 2)
    assert found["model.layers.1.mlp.up.weight"] == (1, 0)
    assert found["model.layers.9.mlp.up.weight"] == (0, 1)
    assert found["model.layers.9.self_attn.q.weight"] == (0.75, 0.25)
    assert found["lm_head.weight"] == (0.5, 0.5)
