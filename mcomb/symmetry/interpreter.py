"""An interpreter of jaxprs whose values are axis identities instead of numbers."""

import collections
import itertools
import math
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from mcomb.symmetry.axes import (
    Axis,
    atoms,
    concatenation,
    find,
    freeze,
    mirrored,
    product,
    tie,
    unite,
)

ArrayAxes = tuple[Axis | None, ...]
"""The axes of an array; None for one along which all entries are equal."""

MOST_KNOWN = 2**20  # entries of an array that is worked out
MOST_PERIODS = 16  # tried for an array that may repeat: mostly the first is right


class Known(tuple[Axis | None, ...]):
    """The axes of an array whose entries are known: it depends on neither parameters nor inputs."""

    value: np.ndarray


class Positions(tuple[Axis | None, ...]):
    """The axes of an array whose entries are positions along some axis, as `argmax` gives them.

    The axis stays free as long as the positions are only used to look something up along it, or compared with all of
    its positions, as `one_hot` does. Whatever else is done with them freezes it.
    """

    along: Axis
    reason: str  # the operation that made them
    shifted: bool  # by its length, as is done to negative indices, of which there are none
    source: object  # the same for arrays of the same positions, in whatever order and shape
    once: int | None  # the axis of the array, if any, along which each position is there just once


class Counts(tuple[Axis | None, ...]):
    """The axes of an array of how often each position occurs, as `bincount` counts them.

    Or of an array whose sum over all axes but one is that, as one-hot vectors are.
    """

    source: object  # of the positions
    along: int  # the axis of the result that is theirs
    most: int  # how many positions there are


class Places(tuple[Axis | None, ...]):
    """The axes of an array whose last axis has a number for each of several axes, as `v[i, j]` is looked up with."""

    columns: tuple[ArrayAxes, ...]  # one of which, at least, is positions


class Reversed(tuple[Axis | None, ...]):
    """The axes of an array that is turned round along some of them, as it was before.

    Unless it is only sorted then, as `argsort(descending=True)` does, these are frozen.
    """

    turned: tuple[int, ...]
    reason: str  # the operation that turned it


class Discrete(tuple[Axis | None, ...]):
    """The axes of an array with entries that are equal, as whole numbers and copies are, be they floats: see `equals`.

    For of several that are equal `argmax` takes the first.
    """

    along: frozenset[int]  # the axes along which it has such


class Stack(tuple[Axis | None, ...]):
    """The axes of a parameter that may be read entry by entry along one of them: see `stacks`."""

    along: int | None  # the axis of the entries
    entries: "dict[Hashable, ArrayAxes]"  # the axes of each that is read, by its index: a number, or an expression
    is_whole: bool  # whether it is used in any other way


def stack_of(axes: Iterable[Axis | None]) -> Stack:
    """The axes of a parameter before it is used."""
    array = Stack(axes)
    array.along, array.entries, array.is_whole = None, {}, False
    return array


def positions(
    axes: Iterable[Axis | None],
    along: Axis,
    reason: str,
    shifted: bool = False,
    source: object = None,
    once: int | None = None,
) -> Positions:
    """An array of positions along an axis."""
    array = Positions(axes)
    array.along, array.reason, array.shifted = along, reason, shifted
    array.source, array.once = source or object(), once
    return array


def same_positions(axes: Iterable[Axis | None], found: Positions, once: int | None) -> Positions:
    """The same positions in an array with other axes, along one of which each is there just once."""
    return positions(axes, found.along, found.reason, found.shifted, found.source, once)


def counts(axes: Iterable[Axis | None], source: object, along: int, most: int) -> Counts:
    """An array of how often each of so many positions of this source occurs."""
    array = Counts(axes)
    array.source, array.along, array.most = source, along, most
    return array


def discrete(axes: Iterable[Axis | None], along: Iterable[int]) -> Discrete:
    """An array with equal entries along some axes."""
    array = Discrete(axes)
    array.along = frozenset(along)
    return array


def places(axes: Iterable[Axis | None], columns: Iterable[ArrayAxes]) -> Places:
    """An array of places, with a column for each axis."""
    array = Places(axes)
    array.columns = tuple(columns)
    return array


def turn(axes: Iterable[Axis | None], turned: Iterable[int], reason: str) -> Reversed:
    """An array that is turned round along some axes."""
    array = Reversed(axes)
    array.turned, array.reason = tuple(turned), reason
    return array


