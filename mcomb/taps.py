"""Where inside a function the units of each permutation are active, and the function with what is there handed out.

`survey` reads a function as `derive` does and lists its equations, those of nested calls and of the bodies of scans
among them, with the arrays they read and make. `tapped` evaluates the function anew and hands out, or replaces, the
arrays at any of these places. Branches and while loops are not entered: what is inside may not happen, or happen any
number of times.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend import core

from mcomb.axes import Axis, cut, factored, find
from mcomb.base import Params
from mcomb.derive import layout_of, read
from mcomb.permute import Blocks, Layout, PermutationSpec, Segments, names_in
from mcomb.primitives import RULES, divided, inside, region
from mcomb.reader import ARGUMENTS, Reader, Way, live


class Place(NamedTuple):
    """Where an array is made: the way to an equation, and which of its results the array is."""

    way: Way
    number: int


@dataclass(frozen=True)
class Tap:
    """An array inside a function: its place, how its axes move, and whether it depends on inputs and parameters.

    For each scan that it is inside of it has an axis of steps, which come first.
    """

    place: Place
    layouts: tuple[Layout, ...]
    inputs: bool
    params: bool

    @property
    def perms(self) -> set[str]:
        """The named axes that the array has."""
        return {name for layout in self.layouts for name in names_in(layout)}


@dataclass(frozen=True)
class Site:
    """An equation with the arrays that it reads, None for constants, and makes."""

    eqn: core.JaxprEqn
    operands: Sequence[Tap | None]
    results: Sequence[Tap]

    @property
    def summed(self) -> Iterator[tuple[Tap, set[str]]]:
        """The arrays that a contraction reads, each with the named axes that it sums over."""
        axes: Sequence[Sequence[int]] = ()
        if self.eqn.primitive.name == "dot_general":
            axes = self.eqn.params["dimension_numbers"][0]
        elif self.eqn.primitive.name == "conv_general_dilated":
            at = self.eqn.params["dimension_numbers"]
            axes = (at.lhs_spec[1:2], at.rhs_spec[1:2])
        for tap, summed, atom in zip(self.operands, axes, self.eqn.invars, strict=False):
            if tap is not None:
                steps = len(tap.layouts) - len(atom.aval.shape)  # type: ignore[attr-defined]
                yield tap, {name for axis in summed for name in names_in(tap.layouts[steps + axis])}


@dataclass(frozen=True)
class Survey:
    """A function's parameters and its equations, in the order in which they are evaluated."""

    leaves: Mapping[str, Tap]
    sites: Sequence[Site]


def survey(spec: PermutationSpec, fn: Callable[..., Any], params: Params, *inputs: Any) -> Survey:
    """What is inside `fn(params, *inputs)`, in the names of the spec; from arrays or their shapes."""
    traced = jax.make_jaxpr(fn)(params, *inputs)
    leaves, reader = read(traced, params, *inputs)
    names: dict[Axis, str] = {}
    for leaf, value in leaves.items():
        for axis, layout in zip(value, spec.axes[leaf], strict=True):
            if axis is not None:
                _name(spec, axis, layout, names)
    surveyor = _Surveyor(reader, names)
    count = len(leaves)
    made = [
        Tap(Place((ARGUMENTS,), i), surveyor.layouts((ARGUMENTS,), i), inputs=i >= count, params=i < count)
        for i in range(len(traced.jaxpr.invars))
    ]
    surveyor.walk(traced.jaxpr, (), made)
    return Survey(dict(zip(leaves, made, strict=False)), surveyor.sites)


def activations(spec: PermutationSpec, found: Survey) -> dict[str, list[Tap]]:
    """For each permutation the arrays in which its units are active, each once, in the order of use.

    They are what the next layer's weights see: the arrays that depend on the inputs and that a contraction sums over
    the permutation's axis. If there is none, they are those of which any operation drops the axis; or else any that
    depend on the inputs; or, where the units are only used between parameters, these parameters.
    """
    read_by = [(tap, site) for site in found.sites for tap in site.operands if tap is not None]
    kept = {id(site): {name for tap in site.results for name in tap.perms} for site in found.sites}
    candidates = (
        [(tap, names) for site in found.sites for tap, names in site.summed if tap.inputs],
        [(tap, tap.perms - kept[id(site)]) for tap, site in read_by if tap.inputs],
        [(tap, tap.perms) for site in found.sites for tap in site.results if tap.inputs],
        [(tap, tap.perms) for tap in found.leaves.values()],
    )
    taps: dict[str, list[Tap]] = {}
    for choice in candidates:
        mine: dict[str, dict[Place, Tap]] = {}
        for tap, names in choice:
            for name in names & spec.sizes.keys() - taps.keys():
                mine.setdefault(name, {})[tap.place] = tap
        taps |= {name: list(of.values()) for name, of in mine.items()}
    return {name: taps[name] for name in spec.sizes}


