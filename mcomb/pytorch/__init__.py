"""Convert PyTorch modules to JAX functions and back, align, sweep and merge them.

    aligned = mcomb.pytorch.align(model_a, model_b, x)
    sweep = mcomb.pytorch.sweep((model_a, aligned), x, y, mcomb.uniform)
    merged = mcomb.pytorch.merge((model_a, aligned), x, y, method="refit")

torchax runs the module's own `forward` on JAX arrays, so that `derive_spec` can read its symmetries. PyTorch and
torchax are imported on first use.
"""

from mcomb.pytorch.modules import align, from_module, merge, sweep, to_arrays, to_module

__all__ = ["align", "from_module", "merge", "sweep", "to_arrays", "to_module"]
