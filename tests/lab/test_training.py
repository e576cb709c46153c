import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcomb import train
from mcomb.base import UserError
from mcomb.lab.models import MLP, Tiny10, classifier
from mcomb.lab.training import Augmentation, Recipe, initial_state

RECIPE = Recipe(
    epochs=3,
    batch_size=20,
    learning_rate=0.05,
    weight_decay=1e-3,
    schedule="cosine",
    augmentation=Augmentation(shift=1),
    clip=1.0,
)


@cache
def apply_of(model, mean, std):
    return classifier(model, mean, std)


def start(digits, recipe=RECIPE, model=None, images=100):
    model = model or MLP(1, 10)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *digits.train.images.shape[1:])))["params"]
    return apply_of(model, digits.mean, digits.std), initial_state(params, recipe, images)


def run(digits, recipe=RECIPE, images=100, model=None, state=None, **options):
    """The losses of the epochs and the last state."""
    apply, fresh = start(digits, recipe, model, images)
    states = train.train(apply, state or fresh, digits.train.first(images), recipe, 0, **options)
    history = [(float(progress.loss), jax.device_get(state)) for _, state, progress in states]
    return [loss for loss, _ in history], history[-1][1]


def assert_trees_equal(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_training_learns(digits):
    losses, _ = run(digits, dataclasses.replace(RECIPE, epochs=15), images=600)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", [MLP(1, 10), Tiny10(1, 10)], ids=["mlp", "conv"])
def test_one_device_and_two_give_the_same_curve(digits, model, request):
    large = digits.train.images.repeat(2, axis=1).repeat(2, axis=2)  # what Tiny-10's strides need
    digits = dataclasses.replace(digits, train=digits.train._replace(images=large))
    two, last_two = run(digits, model=model, images=60)
    request.getfixturevalue("one_device")
    one, last_one = run(digits, model=model, images=60)
    np.testing.assert_allclose(one, two, rtol=1e-4)
    assert_trees_equal(last_one.params, last_two.params, rtol=1e-2, atol=1e-4)


def test_a_batch_that_devices_do_not_divide_counts_each_image_once(digits, request):
    recipe = dataclasses.replace(RECIPE, batch_size=15)
    two, _ = run(digits, recipe)
    request.getfixturevalue("one_device")
    one, _ = run(digits, recipe)
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_many_steps_in_a_call_equal_one_by_one(digits):
    together, last = run(digits, per_call=5)
    apart, last_apart = run(digits, per_call=1)
    ragged, _ = run(digits, per_call=3)
    np.testing.assert_allclose(together, apart, rtol=1e-4)
    np.testing.assert_allclose(together, ragged, rtol=1e-4)
    assert_trees_equal(last.params, last_apart.params, rtol=1e-3, atol=1e-5)


def test_a_resumed_training_ends_like_an_uninterrupted_one(digits):
    apply, fresh = start(digits)
    epochs = train.train(apply, fresh, digits.train.first(100), RECIPE, 0)
    _, state, _ = next(epochs)
    half = jax.device_get(state)
    epochs.close()
    losses, resumed = run(digits, state=half)
    whole_losses, whole = run(digits)
    assert losses == whole_losses[1:]
    assert_trees_equal(resumed, whole, rtol=0, atol=0)


def test_training_leaves_its_start_untouched(digits):
    apply, fresh = start(digits)
    before = jax.device_get(fresh)
    list(train.train(apply, fresh, digits.train.first(40), RECIPE, 0))
    assert_trees_equal(jax.device_get(fresh), before, rtol=0, atol=0)


def test_seeds_change_the_order_of_images():
    first, again, other = (train.epoch_order(seed, 0, 50, 10, 1) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert sorted(first.ravel()) == list(range(50))


def test_order_is_padded_to_the_devices():
    order = train.epoch_order(0, 0, 50, 15, 2)
    assert order.shape == (3, 16)
    assert (order[:, -1] == -1).all()
    assert (order[:, :-1] >= 0).all()


def test_a_loss_that_is_not_finite_stops_the_run(digits):
    with pytest.raises(train.Diverged, match=r"infinite or not a number in epoch \d.*--learning-rate below"):
        run(digits, dataclasses.replace(RECIPE, learning_rate=1e30, clip=None))


def test_a_last_step_that_blows_up_is_not_taken_for_good(digits):
    """The loss of a step is that before it, so that the last step's harm shows only in the weights."""
    recipe = dataclasses.replace(RECIPE, epochs=1, batch_size=100, learning_rate=1e38, weight_decay=1e3, clip=None)
    with pytest.raises(train.Diverged):
        run(digits, recipe)


def test_a_batch_larger_than_the_data_is_refused(digits):
    with pytest.raises(UserError, match="--batch-size 20 is more than the 10 training images"):
        run(digits, images=10)


def test_convolutions_on_cpu_are_dispatched_step_by_step(digits):
    shapes = jax.eval_shape(Tiny10(1, 10).init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    assert train.steps_per_call(shapes, 500) == 1
    assert train.steps_per_call(start(digits)[1].params, 500) == 500


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("thirds", {0: 0.1, 9: 0.1, 10: 0.01, 20: 0.001, 29: 0.001}),
        ("cosine", {0: 0.1, 15: 0.05, 30: 0.0}),
        ("warmup-cosine", {0: 1e-6, 10: 0.1, 20: 0.05, 30: 0.0}),
    ],
)
def test_learning_rates_follow_the_paper(schedule, expected):
    recipe = dataclasses.replace(RECIPE, learning_rate=0.1, schedule=schedule)
    rate = train.learning_rate(recipe, 10)
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, atol=1e-7)


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("schedule", ["thirds", "cosine", "warmup-cosine"])
def test_short_trainings_have_a_learning_rate(schedule, epochs):
    rate = train.learning_rate(dataclasses.replace(RECIPE, epochs=epochs, schedule=schedule), 10)
    assert 0 <= float(rate(0)) <= 1.001 * RECIPE.learning_rate


