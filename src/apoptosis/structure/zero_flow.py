"""Which tensors are zero at removed units, and therefore which cuts are exact.

A cut is exact when the network equals its twin in which every slice of the removed units is zero. Elementwise
operations never spoil that: they act at each index by itself. A sum over the axis does, unless what it sums is zero at
the removed indices: in a linear layer the weight's column is, but a product of two activations (linear attention with
elu + 1) may sum what activations with φ(0) ≠ 0 left there. A statistic over the axis (a mean, LayerNorm) depends on how
many indices there are, so it is never exact. Nor is a division by zeros: the twin then has no finite numbers.

So one pass over the calls keeps, for each value, the pairs (dimension, axis) such that the value is zero wherever its
place along that dimension belongs to a removed unit of that axis. Tensors of the model are, by definition of the twin.
"""

from collections.abc import Iterator
from typing import TypeAlias

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Expr
from apoptosis.structure.facts import Facts
from apoptosis.structure.flows import (
    AllOf,
    AnyOf,
    Divided,
    Everywhere,
    Flow,
    Joined,
    Moved,
    Pole,
    Through,
)
from apoptosis.structure.program import Value

__all__ = ["Zeros", "flow_zeros", "inexact_axes"]

Zeros: TypeAlias = frozenset[tuple[int, Axis]]


def inexact_axes(analysis: Analysis) -> dict[Axis, str]:
    """Axes whose cut differs from zeroing, and why."""
    zeros: dict[Value, Zeros] = {}
    inexact: dict[Axis, str] = {}
    spared = analysis.spared()
    for value in analysis.program.tensors.values():
        if value.dtype.is_floating_point or value.dtype.is_complex:
            pairs = _pairs(analysis.axes[value])
            zeros[value] = frozenset((d, axis) for d, axis in pairs if (value, d) not in spared)
    for call in analysis.program.calls:
        facts = analysis.facts[call]
        for axis, why in _spoilt_by(facts, zeros):
            where = f"in {call.name} of {call.module}" if call.module else f"in {call.name}"
            inexact.setdefault(axis, f"{why} {where}")
        made = [
            flow_zeros(flow, axes, zeros, analysis.axes)
            for flow, axes in zip(facts.flows, facts.axes, strict=True)
        ]
        for flow, axes in zip(facts.flows, facts.axes, strict=True):
            for _, axis in _infinite(flow, axes, zeros, analysis.axes):
                inexact.setdefault(
                    axis, f"zeros have no finite image in {call.name} of {call.module}"
                )
        zeros |= dict(zip(call.outputs, made, strict=True))
        if call.overwrites:  # what shares memory with the result stays zero as far as the result is
            spoilt = {
                a for axes, own in zip(facts.axes, made, strict=True) for _, a in _pairs(axes) - own
            }
            for value in call.overwrites:
                known = zeros.get(value, frozenset())
                zeros[value] = frozenset((d, a) for d, a in known if a not in spoilt)
    return inexact


def _spoilt_by(facts: Facts, zeros: dict[Value, Zeros]) -> Iterator[tuple[Axis, str]]:
    """Axes that a call sums or averages over although something is there at removed units."""
    for expr, why in facts.statistics:
        for axis in _free(expr):
            yield axis, why
    for expr, operands in facts.contractions:
        for axis in _free(expr):
            if not any((dim, axis) in zeros.get(value, frozenset()) for value, dim in operands):
                yield axis, "a sum runs over what is not zero there,"


def flow_zeros(
    flow: Flow,
    result: list[Expr],
    zeros: dict[Value, Zeros],
    axes: dict[Value, tuple[Expr, ...]],
) -> Zeros:
    """Where a result with those axes is zero, given where the operands are."""
    match flow:
        case Through(value, dims):
            known = zeros.get(value, frozenset())
            return frozenset((d, a) for d, a in _pairs(result) if (dims[d], a) in known)
        case Moved(value):
            lost = _pairs(axes[value]) - zeros.get(value, frozenset())
            missing = {axis for _, axis in lost}
            return frozenset((d, a) for d, a in _pairs(result) if a not in missing)
        case Joined(values, dims):
            lost = {
                (dim, axis)
                for value in values
                for dim, axis in _pairs(axes[value]) - zeros.get(value, frozenset())
            }
            return frozenset((d, a) for d, a in _pairs(result) if (dims[d], a) not in lost)
        case AnyOf(flows):
            return frozenset().union(*(flow_zeros(f, result, zeros, axes) for f in flows))
        case Divided(numerator, denominator):
            known, spoilt = (flow_zeros(f, result, zeros, axes) for f in (numerator, denominator))
            return known - spoilt
        case AllOf(flows):
            parts = [flow_zeros(f, result, zeros, axes) for f in flows]
            return frozenset.intersection(*parts) if parts else frozenset()
        case Everywhere():
            return _pairs(result)
        case _:
            return frozenset()


def _infinite(
    flow: Flow,
    result: list[Expr],
    zeros: dict[Value, Zeros],
    axes: dict[Value, tuple[Expr, ...]],
) -> Zeros:
    """Where the zeroed twin would divide by zero or take its logarithm; the cut network has no such entries."""
    match flow:
        case Divided(_, denominator):
            return flow_zeros(denominator, result, zeros, axes)
        case Pole(value):
            return flow_zeros(value, result, zeros, axes)
        case AnyOf(flows) | AllOf(flows):
            return frozenset().union(*(_infinite(f, result, zeros, axes) for f in flows))
        case _:
            return frozenset()


def _pairs(axes: list[Expr] | tuple[Expr, ...]) -> Zeros:
    return frozenset((dim, axis) for dim, expr in enumerate(axes) for axis in _free(expr))


def _free(expr: Expr) -> set[Axis]:
    return {axis for axis in expr.axes() if axis.pin is None}
