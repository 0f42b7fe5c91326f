"""How a cut network can be delivered: as the user's own module, or as a rewritten program.

The user's code is preferred. Attributes that hold sizes get new values such that every integer that came from them is
what the plan asks for. Then the cut module is run and recorded, first on the meta device, without data, and compared
with what the algebra predicts (`comparison`). Where meta tensors cannot go, the example itself is used. Where the
module only goes another way although the plan is exact (Python chooses its way by values, or has a short cut for one
head), outputs decide, on random weights: they must be those of the zeroed twin.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apoptosis.errors import PlanMismatchError
from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis
from apoptosis.structure.comparison import Difference, difference
from apoptosis.structure.mirrors import unread_sizes
from apoptosis.structure.network import Network, Run
from apoptosis.structure.plan import Plan, Scaling, moved_scalings
from apoptosis.structure.program import Program
from apoptosis.structure.recording import Example, line_of, record
from apoptosis.structure.replay import why_not_a_program
from apoptosis.structure.scaling import find_number_scalings, find_scalings
from apoptosis.structure.sizing import Unsolvable, solve_attributes
from apoptosis.structure.surgery import cut_module, zero
from apoptosis.structure.twins import TOLERANCE, as_double, compare, randomised, redrawn

__all__ = ["deliver"]


def deliver(plan: Plan, network: Network, sizes: dict[Axis, int], *, exact: bool) -> Plan:
    """The plan with what must be set in the module, or, where that does not do, as a program.

    Raises:
        PlanMismatchError: neither does.
    """
    because, sizes = "an earlier cut was delivered so", network.run.as_run(sizes)
    if network.skeleton is not None:
        try:
            return _as_module(plan, network, sizes, exact=exact)
        except Unsolvable as reason:
            because = str(reason)
    if hindrance := why_not_a_program(network.run):
        raise PlanMismatchError(
            f"The model's own code cannot run this plan ({because}), and it cannot be written as a program either: "
            f"{hindrance}. Keep the groups that this concerns whole: {', '.join(list(plan.kept)[:5])}."
        )
    undone = _undone_scalings(network.applied, plan)
    return replace(
        plan,
        attentions=(),
        scalings=undone,
        delivery="program",
        delivery_because=_without_folders(because),
    )


def _without_folders(text: str) -> str:
    """Files by their names alone: a plan is saved, and others need not know where on a disk it was made."""
    return re.sub(r"(?:[A-Za-z]:)?[/\\](?:[^\s:/\\]+[/\\])+", "", text)


def _as_module(plan: Plan, network: Network, sizes: dict[Axis, int], *, exact: bool) -> Plan:
    replaced = {shape.module for shape in plan.attentions}
    changes = solve_attributes(network.run.analysis, sizes, network.attributes, replaced)
    plan = replace(plan, attributes=(*changes, *unread_sizes(plan, network, sizes)))
    differs = _why_not(plan, network, sizes, exact=exact, scaled=False)
    if differs is not None and differs.kind == "scale":
        scalings = find_scalings(network.run.analysis, network.sizes, sizes, network.whole(plan))
        if scalings is not None:  # empty where an earlier cut has scaled already
            plan = replace(plan, scalings=scalings)
            differs = _why_not(plan, network, sizes, exact=exact, scaled=True)
    if differs is None:
        return plan
    by_number = exact and differs.kind == "number"
    scaled = _with_numbers_made_good(plan, network, sizes) if by_number else None
    if scaled is None:
        raise Unsolvable(differs.because)
    return scaled


def _with_numbers_made_good(plan: Plan, network: Network, sizes: dict[Axis, int]) -> Plan | None:
    """The plan with scaled queries or keys, if outputs then are those of the zeroed twin; None otherwise."""
    run = network.run
    if run.is_meta:
        return None
    whole = network.whole(plan)
    try:
        found = record(cut_module(run.model, whole), run.example)
    except Exception:  # noqa: BLE001 - user code may raise anything at sizes it was not written for
        return None
    sizes_of_both = (network.sizes, sizes)
    for side in (0, 1):
        more = find_number_scalings(run.analysis.program, found, sizes_of_both, whole, side=side)
        scaled = replace(plan, scalings=(*plan.scalings, *more))
        if more and _agrees_with_twin(run, network.whole(scaled)):
            return scaled
    return None


def _undone_scalings(applied: Plan | None, plan: Plan) -> tuple[Scaling, ...]:
    """A program has the traced model's scale: what an earlier cut, as a module, made up for is taken back."""
    if applied is None or applied.delivery != "module":
        return ()
    moved = moved_scalings(applied.scalings, plan.tensors)
    return tuple(replace(scaling, factor=1 / scaling.factor) for scaling in moved)


def _why_not(
    plan: Plan, network: Network, sizes: dict[Axis, int], *, exact: bool, scaled: bool
) -> Difference | None:
    """What the cut module does otherwise than the algebra says; None if nothing."""
    run = network.run
    assert network.skeleton is not None, "asked only while there is one"
    example = run.example.map(lambda t: torch.empty_like(t, device="meta"))
    found = _confirm(network.skeleton, example, plan, run.analysis, sizes, scaled=scaled)
    if found is None or found.kind == "scale" or run.is_meta:
        return found
    whole = network.whole(plan)
    found = _confirm(run.model, run.example, whole, run.analysis, sizes, scaled=scaled)
    if found is not None and found.kind == "way" and exact and _agrees_with_twin(run, whole):
        return None
    return found


def _confirm(
    model: nn.Module,
    example: Example,
    plan: Plan,
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    *,
    scaled: bool,
) -> Difference | None:
    try:
        found = record(cut_module(model, plan), example)
    except Exception as error:  # noqa: BLE001 - user code may raise anything at sizes it was not written for
        lines = str(error).strip().splitlines()
        where = f", {place}" if (place := line_of(error)) else ""
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
        return Difference("fails", f"the model's own code does not run at these sizes ({reason})")
    replaced = tuple(shape.module for shape in plan.attentions)
    differs = difference(analysis, sizes, found, scaled=scaled, replaced=replaced)
    if differs is None or differs.kind != "way":
        return differs
    # Outputs may decide between two ways of computing the same, but a scale that follows a size changes what is
    # computed, and in the outputs perhaps by very little.
    scales = {f"{shape.scale:.10g}" for shape in plan.attentions}
    new = _floats(found) - _floats(analysis.program) - scales
    return Difference("number", f"{differs.because}, with other numbers") if new else differs


def _floats(program: Program) -> set[str]:
    """Every number with a point that operations are called with."""
    found: set[str] = set()
    pending: list[Any] = [call.arguments for call in program.calls if "dropout" not in call.name]
    while pending:
        item = pending.pop()
        if isinstance(item, float):
            found.add(f"{item:.10g}")
        elif isinstance(item, (tuple, list)):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
    return found


def _agrees_with_twin(run: Run, plan: Plan) -> bool:
    """Whether the cut module gives the outputs of the zeroed twin, on random weights and other inputs."""
    generator = torch.Generator().manual_seed(0)
    try:
        model = randomised(run.model, generator)
        examples = [as_double(run.example), redrawn(as_double(run.example), generator)]
        return compare(cut_module(model, plan), zero(model, plan), examples) <= TOLERANCE
    except Exception:  # noqa: BLE001 - as above
        return False
