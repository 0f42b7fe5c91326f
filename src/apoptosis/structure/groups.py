"""Groups: what is removed together. A group is a free axis; a unit is one of its indices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, lcm

import numpy as np

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.attributes import Origin, show
from apoptosis.structure.axes import Axis, Expr, Indices, coordinates, size_of
from apoptosis.structure.facts import PinReason
from apoptosis.structure.kinds import kinds_of
from apoptosis.structure.program import Value, values_in
from apoptosis.structure.zero_flow import inexact_axes

__all__ = ["Group", "PinnedAxis", "Site", "Slice", "Tie", "find_groups", "find_pinned", "find_ties"]


@dataclass(frozen=True, eq=False)
class Slice:
    """Where a tensor holds the units of a group: along `dim`, unit u owns the entries `indices[u]`."""

    tensor: str
    dim: int
    role: str
    """`producer` makes the unit, `consumer` reads it, `carrier` acts on it on the way."""
    _expr: Expr = field(repr=False)
    _axis: Axis = field(repr=False)
    _sizes: Mapping[Axis, int] = field(repr=False)

    @cached_property
    def indices(self) -> Indices:
        """(units, entries per unit)."""
        return _entries(self._expr, self._axis, self._sizes)


@dataclass(frozen=True, eq=False)
class Site:
    """Where a run of the model shows the units: the input or output of a module's call, along `dim`."""

    module: str
    call: int
    side: str
    dim: int
    _expr: Expr = field(repr=False)
    _axis: Axis = field(repr=False)
    _sizes: Mapping[Axis, int] = field(repr=False)

    @cached_property
    def indices(self) -> Indices:
        """(units, entries per unit)."""
        return _entries(self._expr, self._axis, self._sizes)


def _entries(expr: Expr, axis: Axis, sizes: Mapping[Axis, int]) -> Indices:
    """Which positions of a dimension belong to each unit of an axis."""
    columns = coordinates(expr, axis, sizes)
    owner, place = np.concatenate(columns), np.tile(np.arange(len(columns[0])), len(columns))
    owned = owner >= 0
    order = np.argsort(owner[owned], kind="stable")
    return np.sort(place[owned][order].reshape(sizes.get(axis, axis.size), -1), axis=1)


@dataclass(frozen=True, eq=False)
class Group:
    """Units that are cut together in every tensor they touch.

    `exact` says whether cutting a unit equals zeroing its slices; if not, `inexact_because` says why. No cut may leave
    fewer than `smallest` units, or other than a multiple of `multiple`; `multiple_because` says why.
    """

    name: str
    kind: str
    size: int
    exact: bool
    inexact_because: str
    smallest: int
    multiple: int
    multiple_because: str
    axis: Axis = field(repr=False)
    places: tuple[tuple[str, int, str, Expr], ...] = field(repr=False)
    """Tensor, dimension, role and expression of each slice."""
    shown: tuple[tuple[str, int, str, int, Expr], ...] = field(repr=False)
    """Module, call, side, dimension and expression of each site."""
    readers: frozenset[str] = field(repr=False)
    """Modules in whose own code weights read the units."""
    makers: frozenset[str] = field(repr=False)
    """Modules in whose own code weights make them."""
    spared: frozenset[tuple[str, int]] = field(repr=False)
    """Slices, by tensor and dimension, that `zero` leaves alone: zeros there would give 0/0."""
    sizes: Mapping[Axis, int] = field(repr=False)
    """Sizes of the axes that have shrunk already."""

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Everywhere the units are, tensor by tensor."""
        return tuple(Slice(*place, self.axis, self.sizes) for place in self.places)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Everywhere a run shows the units, in the order of the run."""
        return tuple(Site(*place, self.axis, self.sizes) for place in self.shown)


@dataclass(frozen=True)
class PinnedAxis:
    """A dimension of a tensor that stays whole, wholly or in part, and why."""

    tensor: str
    dim: int
    size: int
    op: str
    reason: str
    module: str
    line: str


@dataclass(frozen=True)
class Tie:
    """Groups that must keep equally many units, times a factor each, for the model's own code to run."""

    members: tuple[tuple[str, int], ...]
    because: str


