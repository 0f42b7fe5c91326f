"""Places where values of tensors decided which way Python took, as far as a recorded run shows it.

Python looks at a number (`item`, `bool`, `tolist`), or at a size that depends on values: how many entries `nonzero` or
a mask have found. Another input may lead another way there, to parameters that this run has not visited.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from apoptosis.structure.axes import Axis, Expr
from apoptosis.structure.guards import NUMBERS
from apoptosis.structure.program import Call, Program, Value, sizes_of, values_in

__all__ = ["Steering", "steerings"]


@dataclass(frozen=True)
class Steering:
    """How Python came to know, the line, and the module whose code it was."""

    how: str
    line: str
    module: str


Axes: TypeAlias = Mapping[Value, Sequence[Expr]]


def steerings(program: Program, axes: Axes) -> Iterator[Steering]:
    """Every place; `axes` are resolved."""
    for call in program.calls:
        if call.name.startswith(NUMBERS) and any(not v.fixed for v in values_in(call.arguments)):
            yield Steering(call.name, call.line, call.module)
    for value, how, line, module in program.escapes:
        if not value.fixed:
            yield Steering(how, line, module)
    if chosen := _chosen(program, axes):
        yield from _by_sizes(program, axes, chosen)
        yield from _by_pieces(program, axes, chosen)


def _by_sizes(program: Program, axes: Axes, chosen: set[Axis]) -> Iterator[Steering]:
    """Sizes that depend on values and were compared, or were asked for and passed to no operation."""
    formulas = [formula for call in program.calls for formula in call.measures.values()]
    followed = {size for formula in formulas for size in sizes_of(formula)}
    for reading in program.readings:
        sizes = {size for side in (reading.left, reading.right) for size in sizes_of(side)}
        followed |= sizes
        if any(_is_chosen(size.value, size.dim, axes, chosen) for size in sizes):
            yield Steering("a size that depends on values", reading.line, reading.module)
    makers = {value: call for call in program.calls for value in call.outputs}
    for size in program.read - followed:  # `range(n)`, perhaps
        if _is_chosen(size.value, size.dim, axes, chosen):
            maker = makers[size.value]
            yield Steering("a size that depends on values", maker.line, maker.module)


def _by_pieces(program: Program, axes: Axes, chosen: set[Axis]) -> Iterator[Steering]:
    """Tensors that Python went through one by one, as many as values decided."""
    for call in program.calls:
        first = next(values_in(call.arguments), None)
        dim = call.arguments.get("dim", 0)
        if not isinstance(call.returns, list) or first is None or not isinstance(dim, int):
            continue
        if first.ndim and _is_chosen(first, dim, axes, chosen):
            yield Steering("pieces, as many as values decide", call.line, call.module)


def _is_chosen(value: Value, dim: int, axes: Axes, chosen: set[Axis]) -> bool:
    return any(axis in chosen for axis in axes[value][dim].axes())


def _chosen(program: Program, axes: Axes) -> set[Axis]:
    """Axes whose sizes depend on values: made by an operation that counts, or from such axes in unknown ways."""
    known = {
        axis
        for value in (*program.tensors.values(), *program.inputs)
        if value in axes
        for expr in axes[value]
        for axis in expr.axes()
    }
    chosen: set[Axis] = set()
    for call in program.calls:
        given = list(values_in(call.arguments))
        of_given = {a for value in given for expr in axes.get(value, ()) for a in expr.axes()}
        made = {a for value in call.outputs for expr in axes[value] for a in expr.axes()}
        new = made - known - of_given
        counts = _counts(call) and any(not value.fixed for value in given)
        if counts or (of_given & chosen and new):
            chosen |= new
        known |= made | of_given
    return chosen


def _counts(call: Call) -> bool:
    """True if an operation gives as many entries as values decide."""
    if call.name.startswith("index."):
        return any(
            v.dtype in (torch.bool, torch.uint8) for v in values_in(call.arguments["indices"])
        )
    return torch.Tag.dynamic_output_shape in call.op.tags or call.name in _COUNTING


_COUNTING = {"where.default", "nonzero_numpy.default", "repeat_interleave.self_Tensor"}
