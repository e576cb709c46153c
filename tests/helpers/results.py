"""Create results without running experiments."""

import dataclasses
import typing

from mcomb.lab.runs.results import from_json


def empty(hint):
    """Return the empty JSON value of a type."""
    if dataclasses.is_dataclass(hint):
        return {name: empty(of) for name, of in typing.get_type_hints(hint).items()}
    return {dict: {}, list: [], str: ""}.get(typing.get_origin(hint) or hint, 0)


def results_of(kind, values):
    """Return results of a kind from JSON values, with empty values for fields that are missing."""
    hints = typing.get_type_hints(kind)
    required = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory]
    return from_json(kind, {name: empty(hints[name]) for name in required} | values)