def images(size=9):
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, size, size, 3)).astype(np.uint8))


def test_no_augmentation_is_the_identity():
    np.testing.assert_allclose(train.augment(jax.random.key(0), images(), Augmentation()), images(), atol=1e-3)


def test_flips_mirror_some_images_exactly():
    batch = jnp.concatenate([images()] * 8)
    flipped = train.augment(jax.random.key(0), batch, Augmentation(flip=True))
    pairs = list(zip(np.asarray(flipped), np.asarray(batch, np.float32), strict=True))
    same = [np.allclose(new, old, atol=1e-2) for new, old in pairs]
    mirrored = [np.allclose(new, old[:, ::-1], atol=1e-2) for new, old in pairs]
    assert 0 < sum(same) < len(pairs)
    assert sum(same) + sum(mirrored) == len(pairs)


def test_shifts_move_by_whole_pixels_and_fill_with_black():
    shifted = train.augment(jax.random.key(0), images(), Augmentation(shift=1))
    padded = np.pad(np.asarray(images(), np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [(y, x) for y in range(3) for x in range(3)]
    for new, old in zip(np.asarray(shifted), padded, strict=True):
        assert any(np.allclose(new, old[y : y + 9, x : x + 9], atol=1e-2) for y, x in windows)


def blob(size=17, sigma=3.0, y=0.0, x=0.0):
    """A round spot at (y, x) from the centre, which no rotation or mirror image about the spot can change."""
    axis = np.arange(size) - (size - 1) / 2
    distance = (axis[:, None] - y) ** 2 + (axis - x) ** 2
    return jnp.asarray(200 * np.exp(-distance / (2 * sigma**2)))[None, :, :, None]


def test_rotation_turns_about_the_centre():
    how = Augmentation(rotation=90.0, flip=True)
    for i in range(5):
        round_image = train.augment(jax.random.key(i), blob(), how)
        np.testing.assert_allclose(round_image, blob(), atol=6)
    turned = train.augment(jax.random.key(0), blob(sigma=1.5, y=4.0), how)
    assert np.abs(np.asarray(turned - blob(sigma=1.5, y=4.0))).max() > 20
    mass = np.asarray(turned)[0, :, :, 0]
    axis = np.arange(17) - 8
    centre = np.array([(mass * axis[:, None]).sum(), (mass * axis).sum()]) / mass.sum()
    np.testing.assert_allclose(np.hypot(*centre), 4.0, atol=0.3)  # as far from the centre as before


def test_resizing_scales_by_a_factor_in_its_range():
    for i in range(5):
        resized = np.asarray(train.augment(jax.random.key(i), blob(33, 2.0), Augmentation(scale=(1.5, 2.0))))
        # Mass grows with the square of the scale, wherever the crop has put the spot.
        assert 1.4 < np.sqrt(resized.sum() / np.asarray(blob(33, 2.0)).sum()) < 2.05


def test_resizing_keeps_constant_images_constant_inside():
    batch = jnp.full((3, 16, 16, 1), 200, jnp.uint8)
    how = Augmentation(scale=(1.1, 1.2), flip=True)
    np.testing.assert_allclose(train.augment(jax.random.key(2), batch, how)[:, 3:-3, 3:-3], 200.0, atol=1e-2)


def test_augmentation_differs_between_images_and_keys():
    how = Augmentation(scale=(0.8, 1.2), rotation=30.0, flip=True)
    batch = jnp.concatenate([images()[:1]] * 2)
    first, second = (np.asarray(train.augment(jax.random.key(i), batch, how)) for i in (0, 1))
    assert not np.allclose(first[0], first[1], atol=1)
    assert not np.allclose(first[0], second[0], atol=1)
