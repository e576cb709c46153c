"""Walk through the equations of a jaxpr, and through the jaxprs inside them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core

T = TypeVar("T")
ClosedOrOpen = core.Jaxpr | core.ClosedJaxpr


def all_equations(jaxpr: ClosedOrOpen) -> Iterator[core.JaxprEqn]:
    """Yield the equations of a jaxpr and of all jaxprs nested inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inner_equations(eqn)


def inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Yield the equations of all jaxprs nested inside an equation."""
    for inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[ClosedOrOpen]:
    """Yield the jaxprs among an equation's parameters, without those nested deeper."""
    kinds = core.Jaxpr, core.ClosedJaxpr
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: isinstance(value, kinds)):
        if isinstance(value, kinds):
            yield value


def live_equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations that affect the results or have side effects other than debugging."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        has_effect = bool(eqn.effects) and not eqn.primitive.name.startswith("debug")
        if has_effect or needed.intersection(eqn.outvars):
            live.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return live[::-1]


def evaluate(
    jaxpr: core.Jaxpr,
    consts: Iterable[T],
    args: Iterable[T],
    constant: Callable[[Any], T],
    apply: Callable[[int, core.JaxprEqn, list[T]], Iterable[T]],
) -> list[T]:
    """Return the results of a jaxpr whose values are of any kind.

    `constant` converts literals, and `apply` evaluates a live equation, given its number and operands.
    """
    env: dict[Any, T] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atoms: Iterable[Any]) -> list[T]:
        return [constant(atom.val) if isinstance(atom, core.Literal) else env[atom] for atom in atoms]

    for index, eqn in enumerate(live_equations(jaxpr)):
        env |= zip(eqn.outvars, apply(index, eqn, read(eqn.invars)), strict=True)
    return read(jaxpr.outvars)


def called_jaxpr(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Return the one jaxpr inside a call or a scan, and its constants."""
    return open_jaxpr(
        next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in eqn.params)
    )


def open_jaxpr(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Return a jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def split_list(values: Sequence[T], *counts: int) -> list[list[T]]:
    """Split values into consecutive lists of the given lengths, and a last list of the rest."""
    rest, parts = list(values), []
    for count in counts:
        parts.append(rest[:count])
        rest = rest[count:]
    return [*parts, rest]


def split_scan(eqn: core.JaxprEqn, operands: Sequence[T]) -> list[list[T]]:
    """Return the constants, the carry and the scanned arrays among the operands of a scan."""
    p = eqn.params
    if "ft_in" in p:  # JAX 0.12 and later
        return split_list(operands, *(len(list(part)) for part in p["ft_in"].unpack()[:2]))
    return split_list(operands, p["num_consts"], p["num_carry"])
