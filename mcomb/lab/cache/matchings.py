"""Cache matchings: read them from disk, or compute and write missing ones.

If several processes need the same matching, one computes it and the others wait.
"""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mcomb.io.fingerprints import fingerprint
from mcomb.io.locks import lock
from mcomb.io.paths import AnyPath, atomic, make_writable
from mcomb.lab import algorithm_versions
from mcomb.lab.cache.durations import Durations, compilation_seconds
from mcomb.lab.cache.networks import Network, NotKeptError
from mcomb.lab.flags import LEARNED
from mcomb.lab.run_folders import RunFolders
from mcomb.lab.setups import SETUPS, load_data
from mcomb.matching.matchers import MATCHERS, weights
from mcomb.matching.matching import Matching
from mcomb.matching.straight_through import STEPS
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import say, warn
from mcomb.symmetry.spec import PermutationSpec

MATCHING_EXAMPLES = 10_000  # train examples for matchers: more would cost much and change little
MATCHING_FIELDS = tuple(field.name for field in fields(Matching) if field.name != "perms")


@dataclass(frozen=True)
class MatchingKey:
    """Key of a matching: the two networks and the method.

    In results and tables the key reads `B to A`, or `B to A, ste, all groups` if the experiment chooses the matcher and
    the symmetries.

    Attributes:
        moved: The letter of the network whose units are reordered.
        reference: The letter of the network that `moved` is matched to.
        matcher: The matcher's name, or None for the value of `--matcher`.
        restarts: The number of restarts of weight matching.
        groups: The symmetries to match by, or None for the value of `--groups`.
    """

    moved: str
    reference: str
    matcher: str | None = None
    restarts: int = 1
    groups: str | None = None

    def __str__(self) -> str:
        by = f", {self.method}" if self.matcher else ""
        by += f", {'all groups' if self.groups == 'all' else self.groups}" if self.groups else ""
        return f"{self.moved} to {self.reference}{by}"

    @property
    def method(self) -> str:
        """The matcher and its restarts as text."""
        return f"{self.matcher} best of {self.restarts}" if self.restarts > 1 else str(self.matcher)


B_TO_A, C_TO_A = MatchingKey("B", "A"), MatchingKey("C", "A")


@dataclass(frozen=True)
class KeptMatching:
    """A matching, its duration in seconds without compilation, and its fingerprint."""

    matching: Matching
    seconds: float
    fingerprint: str


class MatchingCache:
    """Cache of the matchings between the networks of one config, in the run folders."""

    def __init__(self, config: Any, folders: RunFolders, durations: Durations):
        self.config, self.folders, self.durations = config, folders, durations
        self.setup = SETUPS[config.setup]

    def get(self, networks: Mapping[str, Network], key: MatchingKey = B_TO_A, make: bool = True) -> KeptMatching:
        """Return the matching of one network to another, and compute it if it is not cached.

        A matching depends only on the networks, the matcher and the dataset. Matchers always use the same examples,
        even if a run evaluates fewer. With several restarts, weight matching keeps the best.

        Raises:
            NotKeptError: The matching is not cached and `make` is False.
        """
        a, b, matcher = networks[key.reference], networks[key.moved], key.matcher or self.config.matcher
        groups = key.groups or self.config.groups
        path, spec = self.folders.matching(a.name, b.name, matcher, key.restarts, groups), self.spec(groups)
        name = path.name.removesuffix(".npz")
        made_from = [a.fingerprint, b.fingerprint, f"version {algorithm_versions.MATCHING}"]
        if matcher != "weights":
            made_from += [load_data(self.config.setup, self.config.data_dir).fingerprint, *self.folders.other_dtype]
        made_from += [f"without {name}" for name in self.config.frozen]
        made_from += [f"all groups, version {algorithm_versions.MATRIX_GROUPS}"] if groups == "all" else []
        steps = self.config.matcher_steps
        made_from += [f"{steps} steps"] if matcher == LEARNED and steps != STEPS else []
        kept = from_first(read_matching, path, made_from, spec)
        if kept is None:
            if not make:
                raise NotKeptError(name)
            from_first(make_writable, path.parent)
            with lock(path.parent / f".{name}.lock", f"matching {b.name} to {a.name}"):
                kept = from_first(read_matching, path, made_from, spec, tell=False)
                if kept is None:
                    kept = from_first(write_matching, path, made_from, self._find(spec, a, b, matcher, key.restarts))
        return kept

    def spec(self, groups: str | None = None) -> PermutationSpec:
        """Return the symmetries that matchings by these groups belong to; None stands for the value of `--groups`."""
        return self.setup.spec(self.config.width, self.config.dtype, self.config.frozen, groups or self.config.groups)

    def _find(self, spec: PermutationSpec, a: Network, b: Network, matcher: str, restarts: int) -> KeptMatching:
        how = matcher if restarts == 1 else f"{matcher}, best of {restarts} restarts"
        say(f"matching {b.name} to {a.name} by {how} …")
        import scipy.optimize  # noqa: F401 (import it before the timer starts, because it is slow)

        compiled, start = compilation_seconds(), time.monotonic()
        with self.durations.timed("matching"):
            if matcher == "weights":
                matching = from_first(weights(restarts=restarts).match, spec, a.params, b.params)
            else:
                examples = load_data(self.config.setup, self.config.data_dir).splits.train.subset(MATCHING_EXAMPLES)
                data: Any = dict(zip(("inputs", "labels"), examples, strict=True))
                apply = self.setup.apply(self.config.width, self.config.dtype)
                options = {"steps": self.config.matcher_steps} if matcher == LEARNED else {}
                matching = MATCHERS[matcher](**options).match(spec, a.params, b.params, apply=apply, **data)
        seconds = time.monotonic() - start - (compilation_seconds() - compiled)
        return KeptMatching(matching, seconds, fingerprint(matching.perms))


def write_matching(path: AnyPath, made_from: list[str], kept: KeptMatching) -> KeptMatching:
    """Write a matching with the fingerprints of its inputs, and return it."""
    values: dict[str, Any] = {name: getattr(kept.matching, name) for name in MATCHING_FIELDS}
    perms = {f"perms/{name}": perm for name, perm in kept.matching.perms.items()}
    with atomic(path) as temporary:
        np.savez(temporary, **values | perms, made_from=made_from, seconds=kept.seconds)
    return kept


def read_matching(path: AnyPath, made_from: list[str], spec: PermutationSpec, tell: bool = True) -> KeptMatching | None:
    """Return a cached matching if it is intact and has the same inputs; otherwise None, with a warning if `tell`."""
    if not path.is_file():
        return None
    perms = {name: f"perms/{name}" for name in spec.identity()}
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:  # np.load would leak the handle of a damaged file
            kept: dict[str, Any] = dict(file)
        if not {"made_from", "seconds", *MATCHING_FIELDS, *perms.values()} <= kept.keys():
            problem = "is from an older version"
        elif kept["made_from"].tolist() != made_from:
            problem = "belongs to other networks, data or versions"
        else:
            values: dict[str, Any] = {name: kept[name].tolist() for name in MATCHING_FIELDS}
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            matching = Matching({name: kept[key] for name, key in perms.items()}, **values)
            return KeptMatching(matching, kept["seconds"].item(), fingerprint(matching.perms))
    except Exception as error:  # damaged zip files raise many types
        problem = f"cannot be read ({type(error).__name__})"
    if tell:
        warn(f"{path} {problem}: matching again")
    return None
