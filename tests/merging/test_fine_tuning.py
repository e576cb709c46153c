from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

import mcomb
from mcomb.merging import fine_tuning
from mcomb.merging.fine_tuning import fine_tune
from mcomb.runtime import training_loop

rng = np.random.default_rng(0)
LABELS = rng.integers(0, 3, 200).astype(np.int32)
INPUTS = (rng.normal(size=(3, 5))[LABELS] + rng.normal(size=(200, 5))).astype(np.float32)
START = {"kernel": rng.normal(size=(5, 3)).astype(np.float32), "steps": np.array(3)}


def apply(params, x):
    return x @ params["kernel"]


def tune(keep=None, **options):
    return fine_tune(apply, START, INPUTS, LABELS, steps=40, batch_size=20, learning_rate=0.1, keep=keep, **options)


@pytest.fixture(scope="module")
def whole():
    return tune()


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Return the file of a descent that was killed at its tenth check."""
    looks, real = iter(range(10)), fine_tuning.score

    def look(*args, **options):
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "score", look)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "kept.npz")
    return tmp_path / "kept.npz"


def test_fine_tune_lowers_held_out_loss_and_keeps_integers(whole):
    held_out = INPUTS[180:], LABELS[180:]
    assert whole.losses[0] == pytest.approx(mcomb.score(apply, START, *held_out).loss, rel=1e-6)
    assert whole.loss == min(whole.losses) < whole.losses[0]
    assert whole.loss == pytest.approx(mcomb.score(apply, whole.params, *held_out).loss, rel=1e-6)
    assert whole.params["steps"] is START["steps"]


@pytest.fixture
def steps(monkeypatch):
    """Return a list of the steps of each compiled call from now on."""
    made, real = [], fine_tuning.fit

    def counting(*args, **options):
        for state, losses, report in real(*args, **options):
            made.append(len(losses))
            yield state, losses, report

    monkeypatch.setattr(fine_tuning, "fit", counting)
    return made


def test_fine_tune_resumes_to_same_bits(interrupted, whole, steps):
    found = tune(interrupted)
    assert_equal(found.params["kernel"], whole.params["kernel"])
    assert (found.loss, found.losses) == (whole.loss, whole.losses)
    assert sum(steps) <= 40 - 2 * 9  # the file holds nine checks, of two steps each


def smooth(amount, logits, label):
    """Return the cross-entropy with smoothed labels."""
    own, count = mcomb.cross_entropy(logits, label)
    return (1 - amount) * own - amount * jax.nn.log_softmax(logits).mean(), count


def test_fine_tune_ignores_file_of_another_seed(interrupted, steps):
    assert_equal(tune(interrupted, seed=1).params["kernel"], tune(seed=1).params["kernel"])
    steps.clear()
    tune(interrupted, seed=1)
    assert not steps  # the file now belongs to this seed


OTHERS = ["loss", *(pytest.param(what, marks=pytest.mark.slow) for what in ("function", "constant inside"))]


@pytest.mark.parametrize("what", OTHERS)
def test_fine_tune_ignores_file_of_another_function(what, tmp_path):
    def learn(number, keep=None):
        constant = np.full((1, 3), number, np.float32)
        inside = jax.jit(lambda params, x: constant * apply(params, x))
        outside = lambda params, x: number * apply(params, x)  # noqa: E731
        run = {"loss": apply, "function": outside, "constant inside": inside}[what]
        how = {"loss": partial(smooth, number / 4 if what == "loss" else 0.0), "steps": 20, "batch_size": 20}
        return fine_tune(run, START, INPUTS, LABELS, **how, keep=keep)

    learn(1.0, tmp_path / "kept.npz")
    before = (tmp_path / "kept.npz").read_bytes()
    assert_equal(learn(2.0, tmp_path / "kept.npz").params["kernel"], learn(2.0).params["kernel"])
    assert (tmp_path / "kept.npz").read_bytes() != before  # replaced


def test_fine_tune_resumes_bfloat16(tmp_path, monkeypatch):
    half = {"kernel": START["kernel"].astype(jnp.bfloat16)}
    learn = lambda keep: fine_tune(apply, half, INPUTS.astype(jnp.bfloat16), LABELS, steps=20, keep=keep)  # noqa: E731
    first = learn(tmp_path / "new folder" / "kept.npz")
    monkeypatch.setattr(fine_tuning, "fit", lambda *args, **options: iter(()))
    again = learn(tmp_path / "new folder" / "kept.npz")
    assert again.params["kernel"].dtype == jnp.bfloat16
    assert_equal(again.params["kernel"], first.params["kernel"])


@pytest.mark.parametrize("steps", [1, 7, 59])
def test_fine_tune_makes_given_number_of_steps(steps, monkeypatch):
    made, real = [], fine_tuning.fit

    def counting(*args, **options):
        for state, losses, report in real(*args, **options):
            made.append(len(losses))
            yield state, losses, report

    monkeypatch.setattr(fine_tuning, "fit", counting)
    monkeypatch.setattr(fine_tuning, "STOPPING_PATIENCE", steps)
    fine_tune(apply, START, INPUTS, LABELS, steps=steps, batch_size=20, learning_rate=1e-4)
    assert sum(made) == steps


def test_learn_shares_compiles_for_convolutions_on_cpu(monkeypatch):
    networks = [{"kernel": rng.normal(size=(3, 3, 1, 3)).astype(np.float32)} for _ in range(2)]
    run = lambda params, x: jax.lax.conv_general_dilated(  # noqa: E731
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).mean((1, 2))
    images, seen = rng.normal(size=(40, 4, 4, 1)).astype(np.float32), []
    real = training_loop._is_convolutional_on_cpu
    monkeypatch.setattr(training_loop, "_is_convolutional_on_cpu", lambda like: seen.append(real(like)) or seen[-1])
    spec = mcomb.derive_spec(run, networks[0], images)
    mcomb.learn_shares(run, networks, images, LABELS[:40], spec=spec, per="network", steps=1, batch_size=10)
    assert seen
    assert set(seen) == {jax.default_backend() == "cpu"}


def test_fine_tune_of_complex_weights():
    def run(params, x):
        return jnp.imag(x.astype(complex) @ params["kernel"])

    start = {"kernel": (START["kernel"] + 1j * START["kernel"][::-1]).astype(np.complex64)}
    found = fine_tune(run, start, INPUTS, LABELS, steps=40, batch_size=20, learning_rate=0.1)
    assert found.loss < 0.7 * mcomb.score(run, start, INPUTS[180:], LABELS[180:]).loss


@pytest.mark.parametrize("left", [100, 0])
def test_fine_tune_names_truncated_file_and_restarts(left, interrupted, whole, capsys):
    interrupted.write_bytes(interrupted.read_bytes()[:left])
    assert_equal(tune(interrupted).params["kernel"], whole.params["kernel"])
    assert f"Cannot read {interrupted}" in capsys.readouterr().err


@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.slow) for part in (0.1, 0.5, 0.7)), 0.3])
def test_fine_tune_restarts_after_corrupted_file(part, interrupted, whole):
    data = bytearray(interrupted.read_bytes())
    data[int(part * len(data))] ^= 1
    interrupted.write_bytes(bytes(data))
    assert_equal(tune(interrupted).params["kernel"], whole.params["kernel"])


def test_learn_shares_resumes(tmp_path, monkeypatch):
    networks = [{"kernel": rng.normal(size=(5, 3)).astype(np.float32)} for _ in range(2)]
    spec = mcomb.derive_spec(apply, networks[0], INPUTS)
    learn = lambda **how: mcomb.learn_shares(apply, networks, INPUTS, LABELS, spec=spec, steps=20, batch_size=20, **how)  # noqa: E731
    first = learn(keep=tmp_path / "kept.npz")
    monkeypatch.setattr(fine_tuning, "fit", lambda *args, **options: iter(()))
    again = learn(keep=tmp_path / "kept.npz")
    assert again.losses == first.losses
    assert_equal(jax.tree.map(jnp.asarray, again.params), jax.tree.map(jnp.asarray, first.params))


def test_fine_tune_of_bfloat16_takes_small_steps():
    """A step of 0.001 is less than half a unit in the last place of a weight above ½."""
    half = {"kernel": (START["kernel"] + np.copysign(4, START["kernel"])).astype(jnp.bfloat16)}
    run = lambda params, x: x @ params["kernel"].astype(jnp.float32)  # noqa: E731
    found, single = (
        fine_tune(run, start, INPUTS, LABELS, steps=60, batch_size=180).params
        for start in (half, jax.tree.map(lambda leaf: leaf.astype(np.float32), half))
    )
    assert found["kernel"].dtype == jnp.bfloat16
    assert (np.asarray(single["kernel"]) != half["kernel"]).all()
    moved, expected = (np.float32(own["kernel"]) - np.float32(half["kernel"]) for own in (found, single))
    assert np.vdot(moved, expected) > 0.5 * np.vdot(expected, expected)
