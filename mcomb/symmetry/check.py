"""Check that a permutation spec fits a function: permuted parameters must compute the same outputs."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mcomb.errors import UserError, require_whole
from mcomb.symmetry.jaxpr_walk import all_equations
from mcomb.trees import Array, Params, named_leaves, output_shapes

if TYPE_CHECKING:
    from mcomb.symmetry.spec import Perms, PermutationSpec


def check_spec(
    spec: "PermutationSpec",
    apply: Callable[..., Any],
    params: Params,
    *inputs: Any,
    perms: "Perms | None" = None,
    draws: int = 2,
) -> None:
    """Raise an error if random permutations, or the given `perms`, change `apply(params, *inputs)`.

    A float output may change by √eps of its largest entry, with eps of the coarsest float dtype in the function. At
    least one entry must be finite and nonzero, because otherwise every spec would pass.
    """
    spec.validate(params)
    if perms is not None:
        spec.check_perms(perms)
    require_whole(0, draws=draws)
    output_shapes(apply, params, *inputs)
    tolerance = _coarsest_eps(jax.make_jaxpr(apply)(params, *inputs)) ** 0.5
    run = jax.jit(lambda perms, params, inputs: apply(spec.apply(perms, params), *inputs))
    candidates = [spec.random(jax.random.key(draw)) for draw in range(draws)] + ([perms] if perms else [])
    with jax.default_matmul_precision("highest"):
        before = named_leaves(run(spec.identity(), params, inputs))
        for candidate in candidates:
            after = named_leaves(run(candidate, params, inputs))
            for name in before:
                check_equal(f"output {name}" if name else "the output", before[name], after[name], tolerance)
    if candidates and spec.sizes:
        require_telling(before)


def require_telling(outputs: Mapping[str, Array]) -> None:
    """Raise an error if no output entry is finite and nonzero, because then every permutation would pass."""
    values = [np.asarray(_numbers(output)) for output in outputs.values()]
    if not any((np.isfinite(value) & (value != 0)).any() for value in values):
        how = "has no entries" if not any(value.size for value in values) else "is nowhere finite and other than zero"
        raise UserError(f"The output {how}, so it cannot reveal a wrong permutation: pass other inputs or weights.")


def _numbers(output: Array) -> Array:
    """Return an output as an array of numbers, converting random keys to their data."""
    return jax.random.key_data(output) if jnp.issubdtype(output.dtype, jax.dtypes.extended) else output


def check_equal(what: str, before: Array, after: Array, tolerance: float) -> None:
    """Raise an error unless two arrays are equal, with finite floats equal up to a relative tolerance."""
    before, after = _numbers(before), _numbers(after)
    exact = not jnp.issubdtype(before.dtype, jnp.inexact)
    dtype = np.float64 if exact or not jnp.iscomplexobj(before) else np.complex128
    old, new = (np.asarray(value).astype(dtype) for value in (before, after))
    finite = np.isfinite(old)
    scale = np.abs(old[finite]).max(initial=0)
    difference = np.abs(old[finite] - new[finite]).max(initial=0)
    same_elsewhere = np.array_equal(old[~finite], new[~finite], equal_nan=True)
    if not (same_elsewhere and difference <= (0 if exact else tolerance * scale)):
        largest = f"by {difference:.2g} where its largest entry is {scale:.2g}"
        by = largest if same_elsewhere else "where it is not finite"
        raise UserError(
            f"The permuted network computes another function ({what} differs {by}): "
            "the spec does not fit the model, so derive it from the function."
        )


def _coarsest_eps(jaxpr: core.ClosedJaxpr) -> float:
    """Return the eps of the coarsest float dtype in a jaxpr and its nested jaxprs."""
    arrays = [*jaxpr.jaxpr.invars, *(atom for eqn in all_equations(jaxpr) for atom in (*eqn.invars, *eqn.outvars))]
    dtypes = [array.aval.dtype for array in arrays if hasattr(array.aval, "dtype")]
    return max([0.0, *(float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))])