def known_value(axes: ArrayAxes) -> np.ndarray:
    """The entries of a known array."""
    assert isinstance(axes, Known)
    return axes.value


Labels = Sequence[Hashable]
"""An operation's index labels for the axes of one array, as in an einsum."""

LabelledAxes = list[tuple[Hashable, Axis]]
"""The axes of one array in an operation, with their labels."""

Rule = Callable[..., Sequence[ArrayAxes] | None]
"""The axes of an equation's results, from the interpreter, the equation and the axes of its operands.

A rule for positions may be None: then they are plain numbers.
"""

EqnPath = tuple[int, ...]
"""Where an equation is in nested jaxprs: (4, 1) is live equation 1 of the jaxpr inside live equation 4."""

ARGUMENTS = -1  # as the last number of a path: the arguments of a jaxpr, as if an equation made them


@dataclass(frozen=True)
class Grouping:
    """Rows that were sorted by the group that each belongs to, which is a position along an axis of groups.

        order = jnp.argsort(expert)       # of rows, of which each has an expert
        y = experts_in_turn(x[order])     # the rows of the first expert come first
        y[jnp.argsort(order)]             # put back

    If the groups are permuted, so are these rows, in an order that depends on the data. That changes nothing as long as
    any order would do, and as all arrays that have the axis of rows got it from this very sort: `break_up_groupings`.
    """

    rows: Axis
    groups: Axis
    source: object  # of the positions that the rows were sorted by
    reason: str


@dataclass(frozen=True)
class DeferredReshape:
    """A reshape, perhaps transposed since, that is only used in slices: each slice is the reshape of a slice.

        qkv = (x @ w).reshape(n, 3, d)
        q, v = qkv[:, 0], qkv[:, 2]

    Reshaped as a whole, `qkv` would have one order of its d units. But `q` is the reshape of the first d columns of
    `x @ w` and `v` of the last, and each may have an order of its own.
    """

    source: ArrayAxes
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    order: tuple[int, ...]  # of the new axes, after the transposes


