"""Evaluate a function in double precision, whatever dtypes its code converts to.

A Flax module with `dtype="float32"` computes in float32 even if its parameters are float64. This module traces the
function once and evaluates the jaxpr with every float replaced by float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mcomb.symmetry.jaxpr_walk import called_jaxpr, live_equations, open_jaxpr, split_list, split_scan
from mcomb.symmetry.rules import CALLS

DTYPE_PARAMETERS = ("new_dtype", "preferred_element_type", "dtype")  # parameters of equations that name a dtype


def in_double(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function that evaluates `function` with all floats in float64; call it under `jax.enable_x64(True)`.

    Its arguments have the structure and the shapes of `args`. Custom derivatives are lost.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(*args: Any) -> Any:
        leaves: Any = zip(jax.tree.leaves(args), traced.jaxpr.invars, strict=True)
        values = [_widened(leaf, var.aval.dtype) for leaf, var in leaves]
        return jax.tree.unflatten(structure, _evaluate(traced.jaxpr, traced.consts, values))

    return run


def wide(dtype: Any) -> Any:
    """Return float64 or complex128 for inexact dtypes; return other dtypes unchanged."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def _widened(value: Any, dtype: Any) -> Any:
    return value if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(value, wide(dtype))


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr in double precision."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    constants: Any = zip(jaxpr.constvars, consts, strict=True)
    env |= {var: _widened(const, var.aval.dtype) for var, const in constants}

    def read(atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return env[atom]
        aval: Any = atom.aval
        return _widened(atom.val, aval.dtype)

    for eqn in live_equations(jaxpr):
        env |= zip(eqn.outvars, _equation(eqn, list(map(read, eqn.invars))), strict=True)
    return list(map(read, jaxpr.outvars))


def _equation(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Return the results of one equation in double precision."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _evaluate(*called_jaxpr(eqn), operands)
    if name == "scan":
        return _scan(eqn, operands)
    if name == "while":
        return _while(eqn, operands)
    if name == "cond":
        branches = [_function(branch) for branch in params["branches"]]
        return jax.lax.switch(operands[0], branches, *operands[1:])
    if name == "reduce_precision":
        return operands
    results = eqn.primitive.bind(
        *operands, **{key: wide(value) if key in DTYPE_PARAMETERS else value for key, value in params.items()}
    )
    return results if eqn.primitive.multiple_results else [results]


def _function(jaxpr: Any) -> Callable[..., list[Any]]:
    """Return a jaxpr as a function."""
    inner, consts = open_jaxpr(jaxpr)
    return lambda *args: _evaluate(inner, consts, args)


def _scan(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    consts, init, xs = split_scan(eqn, operands)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate(*called_jaxpr(eqn), [*consts, *carry, *x])
        return results[: len(carry)], results[len(carry) :]

    last, ys = jax.lax.scan(step, list(init), list(xs), eqn.params["length"], eqn.params["reverse"])
    return [*last, *ys]


def _while(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    p = eqn.params
    cond_consts, body_consts, first = split_list(operands, p["cond_nconsts"], p["body_nconsts"])
    condition, body = _function(p["cond_jaxpr"]), _function(p["body_jaxpr"])
    return jax.lax.while_loop(
        lambda carry: condition(*cond_consts, *carry)[0], lambda carry: body(*body_consts, *carry), list(first)
    )
