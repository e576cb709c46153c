"""Derive, align and merge large language models in files, and measure time and memory.

    python -m benchmarks.pytorch_large                     # 7 billion parameters without weights: seconds
    python -m benchmarks.pytorch_large --folder large/     # two networks of 1 billion parameters, folder to folder

The first form derives the symmetries of a Llama from shapes. The second writes two Llamas with random weights in
bfloat16, where B is A with permuted units and noise, and runs `mcomb align` and `mcomb merge` on their folders. It
needs twelve bytes of disk for each parameter. The folders remain; delete them afterwards.
"""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

import mcomb
from mcomb.io.safetensors_shards import SINGLE, list_shards, write_shard
from mcomb.lab import cli
from mcomb.lab.cli import Flag
from mcomb.matching import ancestor
from mcomb.matching import weights as matching
from mcomb.merging.merge import BASED_METHODS
from mcomb.pytorch import from_module, to_arrays
from mcomb.pytorch.files import example_inputs
from mcomb.pytorch.hugging_face import build_skeleton

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 22, "num_attention_heads": 32},
}
SIZES["tiny"] |= {"vocab_size": 1000}
SIZES["1B"] |= {"num_key_value_heads": 4, "vocab_size": 64000}
LARGE_METHODS = ("average", "slerp", "ties")
SCALE = 0.02  # standard deviation of A's weights
NOISE_OF_B = 0.5  # standard deviation of B's noise, relative to the weights


@dataclass(frozen=True)
class LargeConfig:
    """Flags of the benchmark."""

    folder: Annotated[Path | None, Flag("folder for two networks; without it, only derive from shapes")] = None
    size: Annotated[str, Flag("size of the networks in the folder", choices=tuple(SIZES))] = "1B"


def save_config(folder: Path, **settings: Any) -> None:
    """Write the configuration of a Llama."""
    import transformers

    config = transformers.LlamaConfig(**settings, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)


def derive(folder: Path) -> Any:
    """Derive the spec of a folder's configuration without weights, and print the time."""
    start = time.perf_counter()
    module = build_skeleton(folder)
    apply, shapes = from_module(module)
    built = time.perf_counter()
    spec = mcomb.derive_spec(apply, shapes, to_arrays(example_inputs(module)))
    seconds = f"{built - start:.1f} s to build and {time.perf_counter() - built:.1f} s to trace and derive"
    count = sum(int(np.prod(shape.shape)) for shape in shapes.values())
    print(f"{count / 1e9:.2f} billion parameters: {len(spec.sizes)} permutations, {seconds}, {peak()}", flush=True)
    return spec, shapes


def peak() -> str:
    """Return the peak memory of this process."""
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def write_networks(folder: Path) -> None:
    """Write A with random weights, and B with A's units permuted and noise."""
    import torch
    from safetensors.torch import save_file

    spec, shapes = derive(folder / "a")
    shutil.copytree(folder / "a", folder / "b", dirs_exist_ok=True)
    random = torch.Generator().manual_seed(0)

    def draw(shape: Any) -> Any:
        """Return random weights, and ones for norms."""
        leaf = torch.empty(shape.shape, dtype=torch.bfloat16)
        return leaf.normal_(0, SCALE, generator=random) if leaf.ndim > 1 else torch.ones_like(leaf)

    save_file({name: draw(shape) for name, shape in shapes.items()}, folder / "a" / SINGLE, {"format": "pt"})
    perms = spec.random(jax.random.key(0))
    (shard,) = list_shards(folder / "a")

    def compute(name: str) -> np.ndarray:
        leaf = spec.permute_array(perms, spec.axes[name], shard.tensors[name].read())
        noise = torch.empty(leaf.shape).normal_(0, NOISE_OF_B * SCALE, generator=random)
        return noise.numpy().__iadd__(leaf).astype(leaf.dtype)

    write_shard(folder / "b" / SINGLE, shard, compute)
    print(f"wrote two networks, {peak()}", flush=True)


def run(words: Sequence[str]) -> dict[str, Any]:
    """Run a command of mcomb in a process of its own, print its time and peak memory, and return its JSON."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        start = time.perf_counter()
        text, memory, seconds = pool.apply(measure, (words,))
        parts = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
        print(f"mcomb {' '.join(words)}: {time.perf_counter() - start:.0f} s, {memory} ({parts})", flush=True)
    found: dict[str, Any] = json.loads(text)
    return found


def measure(words: Sequence[str]) -> tuple[str, str, dict[str, float]]:
    """Run a command in this process; return its output, its peak memory, and the seconds spent in its parts."""
    from mcomb.__main__ import main as command
    from mcomb.pytorch import files, hugging_face

    seconds: dict[str, float] = {}

    def time_it(module: Any, name: str, label: str) -> None:
        function = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(module, name, timed)

    time_it(hugging_face, "derive_spec", "deriving")
    time_it(ancestor, "check_networks", "checking")
    time_it(ancestor, "least_similarity", "looking for an ancestor")
    time_it(matching, "coordinate_descent", "matching")
    time_it(hugging_face, "write_shard", "computing and writing")
    time_it(files, "require_same_outputs", "comparing outputs")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command([*words, "--json"])
    return printed.getvalue(), peak(), seconds


def main(flags: LargeConfig) -> None:
    """Derive a spec from shapes; or write, align and merge two networks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if flags.folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            save_config(Path(temporary))  # transformers' default Llama has 7 billion parameters
            derive(Path(temporary))
        return
    folder = flags.folder.absolute()
    save_config(folder / "a", **SIZES[flags.size])
    write_networks(folder)
    a, b, aligned = (str(folder / name) for name in ("a", "b", "aligned"))
    run(["align", a, b, aligned])
    for method in LARGE_METHODS:
        base = ["--base", a] if method in BASED_METHODS else []
        found = run(["merge", a, aligned, str(folder / method), "--method", method, *base])
    best = 1 / np.sqrt(1 + NOISE_OF_B**2)
    print(f"cosine similarity of A and the aligned B: {found['similarity']:.4f}; at best {best:.4f}")


if __name__ == "__main__":
    cli.run(lambda: main(cli.parse(LargeConfig, __doc__ or "")))