class Interpreter:
    """What is known of the axes in a function, as its equations are interpreted one after the other."""

    def __init__(
        self,
        rules: Mapping[str, Rule],
        default_rule: Rule,
        special_rules: Mapping[type, Mapping[str, Rule]],
        explanations: Mapping[str, str],
        equal_along: Callable[..., frozenset[int] | None],
    ) -> None:
        self.rules, self.default_rule = rules, default_rule
        self.special_rules = special_rules  # for primitives with an operand of some kind: Stack, Positions and so on
        self.explanations = explanations
        self.equal_along = equal_along  # axes along which an equation's results have equal entries, if that is known
        self.choices: list[tuple[Axis, str]] = []  # what positions were chosen along, and the operation that did
        self.reason = ""  # the current operation, to blame if an axis freezes
        self.operations: list[list[LabelledAxes]] = []  # the arrays that each operation relates
        self.first_use: dict[Axis, int] = {}  # axes, numbered in the order in which operations first use them
        self.scan_steps: LabelledAxes = []  # an axis for the steps of each scan that we are inside of
        self.results: dict[EqnPath, list[ArrayAxes]] = {}  # of each equation; enclosing scans' steps come first
        self.loop_axes: list[Axis] = []  # of what loops carry from step to step, or return
        self.groupings: list[Grouping] = []
        self.shards = 0  # how many `shard_map`s we are inside of
        self.expressions: dict[Any, Hashable] = {}  # for each scalar of the current jaxpr, how it is computed
        self._path: EqnPath = ()
        self._scopes = [""]

    def interpret(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[ArrayAxes]) -> list[ArrayAxes]:
        """The axes of a jaxpr's results, from those of its arguments; positions are taken for plain numbers."""
        results = self.interpret_call(jaxpr, consts, args)
        return [axes if isinstance(axes, Discrete) else self.plain(axes) for axes in results]

    def interpret_call(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[ArrayAxes],
        expressions: Mapping[Any, Hashable] = MappingProxyType({}),
    ) -> list[ArrayAxes]:
        """The axes of a jaxpr's results, from those of its arguments and how some of these are computed."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        env |= zip(jaxpr.constvars, map(self.constant, consts), strict=True)

        def read(atom: Any) -> Any:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else env.get(atom)

        path, eqns = self._path, live_equations(jaxpr)
        only_to_solve = _only_to_solve(eqns, jaxpr.outvars, self.special_rules[Stack])
        self._store((*path, ARGUMENTS), args)
        deferred = _deferrable_reshapes(eqns, jaxpr.outvars)
        expressions = {var: expressions.get(var, (path, i)) for i, var in enumerate(jaxpr.invars)}
        for index, eqn in enumerate(eqns):
            if eqn.outvars and only_to_solve.issuperset(eqn.outvars):
                self._store((*path, index), [(None,) * len(var.aval.shape) for var in eqn.outvars])  # type: ignore[attr-defined]
                continue
            if deferred.intersection(eqn.outvars):
                env[eqn.outvars[0]] = reshape = defer_reshape(eqn, self.plain(settled(read(eqn.invars[0]))))
                self._store((*path, index), [(None,) * len(reshape.order)])  # only its slices are read
                continue
            self._path = (*path, index)
            self._scopes.append(self._scope(eqn))
            self.explain(eqn.primitive.name, self.explanations.get(eqn.primitive.name))
            operands = list(map(read, eqn.invars))
            self.expressions = expressions
            results = self._apply_rule(eqn, operands)
            expressions |= {var: _expression(eqn, expressions, self._path, i) for i, var in enumerate(eqn.outvars)}
            env |= zip(eqn.outvars, results, strict=True)
            self._store(self._path, results)
            self._scopes.pop()
        self._path = path
        return [read(atom) for atom in jaxpr.outvars]

    def _apply_rule(self, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[ArrayAxes]:
        """The axes of an equation's results."""
        name = eqn.primitive.name
        results: Sequence[ArrayAxes] | None = self._work_out(eqn, operands)
        equal = self.equal_along(eqn, operands)
        if equal is None and name not in self.special_rules[Discrete]:
            operands = list(map(settled, operands))
        for few in (Places, Counts, Reversed, Discrete):  # which few rules are for
            if name not in self.special_rules[few]:
                operands = [self.plain(operand) if isinstance(operand, few) else operand for operand in operands]
        for kind, rules in self.special_rules.items():
            if results is None and name in rules and any(isinstance(operand, kind) for operand in operands):
                results = rules[name](self, eqn, *operands)
        if results is None:
            results = self.rules.get(name, self.default_rule)(self, eqn, *map(self.plain, operands))
        results = [_without_ones(axes) for axes in results or ()]
        return [discrete(axes, equal) if equal and type(axes) is tuple else axes for axes in results]

    def read_entry(self, stack: Stack, axis: int, index: Hashable) -> list[ArrayAxes] | None:
        """The axes of an entry of a stack, with its own axis; None if entries of another axis were read before."""
        if stack.along not in (None, axis) or stack[axis] is None:
            return None
        stack.along = axis
        new = [None if i == axis or a is None else Axis(a.size) for i, a in enumerate(stack)]
        self.record([(tuple(stack), range(len(stack)))])
        return [stack.entries.setdefault(index, tuple(new))]

    def plain(self, axes: Any) -> Any:
        """The axes of an array that is used as any other: not as positions, and not entry by entry."""
        if isinstance(axes, Positions):
            freeze(axes.along, axes.reason)
        elif isinstance(axes, Places):
            for column in axes.columns:
                self.plain(column)
        elif isinstance(axes, Reversed):
            return self._turned(axes)
        elif isinstance(axes, Stack):
            axes.is_whole = True
        elif not isinstance(axes, Counts | Discrete):
            return axes
        return tuple(axes)

    def _turned(self, array: Reversed) -> ArrayAxes:
        """The axes of a reversed array that is used as any other: entries that were moved come out in another place."""
        for axis in array.turned:
            if (before := array[axis]) is not None:
                freeze(before, array.reason)
        result = tuple(Axis(a.size, array.reason) if a and i in array.turned else a for i, a in enumerate(array))
        # A turned axis has another label in the result: so no permutation is batched over it.
        labels = [("turned", i) if i in array.turned else i for i in range(len(array))]
        self.record([(tuple(array), range(len(array))), (result, labels)])
        return result

    def _work_out(self, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[ArrayAxes] | None:
        """The result of a simple equation of known arrays, such as those that `jnp.eye` consists of; or else None."""
        work_out = WORKED_OUT.get(eqn.primitive.name)
        if work_out is None or not all(isinstance(operand, Known) for operand in operands):
            return None
        aval: Any = eqn.outvars[0].aval
        if math.prod(aval.shape) > MOST_KNOWN or not _is_type_of_numpy(aval.dtype):
            return None
        with np.errstate(all="ignore"):
            result = work_out(eqn.params, *map(known_value, operands))
            if result is None:
                return None
            return [self.constant(np.broadcast_to(result, aval.shape).astype(aval.dtype))]

    def _store(self, path: EqnPath, results: Sequence[ArrayAxes]) -> None:
        """Stores an equation's results; a loop's body is interpreted several times, and the last time counts."""
        steps = tuple(axis for _, axis in self.scan_steps)
        self.results[path] = [(*steps, *_unturned(axes)) for axes in results]

    def new_axes(self, shape: Sequence[int], frozen: str | None = None) -> ArrayAxes:
        """New axes of the given sizes."""
        return tuple(Axis(size, frozen) if size > 1 else None for size in shape)

    def constant(self, value: Any) -> ArrayAxes:
        """The axes of a known array, frozen where its entries differ."""
        shape = np.shape(value)
        if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended) or not math.prod(shape):
            return self.new_axes(shape, "a constant")
        array = np.asarray(value)
        differs = [not _look_the_same(array, array.take([0], axis)).all() for axis in range(array.ndim)]
        axes = [_constant_axis(array, axis) if d else None for axis, d in enumerate(differs)]
        if array.size > MOST_KNOWN:
            return tuple(axes)
        for i, j in _diagonals(array, [axis for axis, d in enumerate(differs) if d]):
            axes[i] = axes[j] = Axis(shape[i], tied=True)
        if not _numpy_knows(array):
            return tuple(axes)
        known = Known(axes)
        known.value = array
        return known

    def explain(self, primitive: str, why: str | None) -> None:
        """Says what is to blame for what freezes now: the primitive, and what it is in it that depends on the order."""
        self.reason = f"{primitive} ({why}) in {self._scopes[-1]}" if why else f"{primitive} in {self._scopes[-1]}"

    def freeze(self, axes: Iterable[Axis | None]) -> None:
        """Forbids any permutation of these axes, and blames the current operation."""
        for axis in axes:
            if axis is not None:
                freeze(axis, self.reason)

    def relate(
        self,
        operands: Sequence[tuple[ArrayAxes, Labels]],
        results: Sequence[Labels],
        new: Mapping[Any, Axis | None] = MappingProxyType({}),
    ) -> list[ArrayAxes]:
        """The results of an operation that is written like an einsum: axes with the same label are united.

            relate([(x, "ij"), (y, "jk")], ["ik"])  # a matrix product: the last axis of x moves with the first of y

        A label that no operand has stands for an axis of `new`, or for one along which all entries are equal.
        """
        axes = {label: axis for label, axis in new.items() if axis is not None}
        for operand, labels in operands:
            for axis, label in zip(operand, labels, strict=True):
                if axis is not None:
                    unite(axes.setdefault(label, axis), axis, self.reason)
        result_axes = [tuple(axes.get(label) for label in labels) for labels in results]
        self.record([*operands, *zip(result_axes, results, strict=True)])
        return result_axes

    def record(self, arrays: Iterable[tuple[ArrayAxes, Labels]]) -> None:
        """Records the arrays that an operation relates, with the labels of their axes."""
        labelled = [
            [
                (int(label) if isinstance(label, np.integer) else label, axis)  # to compare with any other
                for axis, label in zip(axes, labels, strict=True)
                if axis is not None
            ]
            for axes, labels in arrays
        ]
        for _, axis in itertools.chain.from_iterable(labelled):
            self.first_use.setdefault(axis, len(self.first_use))
        self.operations.append([self.scan_steps + axes for axes in labelled])

    def freeze_ties(self) -> None:
        """Freezes what something was chosen from by its position where entries turn out to be equal by construction.

        As copies, padding and what is on both sides of the diagonal of a symmetric matrix are.
        """
        for along, reason in self.choices:
            for atom in [*(atom for atom in atoms(along) if atom.tied), *mirrored(along)]:
                freeze(atom, reason)

    def break_up_groupings(self, others: Iterable[Axis]) -> None:
        """Freezes the groups by which rows were sorted, if their order comes to matter, or others move with them.

        A loop may carry sorted rows from one step to another, which sorts them in another order. And of two networks
        the sorted rows have nothing in common, so that no units are to be found in them.
        """
        sorts = collections.Counter(find(grouping.rows) for grouping in self.groupings)
        others = {*map(find, others), *(atom for axis in self.loop_axes for atom in atoms(axis))} if sorts else set()
        for grouping in self.groupings * len(self.groupings):  # groups may be rows that were sorted before
            rows = find(grouping.rows)
            if rows.frozen or rows.parts or rows in others or sorts[rows] > 1:
                freeze(rows, grouping.reason)
                freeze(grouping.groups, rows.frozen or grouping.reason)
        for path, arrays in self.results.items() if sorts else ():
            self.results[path] = [
                axes if sorts.keys().isdisjoint(_atoms_of(axes)) else (None,) * len(axes) for axes in arrays
            ]

    def split(self, axis: Axis | None, sizes: Sequence[int], split: Callable[..., list[Axis] | None]) -> ArrayAxes:
        """The parts of an axis by `split_product` or `split_segments`; where it cannot be split it is frozen."""
        if axis is None:
            return (None,) * len(sizes)
        self.first_use.setdefault(axis, len(self.first_use))
        parts = split(axis, sizes, self.reason)
        if parts is None:
            self.explain(self.reason.split()[0], "its parts end where those of a product or a concatenation do not")
            self.freeze([axis])
            return self.new_axes(sizes, self.reason)
        return tuple(part if part.size > 1 else None for part in parts)

    def join(self, axes: Sequence[Axis | None], sizes: Sequence[int]) -> Axis | None:
        """The product of axes; one along which all entries are equal is a free factor."""
        if all(axis is None for axis in axes):
            return None
        return product([axis or Axis(size, tied=True) for axis, size in zip(axes, sizes, strict=True)])

    def _scope(self, eqn: core.JaxprEqn) -> str:
        """Where in the model an equation comes from: its module, or else its line."""
        outer, inner = self._scopes[-1], str(eqn.source_info.name_stack)
        while (named := re.sub(r"\w+\(\)/?", "", inner)) != inner:  # such as vmap(jvp()), which is no module
            inner = named
        if inner and outer.endswith(inner):
            return outer
        if inner:
            return f"{outer}/{inner}" if outer and ":" not in outer else inner
        return outer or PurePath(source_info_util.summarize(eqn.source_info)).name