def find_groups(analysis: Analysis) -> list[Group]:
    """Every group, in the order of the model's tensors."""
    kinds, inexact = kinds_of(analysis), inexact_axes(analysis)
    roles, sites, workers = _roles(analysis), _sites(analysis), _workers(analysis)
    floors = {axis for facts in analysis.facts.values() for e in facts.floors for axis in e.axes()}
    multiples = _multiples(analysis)
    spared = frozenset((value.names[0], dim) for value, dim in analysis.spared() if value.names)
    places: dict[Axis, list[tuple[str, int, str, Expr]]] = {}
    for value in analysis.tensors():
        for dim, expr in enumerate(analysis.axes[value]):
            for axis in dict.fromkeys(a for a in expr.axes() if a.pin is None):
                role = roles.get((value, dim, axis)) or roles.get((value, None, axis), "carrier")
                places.setdefault(axis, []).append((value.names[0], dim, role, expr))
    groups: dict[str, Group] = {}
    for axis, own in places.items():
        kind = kinds.get(axis, "hidden")
        name = _name(own, kind, groups)
        groups[name] = Group(
            name,
            kind,
            axis.size,
            exact=axis not in inexact,
            inexact_because=inexact.get(axis, ""),
            smallest=2 if axis in floors else 1,
            multiple=multiples.get(axis, (1, ""))[0],
            multiple_because=multiples.get(axis, (1, ""))[1],
            axis=axis,
            places=tuple(own),
            shown=tuple(sites.get(axis, ())),
            readers=frozenset(workers.get((axis, "consumer"), ())),
            makers=frozenset(workers.get((axis, "producer"), ())),
            spared=spared,
            sizes={},
        )
    return list(groups.values())


def find_pinned(analysis: Analysis) -> list[PinnedAxis]:
    """Every pinned dimension of a tensor of the model that somebody might have expected to shrink."""
    found: list[PinnedAxis] = []
    for value in analysis.tensors():
        for dim, expr in enumerate(analysis.axes[value]):
            reasons = {
                a.pin: None for a in expr.axes() if isinstance(a.pin, PinReason) and not a.pin.quiet
            }
            for pin in reasons:
                found.append(
                    PinnedAxis(
                        value.names[0], dim, size_of(expr), pin.op, pin.reason, pin.module, pin.line
                    )
                )
    return found


def find_ties(analysis: Analysis, groups: list[Group]) -> list[Tie]:
    """Count ties that operations and attributes impose."""
    names = {group.axis: group.name for group in groups}
    found: dict[frozenset[tuple[str, int]], Tie] = {}

    def note(exprs: list[Expr], because: str) -> None:
        for other in exprs[1:]:
            pair = _reduced(exprs[0], other)
            if pair is None:
                continue
            members = tuple((names[axis], factor) for axis, factor in pair if axis in names)
            if len(members) == 2 and members[0] != members[1]:
                found.setdefault(frozenset(members), Tie(members, because))

    by_origin: dict[Origin, list[Expr]] = {}
    for call, facts in analysis.facts.items():
        for exprs in facts.ties:
            note(list(exprs), f"{call.name} cuts or stacks evenly ({call.line})")
        for place, origin in call.taints.items():
            if place in facts.sizes:
                by_origin.setdefault(origin, []).append(facts.sizes[place].expr)
    for origin, exprs in by_origin.items():
        note(list(dict.fromkeys(exprs)), f"one attribute holds both sizes: {show(origin)}")
    return list(found.values())


def _reduced(a: Expr, b: Expr) -> tuple[tuple[Axis, int], tuple[Axis, int]] | None:
    """Two expressions of equal size as multiples of one free axis each, if what else is in them is the same."""
    left, right = _monomial(a), _monomial(b)
    if left is None or right is None:
        return None
    common = [axis for axis in left[0] if axis in right[0]]
    rest = [[axis for axis in side[0] if axis not in common] for side in (left, right)]
    if [len(side) for side in rest] != [1, 1]:
        return None
    return (rest[0][0], left[1]), (rest[1][0], right[1])


def _monomial(expr: Expr) -> tuple[list[Axis], int] | None:
    """Free axes and a number whose product is the size, if that is all there is."""
    found: list[tuple[tuple[Axis, ...], int]] = []
    for term in expr.terms:
        axes: list[Axis] = []
        factor = 1
        for part in term:
            inner = ([part], 1) if isinstance(part, Axis) else _monomial(part)
            if inner is None:
                return None
            for axis in inner[0]:
                if axis.pin is None:
                    axes.append(axis)
                else:
                    factor *= axis.size
            factor *= inner[1]
        found.append((tuple(axes), factor))
    if len({frozenset(axes) for axes, _ in found}) != 1:
        return None
    return list(found[0][0]), sum(factor for _, factor in found)


