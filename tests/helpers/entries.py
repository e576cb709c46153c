"""Create entries of a report without running experiments."""

import struct
import zlib

from results import results_of

from experiments.report_page import Entry
from mcomb.lab.runs.results import Curves, Results


def png(width=7, height=5):
    """Return a black picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(height * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def entry(name=None, place="MLP on digits, width 32", picture=None, **changes):
    """Return an entry with default results, updated with `changes`."""
    results = {
        "experiment": "uniform",
        "title": "MLP on digits, width 32: uniform coefficients",
        "claim": "every mixture works",
        "finding": "every mixture worked",
        "agrees": True,
        "is_open": False,
        "is_papers": True,
        "alt": "loss and accuracy over s",
        "barriers": {
            "naive": {"train": {"loss": 1.41, "accuracy": 0.42}, "test": {"loss": 1.4567, "accuracy": 0.4471}},
            "aligned": {"train": {"loss": 0.0419, "accuracy": 0.0}, "test": {"loss": 0.0523, "accuracy": 0.0114}},
        },
        "paper": {"loss": 0.044, "accuracy": 0.012},
        "command": "python -m experiments.uniform --setup mlp-digits",
        "config": {"setup": "mlp-digits", "width": 32, "seed": 0, "seed_a": None, "recipe": {"batch_size": 100}},
        "environment": {
            "python": "3.11.2",
            "platform": "Linux-6.1",
            "packages": {"jax": "0.10.2", "scipy": None},
            "devices": ["cpu:cpu", "cpu:cpu"],
            "revision": "0123abcd",
        },
        "seconds": 72.3,
    }
    results = {name: value for name, value in (results | changes).items() if value is not None or name == "agrees"}
    kind = Curves if "barriers" in results else Results
    return Entry(results_of(kind, results), picture or png(), name or results["experiment"], place)