def _expression(eqn: core.JaxprEqn, known: Mapping[Any, Hashable], path: EqnPath, result: int) -> Hashable:
    """How a scalar is computed: the same for scalars that are equal because of it, such as twice i + 1."""
    scalar = all(getattr(atom.aval, "shape", None) == () for atom in (*eqn.invars, *eqn.outvars))
    if eqn.effects or not scalar or eqn.primitive.multiple_results or eqn.primitive.name not in SCALAR_OPERATIONS:
        return (*path, result)
    operands = [np.asarray(a.val).item() if isinstance(a, core.Literal) else known.get(a, a) for a in eqn.invars]
    return (eqn.primitive.name, str(eqn.outvars[0].aval), *operands)


def _atoms_of(axes: ArrayAxes) -> Iterator[Axis]:
    """The atoms of all axes of an array."""
    return (atom for axis in axes if axis is not None for atom in atoms(axis))


def _unturned(axes: ArrayAxes) -> ArrayAxes:
    """The axes along which the entries of an array are in the order of the axis, and the same in that order."""
    if isinstance(axes, Positions):  # numbers that other permutations change
        return (None,) * len(axes)
    turned = axes.turned if isinstance(axes, Reversed) else ()
    return tuple(None if i in turned else axis for i, axis in enumerate(axes))


