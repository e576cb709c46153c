"""The identity of a result: everything that it was made from. A kept result is used only if all of it is the same."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mcomb.io.paths import AnyPath, read_json
from mcomb.lab import versions
from mcomb.lab.cache.matchings import KeptMatching, MatchingKey
from mcomb.lab.cache.networks import Network
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import CHECKPOINT_FLAGS, RECIPE_FLAGS, YOUNGER_FLAGS, identity_flags, recipe_dict
from mcomb.lab.runs.results import Results
from mcomb.runtime.devices import describe_devices
from mcomb.runtime.progress import warn


def result_identity(
    experiment: str,
    store: Store,
    networks: Mapping[str, Network],
    matchings: Mapping[MatchingKey, KeptMatching],
    parts: Mapping[str, Results],
) -> Results:
    """Everything that a result is made from: with the same identity it would come out the same."""
    identity = flags_identity(experiment, store) | {
        "networks": {letter: network.fingerprint for letter, network in networks.items()},
        "matchings": {str(key): kept.fingerprint for key, kept in matchings.items()},
        "parts": {name: identity_hash(results) for name, results in parts.items()},
    }
    if networks:
        # Another kind or number of devices may be compiled for in another way, and round differently.
        identity |= {"data": store.data_fingerprint, "devices": describe_devices()}
    return json.loads(json.dumps(identity, default=str))


def flags_identity(experiment: str, store: Store) -> Results:
    """What of the identity follows from the flags and the version: no network is read for it."""
    config, skipped = store.config, [*RECIPE_FLAGS, *CHECKPOINT_FLAGS]
    skipped += [name for name in YOUNGER_FLAGS if not getattr(config, name)]
    chosen = {name: getattr(config, name) for name in identity_flags(config) if name not in skipped}
    identity = {
        "experiment": experiment,
        "config": chosen | {"recipe": recipe_dict(config)},
        "version": versions.MEASUREMENT,
    }
    return json.loads(json.dumps(identity, default=str))


def identity_hash(results: Results) -> str:
    """A short hash of what results were made from."""
    names = ("experiment", "config", "version", "networks", "matchings", "parts", "data", "devices")
    text = json.dumps({name: results.get(name) for name in names}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_finished(folder: AnyPath, identity: Mapping[str, Any], tell: bool = True) -> Results | None:
    """The results in a folder, if everything that made them is the same; if not, says what has changed."""
    path = folder / "results.json"
    if not path.is_file():
        return None
    results = read_json(path)
    changed = [name for name, value in identity.items() if results and results.get(name) != value]
    if tell and (changed or results is None):
        why = f"was made from other {', '.join(changed)}" if changed else "is damaged or has no digest"
        warn(f"{path} {why}: measuring again")
    return None if changed else results
