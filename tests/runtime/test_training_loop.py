from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close, assert_equal

from mcomb.errors import Diverged
from mcomb.runtime.devices import device_mesh, meshes_of, replicate
from mcomb.runtime.training_loop import (
    _can_be_tuned,
    _compiled_update,
    _is_convolutional_on_cpu,
    all_finite,
    fit,
    initial_state,
    shuffled_rows,
    steps_per_call,
)

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
KEY = jax.random.key(3)
ROUNDINGS = 32  # of the largest number, after a dozen steps


def logistic_loss(params, rows, data, key):
    """Return the loss and the accuracy of a logistic regression with noise on its inputs."""
    inputs, labels = data
    noise = 0.1 * jax.random.normal(key, params["w"].shape)
    logits = inputs[rows] @ (params["w"] + noise) + params["b"]
    losses = optax.sigmoid_binary_cross_entropy(logits, labels[rows])
    is_real = rows >= 0
    return jnp.mean(losses, where=is_real), jnp.mean((logits > 0) == (labels[rows] > 0), where=is_real)


def problem():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((30, 4), np.float32)
    labels = (inputs @ rng.standard_normal(4, np.float32) > 0).astype(np.float32)
    return {"w": rng.standard_normal(4, np.float32), "b": np.zeros((), np.float32)}, (inputs, labels)


def minibatches(count=12, size=7):
    return np.random.default_rng(1).integers(0, 30, (count, size)).astype(np.int32)


def run_fit(rows, *, steps=1, loss=logistic_loss, params=None, data=None):
    """Return the last parameters, all losses and all reports of a fit with so many steps in a call."""
    start, all_data = problem()
    items = ((rows[i : i + steps], all_data if data is None else data) for i in range(0, len(rows), steps))
    history = list(fit(loss, initial_state(start if params is None else params, OPTIMIZER), items, OPTIMIZER, KEY))
    losses, reports = (np.concatenate([item[i] for item in history]) for i in (1, 2))
    return jax.device_get(history[-1][0]), losses, reports


value_and_gradient = jax.jit(jax.value_and_grad(logistic_loss, has_aux=True))
update = jax.jit(OPTIMIZER.update)


def run_plain_loop(rows):
    """Return the same by a plain loop, on one device and without padding."""
    params, data = problem()
    state, losses, reports = OPTIMIZER.init(params), [], []
    for step, batch in enumerate(rows):
        (loss, report), gradient = value_and_gradient(params, batch, data, jax.random.fold_in(KEY, step))
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
        reports.append(report)
    return params, state, np.array(losses), np.array(reports)


@pytest.mark.parametrize("steps", [1, 5])  # 5: the last call makes only two steps
def test_fit_equals_plain_loop_for_any_steps_per_call(steps):
    rows = minibatches()
    params, optimizer_state, losses, reports = run_plain_loop(rows)
    state, found_losses, found_reports = run_fit(rows, steps=steps)
    assert_close(state.params, params, roundings=ROUNDINGS)
    assert_close(state.optimizer, optimizer_state, roundings=ROUNDINGS)
    assert int(state.step) == len(rows)
    assert_close(found_losses, losses, roundings=ROUNDINGS)
    assert_close(found_reports, reports, roundings=4)
    assert losses[-1] < losses[0]


def test_fit_ignores_padding():
    """Neither the padding rows nor the example at index -1 count."""
    rows = minibatches() % 29  # so that the last example is only ever padding
    params, (inputs, labels) = problem()
    expected = run_plain_loop(rows)[0]
    more_padding = np.pad(rows, ((0, 0), (2, 3)), constant_values=-1)
    inputs[-1], labels[-1] = 1e3, 1 - labels[-1]
    state, *_ = run_fit(more_padding, params=params, data=(inputs, labels))
    assert_close(state.params, expected, roundings=ROUNDINGS)


@pytest.mark.parametrize("steps", [1, 5])
def test_fit_one_device_equals_all(steps, request):
    on_all, losses, reports = run_fit(minibatches(), steps=steps)
    request.getfixturevalue("one_device")
    on_one, one_losses, one_reports = run_fit(minibatches(), steps=steps)
    assert_close(on_one.params, on_all.params, roundings=ROUNDINGS)
    assert_close(one_losses, losses, roundings=ROUNDINGS)
    assert_close(one_reports, reports, roundings=4)


def test_fit_keeps_arrays_of_caller():
    params, data = problem()
    # On the devices where `fit` wants them, and never read: else JAX would have to copy them before it donates them.
    start = replicate(initial_state(params, OPTIMIZER))
    states = fit(logistic_loss, start, [(minibatches(1), data)] * 3, OPTIMIZER, KEY)
    yielded = [state for state, _, _ in states]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(yielded[0].params))  # donated indeed
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(start))
    assert_equal(start, initial_state(params, OPTIMIZER))


def test_fit_resumes_from_step_of_state():
    """The key of a step depends on its number, so a fit in two parts equals an uninterrupted one."""
    rows, data = minibatches(10), problem()[1]
    whole, losses, _ = run_fit(rows, steps=5)
    state = initial_state(problem()[0], OPTIMIZER)
    for part in (rows[:5], rows[5:]):
        *_, (state, last, _) = fit(logistic_loss, state, [(part, data)], OPTIMIZER, KEY)
        state = jax.device_get(state)
    assert_close(state.params, whole.params, roundings=ROUNDINGS)
    assert_close(last, losses[5:], roundings=ROUNDINGS)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_fit_names_step_of_diverged_loss(bad, steps):
    _, (inputs, labels) = problem()
    rows = np.where(minibatches() == 15, 16, minibatches())
    rows[6, 2] = 15  # used in the seventh step only
    inputs[15] = bad
    with pytest.raises(Diverged, match=r"in step 7:"):
        run_fit(rows, data=(inputs, labels), steps=steps)


