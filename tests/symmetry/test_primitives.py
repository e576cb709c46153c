"""Which primitives of JAX have a rule, which have none on purpose, and which have none yet."""

import sys

import jax
import jax.extend.core.primitives
import pytest
from jax.extend import core

from mcomb.symmetry.rules import CONTROL, FROZEN_ON_PURPOSE, RULES

RECORDED = "0.10.2"  # the version of JAX that the list below is exact for
WITHOUT = {
    *("after_all", "create_token", "custom_lin", "dce_sink", "empty", "empty2", "eval_jaxpr", "from_edtype"),
    *("platform_index", "preduced", "stage", "tie", "to_edtype", "unreduced_psum", "vary_unreduced_cast_p"),
    *("approx_top_k", "cholesky_update", "geqp3", "geqrf", "lu_pivots_to_permutation", "ormqr"),
    *("scaled_dot", "select_and_scatter"),
    *("symmetric_product", "tridiagonal_solve", "call"),
}


def primitives():
    """The names of the public primitives, and of those that `jax.lax` consists of; asynchronous ones left out."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("jax._src.lax.")]
    found = [value for module in (jax.extend.core.primitives, *modules) for value in vars(module).values()]
    names = {value.name for value in found if isinstance(value, core.Primitive)}
    return {name for name in names if not name.endswith(("_start", "_done"))}


def test_primitives_without_rules_are_listed():
    without = primitives() - RULES.keys() - CONTROL.keys() - FROZEN_ON_PURPOSE.keys()
    new, gone = sorted(without - WITHOUT), sorted(WITHOUT - without)
    difference = f"without a rule besides those listed: {new}; listed, but not there or with a rule: {gone}"
    if jax.__version__ != RECORDED:
        print(difference)
        pytest.skip(f"JAX {jax.__version__}, and the list is that of {RECORDED}: {difference}")
    assert not new, difference
    assert not gone, difference


def test_primitives_with_rules_are_not_frozen_on_purpose():
    assert not (RULES.keys() | CONTROL.keys()) & FROZEN_ON_PURPOSE.keys()
