"""Find the largest group of matrices that each hidden space admits.

A derived permutation says which axes of which leaves share a space. Let C_o be the matrix of inner products

    (C_o)_ij = Σ_r (∂f/∂W_o)_ir (W_o)_jr

of the gradient of an output f with the weights W_o, at a place o where the space is axis 0 and r runs over all other
axes. If an infinitesimal matrix A multiplies this axis, the output changes by ⟨A, C_o⟩. So matrices A with coefficients
c_o are a symmetry exactly if Σ_o c_o ⟨A, C_o⟩ = 0 for every output. Every kind of group is a system of linear equations
for the coefficients:

    kind of A                           equations                          group
    diagonal                            Σ c_o (C_o)_ii = 0                 scales, and the foldings of gains
    skew                                Σ C_o − C_oᵀ = 0                   rotations
    skew with A·1 = 0                   the same after centring            rotations that keep the mean
    A for writers, −Aᵀ for readers      Σ₊ C_o − Σ₋ C_oᵀ = 0               invertible matrices

The equations are solved in float64 at generic weights near the given ones, for random combinations of all outputs.
There, singular values vanish to 1e-15 or stay above 1e-2. Signs are not connected to the identity, so they are tried on
the function. Finally, a random element of each group is checked on the function, and a group that fails is dropped.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mcomb.errors import UserError, name_error
from mcomb.symmetry.double_precision import in_double
from mcomb.symmetry.matrix_groups import (
    CENTRED,
    EXACT,
    INVERTIBLE,
    ROTATION,
    Group,
    Scaling,
    SymmetrySpec,
    centring,
)
from mcomb.symmetry.places import Place, part_at, places_of, unit_rows
from mcomb.symmetry.spec import PermutationSpec
from mcomb.trees import Apply, Inputs, Params, named_leaves

GradientMoments = dict[Place, Float[np.ndarray, "draws batch n n"]]
"""The matrices C_o of each place, for several random combinations of the outputs."""

GROUP_EXAMPLES = 16  # inputs, at most
FEWEST_DRAWS, MOST_DRAWS = 6, 64  # random combinations of the outputs
MOST_EQUATIONS = 3_000  # of one system
VANISHES = 1e-9  # a singular value or a residual below this fraction of the largest
WHOLE = 1e-6  # rounding of a power
SIGNS_ONE_BY_ONE, SIGNS_BY_COLLISION = 6, 18  # places for which signs are searched


def extend_spec(spec: PermutationSpec, apply: Apply, params: Params, inputs: Inputs, *, seed: int = 0) -> SymmetrySpec:
    """Return the spec with the largest group of each of its spaces.

    Raises:
        UserError: The function cannot be evaluated or differentiated at these arguments.
    """
    for leaf in jax.tree.leaves((params, inputs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise UserError(
                'groups="all" evaluates the function, but an argument has only a shape: pass an array with values, '
                'or use groups="permutations".'
            )
    few = first_examples(inputs)
    run = in_double(apply, params, few)  # traced without x64, which would change dtypes inside the function
    with jax.enable_x64(True):
        return _Finder(spec, run, params, few, np.random.default_rng(seed)).spec()


def nullity(apply: Apply, params: Params, inputs: Inputs, *, seed: int = 0) -> int:
    """Return the number of directions in which generic weights move without any change of the outputs.

    This is the number of weights minus the rank of the Jacobian of the outputs, for small networks with more outputs
    than weights. It is at least the dimension of the symmetry group, and equality means that no continuous symmetry is
    missing.
    """
    run = in_double(apply, params, inputs)
    with jax.enable_x64(True):
        weights = generic_weights(params, np.random.default_rng(seed))
        floats, merge = _split_floats(weights)
        jacobian = jax.jacfwd(lambda x: _flat(run(merge(x), inputs)))(floats)
        matrix = np.concatenate([np.asarray(part).reshape(part.shape[0], -1) for part in jax.tree.leaves(jacobian)], 1)
    if matrix.shape[0] < matrix.shape[1]:
        raise UserError(f"{matrix.shape[0]} outputs are fewer than {matrix.shape[1]} weights: pass more inputs.")
    values = np.linalg.svd(matrix, compute_uv=False)
    return int((values < VANISHES * values[0]).sum())


def generic_weights(params: Params, rng: np.random.Generator) -> Params:
    """Return random weights near the given ones, in float64; leaves of positive numbers stay positive."""

    def vary(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return np.asarray(leaf)
        values = np.asarray(leaf, float)
        noise = rng.normal(size=values.shape)
        if values.size and (values > 0).all():
            return values * np.exp(0.3 * noise)
        return values + noise * (0.3 * np.sqrt(np.mean(values**2)) or 0.1)

    return jax.tree.map(vary, params)


def _split_floats(tree: Params) -> tuple[list[Any], Callable[[list[Any]], Params]]:
    """Return the float leaves of a tree, and a function that replaces them."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def merge(values: list[Any]) -> Params:
        new = dict(zip(floats, values, strict=True))
        return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in floats], merge


