"""Walk through the equations of a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend import core


def all_equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yield the equations of a jaxpr and of all jaxprs nested inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from inner_equations(eqn)


def inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Yield the equations of all jaxprs nested inside an equation."""
    for inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    """Yield the jaxprs among an equation's parameters, without those nested deeper."""
    kinds = core.Jaxpr, core.ClosedJaxpr
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: isinstance(value, kinds)):
        if isinstance(value, kinds):
            yield value
