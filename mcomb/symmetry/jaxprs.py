"""Walk through the equations of a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend import core


def all_equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr and of all that are inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inner_equations(eqn)


def inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Yields the equations of all jaxprs inside an equation."""
    for inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    """Yields the jaxprs among an equation's parameters, not those inside them."""
    kinds = core.Jaxpr, core.ClosedJaxpr
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: isinstance(value, kinds)):
        if isinstance(value, kinds):
            yield value
