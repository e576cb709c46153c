"""Resolve the shares of networks in a merge, which may differ between layers."""

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from mcomb.errors import UserError, brief

Share = float | Sequence[float]
Shares = Share | Mapping[str, Share] | None
"""The share of B, or one share for each network; or a mapping from layers to these; or None for equal shares."""


def resolve_shares(shares: Shares, names: Iterable[str], count: int) -> dict[str, tuple[float, ...]]:
    """Return a share for each network and leaf.

    The keys of a mapping are consecutive parts of leaf names, such as `lm_head` or `layers.3.mlp`. A part may be a
    range of numbers, as in `layers.0-9`, or have wildcards. The first matching key applies. Leaves without one get
    equal shares.

    Args:
        shares: The share of B, or one share for each network, or a mapping from layers to these.
        names: The names of the leaves, with parts separated by dots or slashes.
        count: The number of networks.

    Raises:
        UserError: A share is out of range, or a key matches no leaf.
    """
    equal = (1 / count,) * count
    names = list(names)
    if not isinstance(shares, Mapping):
        return dict.fromkeys(names, equal if shares is None else _one_each(shares, count))
    layers = [(key, re.split(r"[./]", key), _one_each(share, count)) for key, share in shares.items()]
    resolved, used = {}, set[str]()
    for name in names:
        parts = re.split(r"[./]", name)
        found = next((layer for layer in layers if _matches(layer[1], parts)), None)
        resolved[name] = found[2] if found else equal
        used |= {key for key, pattern, _ in layers if _matches(pattern, parts)}
    if unknown := [key for key in shares if key not in used]:
        stem = re.split(r"[./]", unknown[0])[0]
        like = next((name for name in reversed(names) if stem in re.split(r"[./]", name)), names[0])
        raise UserError(f"No weight belongs to the layers {brief(unknown[0])}: use parts of names such as {like:.80}.")
    return resolved


def _one_each(share: Share, count: int) -> tuple[float, ...]:
    """Return a share for each network."""
    if isinstance(share, numbers.Real):
        if count != 2:
            raise UserError(f"shares has one number for {count} networks: pass {count} shares that sum to 1.")
        found: tuple[float, ...] = (1 - float(share), float(share))
    else:
        found = tuple(share) if isinstance(share, Sequence) else ()
    in_range = all(isinstance(own, numbers.Real) and 0 <= own <= 1 for own in found)
    if len(found) != count or not in_range or not math.isclose(sum(found), 1, abs_tol=1e-6):
        raise UserError(
            f"shares has {brief(share)}: pass the share of B from 0 to 1, or {count} such shares that sum to 1."
        )
    return found


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether consecutive parts of a name match a pattern."""
    starts = range(len(parts) - len(pattern) + 1)
    return any(all(map(_part_matches, pattern, parts[start:])) for start in starts)


def _part_matches(pattern: str, part: str) -> bool:
    """Return whether a part of a name matches a word with wildcards, or a range of numbers such as `block0-9`."""
    numbered = re.fullmatch(r"(.*?)(\d+)-(\d+)", pattern)
    if not numbered:
        return fnmatchcase(part, pattern)
    stem, least, most = numbered.groups()
    number = part.removeprefix(stem)
    return part.startswith(stem) and number.isdecimal() and int(least) <= int(number) <= int(most)
