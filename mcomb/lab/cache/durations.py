"""Measure the time that a run spends on each kind of work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax

# JAX's monitoring events for lowering and compilation.
COMPILATION = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class Durations:
    """The seconds that a run has spent on each kind of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the duration of the body to the seconds of `kind`."""
        start = time.monotonic()
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - start


def compilation_seconds() -> float:
    """Return the seconds that JAX has spent on compilation since the first call of this function."""
    return sum(_compilations(), start=0.0)


@cache
def _compilations() -> list[float]:
    """Register a listener, and return the list to which it appends the seconds of each compilation."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in COMPILATION:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
