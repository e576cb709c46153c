from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_equal

import mcomb
from mcomb.merging import fine_tuning as early_stopping
from mcomb.merging.fine_tuning import fine_tune
from mcomb.runtime import training_loop as gradient_descent

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
    """A file that was left by a descent which was killed at its tenth look."""
    looks, real = iter(range(10)), early_stopping.score

    def look(*args, **options):
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(early_stopping, "score", look)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "kept.npz")
    return tmp_path / "kept.npz"


def test_fine_tuning_lowers_the_held_out_loss_and_leaves_what_is_no_float(whole):
    params, loss = whole
    held_out = INPUTS[180:], LABELS[180:]
    assert loss < mcomb.score(apply, START, *held_out).loss
    assert loss == pytest.approx(mcomb.score(apply, params, *held_out).loss, rel=1e-6)
    assert params["steps"] is START["steps"]


def test_a_descent_that_was_killed_goes_on_to_the_same_bits(interrupted, whole, monkeypatch):
    steps = []
    real = early_stopping.fit

    def counting(*args, **options):
        for state, losses, report in real(*args, **options):
            steps.append(len(losses))
            yield state, losses, report

    monkeypatch.setattr(early_stopping, "fit", counting)
    found = tune(interrupted)
    assert_equal(found[0]["kernel"], whole[0]["kernel"])
    assert found[1] == whole[1]
    assert sum(steps) <= 40 - 2 * 9  # nine looks were kept, of two steps each


def smooth(amount, logits, label):
    """Cross-entropy with some of the label given to all classes."""
    own, count = mcomb.cross_entropy(logits, label)
    return (1 - amount) * own - amount * jax.nn.log_softmax(logits).mean(), count


def test_a_file_of_another_call_is_not_used(interrupted):
    assert_equal(tune(interrupted, seed=1)[0]["kernel"], tune(seed=1)[0]["kernel"])


OTHERS = ["loss", *(pytest.param(what, marks=pytest.mark.slow) for what in ("function", "constant inside"))]


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_of_another_loss_or_function_of_the_same_name_is_not_used(what, tmp_path):
    def learn(number, keep=None):
        constant = np.full((1, 3), number, np.float32)
        inside = jax.jit(lambda params, x: constant * apply(params, x))
        outside = lambda params, x: number * apply(params, x)  # noqa: E731
        run = {"loss": apply, "function": outside, "constant inside": inside}[what]
        how = {"loss": partial(smooth, number / 4 if what == "loss" else 0.0), "steps": 20, "batch_size": 20}
        return fine_tune(run, START, INPUTS, LABELS, **how, keep=keep)

    learn(1.0, tmp_path / "kept.npz")
    assert_equal(learn(2.0, tmp_path / "kept.npz")[0]["kernel"], learn(2.0)[0]["kernel"])


def test_half_precision_is_read_as_it_was_kept(tmp_path, monkeypatch):
    half = {"kernel": START["kernel"].astype(jnp.bfloat16)}
    learn = lambda keep: fine_tune(apply, half, INPUTS.astype(jnp.bfloat16), LABELS, steps=20, keep=keep)  # noqa: E731
    first, _ = learn(tmp_path / "a folder that is not there" / "kept.npz")
    monkeypatch.setattr(early_stopping, "fit", lambda *args, **options: iter(()))
    again, _ = learn(tmp_path / "a folder that is not there" / "kept.npz")
    assert again["kernel"].dtype == jnp.bfloat16
    assert_equal(again["kernel"], first["kernel"])


@pytest.mark.parametrize("steps", [1, 7, 59])
def test_it_makes_as_many_steps_as_it_is_told(steps, monkeypatch):
    made, real = [], early_stopping.fit

    def counting(*args, **options):
        for state, losses, report in real(*args, **options):
            made.append(len(losses))
            yield state, losses, report

    monkeypatch.setattr(early_stopping, "fit", counting)
    monkeypatch.setattr(early_stopping, "PATIENCE", steps)
    fine_tune(apply, START, INPUTS, LABELS, steps=steps, batch_size=20, learning_rate=1e-4)
    assert sum(made) == steps


