"""Uniform coefficients from a box centred at A, so that they extrapolate as often as they interpolate.

    python -m experiments.centered --setup mlp-digits

The paper: combinations of aligned networks work for s up to 0.25.
"""

import numpy as np

from mcomb.combine import centered, mix
from mcomb.experiment import Finding, Results, main, sweep


def conclude(results: Results) -> Finding:
    """How much test accuracy is lost up to s = 0.25, aligned and naive."""
    at = np.array(results["parameter"]["values"])
    level = results["models"]["A"]["test"]["accuracy"]
    lost = {
        variant: level - np.array(results["curves"][variant]["test"]["accuracy"])[at <= 0.25].min()
        for variant in ("aligned", "naive")
    }
    return bool(lost["aligned"] <= 0.1), (
        f"Up to s = 0.25 the worst aligned combination loses {lost['aligned']:.1%} of A's test accuracy, "
        f"the worst naive one {lost['naive']:.1%}."
    )


EXPERIMENT = sweep(
    name="centered",
    title="coefficients in a box around A",
    claim="Noise around A in the shape of the differences to the aligned B is harmless for s up to 0.25.",
    alt="Loss and accuracy against the size of the box around A, naive and aligned.",
    parameter="s",
    label="s: the share of B is uniform on [−s, s]",
    values=(0.0, 0.5),
    combine=mix(centered),
    conclude=conclude,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
