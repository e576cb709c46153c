from math import erfc, sqrt

import jax
import jax.numpy as jnp
import numpy as np

from mcomb.lab.data import augmentation
from mcomb.lab.data.augmentation import Augmentation, shrink

augment = jax.jit(augmentation.augment, static_argnums=2)  # inside a compiled step, as always

SIZE = 9
EPS = np.finfo(np.float32).eps
# A few operations on numbers up to SIZE round a pixel's source position, and between neighbouring pixels the
# value changes by at most 255.
ROUNDING = 4 * SIZE * EPS * 255


def images():
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, SIZE, SIZE, 3)).astype(np.uint8))


def equal(new, old):
    return np.abs(new - old).max() <= ROUNDING


def test_augmentation_default_is_identity():
    new = augment(jax.random.key(0), images(), Augmentation())
    assert not equal(np.asarray(augment(jax.random.key(0), images(), Augmentation(rotation=30.0))), np.asarray(new))
    assert new.dtype == jnp.float32
    assert equal(np.asarray(new), np.asarray(images(), np.float32))


def test_flip_mirrors_some_images_exactly():
    batch = jnp.concatenate([images()] * 8)
    flipped = augment(jax.random.key(0), batch, Augmentation(flip=True))
    pairs = list(zip(np.asarray(flipped), np.asarray(batch, np.float32), strict=True))
    same = [equal(new, old) for new, old in pairs]
    mirrored = [equal(new, old[:, ::-1]) for new, old in pairs]
    assert 0 < sum(same) < len(pairs)
    assert sum(same) + sum(mirrored) == len(pairs)


def test_shift_moves_whole_pixels_and_fills_with_black():
    batch = jnp.concatenate([images()] * 16)
    shifted = augment(jax.random.key(0), batch, Augmentation(shift=1))
    padded = np.pad(np.asarray(batch, np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [(y, x) for y in range(3) for x in range(3)]
    seen = set()
    for new, old in zip(np.asarray(shifted), padded, strict=True):
        (window,) = [(y, x) for y, x in windows if equal(new, old[y : y + SIZE, x : x + SIZE])]
        seen.add(window)
    assert seen == set(windows)


PEAK = 200.0


def blob(size=17, sigma=3.0, y=0.0, x=0.0):
    """Return an image of a round spot at (y, x) from the centre, which is symmetric about its own centre."""
    axis = np.arange(size) - (size - 1) / 2
    distance = (axis[:, None] - y) ** 2 + (axis - x) ** 2
    return jnp.asarray(PEAK * np.exp(-distance / (2 * sigma**2)))[None, :, :, None]


def test_rotation_turns_about_the_centre():
    how = Augmentation(rotation=90.0, flip=True)
    # Bilinear resampling has an error of an eighth of the second derivatives. Pixels from outside are black.
    curvature = 2 * PEAK / 3.0**2 / 8
    border = float(blob()[0, 0, 8, 0])
    for i in range(5):
        round_image = augment(jax.random.key(i), blob(), how)
        np.testing.assert_allclose(round_image, blob(), rtol=0, atol=max(curvature, border))
    before = blob(sigma=1.5, y=4.0)
    turned = augment(jax.random.key(0), before, how)
    assert np.abs(np.asarray(turned - before)).max() > PEAK / 10
    cut = erfc(4 / 1.5 / sqrt(2)) / 2  # the fraction of the spot beyond the border, 8 from the centre
    np.testing.assert_allclose(distance_from_centre(turned), 4.0, rtol=0, atol=8 * cut)


def distance_from_centre(image):
    """Return the distance of the centre of mass from the centre of the image."""
    mass = np.asarray(image)[0, :, :, 0]
    axis = np.arange(len(mass)) - (len(mass) - 1) / 2
    return np.hypot((mass * axis[:, None]).sum(), (mass * axis).sum()) / mass.sum()


def test_scale_resizes_both_axes_by_one_factor_in_range():
    size, least, most = 33, 1.5, 2.0
    places = np.stack(np.meshgrid(*[np.arange(size, dtype=np.float32)] * 2, indexing="ij"), -1)[None]
    factors, crops = [], []
    for i in range(8):
        found = np.asarray(augment(jax.random.key(i), places, Augmentation(scale=(least, most))))[0]
        inside = found[1:-1, 1:-1]  # resampling is exact for values that are linear in the position
        steps = np.concatenate([np.diff(inside[..., 0], axis=0).ravel(), np.diff(inside[..., 1], axis=1).ravel()])
        np.testing.assert_allclose(steps, steps.mean(), rtol=0, atol=8 * size * EPS)
        factors.append(1 / steps.mean())
        crops.append((found[size // 2, size // 2] - size // 2) * factors[-1])
        assert (np.abs(crops[-1]) <= (factors[-1] - 1) * size / 2).all()
    assert least <= min(factors) < max(factors) <= most
    assert np.ptp(crops, axis=0).min() > 1


def test_scale_keeps_constant_images_constant_inside():
    batch = jnp.full((3, 16, 16, 1), 200, jnp.uint8)
    resized = np.asarray(augment(jax.random.key(2), batch, Augmentation(scale=(0.8, 0.9), flip=True)))
    np.testing.assert_allclose(resized[:, 5:-5, 5:-5], 200.0, rtol=8 * EPS)  # four weights whose sum is one
    assert (resized == 0).any(axis=(1, 2, 3)).all()  # black around the smaller image


def test_augmentation_differs_between_images_and_keys():
    how = Augmentation(scale=(0.8, 1.2), rotation=30.0, flip=True)
    batch = jnp.concatenate([images()[:1]] * 2)
    first, second = (np.asarray(augment(jax.random.key(i), batch, how)) for i in (0, 1))
    assert np.abs(first[0] - first[1]).max() > 1
    assert np.abs(first[0] - second[0]).max() > 1


def test_shrink_averages_squares():
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 9, 3), np.uint8)
    found = shrink(jnp.asarray(images), 3)
    assert found.shape == (2, 2, 3, 3)
    assert found.dtype == jnp.float32
    for row, column in np.ndindex(2, 3):
        square = images[:, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        np.testing.assert_allclose(found[:, row, column], square.mean(axis=(1, 2)), rtol=1e-6)
