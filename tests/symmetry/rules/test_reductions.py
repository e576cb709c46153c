"""Rules of reductions, pooling and ordered axes.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import pytest
from rule_programs import FEATURES, ROWS, UNITS, WHOLE, Program, check_freedom, layer, pooled, unused_rules, weights

from mcomb.symmetry.rules import reductions


def pooled_derivative(derive):
    """The derivative of something that is computed of the maxima of windows, along another axis than that of units."""

    def energy(params, x):
        hidden = jnp.tanh(x.reshape(ROWS, FEATURES, 1) * params["up"].reshape(1, 1, UNITS))
        return jnp.sin(jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")).sum()

    return Program(lambda p, x: derive(lambda x: energy(p, x), x), {"up": (UNITS,)}, WHOLE)


PROGRAMS = {
    "gradient of max pooling": pooled_derivative(lambda energy, x: jax.grad(energy)(x)),
    "tangent of max pooling": pooled_derivative(lambda energy, x: jax.jvp(energy, (x,), (x,))[1]),
    "maximum of each window": pooled(
        lambda h: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3), (1, 3), "VALID").sum(-1), []
    ),
    "Fourier transform of another axis": Program(
        lambda p, x: jnp.abs(jnp.fft.fft(jnp.einsum("bt,h->bth", x, p["up"]), axis=1)).sum(1) @ p["down"],
        {"up": (UNITS,), "down": (UNITS, 2)},
        WHOLE,
    ),
    "windows of one number in several arrays": Program(
        lambda p, x: (
            jnp.multiply(
                *jax.lax.reduce_window(
                    (h := x @ p["up"], h), (0.0, 0.0), lambda s, t: (s[0] + t[0], s[1] + t[1]), (1, 1), (1, 1), "VALID"
                )
            )
            @ p["down"]
        ),
        {"up": (FEATURES, UNITS), "down": (UNITS, 2)},
        WHOLE,
    ),
    "turned round": layer(lambda h, p: h[:, ::-1] * h, []),
    "a window of one number": weights(
        lambda w: jax.lax.reduce_window(w.sum(), -jnp.inf, jax.lax.max, (), (), "VALID"), [(6,)], (6,)
    ),
    "sums of all before": layer(lambda h, p: jnp.cumsum(h, 1), []),
    "sums of rows before": layer(lambda h, p: jnp.cumsum(h, 0), WHOLE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(reductions, PROGRAMS, monkeypatch)
