import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_equal

from mcomb.errors import Diverged, UserError
from mcomb.lab.data.augmentation import Augmentation
from mcomb.lab.data.digits import DIGITS
from mcomb.lab.models import MLP, Tiny10, ViT, network_function
from mcomb.lab.training.train import (
    Recipe,
    Stage,
    compile_training,
    initial_state,
    learning_rate,
    train,
    training_bar,
    training_loss,
)
from mcomb.runtime.devices import device_mesh
from mcomb.runtime.training_loop import ON_CPU, _can_be_tuned

RECIPE = Recipe(
    epochs=3,
    batch_size=20,
    learning_rate=0.05,
    weight_decay=1e-3,
    schedule="cosine",
    augmentation=Augmentation(shift=1),
    clip=1.0,
)
TWO_STAGES = dataclasses.replace(RECIPE, stages=(Stage(share=0.67, shrink=2), Stage(share=0.33, rate=0.5)))
ROUNDINGS = 16  # rounding errors of a parameter per step, because devices group sums differently


class Pooled(nn.Module):
    """A network that accepts images of any size."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="pixels")(x))
        return nn.Dense(10, name="logits")(x.mean(axis=(1, 2)))


def start(digits, recipe=RECIPE, model=None, examples=100):
    model = model or MLP(1, 10)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *digits.train.inputs.shape[1:])))["params"]
    return network_function(model, DIGITS), initial_state(params, recipe, examples)


def run(digits, recipe=RECIPE, examples=100, model=None, state=None, **options):
    """Return the losses of the epochs and the last state."""
    apply, fresh = start(digits, recipe, model, examples)
    states = train(apply, state or fresh, digits.train.first(examples), recipe, 0, **options)
    history = [(float(progress.loss), jax.device_get(state)) for _, state, progress in states]
    return [loss for loss, _ in history], history[-1][1]


def assert_same_training(one, other):
    """Assert that losses and parameters differ only by rounding errors of all steps."""
    roundings = ROUNDINGS * int(one[1].step)
    assert one[1].step == other[1].step
    assert_close(one[0], other[0], roundings=roundings)
    assert_close(one[1].params, other[1].params, roundings=roundings)


@pytest.fixture(scope="module")
def whole(digits):
    """The reference training."""
    return run(digits)


def test_train_reduces_loss(digits):
    losses, _ = run(digits, dataclasses.replace(RECIPE, epochs=15), examples=600)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_train_on_one_or_several_devices_agrees(digits, whole, one_device):
    assert_same_training(run(digits), whole)


@pytest.mark.slow
def test_train_convolutions_on_one_or_several_devices_agrees(digits, request):
    large = digits.train.inputs.repeat(2, axis=1).repeat(2, axis=2)  # minimum size for the strides of Tiny-10
    digits, recipe = digits._replace(train=digits.train._replace(inputs=large)), dataclasses.replace(RECIPE, epochs=2)
    several = run(digits, recipe, model=Tiny10(1, 10), examples=60)
    request.getfixturevalue("one_device")
    assert_same_training(run(digits, recipe, model=Tiny10(1, 10), examples=60), several)


@pytest.mark.slow
def test_train_indivisible_batch_counts_each_image_once(digits, request):
    recipe = dataclasses.replace(RECIPE, batch_size=13)
    several = run(digits, recipe)
    request.getfixturevalue("one_device")
    assert_same_training(run(digits, recipe), several)


@pytest.mark.slow
def test_train_is_independent_of_steps_per_call(digits, whole):
    assert_same_training(run(digits, per_call=3), whole)  # of five steps


def test_train_resumed_equals_uninterrupted(digits, whole):
    apply, fresh = start(digits)
    epochs = train(apply, fresh, digits.train.first(100), RECIPE, 0)
    _, state, _ = next(epochs)
    half = jax.device_get(state)
    epochs.close()
    losses, resumed = run(digits, state=half)
    whole_losses, last = whole
    assert losses == whole_losses[1:]
    assert_equal(resumed, last)


def test_stage_trains_on_averaged_images(digits):
    stages = (Stage(shrink=2),)
    recipe = dataclasses.replace(RECIPE, augmentation=None, stages=stages)
    images = digits.train.inputs.astype(np.float32)
    small = (images[:, ::2, ::2] + images[:, 1::2, ::2] + images[:, ::2, 1::2] + images[:, 1::2, 1::2]) / 4
    averaged = digits._replace(train=digits.train._replace(inputs=small))
    plain = dataclasses.replace(recipe, stages=RECIPE.stages)
    assert_same_training(run(digits, recipe, model=Pooled()), run(averaged, plain, model=Pooled()))


def test_stages_follow_each_other(digits):
    """Compare with one run for each stage, whose learning rate is constant because it sees a single epoch."""
    stages = (Stage(share=0.5, shrink=2), Stage(share=0.5, rate=0.5))
    recipe = dataclasses.replace(RECIPE, epochs=2, schedule="thirds", augmentation=None, stages=stages)
    _, whole = run(digits, recipe, model=Pooled())
    _, first = run(digits, dataclasses.replace(recipe, epochs=1, stages=(Stage(shrink=2),)), model=Pooled())
    assert int(first.step) == 5
    large = dataclasses.replace(recipe, stages=(Stage(share=0.5), stages[1]))
    assert_equal(whole, run(digits, large, state=first, model=Pooled())[1])
    _, alike = run(digits, dataclasses.replace(recipe, stages=(stages[0],) * 2), model=Pooled())
    assert (np.asarray(whole.params["pixels"]["kernel"]) != np.asarray(alike.params["pixels"]["kernel"])).any()


@pytest.mark.parametrize("done", [1, 2])
def test_train_with_stages_resumes(digits, done):
    losses, last = run(digits, TWO_STAGES, model=Pooled())
    apply, fresh = start(digits, TWO_STAGES, model=Pooled())
    epochs = train(apply, fresh, digits.train.first(100), TWO_STAGES, 0)
    states = [jax.device_get(next(epochs)[1]) for _ in range(done)]
    epochs.close()
    others, resumed = run(digits, TWO_STAGES, state=states[-1], model=Pooled())
    assert others == losses[done:]
    assert_equal(resumed, last)


@pytest.mark.parametrize("epochs", [0, 1, 3, 7, 20])
def test_stages_cover_all_epochs(epochs):
    recipe = dataclasses.replace(TWO_STAGES, epochs=epochs)
    first, second = recipe.epochs_by_stage()
    assert [*first, *second] == list(range(epochs))
    assert len(first) == round(0.67 * epochs)
    assert recipe.work_after(0) == len(first) / 4 + len(second)
    assert recipe.work_after(len(first)) == len(second)
    assert dataclasses.replace(recipe, stages=RECIPE.stages).work_after(epochs // 2) == epochs - epochs // 2


def test_stages_have_own_schedules():
    stages = (Stage(share=0.5), Stage(share=0.5, rate=0.5))
    recipe = dataclasses.replace(RECIPE, epochs=4, learning_rate=0.1, schedule="warmup-cosine", stages=stages)
    rate = learning_rate(recipe, 10)
    for step, value in {0: 1e-6, 10: 0.1, 15: 0.05, 20: 0.05, 30: 0.025, 40: 0.0}.items():
        assert_close(rate(step), value, roundings=4, scale=0.1)


def test_needs_of_stages_are_largest_memory_and_mean_work(digits):
    apply, state = start(digits, model=Pooled())
    data, mesh = digits.train.first(100), device_mesh(jax.devices()[:1])

    def needs(*stages):
        recipe = dataclasses.replace(RECIPE, augmentation=None, stages=stages)
        return compile_training(apply, state.params, data, recipe, mesh)

    full, small, both = needs(Stage()), needs(Stage(shrink=2)), needs(*TWO_STAGES.stages)
    assert both.memory == max(full.memory, small.memory)
    assert small.flop < 0.6 * full.flop
    assert both.flop == pytest.approx(0.67 * small.flop + 0.33 * full.flop, rel=1e-3)


def test_step_compiled_from_shapes_is_reused(digits, caplog):
    """Use a unique recipe that no other test has compiled."""
    recipe = dataclasses.replace(RECIPE, learning_rate=0.0123, epochs=2)
    (apply, state), data, mesh = start(digits, recipe), digits.train.first(100), device_mesh()
    with jax.log_compiles():
        compile_training(apply, jax.eval_shape(lambda: state.params), data, recipe, mesh)
        assert "Finished XLA compilation of jit(_update)" in caplog.text
        caplog.clear()
        assert len(list(train(apply, state, data, recipe, 0, mesh=mesh))) == 2
    assert "Finished XLA compilation of jit(_update)" not in caplog.text


def test_needs_include_state_data_and_activations(digits):
    model, data = MLP(8, 10), digits.train.first(100)
    apply, state = start(digits, model=model)
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    mesh = device_mesh(jax.devices()[:1])
    small, large = (
        compile_training(apply, state.params, data, dataclasses.replace(RECIPE, batch_size=size), mesh)
        for size in (10, 100)
    )
    held = 2 * (2 * 4 * weights) + sum(array.nbytes for array in data)  # weights and momentum, twice
    hidden = 3 * 16 * 8 * 4  # bytes of hidden layers per image
    assert held < small.memory < large.memory < held + 20 * (4 * weights + 100 * hidden)
    assert large.memory - small.memory > 0.5 * 90 * hidden
    assert 0.8 < large.flop / (6 * weights * 100) < 2  # two per weight forward, twice that backward
    assert 5 < large.flop / small.flop < 11


def test_training_bar_starts_clock_at_first_step(digits):
    apply, state = start(digits)
    bar = training_bar(RECIPE, 100, 0, "training")
    bar.start_t -= 3600  # one hour of compilation
    bar.last_print_t -= 3600
    for _ in train(apply, state, digits.train.first(100), RECIPE, 0, bar=bar):
        assert bar.format_dict["elapsed"] < 600
        assert bar.format_dict["rate"] is None or bar.format_dict["rate"] > 300 / 600


def test_train_keeps_start_unchanged(digits):
    apply, fresh = start(digits)
    before = jax.device_get(fresh)
    for _, state, _ in train(apply, fresh, digits.train.first(100), RECIPE, 0):
        assert (np.asarray(state.params["logits"]["kernel"]) != before.params["logits"]["kernel"]).any()
    assert_equal(jax.device_get(fresh), before)


def test_train_stops_at_nonfinite_loss(digits):
    words = r"loss became infinite or not a number in step \d+ in epoch \d.*--learning-rate below 1e\+30"
    with pytest.raises(Diverged, match=words):
        run(digits, dataclasses.replace(RECIPE, learning_rate=1e30, clip=None))


def test_train_names_weight_decay_that_diverges(digits):
    with pytest.raises(Diverged, match=r"not a number in step .*: use a --weight-decay below 1e\+38"):
        run(digits, dataclasses.replace(RECIPE, weight_decay=1e38, clip=None))


def test_train_checks_weights_after_last_step(digits):
    """A step reports the loss before its update, so that only the weights show that the last step diverged."""
    recipe = dataclasses.replace(RECIPE, epochs=1, batch_size=100, learning_rate=1e38, weight_decay=1e3, clip=None)
    with pytest.raises(Diverged, match="a weight became infinite or NaN in epoch 1"):
        run(digits, recipe)


def test_train_rejects_batch_larger_than_data(digits):
    with pytest.raises(UserError, match="--batch-size 20 exceeds the 10 training examples"):
        run(digits, examples=10)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("thirds", {0: 0.1, 9: 0.1, 10: 0.01, 20: 0.001, 29: 0.001}),
        ("cosine", {0: 0.1, 15: 0.05, 30: 0.0}),
        ("warmup-cosine", {0: 1e-6, 10: 0.1, 20: 0.05, 30: 0.0}),
    ],
)
def test_schedule_follows_paper(schedule, expected):
    recipe = dataclasses.replace(RECIPE, learning_rate=0.1, schedule=schedule)
    rate = learning_rate(recipe, 10)
    for step, value in expected.items():
        assert_close(rate(step), value, roundings=4, scale=0.1)


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("schedule", ["thirds", "cosine", "warmup-cosine"])
def test_schedule_is_positive_for_short_trainings(schedule, epochs):
    steps = 10
    rate = learning_rate(dataclasses.replace(RECIPE, epochs=epochs, schedule=schedule), steps)
    rates = [float(rate(step)) for step in range(max(1, epochs * steps))]
    assert all(0 <= value <= np.nextafter(np.float32(RECIPE.learning_rate), np.float32(1)) for value in rates)
    assert max(rates) > 0


@pytest.mark.slow
def test_loss_barriers_on_cpu_keep_gradient(digits, monkeypatch):
    apply, state = start(digits, model=Tiny10(1, 10))
    args = state.params, jnp.arange(10), tuple(map(jnp.asarray, digits.train.first(10))), jax.random.key(0)

    def barriers_and_gradient(options):
        loss = training_loss.__wrapped__(apply, Augmentation())  # without the cache of earlier traces
        gradient = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(*args)
        return str(jax.make_jaxpr(loss)(*args)).count("optimization_barrier"), gradient

    held, found = barriers_and_gradient(ON_CPU if _can_be_tuned() else None)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    free, wanted = barriers_and_gradient(None)
    assert (held, free) == (len(Tiny10.LAYERS), 0)
    assert_close(found, wanted, roundings=ROUNDINGS)


def test_dense_layers_on_cpu_keep_gradient(digits, monkeypatch):
    apply, state = start(digits, model=ViT(1, 10))
    args = state.params, jnp.arange(10), tuple(map(jnp.asarray, digits.train.first(10))), jax.random.key(0)

    def reshapes_and_gradient():
        loss = training_loss.__wrapped__(apply, None)  # without the cache of earlier traces
        return str(jax.make_jaxpr(loss)(*args)).count(" reshape["), jax.jit(jax.grad(loss, has_aux=True))(*args)

    merged, found = reshapes_and_gradient()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    usual, wanted = reshapes_and_gradient()
    dense_layers = 1 + 2 * ViT.layers  # of patches and in blocks; the logits are those of one token
    assert merged - usual == 2 * dense_layers
    assert_close(found, wanted, roundings=ROUNDINGS)
