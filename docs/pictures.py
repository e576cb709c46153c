"""Pictures that are small enough to come with the repository."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 256  # of a picture: as many as one byte for each dot has


def reduce_picture(image: Image.Image, path: Path, width: int = 1400) -> None:
    """Writes a picture in few colours, no wider than `width`, the same bytes every time."""
    image = image.convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def write_picture(figure: Figure, path: Path) -> None:
    """Writes a figure in few colours."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=250)
    reduce_picture(Image.open(drawn), path)
