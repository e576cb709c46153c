"""Split train images between two networks to merge, so that each sees different images."""

import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

PARTITIONS = ("biased", "dirichlet", "none")


class Subset(NamedTuple):
    """The train images of network A or B of a pair, or the images withheld from both.

    The split assigns the images that are not withheld:

    - `biased`: A sees the fraction `skew` of one half of the classes, and the fraction 1 − `skew` of the other half.
    - `dirichlet`: A sees a random fraction of each class. The fraction follows the beta distribution with both
      parameters `skew`, which is the Dirichlet distribution for two networks.
    - `none`: both networks see all images.

    For the first two, B sees the remaining images. The pair's seed determines all random choices.
    """

    split: str
    skew: float
    withheld: int
    seed: int
    who: str  # A, B or withheld

    @property
    def name(self) -> str:
        """The part of a network's name for this subset."""
        return f"split={self.split}-{self.skew:g},withheld={self.withheld},images={self.who}{self.seed}"

    def expected_count(self, images: int) -> int:
        """Return the expected size of this subset, out of `images` train images."""
        if self.who == "withheld":
            return self.withheld
        return (images - self.withheld) // (1 if self.split == "none" else 2)

    def rows(self, labels: Int32[np.ndarray, "n"]) -> Int64[np.ndarray, "m"]:
        """Return the indices of its images in random order."""
        classes = int(labels.max()) + 1
        rng = np.random.default_rng([self.seed, zlib.crc32(b"split")])
        order = rng.permutation(len(labels))
        withheld, seen = np.split(order, [self.withheld])
        favoured = np.isin(np.arange(classes), rng.permutation(classes)[: classes // 2])
        of_a = np.where(favoured, self.skew, 1 - self.skew)
        if self.split == "dirichlet":
            of_a = rng.beta(self.skew, self.skew, classes)
        parts: dict[str, list[np.ndarray]] = {"A": [], "B": [], "withheld": [withheld]}
        for label, part in enumerate(of_a):
            mine = seen[labels[seen] == label]
            cut = round(part * len(mine))
            for who, rows in (("A", mine[:cut]), ("B", mine[cut:])):
                parts[who].append(mine if self.split == "none" else rows)
        return rng.permutation(np.concatenate(parts[self.who]))
