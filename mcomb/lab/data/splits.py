"""Train images shared out between two networks that are to be merged: what one knows, the other hardly does."""

import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

PARTITIONS = ("biased", "dirichlet", "none")


class Subset(NamedTuple):
    """The train images of one network of a pair, A or B, or those that are withheld from both.

    Of the images that are not withheld, with the split

    - `biased`, A sees the part `skew` of those of one half of the classes and the rest of the other half's;
    - `dirichlet`, A sees a part of each class that is drawn from the beta distribution with both parameters `skew`,
      which is the Dirichlet distribution for two;
    - `none`, both see all.

    In the first two B sees whatever A does not. All of it is drawn from the pair's seed.
    """

    split: str
    skew: float
    withheld: int
    seed: int
    who: str  # A, B or withheld

    @property
    def name(self) -> str:
        """What folders call it."""
        return f"split={self.split}-{self.skew:g},withheld={self.withheld},images={self.who}{self.seed}"

    def expected_count(self, images: int) -> int:
        """About how many of so many images it has."""
        if self.who == "withheld":
            return self.withheld
        return (images - self.withheld) // (1 if self.split == "none" else 2)

    def rows(self, labels: Int32[np.ndarray, "n"]) -> Int64[np.ndarray, "m"]:
        """The indices of its images, in a random order."""
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
