"""The permutation symmetries of a network: which axes of which parameters must move together.

`perms` is a plain dict from a permutation's name to an index array; applying one takes `axis[perm]`. A family of
permutations, such as one for each head of an attention layer, is an array with a row for each member. Row h then
belongs to the head that is h-th after the heads themselves have moved: new[h, d] = old[heads[h], dims[h, d]].
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Int, PRNGKeyArray

from mcomb.base import Array, Params, UserError, map_named, named_leaves

Perms = dict[str, Int[Array, "..."]]


@dataclass(frozen=True)
class Blocks:
    """An axis whose positions are the row-major product of its factors, as flattening leaves it."""

    factors: tuple["str | int | Blocks | Segments", ...]


@dataclass(frozen=True)
class Segments:
    """An axis whose parts follow one another, as concatenation leaves it."""

    parts: tuple["str | int | Blocks | Segments", ...]


Layout = str | int | Blocks | Segments | None
"""How an axis moves: by the named permutation, not at all (None, or how many positions), or part by part."""

Axes = Mapping[str, tuple[Layout, ...]]


@dataclass(frozen=True)
class Frozen:
    """An axis of a leaf of which some positions must stay, and the operation that holds them."""

    leaf: str
    axis: int
    why: str


@dataclass(frozen=True)
class PermutationSpec:
    """For each leaf, by name, how each of its axes moves; and the size of each permutation.

    A permutation in `families` is one for each position along the axes named there: other permutations', or
    those of `fixed`, which never move.
    """

    axes: Axes
    sizes: Mapping[str, int]
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()

    @classmethod
    def of(cls, params: Params, axes: Axes) -> "PermutationSpec":
        """The spec that `axes` describes, each permutation's size read off an axis that is wholly its own."""
        leaves = named_leaves(params)
        sizes: dict[str, int] = {}
        for name, layouts in axes.items():
            for size, layout in zip(np.shape(leaves.get(name, ())), layouts, strict=False):
                if isinstance(layout, str):
                    sizes.setdefault(layout, size)
        spec = cls(axes, sizes)
        spec.validate(params)
        return spec

    def __hash__(self) -> int:  # mappings have none, but what is compiled for a spec is kept under it
        return hash(frozenset(self.sizes.items()))

    def validate(self, params: Params) -> None:
        """Raises an error that names the leaf unless every axis of every leaf is accounted for and fits."""
        leaves = named_leaves(params)
        for name in sorted(leaves.keys() | self.axes.keys()):
            if name not in self.axes:
                raise UserError(f"the permutation spec says nothing of {name}: add its axes")
            if name not in leaves:
                raise UserError(f"the permutation spec names {name}, which the parameters lack: remove it")
            shape, layouts = np.shape(leaves[name]), self.axes[name]
            if len(shape) != len(layouts):
                raise UserError(f"the permutation spec gives {name} {len(layouts)} axes, but its shape is {shape}")
            for axis, (size, layout) in enumerate(zip(shape, layouts, strict=True)):
                unknown = [perm for perm in names_in(layout) if perm not in self.sizes and perm not in self.fixed]
                if unknown:
                    raise UserError(f"axis {axis} of {name}: the size of permutation {unknown[0]} is not known")
                if layout is not None and self.length(layout) != size:
                    whose = f"permutation {layout}" if isinstance(layout, str) else f"its layout {layout}"
                    raise UserError(f"axis {axis} of {name} has {size} entries, but {whose} has {self.length(layout)}")
            for labels, _ in self.pieces(layouts, np.broadcast_to(0, shape)):
                for perm in labels:
                    for parent in self.families.get(perm, ()) if isinstance(perm, str) else ():
                        if labels.count(parent) != 1:
                            raise UserError(
                                f"permutation {perm} differs along {parent}, which {name} has "
                                f"{labels.count(parent)} times where it must have it once"
                            )

    def places(self, perm: str) -> list[tuple[str, int]]:
        """The (leaf, axis) pairs that a permutation acts on."""
        return [
            (name, axis)
            for name, layouts in self.axes.items()
            for axis, layout in enumerate(layouts)
            if perm in names_in(layout)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a permutation's index array."""
        return (*(self.length(parent) for parent in self.families.get(name, ())), self.sizes[name])

    def inside(self, name: str) -> list[str]:
        """The permutations of what is inside a permutation's units, such as a head's dimensions."""
        family = self.families.get(name, ())
        return [other for other, along in self.families.items() if along == (*family, name)]

    def length(self, layout: str | int | Blocks | Segments) -> int:
        """How many positions an axis of this layout has."""
        if isinstance(layout, str):
            return self.sizes[layout] if layout in self.sizes else self.fixed[layout]
        if isinstance(layout, int):
            return layout
        if isinstance(layout, Blocks):
            return math.prod(self.length(factor) for factor in layout.factors)
        return sum(self.length(part) for part in layout.parts)

    def pieces(self, layouts: tuple[Layout, ...], value: Any) -> Iterator[tuple[tuple[Layout, ...], Any]]:
        """The parts of an array in which every axis is one permutation's or none's, with their names."""
        for axis, layout in enumerate(layouts):
            before, after = layouts[:axis], layouts[axis + 1 :]
            if isinstance(layout, Blocks):
                lengths = tuple(self.length(factor) for factor in layout.factors)
                unfolded = value.reshape(value.shape[:axis] + lengths + value.shape[axis + 1 :])
                yield from self.pieces(before + layout.factors + after, unfolded)
                return
            if isinstance(layout, Segments):
                ends = np.cumsum([self.length(part) for part in layout.parts])
                for part, piece in zip(layout.parts, np.split(value, ends[:-1], axis), strict=True):
                    yield from self.pieces((*before, part, *after), piece)
                return
        yield layouts, value

    def apply(self, perms: Perms, params: Params) -> Params:
        """The permuted parameters: the same function, its hidden units in another order."""
        return map_named(lambda name, leaf: self.moved(perms, self.axes[name], leaf), params)

    def identity(self) -> Perms:
        """The permutations that change nothing."""
        return {name: np.broadcast_to(np.arange(self.sizes[name]), self.shape(name)).copy() for name in self.sizes}

    def random(self, key: PRNGKeyArray) -> Perms:
        """Uniformly random permutations."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # compiles nothing
        return {name: rng.permuted(rows, axis=-1) for name, rows in self.identity().items()}

    def invert(self, perms: Perms) -> Perms:
        """The permutations that undo `perms`."""
        undo: Perms = {}
        # What a family is indexed by comes first: its own families are among the family's.
        for name in sorted(self.sizes, key=lambda name: len(self.shape(name))):
            undo[name] = np.argsort(self.moved(undo, self._rows(name), np.asarray(perms[name])), axis=-1)
        return {name: undo[name] for name in self.sizes}

    def compose(self, p: Perms, q: Perms) -> Perms:
        """`p` after `q`: apply(compose(p, q), x) is apply(p, apply(q, x))."""
        p = {name: np.asarray(perm) for name, perm in p.items()}
        return {
            name: np.take_along_axis(self.moved(p, self._rows(name), np.asarray(q[name])), np.asarray(p[name]), -1)
            for name in self.sizes
        }

    def __str__(self) -> str:
        """A table: each permutation, its size and what it acts on; then what is frozen and by what."""
        rows = []
        for name in self.sizes:
            places = [f"{leaf}[{axis}{self._sketch(leaf, axis, name)}]" for leaf, axis in self.places(name)]
            each = [f"(one for each of {parent})" for parent in self.families.get(name, ())]
            rows.append((name, " × ".join(map(str, self.shape(name))), " ".join(places + each)))
        reasons: dict[str, dict[str, list[str]]] = {}
        for frozen in self.frozen:
            reasons.setdefault(frozen.why, {}).setdefault(frozen.leaf, []).append(str(frozen.axis))
        frozen_rows = [
            (why, " ".join(f"{leaf}[{','.join(axes)}]" for leaf, axes in places.items()))
            for why, places in reasons.items()
        ]
        tables = [_table(("permutation", "size", "acts on"), rows), _table(("frozen by", "axes"), frozen_rows)]
        return "\n\n".join(tables if reasons else tables[:1])

    def _sketch(self, leaf: str, axis: int, name: str) -> str:
        """Where in an axis a permutation is, if it is not all of it: `: 49×·`, or `: ·+12`."""

        def drawn(layout: Layout) -> str:
            if isinstance(layout, Blocks):
                inner = (f"({drawn(f)})" if isinstance(f, Segments) else drawn(f) for f in layout.factors)
                return "×".join(inner)
            if isinstance(layout, Segments):
                return "+".join(map(drawn, layout.parts))
            return "·" if layout == name else str(self.length(layout or 0))

        layout = self.axes[leaf][axis]
        return "" if isinstance(layout, str) else f": {drawn(layout)}"

    def _rows(self, name: str) -> tuple[Layout, ...]:
        """How the axes of a permutation's index array move when the permutations that index it do."""
        return (*self.families.get(name, ()), None)

    def moved(self, perms: Perms, layouts: tuple[Layout, ...], leaf: Any) -> Any:
        """An array with its axes permuted as the layouts say; a NumPy array stays one."""
        moving = [axis for axis, layout in enumerate(layouts) if any(n in self.sizes for n in names_in(layout))]
        if not moving:
            return leaf
        xp: Any = np if all(isinstance(value, np.ndarray) for value in (leaf, *perms.values())) else jnp
        leaf = xp.asarray(leaf)
        positions = np.ogrid[tuple(slice(size) for size in leaf.shape)]
        along: dict[str, np.ndarray] = {}
        for layout, position in zip(layouts, positions, strict=True):
            along |= self._digits(layout, position)
        sources = {axis: self._source(perms, layouts[axis], positions[axis], along) for axis in moving}
        if any(source.size > leaf.shape[axis] for axis, source in sources.items()):
            return leaf[tuple(sources.get(axis, position) for axis, position in enumerate(positions))]
        for axis, source in sources.items():
            leaf = xp.take(leaf, source.ravel(), axis)
        return leaf

    def _source(self, perms: Perms, layout: Layout, position: np.ndarray, along: dict[str, np.ndarray]) -> Any:
        """Where along an axis the entries at `position` come from; `along` has the positions on named axes."""
        if isinstance(layout, str) and layout in self.sizes:
            return perms[layout][(*(along[parent] for parent in self.families.get(layout, ())), position)]
        if isinstance(layout, Blocks):
            along = along | self._digits(layout, position)
            return sum(
                self._source(perms, factor, digit, along) * stride
                for factor, digit, stride in self._unfolded(layout, position)
            )
        if isinstance(layout, Segments):
            total, start = 0, 0
            for part in layout.parts:
                size = self.length(part)
                inside = (position >= start) & (position < start + size)
                local = np.clip(position - start, 0, size - 1)
                total = total + inside * (start + self._source(perms, part, local, along))
                start += size
            return total
        return position

    def _digits(self, layout: Layout, position: np.ndarray) -> dict[str, np.ndarray]:
        """The position along each named factor of an axis, for each position on the axis."""
        if isinstance(layout, str):
            return {layout: position}
        if isinstance(layout, Blocks):
            inner = (self._digits(factor, digit) for factor, digit, _ in self._unfolded(layout, position))
            return {name: digit for digits in inner for name, digit in digits.items()}
        return {}

    def _unfolded(self, blocks: Blocks, position: np.ndarray) -> Iterator[tuple[Layout, np.ndarray, int]]:
        """Each factor of a product with the position along it and its stride."""
        stride = self.length(blocks)
        for factor in blocks.factors:
            size = self.length(factor)
            stride //= size
            yield factor, position // stride % size, stride


def check_spec(
    fn: Callable[..., Any],
    params: Params,
    spec: PermutationSpec,
    *inputs: Any,
    perms: Perms | None = None,
    draws: int = 2,
) -> None:
    """Raises an error unless random permutations, and `perms` if given, leave `fn(params, *inputs)` as it is.

    Compares every output to half the digits that the coarsest float dtype in the computation resolves.
    """
    spec.validate(params)
    tolerance = _resolution(jax.make_jaxpr(fn)(params, *inputs).jaxpr) ** 0.5
    run = jax.jit(lambda perms, params, inputs: fn(spec.apply(perms, params), *inputs))
    candidates = [spec.random(jax.random.key(draw)) for draw in range(draws)] + ([perms] if perms else [])
    with jax.default_matmul_precision("highest"):
        before = named_leaves(run(spec.identity(), params, inputs))
        for candidate in candidates:
            after = named_leaves(run(candidate, params, inputs))
            for name in before:
                _check_equal(f"output {name}" if name else "the output", before[name], after[name], tolerance)


def _check_equal(what: str, before: Array, after: Array, tolerance: float) -> None:
    exact = not jnp.issubdtype(before.dtype, jnp.inexact)
    dtype = np.float64 if exact or not jnp.iscomplexobj(before) else np.complex128
    old, new = (np.asarray(value).astype(dtype) for value in (before, after))
    difference, scale = np.abs(old - new).max(initial=0), np.abs(old).max(initial=0)
    if not difference <= (0 if exact else tolerance * scale):
        raise UserError(
            f"the permuted network computes another function ({what} differs by {difference:.2g} "
            f"where its largest entry is {scale:.2g}): the permutation spec does not fit the model"
        )


def _resolution(jaxpr: Any) -> float:
    """The relative spacing of the coarsest float dtype among the arrays of a computation."""
    arrays = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    dtypes = [var.aval.dtype for var in arrays if hasattr(var.aval, "dtype")]
    spacings = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    inner = jax.tree.leaves([list(eqn.params.values()) for eqn in jaxpr.eqns], is_leaf=_is_jaxpr)
    return max([0.0, *spacings, *(_resolution(getattr(one, "jaxpr", one)) for one in inner if _is_jaxpr(one))])


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def names_in(layout: Layout) -> list[str]:
    """The named axes within an axis, in order."""
    if isinstance(layout, str):
        return [layout]
    inner = layout.factors if isinstance(layout, Blocks) else layout.parts if isinstance(layout, Segments) else ()
    return [name for part in inner for name in names_in(part)]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns, of which the last is wrapped."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)][:-1]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for *first, last in [head, *rows]:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(first, widths, strict=True))
        wrapped = textwrap.fill(last, max(115, indent + 40), initial_indent=start, subsequent_indent=" " * indent,
                                break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines.append(wrapped.rstrip())
    return "\n".join(lines)