def equal_axes(array: ArrayAxes) -> frozenset[int]:
    """The axes along which all entries of an array are equal, or some."""
    constant = frozenset(i for i, axis in enumerate(array) if axis is None)
    return constant | array.along if isinstance(array, Discrete) else constant


def settled(axes: Any) -> Any:
    """The array, whose axes are noted to have equal entries in some array: it goes where this is lost sight of."""
    if isinstance(axes, Discrete):
        for i in axes.along:
            tie(axes[i])
    return axes


def _without_ones(axes: ArrayAxes) -> ArrayAxes:
    """The same array, its axes of size one taken for such along which all entries are equal."""
    plain = tuple(axis if axis is not None and axis.size > 1 else None for axis in axes)
    if isinstance(axes, Positions):
        return same_positions(plain, axes, axes.once)
    if isinstance(axes, Places):
        return places(plain, axes.columns)
    if isinstance(axes, Counts):
        return counts(plain, axes.source, axes.along, axes.most)
    if isinstance(axes, Reversed):
        return turn(plain, axes.turned, axes.reason)
    if isinstance(axes, Discrete):
        return discrete(plain, axes.along)
    return axes if isinstance(axes, Known | Stack) else plain


def _constant_axis(array: np.ndarray, axis: int) -> Axis:
    """An axis along which a known array varies: frozen, but for entries that look the same.

    They may follow one another, or come back with a period, as in a mask of every second unit. Then the axis is the
    product of periods, in any order, with what is inside them. (A last period that is cut off would be a segment of its
    own, and no permutation can be batched over segments.)
    """
    entries = np.moveaxis(array, axis, 0)
    count = len(entries)
    if array.size > MOST_KNOWN:
        return Axis(count, "a constant")

    def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(_look_the_same(x, y).reshape(len(x), -1).all(1))

    starts = [0, *(1 + np.flatnonzero(~same(entries[1:], entries[:-1]))), count]
    sizes = [int(stop - start) for start, stop in itertools.pairwise(starts)]
    if max(sizes) > 1:
        return concatenation([Axis(size, "a constant" if size == 1 else None, tied=True) for size in sizes])
    candidates = 1 + np.flatnonzero(same(entries[1 : count // 2 + 1], entries[:1]))
    for period in map(int, candidates[:MOST_PERIODS]):
        if count % period == 0 and same(entries[period:], entries[:-period]).all():
            return product([Axis(count // period, tied=True), Axis(period, "a constant")])
    return Axis(count, "a constant")


def _diagonals(array: np.ndarray, axes: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of axes in which an array is a multiple of the identity plus a constant, as `jnp.eye` is.

    Both may be permuted together. No axis is in two pairs.
    """
    pairs: list[tuple[int, int]] = []
    for i, j in itertools.combinations(axes, 2):
        if array.shape[i] == array.shape[j] and not any({i, j} & {*pair} for pair in pairs):
            matrices = np.moveaxis(array, (i, j), (0, 1))
            on = np.eye(len(matrices), dtype=bool)
            if all(_look_the_same(entries, entries[:1]).all() for entries in (matrices[on], matrices[~on])):
                pairs.append((i, j))
    return pairs


def _look_the_same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """For each entry, whether no program can tell two arrays apart: 0.0 and −0.0 it can, and NaN by their bits."""
    if np.iscomplexobj(x):
        return _look_the_same(x.real, y.real) & _look_the_same(x.imag, y.imag)
    if jax.numpy.issubdtype(x.dtype, np.floating):
        x, y = (array.view(f"u{array.itemsize}") for array in (x, y))
    return x == y


def _is_type_of_numpy(dtype: Any) -> bool:
    """Whether a type is one of NumPy's own: what it does with others, such as `int4`, XLA may do in another way."""
    return isinstance(dtype, np.dtype) and dtype.isbuiltin == 1


def _numpy_knows(array: np.ndarray) -> bool:
    """Whether NumPy can be trusted to do with an array what XLA does.

    Not with numbers so small that XLA may take them for zero, nor with −0.0: XLA takes x + 0.0 for x.
    """
    if np.iscomplexobj(array):
        return _numpy_knows(array.real) and _numpy_knows(array.imag)
    if array.dtype.kind != "f" or not _is_type_of_numpy(array.dtype):
        return _is_type_of_numpy(array.dtype)
    zero = array == 0
    return not (zero & np.signbit(array) | ~zero & (np.abs(array) < np.finfo(array.dtype).tiny)).any()


def reshape_groups(old_shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """The smallest groups of consecutive axes that a reshape turns into one another; none of an empty array.

    (6, 5) to (2, 3, 5) has two: axis 0 becomes axes 0 and 1, and axis 1 becomes axis 2.
    """
    if 0 in old_shape:
        return []
    groups, i, j = [], 0, 0
    while i < len(old_shape) or j < len(new_shape):
        start, old, new = (i, j), 1, 1
        while True:
            if old <= new and i < len(old_shape):
                old, i = old * old_shape[i], i + 1
            else:
                new, j = new * new_shape[j], j + 1
            if old == new:
                break
        # Axes of size one go with what is before them, so that each group begins with a proper axis.
        i += next((n for n, size in enumerate(old_shape[i:]) if size != 1), len(old_shape) - i)
        j += next((n for n, size in enumerate(new_shape[j:]) if size != 1), len(new_shape) - j)
        groups.append((slice(start[0], i), slice(start[1], j)))
    return groups


def defer_reshape(eqn: core.JaxprEqn, operand: Any) -> DeferredReshape:
    """The result of a reshape, or of a transpose of a deferred one."""
    if eqn.primitive.name == "transpose":
        return replace(operand, order=tuple(operand.order[axis] for axis in eqn.params["permutation"]))
    old_shape, new_shape = (atom.aval.shape for atom in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    if eqn.params["dimensions"] is not None:  # a transpose comes first
        old_shape, operand = ([array[i] for i in eqn.params["dimensions"]] for array in (old_shape, operand))
    return DeferredReshape(tuple(operand), tuple(old_shape), new_shape, tuple(range(len(new_shape))))


def _deferrable_reshapes(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> set[Any]:
    """The results of reshapes, and of their transposes, that are only used in slices.

    The slices must be along the first of several axes that one group of axes is reshaped to.
    """
    uses: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                uses.setdefault(atom, []).append(eqn)

    def sliced_only(var: Any, axes: list[int]) -> list[Any] | None:
        """The variable and its transposes, if all uses of them are slices along these axes."""
        variables = [var]
        for eqn in uses.get(var, ()):
            if eqn.primitive.name == "transpose":
                inner = sliced_only(eqn.outvars[0], [eqn.params["permutation"].index(axis) for axis in axes])
                if inner is None:
                    return None
                variables += inner
            elif sliced_axis(eqn) not in axes:
                return None
        return variables if var not in outvars else None

    deferred: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None:
            reshape = defer_reshape(eqn, ())
            groups = [new for _, new in reshape_groups(reshape.old_shape, reshape.new_shape)]
            first_axes = [new.start for new in groups if new.stop - new.start > 1]
            deferred |= set(sliced_only(eqn.outvars[0], first_axes) or ())
    return deferred


def sliced_axis(eqn: core.JaxprEqn) -> int | None:
    """The one axis along which an equation slices its operand without gaps; None if it does anything else."""
    if eqn.primitive.name in ("split", "unstack"):
        return eqn.params["axis"]
    if eqn.primitive.name != "slice" or any(stride != 1 for stride in eqn.params["strides"] or ()):
        return None
    shape = eqn.invars[0].aval.shape  # type: ignore[attr-defined]
    bounds = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    sliced = [axis for axis, (size, start, stop) in enumerate(bounds) if stop - start != size]
    return sliced[0] if len(sliced) == 1 else None


def _only_to_solve(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any], kept: Container[str]) -> set[Any]:
    """What is only used to solve linear equations: the LU factorisation of their matrix, by `jnp.linalg.solve`.

    But not the results of primitives that are `kept`.
    """
    if all(eqn.primitive.name != "custom_linear_solve" for eqn in eqns):
        return set()
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    needed = {atom for atom in outvars if isinstance(atom, core.Var)}
    for eqn in reversed(eqns):
        if eqn.effects or eqn.primitive.name in kept:
            needed.update(eqn.outvars)
        if not needed.isdisjoint(eqn.outvars):
            used = eqn.invars
            if _is_solved_by_lu(eqn, makers):  # the matrix and the right sides determine the solution
                lengths = eqn.params["const_lengths"]
                used = [*eqn.invars[: lengths.matvec], *eqn.invars[sum(lengths) :]]
            needed.update(atom for atom in used if isinstance(atom, core.Var))
    return makers.keys() - needed


def _is_solved_by_lu(eqn: core.JaxprEqn, makers: Mapping[Any, core.JaxprEqn]) -> bool:
    """Whether an equation solves linear equations exactly: with the LU factorisation of their very matrix."""
    if eqn.primitive.name != "custom_linear_solve":
        return False
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    factors = [makers.get(atom) for atom in eqn.invars[start : start + lengths.solve]]
    if not factors or any(maker is None or maker.primitive.name != "lu" for maker in factors):
        return False
    matrices = [maker.invars[0] for maker in factors if maker is not None]
    sources = [makers[m] for m in matrices if isinstance(m, core.Var) and m in makers]
    matrices += [maker.invars[0] for maker in sources if maker.primitive.name == "stop_gradient"]
    return any(atom is matrix for atom in eqn.invars[: lengths.matvec] for matrix in matrices)


def live_equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the results depend on, and those with side effects other than debugging."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        has_effect = bool(eqn.effects) and not eqn.primitive.name.startswith("debug")
        if has_effect or needed.intersection(eqn.outvars):
            live.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return live[::-1]


def _broadcast(params: Any, value: np.ndarray, *sizes: Any) -> np.ndarray:
    """The value with axes of size one where it is broadcast."""
    kept = dict(zip(params["broadcast_dimensions"], value.shape, strict=True))
    return np.broadcast_to(value.reshape([kept.get(i, 1) for i in range(len(params["shape"]))]), params["shape"])


def _convert(params: Any, value: np.ndarray) -> np.ndarray | None:
    """The value, of complex numbers the real part, unless it is rounded or floats are no numbers of an integer type."""
    dtype, value = params["new_dtype"], value.real
    if value.dtype.kind == "f" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        whole = np.trunc(value.astype(np.float64))
        return value if ((whole >= limits.min) & (whole < limits.max + 1)).all() else None
    return _as_floats(value, dtype) if dtype.kind in "fc" else value


def _as_floats(value: np.ndarray, dtype: Any) -> np.ndarray | None:
    """The value as floats, unless these are complex or it is rounded: XLA may do without."""
    floats = None if dtype.kind == "c" else value.astype(dtype)
    return floats if floats is not None and (floats.astype(value.dtype) == value).all() else None


def _iota(params: Any) -> np.ndarray | None:
    """Numbers along an axis, unless they are rounded."""
    shape, axis, dtype = params["shape"], params["dimension"], params["dtype"]
    numbers = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return _as_floats(numbers, dtype) if dtype.kind in "fc" else numbers


def _arithmetic(operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray | None]:
    """The operation, of floats only if they and its result are small whole numbers.

    These are exact in whatever order XLA adds and multiplies: it takes (x + 1e8) - 1e8 for x, and may add to a product
    before it rounds.
    """

    def small_whole(x: np.ndarray) -> bool:
        limit = 2 ** (np.finfo(x.dtype).nmant // 2) if x.dtype.kind == "f" else 0
        return bool(((np.abs(x) <= limit) & (x == np.trunc(x))).all())

    def work_out(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
        result = np.asarray(operation(x, y))
        exact = result.dtype.kind != "c" and all(z.dtype.kind != "f" or small_whole(z) for z in (x, y, result))
        return result if exact else None

    return work_out


def _rem(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The remainder, unless something is divided by zero."""
    return _arithmetic(np.fmod)(_, x, y) if y.all() else None


def _select(_: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    """The chosen entries, unless a number is that of no case."""
    if which.min() < 0 or which.max() >= len(cases):
        return None
    which = np.broadcast_to(which, cases[0].shape).astype(int)
    return np.take_along_axis(np.stack(cases), which[None], 0).squeeze(0)


def _reshape(params: Any, value: np.ndarray) -> np.ndarray:
    """The value in another shape, its axes in another order before."""
    order = params["dimensions"]
    return (value if order is None else value.transpose(order)).reshape(params["new_sizes"])


SCALAR_OPERATIONS = {"add", "convert_element_type", "lt", "max", "min", "mul", "select_n", "sub"}

WORKED_OUT: dict[str, Callable[..., np.ndarray | None]] = {
    "add": _arithmetic(np.add),
    "and": lambda _, x, y: x & y,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *values: np.concatenate(values, params["dimension"]),
    "convert_element_type": _convert,
    "eq": lambda _, x, y: x == y,
    "ge": lambda _, x, y: x >= y,
    "gt": lambda _, x, y: x > y,
    "iota": _iota,
    "le": lambda _, x, y: x <= y,
    "lt": lambda _, x, y: x < y,
    "mul": _arithmetic(np.multiply),
    "ne": lambda _, x, y: x != y,
    "not": lambda _, x: ~x,
    "or": lambda _, x, y: x | y,
    "rem": _rem,
    "reshape": _reshape,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "stack": lambda params, *values: np.stack(values, params["axis"]),
    "sub": _arithmetic(np.subtract),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
}
"""How NumPy does what simple primitives do, None where it might differ; the result still has to be broadcast and
converted."""
