"""Check on random programs that no derived permutation changes the function.

    python -m benchmarks.fuzz                        # 200 programs: half a minute on one CPU core
    python -m benchmarks.fuzz --programs 20000

For each program, the benchmark checks that the spec is valid and that permuted parameters give the same result in
double precision. It also checks the inverse and the composition of permutations. For one in `--deep` programs, it
also checks that activation matching is optimal and that REPAIR keeps the networks at both ends. It skips these two
checks if JAX cannot batch the program, or if the program has a `shard_map` and there are several devices.

Programs that XLA cannot run are counted separately. So are programs whose result depends on rounding errors, such as
the argmax of two rows that are equal in exact arithmetic. Their permuted result must then equal the result for
parameters that differ only by rounding errors. The output names each failure, and `Program(seed, steps)` recreates it.
"""

import collections
import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from mcomb import PermutationSpec, derive_spec, linear
from mcomb.evaluation.repair import repaired
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.matching.activations import correlations, match_activations
from mcomb.runtime.progress import progress_bar, say
from tests.helpers.programs import Program

FUZZ_TOLERANCE = 1e-7  # relative to the largest entry: the limit of accumulated rounding errors in double precision
ROUNDING_ERROR = 1e-13  # absolute, because numbers in these programs are about one: a smaller difference counts as zero
TRIALS = 64  # samples at once of parameters that differ only by rounding errors
MOST_TRIALS = 64 * TRIALS  # enough for a dozen choices that rounding errors decide independently