def _roles(analysis: Analysis) -> dict[tuple[Value, int | None, Axis], str]:
    """What each tensor's axes are there for; a role of a reshaped weight is one of the weight, whatever dimension."""
    origins: dict[Value, set[Value]] = {v: {v} for v in analysis.program.tensors.values()}
    rank = {"producer": 0, "consumer": 1, "carrier": 2}
    found: dict[tuple[Value, int | None, Axis], str] = {}
    for call in analysis.program.calls:
        made_of = {o for v in values_in(call.arguments) for o in origins.get(v, ()) if v.fixed}
        for value in call.outputs:
            if value.fixed:
                origins[value] = made_of
        for value, dim, expr, role in analysis.facts[call].roles:
            for axis in expr.axes():
                for tensor in origins.get(value, ()):
                    place = (tensor, dim if tensor is value else None, axis)
                    known = found.get(place)
                    if known is None or rank[role] < rank[known]:
                        found[place] = role
    return found


def _workers(analysis: Analysis) -> dict[tuple[Axis, str], set[str]]:
    """The modules whose operations make or read each axis with weights."""
    found: dict[tuple[Axis, str], set[str]] = {}
    for call in analysis.program.calls:
        for _, _, expr, role in analysis.facts[call].roles:
            for axis in expr.axes():
                found.setdefault((axis, role), set()).add(call.module)
    return found


def _multiples(analysis: Analysis) -> dict[Axis, tuple[int, str]]:
    """What the size of each axis must stay a multiple of, so that kernels take what they are given, and why.

    Of a product the last axes answer for it first. A term that is on no grid of its own, in a sum that is, stays whole.
    """
    found: dict[Axis, tuple[int, str]] = {}
    for facts in analysis.facts.values():
        for expr, multiple, why in facts.grids:
            if (
                size_of(expr) % multiple == 0
            ):  # else it ran all the same: the kernel did not ask here
                for axis, own in _needed(expr, multiple):
                    known = found.get(axis, (1, ""))[0]
                    if (both := lcm(known, own)) > known:
                        found[axis] = (both, why)
    return found


def _needed(expr: Expr, multiple: int) -> list[tuple[Axis, int]]:
    """What the free axes of an expression must each be a multiple of for the whole to be one."""
    found: list[tuple[Axis, int]] = []
    for term in expr.terms:
        missing, factors = multiple, list(reversed(term))
        factors.sort(key=_may_shrink)
        for factor in factors:
            size = factor.size if isinstance(factor, Axis) else size_of(factor)
            own = gcd(missing, size)
            missing //= own
            if isinstance(factor, Expr):
                found += _needed(factor, own)
            elif factor.pin is None:
                found.append((factor, own))
        if missing > 1:
            found += [(axis, axis.size) for axis in Expr((term,)).axes() if axis.pin is None]
    return found


def _may_shrink(factor: Axis | Expr) -> bool:
    return isinstance(factor, Expr) or factor.pin is None


def _sites(analysis: Analysis) -> dict[Axis, list[tuple[str, int, str, int, Expr]]]:
    found: dict[Axis, list[tuple[str, int, str, int, Expr]]] = {}
    for call in analysis.program.modules:
        if not call.leaf:
            continue
        for side, value in (("input", call.input), ("output", call.output)):
            if value is None or value not in analysis.axes:
                continue
            for dim, expr in enumerate(analysis.axes[value]):
                for axis in dict.fromkeys(a for a in expr.axes() if a.pin is None):
                    found.setdefault(axis, []).append((call.path, call.index, side, dim, expr))
    return found


def _name(places: list[tuple[str, int, str, Expr]], kind: str, taken: dict[str, Group]) -> str:
    """The module that makes the units, with the kind where the module makes several."""
    tensor = next((tensor for tensor, _, role, _ in places if role == "producer"), places[0][0])
    path, _, last = tensor.rpartition(".")
    name = path if path and last in ("weight", "bias") else tensor
    if kind not in ("channel", "hidden", "stream"):
        name = f"{name}:{kind}"
    serial, unique = 2, name
    while unique in taken:
        unique, serial = f"{name}#{serial}", serial + 1
    return unique