def tapped(
    fn: Callable[..., Any],
    wanted: Collection[Place],
    edits: Mapping[Place, Callable[[Any], Any]] = MappingProxyType({}),
) -> Callable[..., tuple[Any, dict[Place, Any]]]:
    """The function that returns what `fn` does, and with it the arrays at the wanted places.

    An edit replaces the array at its place before anything reads it, inside a scan at every step alike. The function
    takes arguments of the shapes with which the places were surveyed; compiled, it computes only what is used of it.
    """
    wanted = frozenset(wanted)
    around = {place.way[:depth] for place in wanted | edits.keys() for depth in range(len(place.way))}

    def run(*args: Any) -> tuple[Any, dict[Place, Any]]:
        traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        results, found = evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(args), ())
        if missing := wanted - found.keys():
            raise ValueError(f"{min(missing)} is not inside this function: survey it with arguments of these shapes")
        return jax.tree.unflatten(jax.tree.structure(shape), results), found

    def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], way: Way) -> tuple[list, dict]:
        found: dict[Place, Any] = {}

        def made(way: Way, values: Sequence[Any]) -> list[Any]:
            values = [edits.get(Place(way, i), lambda value: value)(value) for i, value in enumerate(values)]
            found.update((Place(way, i), value) for i, value in enumerate(values) if Place(way, i) in wanted)
            return values

        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= zip(jaxpr.invars, made((*way, ARGUMENTS), args), strict=True)

        def look_up(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for number, eqn in enumerate(live(jaxpr)):
            here, operands = (*way, number), list(map(look_up, eqn.invars))
            inner: dict[Place, Any] = {}
            if here not in around:
                results = _evaluate(jaxpr, eqn, operands)
            elif eqn.primitive.name == "scan":
                results, inner = scan(eqn, operands, here)
            else:  # a call, evaluated in place: derivatives of its own are lost
                results, inner = evaluate(*inside(eqn), operands, here)
            found |= inner
            values |= zip(eqn.outvars, made(here, results), strict=True)
        return [look_up(atom) for atom in jaxpr.outvars], found

    def scan(eqn: core.JaxprEqn, operands: Sequence[Any], here: Way) -> tuple[list, dict]:
        p = eqn.params
        consts, init, xs = divided(operands, p["num_consts"], p["num_carry"])

        def step(carry: list[Any], x: list[Any]) -> tuple[list, tuple[list, dict]]:
            results, found = evaluate(*inside(eqn), [*consts, *carry, *x], here)
            return results[: len(carry)], (results[len(carry) :], found)

        last, (ys, found) = jax.lax.scan(step, init, xs, p["length"], p["reverse"], p["unroll"])
        return [*last, *ys], found

    return run


def _evaluate(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation of a jaxpr."""
    given = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if isinstance(atom, core.Var)}
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn])
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*given.values())


def _name(spec: PermutationSpec, axis: Axis, layout: Layout, names: dict[Axis, str]) -> None:
    """Adds to `names` the axes, within a parameter's axis, that its layout names."""
    if isinstance(layout, str):
        names[find(axis)] = layout
    elif isinstance(layout, Blocks | Segments):
        within = layout.factors if isinstance(layout, Blocks) else layout.parts
        divide = factored if isinstance(layout, Blocks) else cut
        parts = divide(axis, [spec.length(part) for part in within], "the spec")
        for part, inner in zip(parts or (), within, strict=False):
            _name(spec, part, inner, names)


class _Surveyor:
    """The state of a survey: what was read, the names of axes, and the equations met so far."""

    def __init__(self, reader: Reader, names: Mapping[Axis, str]) -> None:
        self.reader, self.names = reader, names
        self.sites: list[Site] = []

    def walk(self, jaxpr: core.Jaxpr, way: Way, args: Sequence[Tap | None]) -> list[Tap | None]:
        """The results of a jaxpr, whose equations are added to the sites."""
        known: dict[Any, Tap | None] = dict(zip(jaxpr.invars, args, strict=True))

        def look_up(atom: Any) -> Tap | None:
            return None if isinstance(atom, core.Literal) else known.get(atom)

        for number, eqn in enumerate(live(jaxpr)):
            here, operands = (*way, number), list(map(look_up, eqn.invars))
            if RULES.get(eqn.primitive.name) is region:
                results: Sequence[Tap | None] = self.walk(inside(eqn)[0], here, operands)
            else:
                scan = eqn.primitive.name == "scan"
                made = self._scan(eqn, here, operands) if scan else self._made(here, [operands] * len(eqn.outvars))
                self.sites.append(Site(eqn, operands, made))
                results = made
            known |= zip(eqn.outvars, results, strict=True)
        return list(map(look_up, jaxpr.outvars))

    def layouts(self, way: Way, number: int) -> tuple[Layout, ...]:
        """How the axes of an array move, in the names of the spec."""
        return tuple(layout_of(axis, self.names) for axis in self.reader.made[way][number])

    def _scan(self, eqn: core.JaxprEqn, here: Way, operands: Sequence[Tap | None]) -> list[Tap]:
        """The results of a scan, of which the carry is taken to depend on everything that goes in."""
        count = eqn.params["num_consts"]
        consts, carry, xs = divided(operands, count, eqn.params["num_carry"])
        sources = [*([operand] for operand in consts), *[operands] * len(carry), *([x] for x in xs)]
        args = self._made((*here, ARGUMENTS), sources)
        inner = self.walk(inside(eqn)[0], here, [*consts, *args[count:]])
        return self._made(here, [*[operands] * len(carry), *([y] for y in inner[len(carry) :])])

    def _made(self, way: Way, sources: Sequence[Sequence[Tap | None]]) -> list[Tap]:
        """What an equation makes, from what each of its results depends on."""
        found = []
        for number, operands in enumerate(sources):
            taps = [tap for tap in operands if tap is not None]
            depends = any(tap.inputs for tap in taps), any(tap.params for tap in taps)
            found.append(Tap(Place(way, number), self.layouts(way, number), *depends))
        return found
