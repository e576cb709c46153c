"""Split train examples between two networks to merge, so that each sees different examples."""

import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

PARTITIONS = ("biased", "dirichlet", "none")


class Subset(NamedTuple):
    """The train examples of network A or B of a pair, or the examples withheld from both.

    Each example has a group: its class, or its part of a text. The split assigns the examples that are not withheld:

    - `biased`: A sees the fraction `skew` of one half of the groups, and the fraction 1 − `skew` of the other half.
    - `dirichlet`: A sees a random fraction of each group. The fraction follows the beta distribution with both
      parameters `skew`, which is the Dirichlet distribution for two networks.
    - `none`: both networks see all examples.

    For the first two, B sees the remaining examples. The pair's seed determines all random choices.
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

    def expected_count(self, examples: int) -> int:
        """Return the expected size of this subset, out of `examples` train examples."""
        if self.who == "withheld":
            return self.withheld
        return (examples - self.withheld) // (1 if self.split == "none" else 2)

    def rows(self, groups: Integer[np.ndarray, "n"]) -> Int64[np.ndarray, "m"]:
        """Return the indices of its examples in random order, given the group of each example."""
        count = int(groups.max()) + 1
        rng = np.random.default_rng([self.seed, zlib.crc32(b"split")])
        order = rng.permutation(len(groups))
        withheld, seen = np.split(order, [self.withheld])
        favoured = np.isin(np.arange(count), rng.permutation(count)[: count // 2])
        of_a = np.where(favoured, self.skew, 1 - self.skew)
        if self.split == "dirichlet":
            of_a = rng.beta(self.skew, self.skew, count)
        parts: dict[str, list[np.ndarray]] = {"A": [], "B": [], "withheld": [withheld]}
        for group, part in enumerate(of_a):
            mine = seen[groups[seen] == group]
            cut = round(part * len(mine))
            for who, rows in (("A", mine[:cut]), ("B", mine[cut:])):
                parts[who].append(mine if self.split == "none" else rows)
        return rng.permutation(np.concatenate(parts[self.who]))
