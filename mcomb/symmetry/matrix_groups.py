"""Symmetries beyond permutations: rotations, invertible matrices, scales and signs of hidden units.

A hidden space is the set of units that one permutation of a `PermutationSpec` acts on. `mcomb.derive_spec(…,
groups="all")` finds the largest group of matrices that each space admits, and returns a `SymmetrySpec`.

An element of the symmetry group is a plain dict, as permutations are. It has

- for each space of permutations, an index array;
- for each space of rotations or invertible matrices, a matrix M of shape (…, n, n), with the batch axes first;
- for each scaling, a factor for each unit.

Weights that write into a space are multiplied by M, and weights that read from it by the inverse transpose of M. For a
rotation, both are M.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from mcomb.errors import UserError, list_some
from mcomb.symmetry.check import check_equal, require_telling
from mcomb.symmetry.double_precision import in_double
from mcomb.symmetry.folding import balancing, folding, require_gain
from mcomb.symmetry.places import Place, map_parts, part_at, unit_axes
from mcomb.symmetry.spec import Layout, Perms, PermutationSpec, format_table
from mcomb.trees import Apply, Array, Inputs, Params, in_dtype_of, is_inexact, map_named, named_leaves, output_shapes

Element = dict[str, Array]
"""An index array, a matrix or a vector of factors for each space and each scaling of a `SymmetrySpec`."""

ROTATION, CENTRED, INVERTIBLE = "rotation", "mean-keeping rotation", "invertible matrix"
MATRIX_TOLERANCE = 1e-4  # of an orthogonal matrix in float32
EXACT = 1e-8  # relative change of an output in float64 that counts as rounding
SPREAD = 0.3  # standard deviation of the logarithms of random scales


@dataclass(frozen=True)
class Group:
    """The matrices that act on a space.

    Attributes:
        kind: "rotation", "mean-keeping rotation" (which fixes the vector of ones) or "invertible matrix".
        powers: 1 for each place that M multiplies, and −1 for each place that its inverse transpose multiplies.
    """

    kind: str
    powers: Mapping[Place, int]

    @property
    def is_invertible(self) -> bool:
        """Whether all invertible matrices act."""
        return self.kind == INVERTIBLE


@dataclass(frozen=True)
class Scaling:
    """Factors of the units of a space: a place of power p is multiplied by the p-th power of its unit's factor.

    Attributes:
        space: The name of the space.
        powers: The power of each place.
        values: "positive", "nonzero" or "sign" (1 and −1).
        gain: For a space of rotations, the gain of a norm that the scaling can set to 1.
    """

    space: str
    powers: Mapping[Place, float]
    values: str
    gain: Place | None = None


@dataclass(frozen=True)
class SymmetrySpec(PermutationSpec):
    """The symmetries of a network's hidden units: permutations and larger groups of matrices.

    `mcomb.derive_spec(apply, params, inputs, groups="all")` derives it. Where the docstrings of `PermutationSpec` say
    permutations, this class takes and returns elements of the larger group: see `mcomb.symmetry.matrix_groups`.

    A rotation mixes units, so it needs norms without gains. With gains, it acts as on the network whose gains are
    folded into the weights that read them: fold, rotate, unfold. The gains themselves stay the same.

    Args:
        groups: The matrices that act on a space, by its name. All other spaces have permutations only.
        scalings: The factors of units, by name.

    Examples:
        >>> spec = mcomb.derive_spec(apply, a, x, groups="all")
        >>> print(spec)
        space  size  group         acts on
        up     128   permutations  bias[0] down[0] up[1]
        <BLANKLINE>
        scaling   space  factors          multiply
        up:scale  up     positive scales  bias up down^-1
        <BLANKLINE>
        frozen by   axes
        the output  down[1]
        input 0     up[0]
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    scalings: Mapping[str, Scaling] = field(default_factory=dict)

    def __hash__(self) -> int:
        return super().__hash__()

    @cached_property
    def permutations(self) -> PermutationSpec:
        """The permutations alone, as `derive_spec` returns them by default."""
        return PermutationSpec(self.axes, self.sizes, self.batched_over, self.fixed, self.frozen)

    @property
    def dimension(self) -> int:
        """The number of continuous parameters of the group."""
        count = 0
        for name, group in self.groups.items():
            *batch, n = self.shape(name)
            sizes = {ROTATION: n * (n - 1) // 2, CENTRED: (n - 1) * (n - 2) // 2, INVERTIBLE: n * n}
            count += int(np.prod(batch)) * sizes[group.kind]
        return count + sum(
            int(np.prod(self.shape(own.space))) for own in self.scalings.values() if own.values != "sign"
        )

    @cached_property
    def _permuted(self) -> list[str]:
        """The spaces that have permutations only."""
        return [name for name in self.sizes if name not in self.groups]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each entry of an element."""
        shapes = {
            name: (*self.shape(name), self.sizes[name]) if name in self.groups else self.shape(name)
            for name in self.sizes
        }
        return shapes | {name: self.shape(own.space) for name, own in self.scalings.items()}

    @cached_property
    def _matrix_at(self) -> dict[Place, str]:
        return {place: name for name, group in self.groups.items() for place in group.powers}

    @cached_property
    def _scalings_at(self) -> dict[Place, list[str]]:
        found: dict[Place, list[str]] = {}
        for name, own in self.scalings.items():
            for place in own.powers:
                found.setdefault(place, []).append(name)
        return found

    def check_perms(self, perms: Element) -> None:
        """Raise an error unless `perms` is an element of the group.

        Only the shapes and dtypes of traced arrays are checked, because their values are unknown.

        Args:
            perms: An index array, a matrix or a vector of factors for each space and each scaling.

        Raises:
            UserError: A name is missing or unknown, or an array does not belong to the group.

        Examples:
            >>> spec.check_perms(spec.identity())
        """
        if isinstance(perms, Mapping) and perms.keys() != self._shapes.keys():
            raise UserError(
                f"The element has arrays for {list_some(perms) or 'nothing'}, and the spec has "
                f"{list_some(self._shapes)}: pass one for each name."
            )
        self.permutations.check_perms(self._index_arrays(perms) if isinstance(perms, Mapping) else perms)
        for name, shape in self._shapes.items():
            if name in self._permuted:
                continue
            values = perms[name]
            if np.shape(values) != shape or not is_inexact(values):
                raise UserError(f"{name} has shape {np.shape(values)}: pass an array of floats of shape {shape}.")
            if not isinstance(values, jax.core.Tracer):
                self._check_values(name, np.asarray(values, np.float64))

    def _check_values(self, name: str, values: np.ndarray) -> None:
        """Raise an error unless a matrix or a vector of factors belongs to the group."""
        problem = "is not finite" if not np.isfinite(values).all() else None
        if name in self.scalings:
            kind = self.scalings[name].values
            wrong = {"positive": values <= 0, "nonzero": values == 0, "sign": np.abs(values) != 1}[kind]
            problem = f"has factors that are not {kind}" if not problem and wrong.any() else problem
        elif not problem and self.groups[name].kind != INVERTIBLE:
            error = np.abs(values @ values.swapaxes(-1, -2) - np.eye(values.shape[-1])).max()
            problem = f"is not orthogonal (error {error:.2g})" if error > MATRIX_TOLERANCE else None
            moved = np.abs(values.sum(-1) - 1).max()
            if self.groups[name].kind == CENTRED and not problem and moved > MATRIX_TOLERANCE:
                problem = f"does not keep the mean (error {moved:.2g})"
        if problem:
            raise UserError(f"{name} {problem}: pass another matrix or other factors.")

    def _index_arrays(self, element: Element) -> Perms:
        """Return the element's permutations, with the identity for spaces of matrices."""
        return {name: element[name] if name in self._permuted else self._still[name] for name in self.sizes}

    @cached_property
    def _still(self) -> Perms:
        return self.permutations.identity()

    def apply(self, perms: Element, params: Params) -> Params:
        """Apply an element of the group to a network without changing its function.

        Args:
            perms: The element.
            params: Parameters of the network.

        Returns:
            The new parameters, computed in float64 and rounded to the dtypes of the old ones. Inside a JAX
            transformation, they are computed in float32 or wider.

        Raises:
            UserError: The element or the parameters do not fit the spec.

        Examples:
            >>> element = spec.random(jax.random.key(0))
            >>> moved = spec.apply(element, b)
        """
        self.check_perms(perms)
        params = self.permutations.apply(self._index_arrays(perms), params)
        traced = any(isinstance(x, jax.core.Tracer) for x in (*jax.tree.leaves(params), *perms.values()))
        xp: Any = jnp if traced else np
        leaves = named_leaves(params)

        def widen(x: Any) -> Any:
            return (
                jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)) if traced else np.asarray(x, float)
            )

        element = {name: widen(perms[name]) for name in perms if name not in self._permuted}
        frames = self._frames({name: widen(leaf) for name, leaf in leaves.items() if name in self._gain_leaves}, xp)
        moving = {place.leaf for place in (*self._matrix_at, *self._scalings_at)}

        def move(name: str, leaf: Any) -> Any:
            if name not in moving:
                return leaf
            moved = map_parts(
                self, self.axes[name], widen(leaf), lambda *part: self._move(element, frames, name, *part)
            )
            moved = in_dtype_of(leaf, moved)
            return jnp.asarray(moved) if isinstance(leaf, jax.Array) else moved

        return map_named(move, params)

    @cached_property
    def _gain_leaves(self) -> set[str]:
        return {own.gain.leaf for own in self.scalings.values() if own.gain}

    def _frames(self, gains: Mapping[str, Any], xp: Any) -> dict[Place, Any]:
        """Return, for each place that reads a gain, the gain to its power: the basis in which rotations act on it."""
        frames: dict[Place, Any] = {}
        for own in self.scalings.values():
            if own.gain is None:
                continue
            gain = part_at(self, own.gain, gains[own.gain.leaf])
            if not isinstance(gain, jax.core.Tracer):
                require_gain(own.gain, gain)
            for place, power in own.powers.items():
                if place != own.gain:
                    frames[place] = frames.get(place, 1.0) * gain**power
        return frames

    def _move(
        self,
        element: Element,
        frames: Mapping[Place, Any],
        leaf: str,
        index: int,
        labels: tuple[Layout, ...],
        part: Any,
    ) -> Any:
        """Apply matrices and factors to one part of a leaf."""
        for axis, label in enumerate(labels):
            place = Place(leaf, index, axis)
            if place in self._matrix_at:
                matrix = element[str(label)]
                if self.groups[str(label)].powers[place] < 0:
                    xp: Any = np if isinstance(matrix, np.ndarray) else jnp
                    matrix = xp.linalg.inv(matrix).swapaxes(-1, -2)
                if place in frames:
                    matrix = frames[place][..., :, None] * matrix / frames[place][..., None, :]
                part = self.multiply(labels, part, axis, matrix)
            for name in self._scalings_at.get(place, ()):
                part = part * self.along(labels, axis, element[name] ** self.scalings[name].powers[place])
        return part

    def multiply(self, labels: tuple[Layout, ...], part: Any, axis: int, matrix: Any) -> Any:
        """Multiply an axis of a part of a leaf by a matrix.

        Args:
            labels: The layouts of the part's axes.
            part: The part.
            axis: The axis with the units of a space.
            matrix: A matrix, or one for each entry of the space's batch axes.

        Returns:
            The product, an array of the part's shape.
        """
        xp: Any = np if isinstance(part, np.ndarray) and isinstance(matrix, np.ndarray) else jnp
        front = unit_axes(self, labels, axis)
        first = xp.moveaxis(part, front, range(len(front)))
        product = matrix @ first.reshape(*first.shape[: len(front)], -1)
        return xp.moveaxis(product.reshape(first.shape), range(len(front)), front)

    def along(self, labels: tuple[Layout, ...], axis: int, values: Any) -> Any:
        """Return the values of a space's units in a shape that broadcasts against a part of a leaf.

        Args:
            labels: The layouts of the part's axes.
            axis: The axis with the units of the space.
            values: A value for each unit, with the batch axes first.

        Returns:
            The values, with an axis of size 1 for each other axis of the part.
        """
        front = unit_axes(self, labels, axis)
        order = sorted(range(len(front)), key=front.__getitem__)
        sizes = dict(zip(front, values.shape, strict=True))
        return values.transpose(order).reshape([sizes.get(i, 1) for i in range(len(labels))])

    def check(
        self, apply: Apply, params: Params, inputs: Inputs, *, perms: Element | None = None, draws: int = 2
    ) -> None:
        """Check in float64 that random elements of the group leave the function unchanged.

        A float output may change by 1e-8 of its largest entry.

        Args:
            apply: The function, called as `apply(params, inputs)`.
            params: Parameters of a network.
            inputs: Example inputs.
            perms: A further element to check.
            draws: Number of random elements.

        Raises:
            UserError: The spec does not fit the parameters, or an element changes the output.

        Examples:
            >>> spec.check(apply, b, x)
        """
        self.validate(params)
        output_shapes(apply, params, inputs)
        run = in_double(apply, params, inputs)  # traced without x64, which would change dtypes inside the function
        with jax.enable_x64(True):
            self.check_in_double(jax.jit(run), params, inputs, perms=perms, draws=draws)

    def check_in_double(
        self, run: Callable[..., Any], params: Params, inputs: Inputs, *, perms: Element | None, draws: int
    ) -> None:
        """Check a function that computes in float64.

        Args:
            run: The function, called as `run(params, inputs)` under `jax.enable_x64(True)`.
            params: Parameters of a network.
            inputs: Example inputs.
            perms: A further element to check, or None.
            draws: Number of random elements.

        Raises:
            UserError: An element changes the output.
        """
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, float) if is_inexact(leaf) else leaf, params)
        before = named_leaves(run(wide, inputs))
        candidates = [self.random(jax.random.key(draw)) for draw in range(draws)] + ([perms] if perms else [])
        for candidate in candidates:
            after = named_leaves(run(self.apply(candidate, wide), inputs))
            for name in before:
                check_equal(f"output {name}" if name else "the output", before[name], after[name], EXACT)
        if candidates and self.sizes:
            require_telling(before)

    def rounding(self, apply: Apply, params: Params, inputs: Inputs, perms: Element | None = None) -> float:
        """Return the largest change of an output, relative to its largest entry, in the dtypes of the parameters.

        In exact arithmetic it would be zero. Permutations and signs are exact, but matrices and scales round.

        Args:
            apply: The function, called as `apply(params, inputs)`.
            params: Parameters of a network.
            inputs: Example inputs.
            perms: The element to apply; a random one by default.

        Returns:
            The relative change.

        Examples:
            >>> spec.rounding(apply, b, x) < 1e-5
            True
        """
        run = jax.jit(apply)
        element = self.random(jax.random.key(0)) if perms is None else perms
        before, after = (
            [np.asarray(leaf, float) for leaf in jax.tree.leaves(run(network, inputs)) if is_inexact(leaf)]
            for network in (params, self.apply(element, params))
        )
        changes = [0.0]
        for old, new in zip(before, after, strict=True):
            finite = np.isfinite(old)
            scale = np.abs(old[finite]).max(initial=0)
            changes += [np.abs(old - new)[finite].max() / scale] if scale else []
        return float(max(changes))

    def fold(self, params: Params) -> Params:
        """Fold the gains of norms into the weights that read them.

        Args:
            params: Parameters of a network.

        Returns:
            Parameters of the same function and architecture, with gains of 1 in front of rotations.

        Raises:
            UserError: The parameters do not fit the spec, or a gain is 0.

        Examples:
            >>> folded = spec.fold(b)
        """
        self.validate(params)
        return self.apply(folding(self, params), params)

    def balance(self, params: Params) -> Params:
        """Bring a network to a canonical form: fold its gains, and balance its heads and scales.

        The weights that write into a space of invertible matrices and those that read from it become orthogonal with
        equal singular values. Scales give each unit the smallest sum of squared weights. Only permutations, rotations
        and signs are left to choose.

        Args:
            params: Parameters of a network.

        Returns:
            Parameters of the same function and architecture.

        Raises:
            UserError: The parameters do not fit the spec, or a gain is 0.

        Examples:
            >>> balanced = spec.balance(b)
            >>> incoming = (balanced["up"] ** 2).sum(0) + balanced["bias"] ** 2
            >>> bool(jnp.allclose(incoming, (balanced["down"] ** 2).sum(1), rtol=1e-4))
            True
        """
        self.validate(params)
        return self.apply(balancing(self, params), params)

    def identity(self) -> Element:
        """Return the identity element.

        Returns:
            Index arrays that leave every unit in place, identity matrices, and factors of 1.

        Examples:
            >>> unchanged = spec.apply(spec.identity(), b)
        """
        element: Element = {}
        for name, shape in self._shapes.items():
            unit = np.broadcast_to(np.eye(shape[-1]), shape) if name in self.groups else np.ones(shape)
            element[name] = self._still[name] if name in self._permuted else unit.copy()
        return element

    def random(self, key: PRNGKeyArray) -> Element:
        """Return a random element: uniformly random permutations and rotations, and scales around 1.

        Args:
            key: A random key. Equal keys give equal elements.

        Returns:
            An array for each space and each scaling.

        Examples:
            >>> element = spec.random(jax.random.key(0))
        """
        perms = self.permutations.random(key)
        rng = np.random.default_rng([1, *np.asarray(jax.random.key_data(key)).tolist()])
        element: Element = {}
        for name, shape in self._shapes.items():
            if name in self._permuted:
                element[name] = perms[name]
            elif name in self.groups:
                element[name] = _random_matrix(rng, self.groups[name].kind, shape)
            else:
                values = self.scalings[name].values
                signs = np.ones(shape) if values == "positive" else rng.choice([-1.0, 1.0], shape)
                element[name] = signs if values == "sign" else signs * np.exp(SPREAD * rng.normal(size=shape))
        return element

    def invert(self, perms: Element) -> Element:
        """Return the inverse element.

        Args:
            perms: An element of the group.

        Returns:
            The element that undoes `perms`.

        Raises:
            UserError: The element does not fit the spec.

        Examples:
            >>> back = spec.apply(spec.invert(element), moved)
            >>> bool(jnp.allclose(back["up"], b["up"], atol=1e-5))
            True
        """
        self.check_perms(perms)
        undo: Element = dict(self.permutations.invert(self._index_arrays(perms)))
        inverse = dict(undo)
        for name, group in self.groups.items():
            matrix = np.asarray(perms[name], float)
            inner = np.linalg.inv(matrix) if group.kind == INVERTIBLE else matrix.swapaxes(-1, -2)
            inverse[name] = self._permute_outer(undo, name, inner)
        for name in self.scalings:
            inverse[name] = self._permute_factors(undo, name, 1 / np.asarray(perms[name], float))
        return {name: inverse[name] for name in self._shapes}

    def compose(self, p: Element, q: Element) -> Element:
        """Compose two elements.

        Args:
            p: The element to apply second.
            q: The element to apply first.

        Returns:
            An element `r` such that `apply(r, params)` equals `apply(p, apply(q, params))`.

        Raises:
            UserError: An element does not fit the spec.

        Examples:
            >>> twice = spec.apply(spec.compose(element, element), b)
        """
        self.check_perms(p)
        self.check_perms(q)
        last = self._index_arrays(p)
        product: Element = dict(self.permutations.compose(last, self._index_arrays(q)))
        for name in self.groups:
            product[name] = np.asarray(p[name], float) @ self._permute_outer(last, name, np.asarray(q[name], float))
        for name in self.scalings:
            product[name] = np.asarray(p[name], float) * self._permute_factors(last, name, np.asarray(q[name], float))
        return {name: product[name] for name in self._shapes}

    def _permute_outer(self, perms: Perms, name: str, matrices: np.ndarray) -> np.ndarray:
        """Permute the matrices of a space by the permutations of its batch axes."""
        return self.permutations.permute_array(perms, (*self.batched_over.get(name, ()), None, None), matrices)

    def _permute_factors(self, perms: Perms, name: str, factors: np.ndarray) -> np.ndarray:
        """Permute the factors of a scaling as the units of its space, or only its batch axes in a space of matrices."""
        space = self.scalings[name].space
        last = None if space in self.groups else space
        return self.permutations.permute_array(perms, (*self.batched_over.get(space, ()), last), factors)

    def __str__(self) -> str:
        """Return tables of the spaces with their groups, of the scalings, and of the frozen axes."""
        kinds = {ROTATION: "rotations", CENTRED: "rotations that keep the mean", INVERTIBLE: "invertible matrices"}
        rows = []
        for name in self.sizes:
            kind = kinds[self.groups[name].kind] if name in self.groups else "permutations"
            size = " × ".join(map(str, self.shape(name)))
            rows.append((name, size, kind, " ".join([*self._places(name), *self._outer(name)])))
        tables = [format_table(("space", "size", "group", "acts on"), rows)]
        if self.scalings:
            values = {"positive": "positive scales", "nonzero": "scales of any sign", "sign": "signs"}
            scaling_rows = [
                (name, own.space, "folds this gain" if own.gain else values[own.values], self._powers(own.powers))
                for name, own in self.scalings.items()
            ]
            tables.append(format_table(("scaling", "space", "factors", "multiply"), scaling_rows))
        _, *frozen = str(self.permutations).split("\n\n")
        return "\n\n".join([*tables, *frozen])

    def _places(self, name: str) -> list[str]:
        """Return the axes that a space's group acts on, with the inverse transpose marked."""
        acts_on = [f"{leaf}[{axis}{self._sketch(leaf, axis, name)}]" for leaf, axis in self.axes_of(name)]
        group = self.groups.get(name)
        if group is None or group.kind != INVERTIBLE:
            return acts_on
        negative = {place.leaf for place, power in group.powers.items() if power < 0}
        return [
            f"{text}⁻¹" if leaf in negative else text
            for text, (leaf, _) in zip(acts_on, self.axes_of(name), strict=True)
        ]

    def _outer(self, name: str) -> list[str]:
        return [f"(one for each of {outer})" for outer in self.batched_over.get(name, ())]

    def _powers(self, powers: Mapping[Place, float]) -> str:
        """Format the places of a scaling with their powers."""

        def text(place: Place, power: float) -> str:
            return place.leaf if power == 1 else f"{place.leaf}^{power:g}"

        return " ".join(dict.fromkeys(itertools.starmap(text, powers.items())))


def centring(n: int) -> Float[np.ndarray, "n m"]:
    """Return an orthonormal basis of the vectors with mean zero, as columns."""
    return np.linalg.qr(np.eye(n)[:, 1:] - 1 / n)[0]


def _random_matrix(rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    """Return random matrices of a group."""
    *batch, _, n = shape

    def rotation(n: int) -> np.ndarray:
        q, r = np.linalg.qr(rng.normal(size=(*batch, n, n)))
        return q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]

    if kind == CENTRED:
        basis = centring(n)
        return 1 / n + basis @ rotation(n - 1) @ basis.T
    if kind == INVERTIBLE:
        return rotation(n) * np.exp(SPREAD * rng.normal(size=(*batch, 1, n))) @ rotation(n)
    return rotation(n)
