"""Estimate the time of a training before it starts."""

from jax.sharding import Mesh

from mcomb.runtime.devices import describe_devices, matrix_rate
from mcomb.runtime.progress import say

HOUR = 3600.0  # seconds
EMBEDDED = "mlp-digits"  # the setup for a first look
SLOWEST = 1e10  # floating-point operations per second that any machine reaches


def say_if_long(flop: float, mesh: Mesh, describe: str) -> None:
    """Print a lower bound on the training time, from the speed of matrix products, if it exceeds an hour."""
    if flop < HOUR * SLOWEST:
        return
    hours = flop / matrix_rate(mesh) / HOUR
    if hours > 1:
        time = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:.0f} hours"
        say(f"{describe} takes {time} or more on {describe_devices(mesh)}: --setup {EMBEDDED} takes a minute")