QUICK = {  # for fast compilation, because each program runs only once
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@dataclass(frozen=True)
class FuzzConfig:
    """Flags of the benchmark."""

    programs: Annotated[int, Flag("number of programs", at_least=1)] = 200
    first: Annotated[int, Flag("seed of the first program", at_least=0)] = 0
    deep: Annotated[int, Flag("check matching and REPAIR on one in this many programs", at_least=1)] = 50


class Unsound(Exception):
    """A failed check, such as a permutation that changes the function."""


class NotRun(Exception):
    """A program that XLA cannot run."""


class DecidedByRoundings(Exception):
    """A permutation that changes the result no more than rounding errors of the parameters do."""


def steps_of(seed: int) -> int:
    """Return the number of operations of the program with this seed."""
    return 3 + seed % 8


def check_program(program: Program) -> PermutationSpec:
    """Derive the spec of a program, check it, and return it."""
    params = program.params()
    spec = derive_spec(program, params, program.input)
    spec.validate(params)
    first, second = (spec.random(jax.random.key(i)) for i in (1, 2))
    one_by_one = spec.apply(first, spec.apply(second, params))
    require(
        equal(spec.apply(spec.compose(first, second), params), one_by_one),
        "a composition differs from its two permutations",
    )
    require(
        equal(spec.apply(spec.invert(first), spec.apply(first, params)), params),
        "an inverse does not restore the parameters",
    )
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
        networks = [exact, *(spec.apply(perms, exact) for perms in (first, second))]
        x = np.random.default_rng(program.seed).standard_normal(program.input.shape)
        run = jax.jit(
            lambda networks, x: jax.lax.map(lambda params: program(params, x), networks), compiler_options=QUICK
        )
        try:
            before, *others = results_of(run, networks, x)
            changed = [distance(after, before) for after in others]
            if max(changed) > FUZZ_TOLERANCE:
                rng = np.random.default_rng(program.seed)
                unexplained = [after for after, off in zip(others, changed, strict=True) if off > FUZZ_TOLERANCE]
                for _ in range(0, MOST_TRIALS, TRIALS):
                    similar = results_of(run, [jax.tree.map(partial(rounded, rng), exact) for _ in range(TRIALS)], x)
                    unexplained = [o for o in unexplained if min(distance(o, one) for one in similar) > FUZZ_TOLERANCE]
                    if not unexplained:
                        raise DecidedByRoundings
                raise Unsound(f"the function changes by {max(changed):.1e}")
        except jax.errors.JaxRuntimeError as error:
            raise NotRun from error
    return spec


def results_of(run: Callable[..., Any], networks: Sequence[Any], x: np.ndarray) -> np.ndarray:
    """Return the result of each network."""
    return np.asarray(run(jax.tree.map(lambda *leaves: np.stack(leaves), *networks), x))


def rounded(rng: np.random.Generator, leaf: np.ndarray) -> np.ndarray:
    """Return the leaf with rounding errors of a few units in the last place."""
    return leaf * (1 + 4 * np.finfo(np.float64).eps * rng.standard_normal(leaf.shape))


def can_be_batched(program: Program) -> bool:
    """Return whether JAX can map the program over examples on all devices."""
    params = program.params()
    try:
        batched = jax.make_jaxpr(jax.vmap(program, (None, 0)))(params, np.zeros((2, *program.input.shape), np.float32))
    except NotImplementedError:
        return False
    return len(jax.devices()) == 1 or "shard_map" not in str(batched)


def check_matching_and_repair(program: Program, spec: PermutationSpec) -> None:
    """Require that activation matching is optimal and that REPAIR keeps both ends."""
    a, b = (program.params(seed) for seed in (program.seed, program.seed + 1))
    x = np.random.default_rng(program.seed).standard_normal((12, *program.input.shape[1:]), np.float32)
    pairs = x.reshape(6, *program.input.shape)

    def apply(params: Any, x: Any) -> Any:
        return jax.vmap(lambda pair: program(params, pair).reshape(-1))(x)

    matching = match_activations(spec, a, b, apply, pairs)
    families = {*spec.batched_over, *itertools.chain.from_iterable(spec.batched_over.values())}  # matched as a whole
    for name in spec.sizes:
        if name in families or name in matching.by_weights:
            continue
        n = spec.sizes[name]
        scores = np.zeros((n, n))
        for shift in range(n):
            order = np.roll(np.arange(n), shift)
            shifted = spec.apply(matching.perms | {name: order}, b)
            scores[np.arange(n), order] = correlations(spec, a, shifted, apply, pairs)[name]
        best = scores[linear_sum_assignment(scores, maximize=True)].sum()
        found = scores[np.arange(n), matching.perms[name]].sum()
        require(found > best - 1e-3 * n, f"{name} is matched with {found:.4f} where {best:.4f} is possible")
    aligned = spec.apply(matching.perms, b)
    repair = repaired(apply, (a, aligned), pairs, linear, spec=spec)
    for share, network in ((0.0, a), (1.0, aligned)):
        drawn = jax.jit(repair.draw)(jax.random.key(0), jnp.float32(share), *repair.networks)
        kept, wanted = jax.jit(repair.apply)(drawn, pairs), jax.jit(apply)(network, pairs)
        off = distance(kept, wanted)
        require(off <= 1e-2, f"REPAIR changes a network by {off:.1e}")


def distance(found: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest entry, or infinity if infinities or NaNs differ.

    Return zero for a difference below `ROUNDING_ERROR`, such as the smallest singular value of a singular matrix.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    other, wanted_other = (np.where(np.isfinite(values), 0, values) for values in (found, wanted))
    if not np.array_equal(other, wanted_other, equal_nan=True):
        return float("inf")
    found, wanted = found[np.isfinite(found)], wanted[np.isfinite(wanted)]
    off, largest = (np.abs(values).max(initial=0) for values in (found - wanted, wanted))
    if off <= ROUNDING_ERROR:
        return 0.0
    return float(off / largest) if largest else float("inf")


def require(holds: Any, what: str) -> None:
    """Raise `Unsound` unless the condition holds."""
    if not holds:
        raise Unsound(what)


def equal(left: Any, right: Any) -> bool:
    """Return whether two trees are equal bit by bit."""
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def main(config: FuzzConfig) -> None:
    """Check the programs, and print the failures and counts."""
    counts: collections.Counter[str] = collections.Counter()
    with progress_bar(config.programs, "program", "fuzzing") as bar:
        for seed in range(config.first, config.first + config.programs):
            program = Program(seed, steps_of(seed))
            try:
                spec = check_program(program)
                counts["permutations"] += len(spec.sizes)
                counts["programs with permutations"] += bool(spec.sizes)
                if seed % config.deep == 0 and can_be_batched(program):
                    check_matching_and_repair(program, spec)
                    counts["matched and repaired"] += 1
            except NotRun:
                counts["not run by XLA"] += 1
            except DecidedByRoundings:
                counts["decided by rounding errors"] += 1
                say(f"Program({seed}, {steps_of(seed)}): rounding errors decide the result")
            except Unsound as error:
                counts["unsound"] += 1
                say(f"Program({seed}, {steps_of(seed)}): {error}")
            except Exception:  # any exception is a finding
                counts["crashed"] += 1
                say(f"Program({seed}, {steps_of(seed)}):\n{traceback.format_exc(limit=-3)}")
            counts["programs"] += 1
            bar.update()
    kinds = "programs", "programs with permutations", "permutations", "matched and repaired"
    for name in (*kinds, "not run by XLA", "decided by rounding errors", "unsound", "crashed"):
        print(f"{counts[name]:>8,}  {name}")


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(FuzzConfig, __doc__ or "")))
