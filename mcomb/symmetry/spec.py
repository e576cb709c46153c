"""The permutation symmetries of a network: which axes of which parameters must be permuted together.

`perms` is a plain dict from a permutation's name to an index array; applying one takes `axis[perm]`. A permutation
can be batched over other axes, as that of the dimensions of an attention head over the heads. Its index array has a
row for each head, in the order that the heads themselves are put in: new[h, d] = old[heads[h], dims[h, d]].
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from mcomb.errors import UserError, list_some
from mcomb.symmetry.check import check_spec
from mcomb.trees import Apply, Array, Inputs, Params, map_named, named_leaves

Perms = dict[str, Int[Array, "..."]]
DERIVE = "derive the spec from these parameters"


@dataclass(frozen=True)
class Blocks:
    """The layout of an axis that is the row-major product of its factors, as flattening leaves it.

    Blocks((49, "P")) is the axis of a flattened 7×7 image with the channels of P, which permutes each of its 49 blocks.
    In Blocks(("heads", "dims")) the blocks are permuted by "heads", and the positions in each block by "dims".
    """

    factors: tuple["str | int | Blocks | Segments", ...]


@dataclass(frozen=True)
class Segments:
    """The layout of an axis whose parts follow one another, as concatenation leaves it.

    Segments(("P", 2, "Q")) is an axis with the units of P, then two that stay where they are, then those of Q.
    """

    parts: tuple["str | int | Blocks | Segments", ...]


Layout = str | int | Blocks | Segments | None
"""How an axis is permuted: by the named permutation, not at all (None, or its size), or part by part."""

Axes = Mapping[str, tuple[Layout, ...]]


@dataclass(frozen=True)
class Frozen:
    """An axis of a leaf of which some positions must stay, and the operation that is the reason."""

    leaf: str
    axis: int
    reason: str


@dataclass(frozen=True)
class PermutationSpec:
    """For each leaf, by name, the layout of each of its axes; and the size of each permutation.

    A permutation in `batched_over` is one for each position along the axes named there, as vmap would batch it. They
    are axes of other permutations, or of `fixed`, which are never permuted. With two heads of four dimensions,

        sizes={"heads": 2, "dims": 4}, batched_over={"dims": ("heads",)}

    the index array of "heads" has the shape (2,), and that of "dims" (2, 4).
    """

    axes: Axes
    sizes: Mapping[str, int]
    batched_over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()

    @classmethod
    def from_axes(cls, params: Params, axes: Axes) -> "PermutationSpec":
        """Return the spec that `axes` describes, each permutation's size taken from an axis whose layout is its name.

        PermutationSpec.from_axes(params, {"up": (None, "P"), "bias": ("P",), "down": ("P", None)})
        """
        leaves = named_leaves(params)
        sizes: dict[str, int] = {}
        for name, layouts in axes.items():
            for size, layout in zip(np.shape(leaves.get(name, ())), layouts, strict=False):
                if isinstance(layout, str):
                    sizes.setdefault(layout, size)
        spec = cls(axes, sizes)
        spec.validate(params)
        return spec

    def __hash__(self) -> int:  # mappings have none, but jit's static arguments need one
        return hash(frozenset(self.sizes.items()))

    def validate(self, params: Params) -> None:
        """Raise an error that names the leaf unless every axis of every leaf has a layout of its size."""
        leaves = named_leaves(params)
        for name in sorted(leaves.keys() | self.axes.keys()):
            if name not in self.axes:
                raise UserError(f"the permutation spec says nothing of {name}: add its axes")
            if name not in leaves:
                raise UserError(f"the permutation spec names {name}, which the parameters lack: remove it")
            shape, layouts = np.shape(leaves[name]), self.axes[name]
            if len(shape) != len(layouts):
                raise UserError(
                    f"the permutation spec gives {name} {len(layouts)} axes, but its shape is {shape}: {DERIVE}"
                )
            for axis, (size, layout) in enumerate(zip(shape, layouts, strict=True)):
                unknown = [perm for perm in axis_names(layout) if perm not in self.sizes and perm not in self.fixed]
                if unknown:
                    raise UserError(f"axis {axis} of {name}: the size of permutation {unknown[0]} is not known")
                if layout is not None and self.length(layout) != size:
                    whose = f"permutation {layout}" if isinstance(layout, str) else f"its layout {layout!s:.100}"
                    raise UserError(
                        f"axis {axis} of {name} has {size} entries, but {whose} has {self.length(layout)}: {DERIVE}"
                    )
            for (perm, outer), count in self.unclear_batch_axes(name):
                raise UserError(
                    f"permutation {perm} differs along {outer}, which {name} has {count} times where it must have it "
                    "once"
                )

    def unclear_batch_axes(self, leaf: str) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield a permutation and an axis that it is batched over, if a part of the leaf does not have it just once.

        With each pair comes the number of times.
        """
        for labels, _ in self.simple_parts(self.axes[leaf], None):
            for perm in (label for label in labels if isinstance(label, str)):
                for outer in self.batched_over.get(perm, ()):
                    if (count := labels.count(outer)) != 1:
                        yield (perm, outer), count

    def axes_of(self, perm: str) -> list[tuple[str, int]]:
        """Return the (leaf, axis) pairs that a permutation acts on."""
        return [
            (name, axis)
            for name, layouts in self.axes.items()
            for axis, layout in enumerate(layouts)
            if perm in axis_names(layout)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a permutation's index array."""
        return (*(self.length(outer) for outer in self.batched_over.get(name, ())), self.sizes[name])

    def log10_arrangements(self, *names: str) -> float:
        """Return the decimal logarithm of how many arrangements these permutations have together, or else all.

        A permutation of two heads has 2, and one of the four dimensions of each head has 24 · 24.
        """
        rows = ((math.prod(self.shape(name)[:-1]), self.sizes[name]) for name in names or self.sizes)
        return sum(count * math.lgamma(size + 1) for count, size in rows) / math.log(10)

    def nested_in(self, name: str) -> list[str]:
        """Return the permutations inside of a permutation's units: nested_in("heads") is ["dims"]."""
        outer = self.batched_over.get(name, ())
        return [other for other, batch_axes in self.batched_over.items() if batch_axes == (*outer, name)]

    def length(self, layout: str | int | Blocks | Segments) -> int:
        """Return the size of an axis of this layout."""
        if isinstance(layout, str):
            return self.sizes[layout] if layout in self.sizes else self.fixed[layout]
        if isinstance(layout, int):
            return layout
        if isinstance(layout, Blocks):
            return math.prod(self.length(factor) for factor in layout.factors)
        return sum(self.length(part) for part in layout.parts)

    def simple_parts(self, layouts: tuple[Layout, ...], value: Any) -> Iterator[tuple[tuple[Layout, ...], Any]]:
        """Yield the parts of an array in which every axis has one name or none, each with these names.

        An array of layout (Segments(("P", 3)), Blocks((2, "Q"))) has two parts, (P, 2, Q) and (3, 2, Q). The value may
        be None, if only the names are wanted.
        """
        for axis, layout in enumerate(layouts):
            before, after = layouts[:axis], layouts[axis + 1 :]
            if isinstance(layout, Blocks):
                if value is not None:
                    lengths = tuple(self.length(factor) for factor in layout.factors)
                    value = value.reshape(value.shape[:axis] + lengths + value.shape[axis + 1 :])
                yield from self.simple_parts(before + layout.factors + after, value)
                return
            if isinstance(layout, Segments):
                segments: list[Any] = [None] * len(layout.parts)
                if value is not None:
                    segments = np.split(value, np.cumsum([self.length(part) for part in layout.parts])[:-1], axis)
                for part, segment in zip(layout.parts, segments, strict=True):
                    yield from self.simple_parts((*before, part, *after), segment)
                return
        yield layouts, value

    def check_perms(self, perms: Perms) -> None:
        """Raise an error that names the first of `perms` that is no permutation of the spec, as far as it is known.

        Arrays that JAX is tracing are known by their shapes alone.
        """
        if not isinstance(perms, Mapping) or perms.keys() != self.sizes.keys():
            wanted = list_some(self.sizes) or "none"
            if isinstance(perms, Mapping):
                names = list_some(perms) or "nothing"
                raise UserError(
                    f"permutations are given for {names}, and the spec has {wanted}: give one for each name"
                )
            kind, inside = type(perms).__name__, getattr(perms, "perms", None)
            remedy = "give a dict with an index array for each"
            if hasattr(perms, "matching"):
                remedy = "give its matching.perms"
            elif inside is not None:
                remedy = f"give its {'perms' if isinstance(inside, Mapping) else 'perms[i], those of network i'}"
            raise UserError(f"the permutations {wanted} are given as an object of type {kind}: {remedy}")
        for name, perm in perms.items():
            dtype = getattr(perm, "dtype", None)
            if np.shape(perm) != self.shape(name) or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
                raise UserError(
                    f"permutation {name} has shape {np.shape(perm)} and dtype {dtype}: give an array of indices, of "
                    f"shape {self.shape(name)}"
                )
            if not isinstance(perm, jax.core.Tracer) and (np.sort(perm, -1) != np.arange(self.sizes[name])).any():
                raise UserError(f"permutation {name} does not have each index from 0 to {self.sizes[name] - 1} once")

    def apply(self, perms: Perms, params: Params) -> Params:
        """Return the permuted parameters: the same function, its hidden units in another order."""
        self.check_perms(perms)
        self.validate(params)
        return map_named(lambda name, leaf: self.permute_array(perms, self.axes[name], leaf), params)

    def check(
        self, apply: Apply, params: Params, inputs: Inputs, *, perms: Perms | None = None, draws: int = 2
    ) -> None:
        """Check that random permutations leave the function unchanged.

        A float output may change by √eps of its largest entry, where eps is that of the coarsest float dtype inside.
        Some entry must be finite and not zero.

        Args:
            apply: The function, called as `apply(params, inputs)`.
            params: Parameters of a network.
            inputs: Example inputs.
            perms: Further permutations to check.
            draws: Number of random permutations.

        Raises:
            UserError: The spec does not fit the parameters, or a permutation changes the output.

        Examples:
            >>> spec.check(apply, b, x)
        """
        check_spec(self, apply, params, inputs, perms=perms, draws=draws)

    def identity(self) -> Perms:
        """Return the permutations that change nothing."""
        return {name: np.broadcast_to(np.arange(self.sizes[name]), self.shape(name)).copy() for name in self.sizes}

    def random(self, key: PRNGKeyArray) -> Perms:
        """Return uniformly random permutations."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # compiles nothing
        return {name: rng.permuted(rows, axis=-1) for name, rows in self.identity().items()}

    def invert(self, perms: Perms) -> Perms:
        """Return the permutations that undo `perms`."""
        self.check_perms(perms)
        undo: Perms = {}
        # Outer permutations first: whatever "heads" is batched over, "dims" is batched over as well.
        for name in sorted(self.sizes, key=lambda name: len(self.shape(name))):
            undo[name] = np.argsort(self._permute_rows(undo, name, perms[name]), axis=-1)
        return {name: undo[name] for name in self.sizes}

    def compose(self, p: Perms, q: Perms) -> Perms:
        """Return `p` after `q`: apply(compose(p, q), x) is apply(p, apply(q, x))."""
        self.check_perms(p)
        self.check_perms(q)
        p = {name: np.asarray(perm) for name, perm in p.items()}
        return {
            name: np.take_along_axis(self._permute_rows(p, name, q[name]), np.asarray(p[name]), -1)
            for name in self.sizes
        }

    def __str__(self) -> str:
        """Return a table of each permutation, its size, arrangements and axes; then one of what is frozen and why."""
        rows = []
        for name in self.sizes:
            acts_on = [f"{leaf}[{axis}{self._sketch(leaf, axis, name)}]" for leaf, axis in self.axes_of(name)]
            acts_on += [f"(one for each of {outer})" for outer in self.batched_over.get(name, ())]
            size, count = " × ".join(map(str, self.shape(name))), self.log10_arrangements(name)
            rows.append((name, size, _power_of_ten(count), " ".join(acts_on)))
        if len(rows) > 1:
            rows.append(("in all", "", _power_of_ten(self.log10_arrangements()), ""))
        reasons: dict[str, dict[str, list[str]]] = {}
        for frozen in self.frozen:
            reasons.setdefault(frozen.reason, {}).setdefault(frozen.leaf, []).append(str(frozen.axis))
        frozen_rows = [
            (reason, " ".join(f"{leaf}[{','.join(axes)}]" for leaf, axes in leaves.items()))
            for reason, leaves in reasons.items()
        ]
        head = ("permutation", "size", "arrangements", "acts on")
        tables = [_table(head, rows), _table(("frozen by", "axes"), frozen_rows)]
        return "\n\n".join(tables if reasons else tables[:1])

    def _sketch(self, leaf: str, axis: int, name: str) -> str:
        """Return where in an axis a permutation is, if it is not all of it: `: 49×·`, or `: ·+12`."""

        def sketch(layout: Layout) -> str:
            if isinstance(layout, Blocks):
                inner = (f"({sketch(f)})" if isinstance(f, Segments) else sketch(f) for f in layout.factors)
                return "×".join(inner)
            if isinstance(layout, Segments):
                return "+".join(map(sketch, layout.parts))
            return "·" if layout == name else str(self.length(layout or 0))

        layout = self.axes[leaf][axis]
        return "" if isinstance(layout, str) else f": {sketch(layout)}"

    def _permute_rows(self, perms: Perms, name: str, rows: Array) -> Any:
        """Permute the rows of a permutation's index array as the axes that it is batched over."""
        return self.permute_array(perms, (*self.batched_over.get(name, ()), None), np.asarray(rows))

    def permute_array(self, perms: Perms, layouts: tuple[Layout, ...], leaf: Any) -> Any:
        """Permute the axes of an array as the layouts say; a NumPy array stays one."""
        moving = [axis for axis, layout in enumerate(layouts) if any(n in self.sizes for n in axis_names(layout))]
        if not moving:
            return leaf
        xp: Any = jnp
        if isinstance(leaf, np.ndarray) and not any(isinstance(perm, jax.core.Tracer) for perm in perms.values()):
            xp, perms = np, {name: np.asarray(perm) for name, perm in perms.items()}
        leaf = xp.asarray(leaf)
        positions = np.ogrid[tuple(slice(size) for size in leaf.shape)]
        coordinates = _overlay(map(self._coordinates, layouts, positions))
        sources = {axis: self._source(perms, layouts[axis], positions[axis], coordinates) for axis in moving}
        if any(source.size > leaf.shape[axis] for axis, source in sources.items()):
            return leaf[tuple(sources.get(axis, position) for axis, position in enumerate(positions))]
        for axis, source in sources.items():
            leaf = xp.take(leaf, source.ravel(), axis)
        return leaf

    def units_of(
        self, layouts: tuple[Layout, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
        """Yield the units at each position of an array, axis by axis.

        Each is a permutation's name, the indices into its index array, and at which positions there is a unit at all.
        """
        positions = np.ogrid[tuple(slice(size) for size in shape)]
        coordinates = _overlay(map(self._coordinates, layouts, positions))
        for layout, position in zip(layouts, positions, strict=True):
            for perm, index, stride in self._terms(layout, position, coordinates):
                if perm is not None:
                    yield perm, index, stride > 0

    def add_units(self, values: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
        """Sum for each weight of a leaf the values of the units that it connects; 0 where there are none.

        `values` has an array of the shape of each permutation that is named by the leaf's axes.
        """
        total: Any = jnp.zeros(())
        for perm, index, is_unit in self.units_of(self.axes[name], shape):
            total = total + is_unit * values[perm][index]
        return jnp.broadcast_to(total, shape)

    def sum_weights(self, values: Params) -> dict[str, Float[np.ndarray, "..."]]:
        """Sum for each unit of each permutation the values of all weights that come into it or go out of it.

        `values` is a tree like the parameters. A weight that connects two units counts for both.
        """
        self.validate(values)
        sums = {name: np.zeros(self.shape(name)) for name in self.sizes}
        for name, leaf in named_leaves(values).items():
            for labels, part in self.simple_parts(self.axes[name], np.asarray(leaf)):
                for axis, perm in enumerate(labels):
                    if isinstance(perm, str) and perm in self.sizes:
                        front = [*map(labels.index, self.batched_over.get(perm, ())), axis]
                        units_first = np.moveaxis(part, front, range(len(front)))
                        sums[perm] += units_first.sum(tuple(range(len(front), part.ndim)), dtype=np.float64)
        return sums

    def _source(self, perms: Perms, layout: Layout, position: np.ndarray, coordinates: dict[str, np.ndarray]) -> Any:
        """Return where along an axis the entries at `position` come from; `coordinates` are positions on named axes."""
        terms = self._terms(layout, position, coordinates)
        return sum((index if perm is None else perms[perm][index]) * stride for perm, index, stride in terms)

    def _terms(
        self, layout: Layout, position: np.ndarray, coordinates: dict[str, np.ndarray], stride: Any = 1
    ) -> Iterator[tuple[str | None, Any, Any]]:
        """Yield the terms whose sum is the positions on an axis: permutations with indices into them, and offsets.

        With each comes what it is multiplied by: the stride in a product, and zero outside of its segment.
        """
        if isinstance(layout, str) and layout in self.sizes:
            yield layout, (*(coordinates[outer] for outer in self.batched_over.get(layout, ())), position), stride
        elif isinstance(layout, Blocks):
            coordinates = _overlay([coordinates, self._coordinates(layout, position)])
            for factor, inner, inner_stride in self._unravel(layout, position):
                yield from self._terms(factor, inner, coordinates, stride * inner_stride)
        elif isinstance(layout, Segments):
            start = 0
            for part in layout.parts:
                size = self.length(part)
                inside = stride * ((position >= start) & (position < start + size))
                yield None, start, inside
                yield from self._terms(part, np.clip(position - start, 0, size - 1), coordinates, inside)
                start += size
        else:
            yield None, position, stride

    def _coordinates(self, layout: Layout, position: np.ndarray) -> dict[str, np.ndarray]:
        """Return the position along each named part of an axis, -1 where it is none, for each position on the axis."""
        if isinstance(layout, str):
            return {layout: position}
        if isinstance(layout, Blocks):
            return _overlay(self._coordinates(factor, inner) for factor, inner, _ in self._unravel(layout, position))
        coordinates: dict[str, np.ndarray] = {}
        start = 0
        for part in layout.parts if isinstance(layout, Segments) and self.batched_over else ():
            size = self.length(part)
            inside = (position >= start) & (position < start + size)
            inner = self._coordinates(part, np.clip(position - start, 0, size - 1))
            coordinates = _overlay([coordinates, {name: np.where(inside, at, -1) for name, at in inner.items()}])
            start += size
        return coordinates

    def _unravel(self, blocks: Blocks, position: np.ndarray) -> Iterator[tuple[Layout, np.ndarray, int]]:
        """Yield each factor of a product with the position along it and its stride, as in `np.unravel_index`."""
        stride = self.length(blocks)
        for factor in blocks.factors:
            size = self.length(factor)
            stride //= size
            yield factor, position // stride % size, stride


def _overlay(each: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the last of several coordinates of each name; where that is none (-1), the one before."""
    result: dict[str, np.ndarray] = {}
    for coordinates in each:
        for name, position in coordinates.items():
            partial = name in result and (position < 0).any()
            result[name] = np.where(position < 0, result[name], position) if partial else position
    return result


def require_spec(spec: Any) -> None:
    """Raise an error unless it is a permutation spec."""
    if not isinstance(spec, PermutationSpec):
        remedy = "derive it with mcomb.derive_spec(apply, params, inputs)"
        raise UserError(f"the permutation spec is an object of type {type(spec).__name__}: {remedy}")


def axis_names(layout: Layout) -> list[str]:
    """Return the names in a layout, in order."""
    if isinstance(layout, str):
        return [layout]
    inner = layout.factors if isinstance(layout, Blocks) else layout.parts if isinstance(layout, Segments) else ()
    return [name for part in inner for name in axis_names(part)]


def _power_of_ten(exponent: float) -> str:
    """Return a whole number from its logarithm: in full up to a million, and else the next power of ten."""
    return f"{round(10**exponent):,}" if exponent < 6 else f"10^{round(exponent)}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Align columns, and wrap the last."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)][:-1]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for *first, last in [head, *rows]:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(first, widths, strict=True))
        wrapped = textwrap.fill(last, max(115, indent + 40), initial_indent=start, subsequent_indent=" " * indent,
                                break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines.append((wrapped or start).rstrip())
    return "\n".join(lines)
