"""Augment train images with random affine maps, and shrink them, on the device and within the compiled step."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float32, PRNGKeyArray, Shaped

from mcomb.keys import unrolled
from mcomb.trees import Array


@dataclass(frozen=True)
class Augmentation:
    """Ranges of a random affine map for each image; the default is the identity."""

    scale: tuple[float, float] = (1.0, 1.0)
    rotation: float = 0.0  # maximum in degrees, in both directions
    flip: bool = False
    shift: int = 0  # maximum in pixels, in both directions


def augment(key: PRNGKeyArray, images: Shaped[Array, "n h w c"], how: Augmentation) -> Float32[Array, "n h w c"]:
    """Apply a random map to each image: resize, crop, flip, rotate and shift in one bilinear resampling."""
    return jax.vmap(partial(_augment_one, how=how))(jax.random.split(unrolled(key), len(images)), images)


def shrink(images: Shaped[Array, "n h w c"], factor: int) -> Float32[Array, "n h2 w2 c"]:
    """Average squares of factor × factor pixels."""
    n, height, width, channels = images.shape
    squares = images.reshape(n, height // factor, factor, width // factor, factor, channels)
    return squares.astype(jnp.float32).mean(axis=(2, 4))


def _augment_one(key: PRNGKeyArray, image: Shaped[Array, "h w c"], how: Augmentation) -> Float32[Array, "h w c"]:
    height, width, _ = image.shape
    k_scale, k_crop, k_flip, k_rotation, k_shift = jax.random.split(key, 5)
    size = jnp.array([height, width], jnp.float32)
    scale = jax.random.uniform(k_scale, minval=how.scale[0], maxval=how.scale[1])
    # Crop the resized image around a random centre, without more border than the resize creates.
    crop = jax.random.uniform(k_crop, (2,), minval=-0.5, maxval=0.5) * jnp.abs(scale - 1) * size
    mirror = jnp.where(how.flip & jax.random.bernoulli(k_flip), -1.0, 1.0)
    angle = jnp.deg2rad(how.rotation) * jax.random.uniform(k_rotation, minval=-1.0)
    shift = jax.random.randint(k_shift, (2,), -how.shift, how.shift + 1)

    # Source coordinates of each target pixel: invert the maps in reverse order about the image's centre.
    centre = (size - 1) / 2
    y = jnp.arange(height)[:, None] - centre[0] - shift[0]
    x = jnp.arange(width)[None, :] - centre[1] - shift[1]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    source_y = (cos * y - sin * x + crop[0]) / scale + centre[0]
    source_x = (mirror * (sin * y + cos * x) + crop[1]) / scale + centre[1]
    sample = partial(jax.scipy.ndimage.map_coordinates, coordinates=[source_y, source_x], order=1)
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image.astype(jnp.float32))
