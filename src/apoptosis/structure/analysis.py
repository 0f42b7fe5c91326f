"""Solve the axes of a whole program: every rule in turn, then everything resolved.

What goes in and out of the model is pinned, and so is what left torch on the way (`.numpy()`), and what parameters may
read that the run has not visited.
"""

from dataclasses import dataclass

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure import (
    rules_attention,
    rules_convolution,
    rules_create,
    rules_distance,
    rules_index,
    rules_norm,
    rules_parts,
    rules_pointwise,
    rules_pool,
    rules_product,
    rules_recurrent,
    rules_reduce,
    rules_shape,
    rules_space,
    rules_transform,
)
from apoptosis.structure.axes import Axis, Expr
from apoptosis.structure.facts import Facts, PinReason, Size
from apoptosis.structure.program import Call, Program, Value, values_in
from apoptosis.structure.rules import Context, analyse_call
from apoptosis.structure.unvisited import pin_for_unvisited

__all__ = ["FAMILIES", "Analysis", "analyse"]

FAMILIES = dict.fromkeys(
    room.FAMILY
    for room in (
        rules_attention,
        rules_convolution,
        rules_create,
        rules_distance,
        rules_index,
        rules_norm,
        rules_parts,
        rules_pointwise,
        rules_pool,
        rules_product,
        rules_recurrent,
        rules_reduce,
        rules_shape,
        rules_space,
        rules_transform,
    )
)


@dataclass(frozen=True)
class Analysis:
    """A program, the axes of its values, and what the rules said of its calls.

    `training` is a second run, in train mode, where the first left parameters unused: a helper head, say. What it
    ties together is tied; costs and exactness are those of the first.
    """

    program: Program
    training: Program | None
    axes: dict[Value, tuple[Expr, ...]]
    facts: dict[Call, Facts]

    def calls(self) -> list[Call]:
        """Of both runs."""
        return [*self.program.calls, *(self.training.calls if self.training is not None else ())]

    def without_rule(self) -> list[Call]:
        """Operations on what depends on the inputs that no rule knows: whole axes, and costs that nobody counts."""
        return [
            call
            for call in self.program.calls
            if self.facts[call].refused and any(not value.fixed for value in call.outputs)
        ]

    def looks_at_values(self) -> bool:
        """True if Python, or the size of a result, depends on values that depend on the inputs."""
        return bool(self.program.escapes) or any(
            _looks_at_values(call) and any(not value.fixed for value in values_in(call.arguments))
            for call in self.program.calls
        )

    def spared(self) -> set[tuple[Value, int]]:
        """Dimensions of tensors that the zeroed twin leaves alone."""
        return {place for facts in self.facts.values() for place in facts.spared}

    def tensors(self) -> list[Value]:
        """The model's own tensors that were used, each once, in the model's order."""
        used = {value for call in self.calls() for value in values_in(call.arguments)}
        return [value for value in dict.fromkeys(self.program.tensors.values()) if value in used]


_SIZED_BY_VALUES = (
    *("nonzero", "masked_select", "_unique2", "unique_", "bincount", "repeat_interleave"),
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "_grouped_mm", "where.default"),
)


def _looks_at_values(call: Call) -> bool:
    if call.name.startswith("index.Tensor"):
        masks = list(values_in(call.arguments))[1:]
        return any(value.dtype in (torch.bool, torch.uint8) for value in masks)
    return call.name.startswith(_SIZED_BY_VALUES)


def analyse(
    program: Program, training: Program | None = None, *, pin_outputs: bool = True
) -> Analysis:
    """The axes of every value; with `pin_outputs` off, results may change their shapes."""
    runs = [program] if training is None else [program, training]
    context = Context(used=set().union(*(_used(run) for run in runs)))
    for value in program.tensors.values():
        if value not in context.axes:
            _add(context, value, None)
    facts: dict[Call, Facts] = {}
    for run in runs:
        facts |= _follow(run, context, pin_outputs=pin_outputs)
    if program.inputs:
        _pin_unread(context, facts)
    pin_for_unvisited(runs, context.axes)
    axes = {v: tuple(algebra.resolve(e) for e in own) for v, own in context.axes.items()}
    for own in facts.values():
        _resolve(own)
    return Analysis(program, training, axes, facts)


def _follow(program: Program, context: Context, *, pin_outputs: bool) -> dict[Call, Facts]:
    """Apply the rules of one run, from inputs to outputs."""
    for value in program.inputs:
        _add(context, value, PinReason("input", "it is an input of the model"))
    facts: dict[Call, Facts] = {}
    for call in program.calls:
        for value in values_in(call.arguments):
            if value not in context.axes:
                reason = PinReason("constant", "it is a constant of the run", quiet=True)
                _add(context, value, reason)
        facts[call] = analyse_call(call, context)
    for value in program.results if pin_outputs else []:
        _pin(context, value, PinReason("output", "it is an output of the model"))
    for value, how, line, _ in program.escapes:
        _pin(context, value, PinReason(how, "its numbers leave torch here", line=line))
    return facts


def _pin_unread(context: Context, facts: dict[Call, Facts]) -> None:
    """Keep whole what a slice leaves of a tensor of the model: of a table of places, a longer input reads more.

    Read is what reaches a value that depends on the inputs, and what is summed over on the way there.
    """
    exprs = [e for value, own in context.axes.items() if not value.fixed for e in own]
    exprs += [expr for own in facts.values() for expr, _ in (*own.contractions, *own.statistics)]
    read = {axis for expr in exprs for axis in algebra.resolve(expr).axes()}
    reason = PinReason(
        "slice", "no operation of the run reads these entries; one of another size may"
    )
    for value, own in context.axes.items():
        for expr in own if value.source == "tensor" else ():
            for axis in algebra.resolve(expr).axes():
                if axis.pin is None and axis not in read:
                    axis.pin = reason


def _used(program: Program) -> set[Value]:
    used = {value for call in program.calls for value in values_in(call.arguments)}
    return used | set(program.results)


def _add(context: Context, value: Value, reason: PinReason | None) -> None:
    context.axes[value] = [algebra.resolve(Expr.of(Axis(size, pin=reason))) for size in value.shape]


def _pin(context: Context, value: Value, reason: PinReason) -> None:
    if value not in context.axes:
        _add(context, value, reason)
    for expr in context.axes[value]:
        algebra.pin(expr, reason)


def _resolve(facts: Facts) -> None:
    """Put the solution into what a rule stated before everything was known."""
    resolve = algebra.resolve
    facts.axes = [[resolve(expr) for expr in axes] for axes in facts.axes]
    facts.sizes = {at: Size(resolve(s.expr), s.negative) for at, s in facts.sizes.items()}
    facts.costs = [tuple(resolve(expr) for expr in cost) for cost in facts.costs]
    facts.contractions = [(resolve(expr), operands) for expr, operands in facts.contractions]
    facts.statistics = [(resolve(expr), why) for expr, why in facts.statistics]
    facts.roles = [(value, dim, resolve(expr), role) for value, dim, expr, role in facts.roles]
    facts.kinds = [(resolve(expr), kind) for expr, kind in facts.kinds]
    facts.ties = [tuple(resolve(expr) for expr in tie) for tie in facts.ties]
    facts.floors = [resolve(expr) for expr in facts.floors]
    facts.grids = [(resolve(expr), multiple, why) for expr, multiple, why in facts.grids]
