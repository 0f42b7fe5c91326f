"""How a cut network can be delivered: as the user's own module, or as a rewritten program.

The user's code is preferred. Attributes that hold sizes get new values such that every integer that came from them is
what the plan asks for; then the cut module is run once, on the meta device, and recorded again. It is accepted only if
it makes the same calls, with the arguments and result shapes that the algebra predicts: then it computes what the
rewritten program computes.
"""

from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any

import torch
from torch import nn

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.attributes import Attribute, Derived, Origin, evaluate, leaves
from apoptosis.structure.axes import Axis, size_of
from apoptosis.structure.plan import AttributeChange, Plan
from apoptosis.structure.program import Call, Program, map_values
from apoptosis.structure.recording import Example, record
from apoptosis.structure.rewriting import expected_arguments
from apoptosis.structure.surgery import cut_module

__all__ = ["DIVIDES_BY_WIDTH", "Unsolvable", "confirm", "solve_attributes"]


DIVIDES_BY_WIDTH = "attention without a scale divides by the square root of its width"


class Unsolvable(Exception):  # noqa: N818 - an answer between two parts, never an error of the user
    """No values of the attributes give the sizes asked for."""


def solve_attributes(
    analysis: Analysis, sizes: Mapping[Axis, int], now: dict[Attribute, int]
) -> tuple[AttributeChange, ...]:
    """New values of attributes such that every traced integer becomes the size it measures."""
    wanted: dict[Origin, tuple[int, Call]] = {}
    for call in analysis.program.calls:
        facts = analysis.facts[call]
        for (name, place), origin in call.taints.items():
            measured = facts.sizes.get((name, place))
            if measured is None:
                new = evaluate(origin, now)
            else:
                new = size_of(measured.expr, sizes) * (-1 if measured.negative else 1)
            if origin in wanted and wanted[origin][0] != new:
                raise Unsolvable(_conflict(origin, wanted[origin], (new, call)))
            wanted[origin] = (new, call)
    values = dict(now)
    settled: set[Attribute] = set()
    for origin, (new, _) in wanted.items():
        if isinstance(origin, Attribute):
            values[origin] = new
            settled.add(origin)
    for origin, (new, _) in wanted.items():
        if not isinstance(origin, Attribute) and evaluate(origin, values) != new:
            _solve(origin, new, values, settled)
    for origin, (new, call) in wanted.items():
        # A number in it may be a tensor's size, which changes by itself: running the model will tell.
        if evaluate(origin, values) != new and not _has_number(origin):
            raise Unsolvable(
                f"{_show(origin)} would have to give {new} in {call.name} ({call.line})"
            )
    return tuple(
        AttributeChange(where, now[where], new)
        for where, new in values.items()
        if now[where] != new
    )


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
        inverse = _INVERSES[origin.operator, left]
        found = inverse(new, other)
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
    ("floordiv", False): lambda new, a: a // new if new and a // (a // new) == new else None,
}


def _conflict(origin: Origin, first: tuple[int, Call], second: tuple[int, Call]) -> str:
    return (
        f"{_show(origin)} would have to be {first[0]} in {first[1].name} ({first[1].line}) "
        f"and {second[0]} in {second[1].name} ({second[1].line})"
    )


def _show(origin: Origin) -> str:
    if isinstance(origin, Attribute):
        place = "" if origin.place is None else f"[{origin.place}]"
        return f"{origin.module}.{origin.name}{place}".lstrip(".")
    if isinstance(origin, Derived):
        symbol = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}[origin.operator]
        return f"({_show(origin.left)} {symbol} {_show(origin.right)})"
    return str(origin)


def confirm(
    skeleton: nn.Module, example: Example, plan: Plan, analysis: Analysis, sizes: Mapping[Axis, int]
) -> str:
    """Cut a copy of the model, run it, and compare with what the algebra says; the reason if it differs."""
    try:
        small = cut_module(skeleton, plan)
        found = record(small, example)
    except Exception as error:  # noqa: BLE001 - user code may raise anything at sizes it was not written for
        lines = str(error).strip().splitlines()
        return f"the model's own code does not run at these sizes ({type(error).__name__}: {lines[0] if lines else ''})"
    return difference(analysis, sizes, found, scaled=bool(plan.scalings))


def difference(
    analysis: Analysis, sizes: Mapping[Axis, int], found: Program, *, scaled: bool
) -> str:
    """The first call that is not as predicted."""
    expected, calls = (_telling(calls) for calls in (analysis.program.calls, found.calls))
    for call, other in zip(expected, calls, strict=False):
        where = f"{call.name} ({call.line})"
        if call.op is not other.op:
            return f"another operation is called: {other.name} instead of {where}"
        axes = analysis.facts[call].axes
        shapes = [tuple(size_of(expr, sizes) for expr in own) for own in axes]
        if shapes != [value.shape for value in other.outputs]:
            got = [value.shape for value in other.outputs]
            return f"{where} gives shape {got[0] if got else ''} instead of {shapes[0] if shapes else ''}"
        wrong = _different_argument(call, other, analysis, sizes)
        if wrong:
            return f"{where} is called with {wrong}"
        if not scaled and "scale" in analysis.facts[call].frozen:
            q = analysis.axes[call.arguments["query"]][-1]
            if not isclose(analysis.facts[call].frozen["scale"], 1 / sqrt(size_of(q, sizes))):
                return DIVIDES_BY_WIDTH
    if len(expected) != len(calls):
        return f"{len(calls)} operations are called instead of {len(expected)}"
    return ""


def _telling(calls: list[Call]) -> list[Call]:
    """Without calls that come and go with strides, devices and dtypes and change nothing."""
    return [call for call in calls if call.name.split(".")[0] not in _NEUTRAL]


_NEUTRAL = {
    *("contiguous", "alias", "detach", "lift_fresh", "scalar_tensor", "to", "_to_copy", "clone"),
    *("item", "is_nonzero", "_local_scalar_dense", "fill_"),
}


def _different_argument(
    call: Call, other: Call, analysis: Analysis, sizes: Mapping[Axis, int]
) -> str:
    expected = expected_arguments(call, analysis, lambda expr: size_of(expr, sizes))
    for name, value in expected.items():
        before, after = (_plain(x) for x in (value, other.arguments[name]))
        if call.name.startswith("slice") and name == "end":
            continue  # beyond the end is the end; the shape tells
        if not _same(before, after):
            return f"{name} = {after} instead of {before}"
    return ""


def _plain(argument: Any) -> Any:
    """Without tensors and devices: those of a meta run differ and do not matter."""
    argument = map_values(argument, lambda _: None)
    return (
        None
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format))
        else argument
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        return (
            isinstance(a, (int, float))
            and isinstance(b, (int, float))
            and (a == b or isclose(a, b, rel_tol=1e-12))
        )
    return a == b
