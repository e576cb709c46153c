"""Permutation symmetries of a network: which axes of which parameters must be permuted together.

`perms` is a plain dict from a permutation's name to an index array. Applying a permutation computes `axis[perm]`. A
permutation can be batched over other axes: each attention head has its own permutation of dimensions. The index array
then has one row for each head, in the order of the permuted heads: new[h, d] = old[heads[h], dims[h, d]].
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from mcomb.errors import UserError, list_some
from mcomb.symmetry.check import check_spec
from mcomb.trees import Apply, Array, Inputs, Params, map_named, named_leaves

Perms = dict[str, Int[Array, "..."]]
DERIVE = "derive the spec from these parameters."


@dataclass(frozen=True)
class Blocks:
    """The layout of an axis that is the row-major product of its factors, as flattening produces it.

    Blocks((49, "P")) is the axis of a flattened 7×7 image with the channels of P. P permutes each of its 49 blocks. In
    Blocks(("heads", "dims")), "heads" permutes the blocks and "dims" permutes the positions inside each block.

    Args:
        factors: The layout of each factor: a name, a size, or another layout.

    Examples:
        >>> axes = {"kernel": (mcomb.Blocks((49, "P")), None), "bias": ("P",)}
        >>> mcomb.PermutationSpec(axes, {"P": 4}).length(mcomb.Blocks((49, "P")))
        196
    """

    factors: tuple["str | int | Blocks | Segments", ...]


@dataclass(frozen=True)
class Segments:
    """The layout of an axis that concatenates its parts.

    Segments(("P", 2, "Q")) is an axis with the units of P, then two entries that stay in place, then the units of Q.

    Args:
        parts: The layout of each part: a name, a size, or another layout.

    Examples:
        >>> axes = {"kernel": (mcomb.Segments(("P", 2)), None), "bias": ("P",)}
        >>> mcomb.PermutationSpec(axes, {"P": 4}).length(mcomb.Segments(("P", 2)))
        6
    """

    parts: tuple["str | int | Blocks | Segments", ...]


Layout = str | int | Blocks | Segments | None
"""The permutation of an axis: a name, None or a size for an axis that stays in place, or a composite layout."""

Axes = Mapping[str, tuple[Layout, ...]]


@dataclass(frozen=True)
class Frozen:
    """An axis of a leaf with positions that must stay in place, and the operation that froze it."""

    leaf: str
    axis: int
    reason: str


@dataclass(frozen=True, repr=False)
class PermutationSpec:
    """The permutations of a network's hidden units, and the parameter axes that they act on.

    `mcomb.derive_spec` derives a spec from a function. A permutation in `batched_over` has a separate order for each
    position along the named axes, as under `vmap`. With two heads of four dimensions,

        sizes={"heads": 2, "dims": 4}, batched_over={"dims": ("heads",)}

    the index array of "heads" has shape (2,), and that of "dims" has shape (2, 4).

    Args:
        axes: For each leaf, by name, the layout of each of its axes.
        sizes: The number of units of each permutation.
        batched_over: For each batched permutation, the names of its batch axes. They are permutations or `fixed` axes.
        fixed: The sizes of named axes that are never permuted.
        frozen: Axes with positions that must stay in place, each with the reason.

    Examples:
        >>> spec = mcomb.derive_spec(apply, a, x)
        >>> shuffled = spec.apply(spec.random(jax.random.key(0)), a)
        >>> np.allclose(apply(shuffled, x), apply(a, x), atol=1e-4)
        True
    """

    axes: Axes
    sizes: Mapping[str, int]
    batched_over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()

    @classmethod
    def from_axes(cls, params: Params, axes: Axes) -> "PermutationSpec":
        """Return the spec that `axes` describes.

        The size of each permutation is read from an axis whose layout is the permutation's name.

        Args:
            params: Parameters of a network: a tree of arrays.
            axes: For each leaf, by name, the layout of each of its axes.

        Returns:
            The spec.

        Raises:
            UserError: The layouts do not fit the parameters.

        Examples:
            >>> params = {"up": np.zeros((3, 4)), "bias": np.zeros(4), "down": np.zeros((4, 2))}
            >>> axes = {"up": (None, "P"), "bias": ("P",), "down": ("P", None)}
            >>> spec = mcomb.PermutationSpec.from_axes(params, axes)
            >>> spec.sizes
            {'P': 4}
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

    def __hash__(self) -> int:  # static arguments of jit need a hash, which mappings lack
        return hash(frozenset(self.sizes.items()))

    def validate(self, params: Params) -> None:
        """Raise an error unless the spec fits the parameters.

        Every axis of every leaf needs a layout of its size.

        Args:
            params: Parameters of a network: a tree of arrays.

        Raises:
            UserError: A leaf is missing in the spec or in the parameters, or a layout has another size. The error names
                the leaf.

        Examples:
            >>> spec.validate(params)
        """
        leaves = named_leaves(params)
        for name in sorted(leaves.keys() | self.axes.keys()):
            if name not in self.axes:
                raise UserError(f"The spec has no entry for {name}: add its axes.")
            if name not in leaves:
                raise UserError(f"The spec has an entry for {name}, but the parameters do not: remove it.")
            shape, layouts = np.shape(leaves[name]), self.axes[name]
            if len(shape) != len(layouts):
                raise UserError(f"The spec has {len(layouts)} axes for {name}, but its shape is {shape}: {DERIVE}")
            for axis, (size, layout) in enumerate(zip(shape, layouts, strict=True)):
                unknown = [perm for perm in axis_names(layout) if perm not in self.sizes and perm not in self.fixed]
                if unknown:
                    raise UserError(f"Axis {axis} of {name} has permutation {unknown[0]}: add its size to the spec.")
                if layout is not None and self.length(layout) != size:
                    whose = f"permutation {layout}" if isinstance(layout, str) else f"its layout {layout!s:.100}"
                    raise UserError(
                        f"Axis {axis} of {name} has {size} entries, but {whose} has {self.length(layout)}: {DERIVE}"
                    )
            for (perm, outer), count in self.unclear_batch_axes(name):
                raise UserError(
                    f"Permutation {perm} differs along {outer}, but {name} has {count} such axes: use exactly one."
                )

    def unclear_batch_axes(self, leaf: str) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield the batch axes that some part of a leaf does not have exactly once.

        Args:
            leaf: The name of a leaf.

        Yields:
            A pair of a permutation and one of its batch axes, and the number of times that the part has this axis.

        Examples:
            >>> list(spec.unclear_batch_axes("up"))
            []
        """
        for labels, _ in self.simple_parts(self.axes[leaf], None):
            for perm in (label for label in labels if isinstance(label, str)):
                for outer in self.batched_over.get(perm, ()):
                    if (count := labels.count(outer)) != 1:
                        yield (perm, outer), count

    def axes_of(self, perm: str) -> list[tuple[str, int]]:
        """Return the axes that a permutation acts on.

        Args:
            perm: The name of a permutation.

        Returns:
            Pairs of a leaf's name and the number of its axis.

        Examples:
            >>> spec.axes_of("P")
            [('up', 1), ('bias', 0), ('down', 0)]
        """
        return [
            (name, axis)
            for name, layouts in self.axes.items()
            for axis, layout in enumerate(layouts)
            if perm in axis_names(layout)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a permutation's index array.

        Args:
            name: The name of a permutation.

        Returns:
            The sizes of its batch axes, followed by its own size.

        Examples:
            >>> spec.shape("P")
            (4,)
        """
        return (*(self.length(outer) for outer in self.batched_over.get(name, ())), self.sizes[name])

    def log10_arrangements(self, *names: str) -> float:
        """Return the decimal logarithm of the number of arrangements.

        A permutation of two heads has 2 arrangements. A permutation of the four dimensions of each head has 24 · 24.

        Args:
            *names: Names of permutations; all permutations by default.

        Returns:
            The logarithm of the product of their numbers of arrangements.

        Examples:
            >>> round(10 ** spec.log10_arrangements("P"))
            24
        """
        rows = ((math.prod(self.shape(name)[:-1]), self.sizes[name]) for name in names or self.sizes)
        return sum(count * math.lgamma(size + 1) for count, size in rows) / math.log(10)

    def without(self, *names: str) -> "PermutationSpec":
        """Return the spec with some permutations kept in place.

        Args:
            *names: Names of permutations.

        Returns:
            The spec with the other permutations. Everything that takes a spec then leaves these axes as they are.

        Raises:
            UserError: The spec has no permutation of this name.

        Examples:
            >>> spec.without("P").sizes
            {}
        """
        for name in names:
            if name not in self.sizes:
                raise UserError(f"There is no permutation {name}: use one of {list_some(self.sizes)}.")
        kept = [Frozen(leaf, axis, "kept in place") for name in names for leaf, axis in self.axes_of(name)]
        return replace(
            self,
            sizes={name: size for name, size in self.sizes.items() if name not in names},
            batched_over={name: outer for name, outer in self.batched_over.items() if name not in names},
            fixed={**self.fixed, **{name: self.sizes[name] for name in names}},
            frozen=(*self.frozen, *kept),
        )

    def nested_in(self, name: str) -> list[str]:
        """Return the permutations inside the units of a permutation.

        Args:
            name: The name of a permutation.

        Returns:
            The names of the permutations that are batched over it and over its own batch axes, and over nothing else.

        Examples:
            >>> heads = mcomb.PermutationSpec({}, {"heads": 2, "dims": 4}, {"dims": ("heads",)})
            >>> heads.nested_in("heads")
            ['dims']
        """
        outer = self.batched_over.get(name, ())
        return [other for other, batch_axes in self.batched_over.items() if batch_axes == (*outer, name)]

    def length(self, layout: str | int | Blocks | Segments) -> int:
        """Return the size of an axis.

        Args:
            layout: The layout of the axis.

        Returns:
            The number of its entries.

        Examples:
            >>> spec.length(mcomb.Blocks((49, "P")))
            196
        """
        if isinstance(layout, str):
            return self.sizes[layout] if layout in self.sizes else self.fixed[layout]
        if isinstance(layout, int):
            return layout
        if isinstance(layout, Blocks):
            return math.prod(self.length(factor) for factor in layout.factors)
        return sum(self.length(part) for part in layout.parts)

    def simple_parts(self, layouts: tuple[Layout, ...], value: Any) -> Iterator[tuple[tuple[Layout, ...], Any]]:
        """Yield the parts of an array in which every axis has at most one name.

        An array of layouts (Segments(("P", 3)), Blocks((2, "Q"))) has two parts: (P, 2, Q) and (3, 2, Q).

        Args:
            layouts: The layouts of the array's axes.
            value: The array, or None to get only the layouts.

        Yields:
            The layouts of a part and its entries, or None in place of the entries.

        Examples:
            >>> layouts = mcomb.Segments(("P", 3)), mcomb.Blocks((2, "P"))
            >>> [labels for labels, _ in spec.simple_parts(layouts, None)]
            [('P', 2, 'P'), (3, 2, 'P')]
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
        """Raise an error unless `perms` are permutations of the spec.

        Only the shapes and dtypes of traced arrays are checked, because their values are unknown.

        Args:
            perms: An index array for each permutation.

        Raises:
            UserError: A name is missing or unknown, or an array is not a permutation of the right shape. The error
                names the first such permutation.

        Examples:
            >>> spec.check_perms({"P": np.array([1, 0, 3, 2])})
        """
        if not isinstance(perms, Mapping) or perms.keys() != self.sizes.keys():
            wanted = list_some(self.sizes) or "none"
            if isinstance(perms, Mapping):
                names = list_some(perms) or "nothing"
                raise UserError(
                    f"The permutations are {names}, but the spec has {wanted}: pass one for each of its names."
                )
            kind, inside = type(perms).__name__, getattr(perms, "perms", None)
            remedy = "pass a dict with an index array for each"
            if hasattr(perms, "matching"):
                remedy = "pass its matching.perms"
            elif inside is not None:
                remedy = f"pass its {'perms' if isinstance(inside, Mapping) else 'perms[i] for network i'}"
            raise UserError(f"The permutations {wanted} are in an object of type {kind}: {remedy}.")
        for name, perm in perms.items():
            dtype = getattr(perm, "dtype", None)
            if np.shape(perm) != self.shape(name) or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
                raise UserError(
                    f"Permutation {name} has shape {np.shape(perm)} and dtype {dtype}: pass indices of shape "
                    f"{self.shape(name)}."
                )
            if isinstance(perm, jax.core.Tracer):
                continue
            every = np.arange(self.sizes[name])
            for row in np.reshape(perm, (-1, len(every))):
                if len(missing := np.setdiff1d(every, row)):
                    remedy = f"pass each index from 0 to {every[-1]} once"
                    raise UserError(f"Permutation {name} lacks index {missing[0]}: {remedy}.")

    def apply(self, perms: Perms, params: Params) -> Params:
        """Permute the hidden units of a network without changing its function.

        Args:
            perms: An index array for each permutation.
            params: Parameters of the network.

        Returns:
            The permuted parameters.

        Raises:
            UserError: The permutations or the parameters do not fit the spec.

        Examples:
            >>> permuted = spec.apply({"P": np.array([1, 0, 3, 2])}, params)
        """
        self.check_perms(perms)
        self.validate(params)
        return map_named(lambda name, leaf: self.permute_array(perms, self.axes[name], leaf), params)

    def check(
        self, apply: Apply, params: Params, inputs: Inputs, *, perms: Perms | None = None, draws: int = 2
    ) -> None:
        """Check that random permutations leave the function unchanged.

        A float output may change by √eps of its largest entry, with eps of the coarsest float dtype in the function. At
        least one entry must be finite and nonzero.

        Args:
            apply: The function, called as `apply(params, inputs)`.
            params: Parameters of a network.
            inputs: Example inputs.
            perms: Further permutations to check.
            draws: Number of random permutations.

        Raises:
            UserError: The spec does not fit the parameters, or a permutation changes the output.

        Examples:
            >>> aligned.spec.check(apply, a, x)  # no error: permutations keep the function
        """
        check_spec(self, apply, params, inputs, perms=perms, draws=draws)

    def identity(self) -> Perms:
        """Return the identity permutations.

        Returns:
            An index array for each permutation that leaves every unit in place.

        Examples:
            >>> spec.identity()
            {'P': array([0, 1, 2, 3])}
        """
        return {name: np.broadcast_to(np.arange(self.sizes[name]), self.shape(name)).copy() for name in self.sizes}

    def random(self, key: PRNGKeyArray) -> Perms:
        """Return uniformly random permutations.

        Args:
            key: A random key. Equal keys give equal permutations.

        Returns:
            An index array for each permutation.

        Examples:
            >>> perms = spec.random(jax.random.key(0))
        """
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # NumPy, to avoid a compilation
        return {name: rng.permuted(rows, axis=-1) for name, rows in self.identity().items()}

    def invert(self, perms: Perms) -> Perms:
        """Return the inverse permutations.

        Args:
            perms: An index array for each permutation.

        Returns:
            The permutations that undo `perms`.

        Raises:
            UserError: The permutations do not fit the spec.

        Examples:
            >>> spec.invert({"P": np.array([1, 2, 3, 0])})
            {'P': array([3, 0, 1, 2])}
        """
        self.check_perms(perms)
        undo: Perms = {}
        # Invert outer permutations first: "dims" is batched over all batch axes of "heads", too.
        for name in sorted(self.sizes, key=lambda name: len(self.shape(name))):
            undo[name] = np.argsort(self._permute_rows(undo, name, perms[name]), axis=-1)
        return {name: undo[name] for name in self.sizes}

    def compose(self, p: Perms, q: Perms) -> Perms:
        """Compose two sets of permutations.

        Args:
            p: The permutations to apply second.
            q: The permutations to apply first.

        Returns:
            Permutations `r` such that `apply(r, params)` equals `apply(p, apply(q, params))`.

        Raises:
            UserError: The permutations do not fit the spec.

        Examples:
            >>> spec.compose({"P": np.array([1, 0, 2, 3])}, {"P": np.array([1, 2, 3, 0])})
            {'P': array([2, 1, 3, 0])}
        """
        self.check_perms(p)
        self.check_perms(q)
        p = {name: np.asarray(perm) for name, perm in p.items()}
        return {
            name: np.take_along_axis(self._permute_rows(p, name, q[name]), np.asarray(p[name]), -1)
            for name in self.sizes
        }

    def __repr__(self) -> str:
        shapes = [f"{name}: {' × '.join(map(str, self.shape(name)))}" for name in self.sizes]
        return f"PermutationSpec({list_some(shapes) or 'no permutations'}; {len(self.frozen)} frozen axes)"

    def __str__(self) -> str:
        """Return a table of the permutations, and a table of the frozen axes with their reasons."""
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
        tables = [format_table(head, rows), format_table(("frozen by", "axes"), frozen_rows)]
        return "\n\n".join(tables if reasons else tables[:1])

    def _sketch(self, leaf: str, axis: int, name: str) -> str:
        """Mark the permutation's place in an axis, such as `: 49×·` or `: ·+12`; empty if it fills the axis."""

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
        """Permute the rows of a permutation's index array by the permutations of its batch axes."""
        return self.permute_array(perms, (*self.batched_over.get(name, ()), None), np.asarray(rows))

    def permute_array(self, perms: Perms, layouts: tuple[Layout, ...], leaf: Any) -> Any:
        """Permute the axes of one array.

        Args:
            perms: An index array for each permutation.
            layouts: The layouts of the array's axes.
            leaf: The array.

        Returns:
            The permuted array. A NumPy array stays a NumPy array unless JAX is tracing the permutations.

        Examples:
            >>> spec.permute_array({"P": np.array([1, 0, 3, 2])}, ("P",), np.array([10, 11, 12, 13]))
            array([11, 10, 13, 12])
        """
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

        Args:
            layouts: The layouts of the array's axes.
            shape: The shape of the array.

        Yields:
            The name of a permutation, the indices into its index array at each position, and a mask of the positions
            that belong to one of its units. The indices and the mask broadcast to `shape`.

        Examples:
            >>> [perm for perm, index, is_unit in spec.units_of((None, "P"), (3, 4))]
            ['P']
        """
        positions = np.ogrid[tuple(slice(size) for size in shape)]
        coordinates = _overlay(map(self._coordinates, layouts, positions))
        for layout, position in zip(layouts, positions, strict=True):
            for perm, index, stride in self._terms(layout, position, coordinates):
                if perm is not None:
                    yield perm, index, stride > 0

    def add_units(self, values: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
        """Sum, for each weight of a leaf, the values of the units that it connects.

        Args:
            values: For each permutation of the leaf, an array with a value for each unit.
            name: The name of the leaf.
            shape: The shape of the leaf.

        Returns:
            An array of this shape. It is 0 for weights that connect no units.

        Examples:
            >>> spec.add_units({"P": jnp.arange(4.0)}, "bias", (4,))
            Array([0., 1., 2., 3.], dtype=float32)
        """
        total: Any = jnp.zeros(())
        for perm, index, is_unit in self.units_of(self.axes[name], shape):
            total = total + is_unit * values[perm][index]
        return jnp.broadcast_to(total, shape)

    def sum_weights(self, values: Params) -> dict[str, Float[np.ndarray, "..."]]:
        """Sum, for each unit, the values of all its incoming and outgoing weights.

        A weight that connects two units counts for both.

        Args:
            values: A tree like the parameters, with a value for each weight.

        Returns:
            For each permutation, an array with the sum for each unit.

        Raises:
            UserError: The tree does not fit the spec.

        Examples:
            >>> spec.sum_weights({"up": np.ones((3, 4)), "bias": np.ones(4), "down": np.ones((4, 2))})
            {'P': array([6., 6., 6., 6.])}
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
        """Return the source of each entry along an axis; `coordinates` are positions along named axes."""
        terms = self._terms(layout, position, coordinates)
        return sum((index if perm is None else perms[perm][index]) * stride for perm, index, stride in terms)

    def _terms(
        self, layout: Layout, position: np.ndarray, coordinates: dict[str, np.ndarray], stride: Any = 1
    ) -> Iterator[tuple[str | None, Any, Any]]:
        """Yield terms that sum to the positions along an axis: permutations with their indices, and offsets.

        Each term comes with a factor: its stride in a product, or zero outside its segment.
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
        """Return the coordinate along each named part of an axis, or -1 for positions outside that part."""
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
        """Yield each factor of a product with its coordinates and its stride, as `np.unravel_index` does."""
        stride = self.length(blocks)
        for factor in blocks.factors:
            size = self.length(factor)
            stride //= size
            yield factor, position // stride % size, stride


def _overlay(each: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merge coordinates by name: later ones replace earlier ones unless they are -1."""
    result: dict[str, np.ndarray] = {}
    for coordinates in each:
        for name, position in coordinates.items():
            partial = name in result and (position < 0).any()
            result[name] = np.where(position < 0, result[name], position) if partial else position
    return result


def require_spec(spec: Any) -> None:
    """Raise an error unless `spec` is a `PermutationSpec`."""
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
    """Format a whole number, given its logarithm: in full below a million, otherwise as a power of ten."""
    return f"{round(10**exponent):,}" if exponent < 6 else f"10^{round(exponent)}"


def format_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Align the columns of a table and wrap the last one."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)][:-1]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for *first, last in [head, *rows]:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(first, widths, strict=True))
        wrapped = textwrap.fill(last, max(115, indent + 40), initial_indent=start, subsequent_indent=" " * indent,
                                break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines.append((wrapped or start).rstrip())
    return "\n".join(lines)
