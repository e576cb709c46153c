"""Write small image files for the repository."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 256  # one byte for each pixel


def reduce_picture(image: Image.Image, path: Path, width: int = 1400) -> None:
    """Write a picture with 256 colours, no wider than `width`, reproducibly."""
    image = image.convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure with 256 colours."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=250)
    reduce_picture(Image.open(drawn), path)
