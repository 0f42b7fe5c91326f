"""Rank dimensions of low-rank adapters (LoRA), found by what they are and not by their names.

An adapter is two layers with nothing between them but dropout and numbers, narrower in the middle than at either end,
whose result is added to that of another layer of the same input: W x + s·B A x. So are two weights whose product is
added to a third: (W + s·B A) x. What is between A and B is a *rank*. It was chosen as small as it is, so it stays whole
unless somebody asks for it.
"""

from collections.abc import Iterator

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Expr, size_of
from apoptosis.structure.program import Call, Value, values_in

__all__ = ["rank_axes"]

_ADDS = {"add", "sub"}
_PASSES = {
    *("_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "div", "dropout"),
    *("feature_dropout", "flatten", "lift_fresh", "mul", "neg", "permute", "reshape", "squeeze"),
    *("t", "to", "transpose", "type_as", "unsqueeze", "view"),
}
"""What may happen on the way: nothing that is not linear, and nothing that mixes."""


def rank_axes(analysis: Analysis) -> set[Axis]:
    """The inner axes of all adapters."""
    ways = _Ways(analysis)
    found: set[Axis] = set()
    for call in analysis.program.calls:
        terms = list(values_in(call.arguments))
        if _base(call) in _ADDS and len(terms) == 2:
            for own, other in (terms, terms[::-1]):
                found |= ways.rank_of(own, other)
    return found


class _Ways:
    """Where values come from, with what changes nothing left out."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._maker = {v: call for call in analysis.program.calls for v in call.outputs}

    def rank_of(self, own: Value, other: Value) -> set[Axis]:
        """The rank, if one side of a sum is the way around that an adapter is, and the other a layer beside it."""
        last = self._maker.get(self._source(own))
        if last is None:
            return set()
        if own.fixed and other.fixed:
            product = self._product(last)
            is_weight = self._source(other).source == "tensor"
            return product if is_weight else set()
        middle = self._input_of(last)
        first = None if middle is None else self._maker.get(middle)
        if first is None or (begin := self._input_of(first)) is None:
            return set()
        if all(self._input_of(layer) is not begin for layer in self._layers(other)):
            return set()
        made, read = self._axes(first, "producer"), self._axes(last, "consumer")
        inner = {axis for expr in made for axis in expr.axes()} & {
            axis for expr in read for axis in expr.axes()
        }
        ends = [*self._axes(first, "consumer"), *self._axes(last, "producer")]
        return inner if made and _is_narrow(made, ends) else set()

    def _product(self, call: Call) -> set[Axis]:
        """What two weights are multiplied along, if it is narrower than the product."""
        facts = self._analysis.facts[call]
        inner = [expr for expr, _ in facts.contractions]
        if not inner or not facts.axes:
            return set()
        ends = [expr for expr in facts.axes[0] if size_of(expr) > 1]
        return (
            {axis for expr in inner for axis in expr.axes()} if _is_narrow(inner, ends) else set()
        )

    def _layers(self, value: Value) -> Iterator[Call]:
        """The layers whose results a value is the sum of."""
        pending, seen = [value], set[Value]()
        while pending:
            if (source := self._source(pending.pop())) in seen:
                continue
            seen.add(source)
            call = self._maker.get(source)
            if call is not None and _base(call) in _ADDS:
                pending += values_in(call.arguments)
            elif call is not None:
                yield call

    def _source(self, value: Value) -> Value:
        """The value before anything that changes nothing."""
        while (call := self._maker.get(value)) is not None and _base(call) in _PASSES:
            moving = [v for v in values_in(call.arguments) if v.fixed is value.fixed]
            if len(moving) != 1:
                break
            value = moving[0]
        return value

    def _input_of(self, call: Call) -> Value | None:
        """What a layer reads, through what changes nothing; None if it is no layer."""
        moving = [value for value in values_in(call.arguments) if not value.fixed]
        weighs = bool(self._analysis.facts[call].costs) or _base(call) == "embedding"
        return self._source(moving[0]) if weighs and len(moving) == 1 else None

    def _axes(self, call: Call, role: str) -> list[Expr]:
        return [expr for _, _, expr, own in self._analysis.facts[call].roles if own == role]


def _is_narrow(inner: list[Expr], ends: list[Expr]) -> bool:
    size = max(size_of(expr) for expr in inner)
    return bool(ends) and all(size < size_of(expr) for expr in ends)


def _base(call: Call) -> str:
    return call.name.split(".")[0].removesuffix("_")
