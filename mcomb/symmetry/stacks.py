"""Parameters that are read entry by entry, as `layers[i]` reads a stack of layers: each entry may have its own order.

While a function is interpreted, every entry that is read has axes of its own (`Interpreter.read_entry`). Afterwards
`unite_entries` looks at what these were united with:

    hidden = jnp.tanh(x @ up[i])    # the hidden units of entry i of `up`
    x = x + hidden @ down[i]        # are those of entry i of `down`; x is the same for all entries

Where axes of entries move with those of the same entries of other stacks, and with nothing else, a permutation may be
batched over the entries: the arrays in which it acts are noted to be at that entry, so that `derive` finds it. All
other axes of entries are united with those of the whole.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from mcomb.symmetry.axes import Axis, atoms, find, flat_parts, freeze, merge_cells, split_product, split_segments, unite
from mcomb.symmetry.interpreter import ArrayAxes, Interpreter, Stack

REASON = "entries that are read one by one"


@dataclass(frozen=True, eq=False)
class Family:
    """One axis of a stack, or a part of it, and the same of each of its entries."""

    along: Axis  # the axis of the entries
    whole: Axis
    entries: dict[Hashable, Axis]

    def parts(self) -> "list[Family]":
        """A family for each factor or segment of the axis, if it is taken apart in some entry."""
        for axis in (self.whole, *self.entries.values()):
            merge_cells(axis, REASON)
        composite = next((entry for entry in map(find, self.entries.values()) if entry.parts), None)
        if composite is None:
            return [self]
        split = split_product if composite.kind == "blocks" else split_segments
        sizes = [part.size for part in flat_parts(composite, composite.kind)]
        wholes, *entries = (split(axis, sizes, REASON) for axis in (self.whole, *self.entries.values()))
        if wholes is None or None in entries:
            return [self]
        of_part = zip(wholes, zip(*entries, strict=True), strict=True)
        families = [Family(self.along, whole, dict(zip(self.entries, axes, strict=True))) for whole, axes in of_part]
        return [part for family in families for part in family.parts()]

    def unite(self) -> None:
        """Gives all entries one order."""
        for entry in self.entries.values():
            unite(self.whole, entry, REASON)


@dataclass
class Group:
    """Families whose entries move together."""

    families: list[Family] = field(default_factory=list)

    def is_sound(self, elsewhere: set[Axis], in_loops: set[Axis]) -> bool:
        """Whether their entries move with one another, entry by entry, and with nothing else.

        A loop may carry an array from one entry to another, of which it is not known which it is.
        """
        first = self.families[0]
        seen: set[Axis] = set()
        for index, entry in first.entries.items():
            if any(find(family.entries.get(index, first.whole)) is not find(entry) for family in self.families):
                return False
            own = {*atoms(entry)}
            loose = own & elsewhere or own & seen or any(atom.frozen is not None for atom in own)
            if loose or (not isinstance(index, int) and own & in_loops):
                return False
            seen |= own
        same = all(family.entries.keys() == first.entries.keys() for family in self.families)
        return same and len({family.along.size for family in self.families}) == 1


def unite_entries(leaves: Iterable[ArrayAxes], interp: Interpreter) -> None:
    """Unites the axes of entries with those of the whole stack, or notes where they are of one entry alone."""
    leaves = list(leaves)
    stacks = [leaf for leaf in leaves if isinstance(leaf, Stack) and leaf.entries]
    families = [part for stack in stacks for family in _families(stack) for part in family.parts()]
    elsewhere = {atom for leaf in leaves for axis in leaf if axis is not None for atom in atoms(axis)}
    in_loops = {atom for axis in interp.loop_axes for atom in atoms(axis)}
    while True:
        groups = _groups(families)
        bad = [group for group in groups if not group.is_sound(elsewhere, in_loops)]
        for family in [family for group in bad for family in group.families]:
            family.unite()
            families.remove(family)
            elsewhere |= {*atoms(family.whole)}
        if not bad:
            break
    for group in groups:
        for family in group.families[1:]:
            unite(group.families[0].along, family.along, REASON)
    at = {
        atom: (index, find(group.families[0].along))
        for group in groups
        for index, entry in group.families[0].entries.items()
        for atom in atoms(entry)
    }
    if at:
        for array in (array for arrays in interp.operations for array in arrays):
            found = {at[atom] for _, axis in array for atom in atoms(axis) if atom in at}
            array += [(("entry", index), along) for index, along in found]
    for family in families:
        family.unite()


def _families(stack: Stack) -> list[Family]:
    """The families of a stack that is only read entry by entry; the entries of any other are united with the whole."""
    along = stack[stack.along] if stack.along is not None else None
    assert along is not None
    families = [
        Family(along, axis, {index: entry[i] for index, entry in stack.entries.items()})  # type: ignore[misc]
        for i, axis in enumerate(stack)
        if axis is not None and i != stack.along
    ]
    for index in stack.entries:
        sizes = [size for size in (index, 1, along.size - index - 1) if size] if isinstance(index, int) else []
        if not (stack.is_whole and sizes) or split_segments(along, sizes, REASON) is None:
            freeze(along, REASON)
    if not stack.is_whole:
        return families
    for family in families:
        family.unite()
    return []


def _groups(families: Iterable[Family]) -> list[Group]:
    """The families, those together of which any entries move together."""
    groups: list[tuple[Group, set[Axis]]] = []
    for family in families:
        axes = {atom for entry in family.entries.values() for atom in atoms(entry)}
        joined, together = Group([family]), axes
        for group, others in [pair for pair in groups if pair[1] & axes]:
            joined.families[:0] = group.families
            together = together | others
        groups = [pair for pair in groups if not pair[1] & axes] + [(joined, together)]
    return [group for group, _ in groups]