def test_shares_of_convolutional_networks_are_learnt_by_steps_that_are_compiled_for_these(monkeypatch):
    networks = [{"kernel": rng.normal(size=(3, 3, 1, 3)).astype(np.float32)} for _ in range(2)]
    run = lambda params, x: jax.lax.conv_general_dilated(  # noqa: E731
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).mean((1, 2))
    images, seen = rng.normal(size=(40, 4, 4, 1)).astype(np.float32), []
    real = gradient_descent._is_convolutional_on_cpu
    monkeypatch.setattr(gradient_descent, "_is_convolutional_on_cpu", lambda like: seen.append(real(like)) or seen[-1])
    spec = mcomb.derive_spec(run, networks[0], images)
    mcomb.learn_shares(run, networks, images, LABELS[:40], spec=spec, per="network", steps=1, batch_size=10)
    assert seen
    assert set(seen) == {jax.default_backend() == "cpu"}


def test_complex_weights_descend():
    def run(params, x):
        return jnp.imag(x.astype(complex) @ params["kernel"])

    start = {"kernel": (START["kernel"] + 1j * START["kernel"][::-1]).astype(np.complex64)}
    _, loss = fine_tune(run, start, INPUTS, LABELS, steps=40, batch_size=20, learning_rate=0.1)
    assert loss < 0.7 * mcomb.score(run, start, INPUTS[180:], LABELS[180:]).loss


@pytest.mark.parametrize("left", [100, 0])
def test_a_file_that_is_not_whole_is_named_and_learning_begins_anew(left, interrupted, whole, capsys):
    interrupted.write_bytes(interrupted.read_bytes()[:left])
    assert_equal(tune(interrupted)[0]["kernel"], whole[0]["kernel"])
    assert f"{interrupted} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.slow) for part in (0.1, 0.5, 0.7)), 0.3])
def test_another_byte_in_the_file_changes_nothing(part, interrupted, whole):
    data = bytearray(interrupted.read_bytes())
    data[int(part * len(data))] ^= 1
    interrupted.write_bytes(bytes(data))
    assert_equal(tune(interrupted)[0]["kernel"], whole[0]["kernel"])


def test_shares_that_are_learnt_go_on_too(tmp_path, monkeypatch):
    networks = [{"kernel": rng.normal(size=(5, 3)).astype(np.float32)} for _ in range(2)]
    spec = mcomb.derive_spec(apply, networks[0], INPUTS)
    learn = lambda **how: mcomb.learn_shares(apply, networks, INPUTS, LABELS, spec=spec, steps=20, batch_size=20, **how)  # noqa: E731
    first = learn(keep=tmp_path / "kept.npz")
    monkeypatch.setattr(early_stopping, "fit", lambda *args, **options: iter(()))
    again = learn(keep=tmp_path / "kept.npz")
    assert again.losses == first.losses
    assert_equal(jax.tree.map(jnp.asarray, again.params), jax.tree.map(jnp.asarray, first.params))


def test_half_precision_is_learnt_by_small_steps():
    """A step of 0.001 is less than half a unit in the last place of a weight above ½."""
    half = {"kernel": (START["kernel"] + np.copysign(4, START["kernel"])).astype(jnp.bfloat16)}
    run = lambda params, x: x @ params["kernel"].astype(jnp.float32)  # noqa: E731
    (found, _), (single, _) = (
        fine_tune(run, start, INPUTS, LABELS, steps=60, batch_size=180)
        for start in (half, jax.tree.map(lambda leaf: leaf.astype(np.float32), half))
    )
    assert found["kernel"].dtype == jnp.bfloat16
    assert (np.asarray(single["kernel"]) != half["kernel"]).all()
    moved, expected = (np.float32(own["kernel"]) - np.float32(half["kernel"]) for own in (found, single))
    assert np.vdot(moved, expected) > 0.5 * np.vdot(expected, expected)
