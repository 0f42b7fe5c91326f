"""New values for attributes that hold sizes: solve what was learnt by tracing integers for the sizes after a cut."""

from collections.abc import Mapping
from typing import Any

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.attributes import Attribute, Derived, Origin, evaluate, leaves, show
from apoptosis.structure.axes import Axis, size_of
from apoptosis.structure.plan import AttributeChange
from apoptosis.structure.program import Call

__all__ = ["Unsolvable", "solve_attributes"]


class Unsolvable(Exception):  # noqa: N818 - an answer between two parts, never an error of the user
    """The model's own code cannot run the sizes asked for, and why."""


def solve_attributes(
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    now: dict[Attribute, int],
    replaced: set[str],
) -> tuple[AttributeChange, ...]:
    """New values of attributes such that every traced integer becomes the size it measures.

    Modules that are `replaced` have no say.

    Raises:
        Unsolvable: there are none.
    """
    wanted = _wanted(analysis, sizes, now, replaced)
    values = now | {o: new for o, (new, _) in wanted.items() if isinstance(o, Attribute)}
    settled = {origin for origin in wanted if isinstance(origin, Attribute)}
    for origin, (new, _) in wanted.items():
        if not isinstance(origin, Attribute) and evaluate(origin, values) != new:
            _solve(origin, new, values, settled)
    for origin, (new, call) in wanted.items():
        # A number in it may be a tensor's size, which changes by itself: running the model will tell.
        if evaluate(origin, values) != new and not _has_number(origin):
            where = f"{call.name} ({call.line})"
            raise Unsolvable(f"{show(origin)} would have to give {new} in {where}")
    return tuple(
        AttributeChange(where, now[where], new)
        for where, new in values.items()
        if now[where] != new
    )


def _wanted(
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    now: dict[Attribute, int],
    replaced: set[str],
) -> dict[Origin, tuple[int, Call]]:
    """What every traced integer must be, and a call that says so."""
    wanted: dict[Origin, tuple[int, Call]] = {}
    for call in analysis.calls():
        facts = analysis.facts[call]
        for place, origin in call.taints.items():
            if any(leaf.module in replaced for leaf in leaves(origin)):
                continue
            measured = facts.sizes.get(place)
            if measured is None:
                new = evaluate(origin, now)
            else:
                new = size_of(measured.expr, sizes) * (-1 if measured.negative else 1)
            if origin in wanted and wanted[origin][0] != new:
                raise Unsolvable(_conflict(origin, wanted[origin], (new, call)))
            wanted[origin] = (new, call)
    return wanted


def _has_number(origin: Origin) -> bool:
    if isinstance(origin, Derived):
        return _has_number(origin.left) or _has_number(origin.right)
    return isinstance(origin, int)


def _solve(origin: Origin, new: int, values: dict[Attribute, int], settled: set[Attribute]) -> None:
    """Change one attribute that is not settled yet so that a derived integer comes out as wanted."""
    while isinstance(origin, Derived):
        sides = (origin.left, origin.right)
        open_sides = [any(leaf not in settled for leaf in leaves(side)) for side in sides]
        if open_sides == [False, False]:
            return
        left = open_sides[0]
        other = evaluate(sides[1] if left else sides[0], values)
        found = _INVERSES[origin.operator, left](new, other)
        if found is None:
            return
        origin, new = sides[0] if left else sides[1], found
    if isinstance(origin, Attribute):
        values[origin] = new
        settled.add(origin)


_INVERSES: dict[tuple[str, bool], Any] = {
    ("add", True): lambda new, b: new - b,
    ("add", False): lambda new, a: new - a,
    ("sub", True): lambda new, b: new + b,
    ("sub", False): lambda new, a: a - new,
    ("mul", True): lambda new, b: new // b if b and new % b == 0 else None,
    ("mul", False): lambda new, a: new // a if a and new % a == 0 else None,
    ("floordiv", True): lambda new, b: new * b,
    ("floordiv", False): lambda new, a: (
        a // new if 0 < new <= a and a // (a // new) == new else None
    ),
}


def _conflict(origin: Origin, first: tuple[int, Call], second: tuple[int, Call]) -> str:
    return (
        f"{show(origin)} would have to be {first[0]} in {first[1].name} ({first[1].line}) "
        f"and {second[0]} in {second[1].name} ({second[1].line})"
    )