def test_fit_draws_minibatches_lazily():
    params, data = problem()
    taken = []

    def items():
        for i in range(3):
            taken.append(i)
            yield minibatches(1), data

    states = fit(logistic_loss, initial_state(params, OPTIMIZER), items(), OPTIMIZER, KEY)
    assert taken == []
    for expected in ([0], [0, 1], [0, 1, 2]):
        next(states)
        assert taken == expected
    assert next(states, None) is None


def test_fit_takes_new_data_in_each_call():
    """Each item brings its own data, as the permuted weights of the straight-through estimator do."""

    def loss(params, rows, target, key):
        return jnp.mean(jnp.square(params - target) + 0 * rows, where=rows >= 0), None

    sgd = optax.sgd(0.5)  # with a square loss this ends at the target after one step
    items = [(np.zeros((1, 2), np.int32), np.float32(target)) for target in (3, -1, 7)]
    states = fit(loss, initial_state(np.zeros((), np.float32), sgd), items, sgd, KEY)
    assert [float(state.params) for state, _, _ in states] == [3, -1, 7]


def test_fit_compiles_once():
    update = _compiled_update(tuned=False)
    run_fit(minibatches(), steps=5)
    compiled = update._cache_size()
    run_fit(minibatches(), steps=5)
    assert update._cache_size() == compiled


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([1, 7, 12, 40]), st.integers(1, 40))
def test_shuffled_rows_have_each_example_at_most_once(seed, epoch, count, batch_size):
    rows = shuffled_rows(seed, epoch, count, batch_size)
    assert rows.shape == (count // batch_size, batch_size)
    assert len(set(rows.ravel())) == rows.size
    assert set(rows.ravel()) <= set(range(count))
    if count == 40 and rows.size > 10:
        assert (np.diff(rows.ravel()) < 0).any()  # not in order


def test_shuffled_rows_depend_on_seed_and_epoch_only():
    first = shuffled_rows(0, 0, 50, 10)
    assert_equal(shuffled_rows(0, 0, 50, 10), first)
    assert_equal(shuffled_rows(0, 0, 50, 25).ravel(), first.ravel())  # nor on the batch size
    for seed, epoch in ((1, 0), (0, 1)):
        assert (shuffled_rows(seed, epoch, 50, 10) != first).any()
    assert (first.ravel() != np.arange(50)).any()


def test_steps_per_call_is_epoch_except_for_convolutions():
    dense, kernel = np.zeros((4, 4), np.float32), np.zeros((3, 3, 4, 4), np.float32)
    assert steps_per_call({"w": dense}, 500) == 500
    assert steps_per_call({"w": dense, "k": kernel}, 500) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fit_finds_single_nan_in_tree(bad):
    tree = {"x": np.ones((2, 3), np.float32), "y": [np.zeros(4, np.float32)]}
    assert all_finite(tree)
    tree["y"][0][2] = bad
    assert not all_finite(tree)


def convolution_loss(params, rows, images, key):
    """Return the output of a convolution of stride 2 followed by a norm."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.optimization_barrier(jnp.tanh(images[rows]))
    x = jax.lax.conv_general_dilated(x, params["kernel"], (2, 2), "SAME", dimension_numbers=dimensions)
    x = jax.nn.relu(jax.nn.standardize(x) * params["scale"].reshape(1, 1, 1, -1))
    return jnp.mean(jnp.square(x) * jnp.cos(x), where=(rows >= 0).reshape(-1, 1, 1, 1)), None


def test_convolutions_have_same_gradient_however_compiled():
    if not _can_be_tuned():
        pytest.skip("this version of XLA has no choice")
    rng, mesh, optimizer = np.random.default_rng(0), device_mesh(), optax.sgd(100.0)
    params = {"kernel": rng.standard_normal((3, 3, 5, 6), np.float32), "scale": np.ones(6, np.float32)}
    images = rng.standard_normal((12, 9, 9, 5), np.float32)
    args = np.arange(12, dtype=np.int32)[None], images, KEY
    found = []
    for tuned in (True, False):
        state = replicate(initial_state(params, optimizer))
        options = {"loss": convolution_loss, "optimizer": optimizer, "mesh": mesh}
        found.append(jax.device_get(_compiled_update(tuned)(state, *replicate(args), **options)[0].params))
    assert_close(found[0], found[1], roundings=ROUNDINGS)
    assert np.abs(found[0]["kernel"] - params["kernel"]).max() > 0.01


def test_convolutions_on_accelerators_compile_unchanged(monkeypatch):
    kernel = {"k": np.zeros((3, 3, 4, 4), np.float32)}
    assert _is_convolutional_on_cpu(kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not _is_convolutional_on_cpu(kernel)
    assert steps_per_call(kernel, 500) == 500


def test_fit_in_two_threads_equals_each_alone():
    """Each runs in its own thread, on its own device."""
    start, data = problem()
    state = initial_state(start, OPTIMIZER)

    def run(mesh):
        items = [(minibatches(1), data)] * 20
        return [jax.device_get(state.params) for state, _, _ in fit(logistic_loss, state, items, OPTIMIZER, KEY, mesh)]

    meshes = meshes_of(1)
    alone = run(meshes[0])
    with ThreadPoolExecutor(len(meshes)) as pool:
        for together in pool.map(run, meshes):
            assert_equal(together, alone)
