"""Describe the environment that produced a network or a result."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("mcomb", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "matplotlib")


def environment() -> dict[str, Any]:
    """Return the versions, devices and git revision that a result depends on, besides its config."""
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "revision": _revision(),
    }


def _revision() -> str | None:
    """Return the git revision of this code; None outside a clone or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None