def _flat(outputs: Any) -> Any:
    """Return the float outputs as one vector, with 0 for entries that are not finite."""
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not leaves:
        raise UserError('The function has no float outputs to derive groups from: use groups="permutations".')
    flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
    return jnp.where(jnp.isfinite(flat), flat, 0.0)


@dataclass(frozen=True)
class _Found:
    """The symmetries of one space: the kind and powers of its matrices, if any, and its scalings."""

    group: Group | None = None
    scalings: tuple[tuple[str, Scaling], ...] = ()


class _Finder:
    """A search for the groups of all spaces of one spec."""

    def __init__(
        self, spec: PermutationSpec, run: Apply, params: Params, inputs: Inputs, rng: np.random.Generator
    ) -> None:
        self.plain, self.rng, self.inputs = spec, rng, inputs
        self.weights = generic_weights(params, rng)
        self.run = jax.jit(run)
        self.leaves = named_leaves(self.weights)
        self.positive = {name for name, leaf in named_leaves(params).items() if np.all(np.asarray(leaf) > 0)}
        try:
            self.before = np.asarray(_flat(self.run(self.weights, self.inputs)))
        except UserError:
            raise
        except Exception as error:  # an operation on the bits of floats, for example
            raise UserError(
                f'Cannot evaluate the function in float64 ({name_error(error)}): use groups="permutations".'
            ) from error

    def spec(self) -> SymmetrySpec:
        """Return the spec with the group of each space."""
        outer = {name for names in self.plain.batched_over.values() for name in names}
        places = {name: places_of(self.plain, name) for name in self.plain.sizes if name not in outer}
        places = {name: own for name, own in places.items() if own and all(map(self._is_float, own))}
        groups: dict[str, Group] = {}
        scalings: dict[str, Scaling] = {}
        moments = self._moments(places)
        for name, own in places.items():
            found = self._search(name, own, {place: moments[place] for place in own})
            if found.group:
                groups[name] = found.group
            for stem, scaling in found.scalings:
                taken = {*scalings, *self.plain.sizes}
                fresh = itertools.chain([stem], (f"{stem}.{i}" for i in itertools.count(2)))
                scalings[next(text for text in fresh if text not in taken)] = scaling
        return self._extended(groups, scalings)

    def _extended(self, groups: Mapping[str, Group], scalings: Mapping[str, Scaling]) -> SymmetrySpec:
        own = self.plain
        return SymmetrySpec(own.axes, own.sizes, own.batched_over, own.fixed, own.frozen, groups, scalings)

    def _is_float(self, place: Place) -> bool:
        return np.asarray(self.leaves[place.leaf]).dtype == np.float64

    def _moments(self, places: Mapping[str, Mapping[Place, Any]]) -> GradientMoments:
        """Return the matrices C_o of all places, for several random combinations of the outputs."""
        found: dict[Place, list[np.ndarray]] = {place: [] for own in places.values() for place in own}
        for gradients in self._gradients(self._draws(places)):
            for place, matrices in found.items():
                slope, weight = (unit_rows(self.plain, place, x[place.leaf]) for x in (gradients, self.leaves))
                matrices.append(slope @ weight.swapaxes(-1, -2))
        return {place: np.stack(matrices) for place, matrices in found.items()}

    def _gradients(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield the gradients of random combinations of the outputs, by leaf."""
        floats, merge = _split_floats(self.weights)
        try:
            outputs, pull = jax.vjp(lambda x: _flat(self.run(merge(x), self.inputs)), floats)
            pull = jax.jit(pull)
            for _ in range(count):
                (gradient,) = pull(jnp.asarray(self.rng.normal(size=outputs.shape)))
                if not all(np.isfinite(leaf).all() for leaf in gradient):
                    raise UserError(
                        'The gradient of the function is not finite: pass other inputs, or use groups="permutations".'
                    )
                yield named_leaves(merge(gradient))
        except UserError:
            raise
        except Exception as error:  # JAX cannot reverse while loops, for example
            raise UserError(
                f'Cannot differentiate the function ({name_error(error)}): use groups="permutations".'
            ) from error

    def _draws(self, places: Mapping[str, Mapping[Place, Any]]) -> int:
        """Return a number of draws that gives every system more equations than unknowns."""
        wanted = FEWEST_DRAWS
        for name, own in places.items():
            *batch, n = self.plain.shape(name)
            wanted = max(wanted, 8 * len(own) // (int(np.prod(batch)) * n * max(1, (n - 1) // 2)) + 1)
        return min(wanted, MOST_DRAWS)

    def _search(self, name: str, places: Mapping[Place, tuple[Any, ...]], moments: GradientMoments) -> _Found:
        """Return the symmetries of a space that hold on the function."""
        size = max(np.abs(own).max() for own in moments.values())
        dead = [place for place in places if np.abs(moments[place]).max() <= VANISHES * size]
        if len(dead) == len(places):
            return _Found()
        moments = {place: own for place, own in moments.items() if place not in dead}
        gains = [place for place, labels in places.items() if self._is_vector(name, labels) and place not in dead]
        gains.sort(key=lambda place: place.leaf not in self.positive)
        stem = re.sub(r"\.\d+$", "", name)  # the module that the space is named after
        writers_first = sorted(moments, key=lambda place: (not place.leaf.startswith(stem), -place.axis))
        moments = {place: moments[place] for place in dict.fromkeys([*gains, *writers_first])}
        scales = self._scales(moments)
        for found in self._candidates(name, scales, gains, moments, writers_first[0]):
            complete = self._adopt(found, dead)
            if self._holds(name, complete):
                return complete
        return _Found()

    def _candidates(
        self, name: str, scales: list[dict[Place, float]], gains: list[Place], moments: GradientMoments, writer: Place
    ) -> Iterator[_Found]:
        """Yield symmetries of a space, from the largest to the smallest."""
        for powers in scales:
            if powers.keys() == moments.keys() and self._is_invertible(powers, moments):
                writes = powers[writer]
                yield _Found(Group(INVERTIBLE, {place: round(power * writes) for place, power in powers.items()}))
        for kind in (ROTATION, CENTRED):
            folded = self._rotation(kind, scales, gains, moments)
            if folded is None:
                continue
            foldings = [
                (f"{gain.leaf}:fold", Scaling(name, scales[i], self._sign_of(name, scales[i]), gain))
                for i, gain in folded.items()
            ]
            others = [powers for i, powers in enumerate(scales) if i not in folded]
            moved = {place: 1 for place in moments if place not in folded.values()}
            yield _Found(Group(kind, moved), (*foldings, *self._scalings(name, others)))
        plain = self._scalings(name, scales)
        yield _Found(None, (*plain, *self._signs(name, [*moments], plain, gains)))
        yield _Found(None, plain)

    def _scalings(self, name: str, scales: Sequence[Mapping[Place, float]]) -> tuple[tuple[str, Scaling], ...]:
        return tuple((f"{name}:scale", Scaling(name, powers, self._sign_of(name, powers))) for powers in scales)

    def _is_vector(self, name: str, labels: tuple[Any, ...]) -> bool:
        """Return whether a part has no axes but those of a space and its batch axes, in their order."""
        return labels == (*self.plain.batched_over.get(name, ()), name)

    def _scales(self, moments: GradientMoments) -> list[dict[Place, float]]:
        """Return a basis of the scalings, as the powers of the places that each moves.

        The first places have power 1 in one scaling and 0 in the others, as far as possible.
        """
        columns = np.stack([np.diagonal(own, axis1=-2, axis2=-1).ravel() for own in moments.values()], 1)
        basis = _reduced(self._null_space(columns))
        return [
            {place: _tidy(power) for place, power in zip(moments, row, strict=True) if abs(power) > WHOLE}
            for row in basis
        ]

    def _null_space(self, columns: np.ndarray) -> np.ndarray:
        """Return a basis of the vectors c with columns · c = 0, as rows."""
        if len(columns) > MOST_EQUATIONS:
            columns = columns[self.rng.choice(len(columns), MOST_EQUATIONS, replace=False)]
        norms = np.linalg.norm(columns, axis=0)
        norms[norms == 0] = 1.0
        _, values, rows = np.linalg.svd(columns / norms, full_matrices=len(columns) < columns.shape[1])
        values = np.pad(values, (0, len(rows) - len(values)))
        return rows[values <= VANISHES * values.max(initial=0)] / norms

    def _is_invertible(self, powers: Mapping[Place, float], moments: GradientMoments) -> bool:
        """Return whether a matrix may multiply the places of power 1, and its inverse transpose those of power −1."""
        if set(powers.values()) != {1, -1}:
            return False
        terms = [own if powers[place] > 0 else -own.swapaxes(-1, -2) for place, own in moments.items()]
        return bool(np.abs(sum(terms)).max() <= VANISHES * max(np.abs(term).max() for term in terms))

    def _rotation(
        self, kind: str, scales: list[dict[Place, float]], gains: list[Place], moments: GradientMoments
    ) -> dict[int, Place] | None:
        """Return the gain that each scaling folds, or None if rotations of this kind are no symmetry.

        A place that reads a gain rotates in the basis that folding the gain would give. The gain is not known, so each
        place gets one unknown for each possible gain, and one for no gain. One solution must remain.
        """
        n = next(iter(moments.values())).shape[-1]
        if n < (3 if kind == CENTRED else 2):
            return None
        upper = np.triu_indices(n - 1 if kind == CENTRED else n, 1)
        basis = centring(n) if kind == CENTRED else np.eye(n)
        unknowns: list[tuple[Place, tuple[int, Place] | None]] = [(place, None) for place in moments]
        for index, powers in enumerate(scales):
            for gain in [gain for gain in gains if powers.get(gain) == 1]:
                unknowns += [(place, (index, gain)) for place in powers if place != gain]
        rows = []
        for place, frame in unknowns:
            own = moments[place]
            if frame:
                gain = part_at(self.plain, frame[1], self.leaves[frame[1].leaf]).reshape(-1, n)
                scale = gain ** scales[frame[0]][place]
                own = scale[..., :, None] * own / scale[..., None, :]
            skew = basis.T @ (own - own.swapaxes(-1, -2)) @ basis
            rows.append(skew[..., upper[0], upper[1]].ravel())
        columns = np.stack(rows, 1)
        norms = np.linalg.norm(columns, axis=0)
        alive = norms > VANISHES * norms.max()
        null = self._null_space(columns[:, alive])
        if len(null) != 1:
            return None
        solution = dict.fromkeys(range(len(unknowns)), 0.0)
        solution |= dict(zip(np.flatnonzero(alive).tolist(), null[0] / np.abs(null[0]).max(), strict=True))
        chosen = [unknown for i, unknown in enumerate(unknowns) if abs(solution[i]) > WHOLE]
        values = np.array([solution[i] for i in range(len(unknowns)) if abs(solution[i]) > WHOLE])
        folded = dict(frame for _, frame in chosen if frame)
        moved = [place for place, _ in chosen]
        if np.abs(values - values[0]).max() > WHOLE or len(set(moved)) < len(moved):
            return None
        still = set(moments) - set(moved)
        return folded if still == set(folded.values()) else None

    def _adopt(self, found: _Found, dead: list[Place]) -> _Found:
        """Let places without effect on these inputs, such as biases of keys, move like the rest of their module."""

        def adopt(powers: Mapping[Place, Any]) -> dict[Place, Any]:
            new = dict(powers)
            for place in dead:
                module = place.leaf.rpartition("/")[0]
                alike = [power for own, power in powers.items() if own.leaf.rpartition("/")[0] == module]
                if alike:
                    new[place] = alike[0]
            return new

        group = found.group and Group(found.group.kind, adopt(found.group.powers))
        scalings = [(name, Scaling(own.space, adopt(own.powers), own.values, own.gain)) for name, own in found.scalings]
        return _Found(group, tuple(scalings))

    def _holds(self, name: str, found: _Found) -> bool:
        """Return whether random elements leave the function unchanged."""
        if not found.group and not found.scalings:
            return True
        groups = {name: found.group} if found.group else {}
        scalings = {f"{i}": scaling for i, (_, scaling) in enumerate(found.scalings)}
        spec = self._extended(groups, scalings)
        try:
            spec.check_in_double(self.run, self.weights, self.inputs, perms=None, draws=2)
        except UserError:
            return False
        return True

    # Signs

    def _flipped(self, name: str, places: Sequence[Place], units: np.ndarray) -> bool:
        """Return whether the signs of some units can be flipped at these places."""
        after = self._after_flip(name, places, units)
        return bool(np.abs(after - self.before).max() <= EXACT * np.abs(self.before).max())

    def _after_flip(self, name: str, places: Sequence[Place], units: np.ndarray) -> np.ndarray:
        """Return the outputs after flipping the signs of some units at these places."""
        spec = self._extended({}, {"s": Scaling(name, dict.fromkeys(places, 1), "sign")})
        element = spec.identity() | {"s": units}
        return np.asarray(_flat(self.run(spec.apply(element, self.weights), self.inputs)))

    def _half(self, name: str) -> np.ndarray:
        """Return random signs of the units of a space, not all equal."""
        signs = self.rng.choice([-1.0, 1.0], self.plain.shape(name))
        signs[..., 0], signs[..., -1] = -1.0, 1.0
        return signs

    def _sign_of(self, name: str, powers: Mapping[Place, float]) -> str:
        """Return "nonzero" if the factors of a scaling may be negative, and "positive" otherwise."""
        if any(power != round(power) for power in powers.values()):
            return "positive"
        odd = [place for place, power in powers.items() if round(power) % 2]
        return "nonzero" if self._flipped(name, odd, self._half(name)) else "positive"

    def _signs(
        self, name: str, places: list[Place], scalings: Sequence[tuple[str, Scaling]], gains: list[Place]
    ) -> list[tuple[str, Scaling]]:
        """Return the sign flips of a space that its scalings do not include.

        The flips of a unit that leave the function unchanged are a group of subsets of its places. All subsets of a few
        places are tried. With more places, random subsets are flipped until two give the same outputs: their difference
        is in the group. With many places, only likely subsets are tried.
        """
        units, count = self._half(name), len(places)

        def subset(bits: np.ndarray) -> list[Place]:
            return [place for place, bit in zip(places, bits, strict=True) if bit]

        known = [
            np.array([round(own.powers.get(place, 0)) % 2 for place in places])
            for _, own in scalings
            if own.values == "nonzero"
        ]
        if count <= SIGNS_ONE_BY_ONE:
            tried = [np.array(bits) for bits in itertools.product((0, 1), repeat=count) if any(bits)]
        elif count <= SIGNS_BY_COLLISION:
            tried = self._collisions(name, places, units)
        else:
            positive = [place for place in gains if place.leaf in self.positive]
            apart: tuple[list[Place], ...] = (positive, gains, [])
            tried = [np.array([place not in without for place in places], int) for without in apart]
        basis = list(known)
        for bits in tried:
            known_before = _in_span(bits, basis)
            if not known_before and all(self._flipped(name, subset(bits), own) for own in (units, self._half(name))):
                basis.append(bits)
        return [(f"{name}:sign", Scaling(name, dict.fromkeys(subset(bits), 1), "sign")) for bits in basis[len(known) :]]

    def _collisions(self, name: str, places: list[Place], units: np.ndarray) -> list[np.ndarray]:
        """Return differences of random subsets whose flips give the same outputs."""
        seen: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        found = []
        scale = np.abs(self.before).max()
        for _ in range(2 ** (len(places) // 2 + 2)):
            bits = self.rng.integers(0, 2, len(places))
            after = self._after_flip(name, [place for place, bit in zip(places, bits, strict=True) if bit], units)
            key = round(float(after.sum()) / scale * 1e6)
            for near in (key - 1, key, key + 1):
                for other, outputs in seen.get(near, []):
                    if (bits != other).any() and np.abs(after - outputs).max() <= EXACT * scale:
                        found.append(bits ^ other)
            seen.setdefault(key, []).append((bits, after))
        return found


def first_examples(inputs: Inputs) -> Inputs:
    """Return the first examples if all arrays have the same number of them."""
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs)}
    if len(counts) == 1 and all(counts) and next(iter(counts))[0] > GROUP_EXAMPLES:
        return jax.tree.map(lambda leaf: leaf[:GROUP_EXAMPLES], inputs)
    return inputs


def _reduced(rows: np.ndarray) -> np.ndarray:
    """Return the reduced row echelon form of a basis."""
    rows, rank = rows.copy(), 0
    scale = np.abs(rows).max(initial=0)
    for column in range(rows.shape[1]):
        if rank == len(rows):
            break
        pivot = rank + int(np.argmax(np.abs(rows[rank:, column])))
        if abs(rows[pivot, column]) <= WHOLE * scale:
            continue
        rows[[rank, pivot]] = rows[[pivot, rank]]
        rows[rank] /= rows[rank, column]
        others = np.arange(len(rows)) != rank
        rows[others] -= np.outer(rows[others, column], rows[rank])
        rank += 1
    return rows[:rank]


def _tidy(power: float) -> float:
    """Return a power as a whole number if it is one up to rounding."""
    return round(power) if abs(power - round(power)) < WHOLE else float(power)


def _in_span(bits: np.ndarray, basis: Sequence[np.ndarray]) -> bool:
    """Return whether bits are a sum, modulo 2, of some of the basis."""
    rows = [row.copy() for row in basis]
    bits = bits.copy()
    while rows:
        row = rows.pop()
        if not row.any():
            continue
        pivot = int(np.argmax(row))
        rows = [other ^ row if other[pivot] else other for other in rows]
        bits = bits ^ row if bits[pivot] else bits
    return not bits.any()
