"""How a cut network can be delivered: as the user's own module, or as a rewritten program.

The user's code is preferred. Attributes that hold sizes get new values such that every integer that came from them is
what the plan asks for. Then the cut module is run and recorded, first on the meta device, without data. It is accepted
if it makes the same calls, with the arguments and result shapes that the algebra predicts: then it computes what the
rewritten program computes. Where meta tensors cannot go, the example itself is used; where the calls differ although
the plan is exact (Python chooses its way by values, or has a short cut for one head), the outputs decide: they must be
those of the zeroed twin.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isclose, sqrt
from typing import Any

import torch
from torch import nn

from apoptosis.errors import PlanMismatchError
from apoptosis.modes import in_eval_mode
from apoptosis.structure.analysis import Analysis
from apoptosis.structure.arrangement import tensors_in
from apoptosis.structure.attributes import Attribute
from apoptosis.structure.axes import Axis, size_of
from apoptosis.structure.network import Network, Run
from apoptosis.structure.plan import AttributeChange, Plan, Scaling, moved_scalings
from apoptosis.structure.program import Call, Program, map_values
from apoptosis.structure.recording import Example, line_of, record
from apoptosis.structure.rewriting import expected_arguments, why_not_a_program
from apoptosis.structure.scaling import find_scalings
from apoptosis.structure.sizing import Unsolvable, solve_attributes
from apoptosis.structure.surgery import copy_with, cut_module, zero

__all__ = ["deliver"]

DIVIDES_BY_WIDTH = "attention without a scale divides by the square root of its width"
DOES_NOT_RUN = "the model's own code does not run at these sizes"
OTHER_NUMBERS = "operations are called with other numbers: a scale that follows a size"
AGREEMENT = 1e-6  # relative, in float64; code that casts to float32 on its way leaves about 1e-7


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
    if hindrance := why_not_a_program(network.run.analysis):
        raise PlanMismatchError(
            f"The model's own code cannot run this plan ({because}), and it cannot be written as a program either: "
            f"{hindrance}. Keep the groups that this concerns whole: {', '.join(list(plan.kept)[:5])}."
        )
    undone = _undone_scalings(network.applied, plan)
    return replace(
        plan, attentions=(), scalings=undone, delivery="program", delivery_because=because
    )


def _as_module(plan: Plan, network: Network, sizes: dict[Axis, int], *, exact: bool) -> Plan:
    replaced = {shape.module for shape in plan.attentions}
    changes = solve_attributes(network.run.analysis, sizes, network.attributes, replaced)
    plan = replace(plan, attributes=(*changes, *_of_empty_norms(network, sizes)))
    because = _why_not(plan, network, sizes, exact=exact, scaled=False)
    if because == DIVIDES_BY_WIDTH:
        scalings = find_scalings(network.run.analysis, network.sizes, sizes, network.whole(plan))
        if scalings is not None:  # empty where an earlier cut has scaled already
            plan = replace(plan, scalings=scalings)
            because = _why_not(plan, network, sizes, exact=exact, scaled=True)
    if because:
        raise Unsolvable(because)
    return plan


def _of_empty_norms(network: Network, sizes: dict[Axis, int]) -> list[AttributeChange]:
    """`num_features` of norms without tensors that would tell it; torch compares it with the input and warns."""
    analysis, changes = network.run.analysis, dict[Attribute, AttributeChange]()
    modules = dict(network.skeleton.named_modules()) if network.skeleton is not None else {}
    for call in analysis.program.modules:
        module = modules.get(call.path)
        if not isinstance(module, nn.modules.batchnorm._NormBase) or call.input is None:
            continue
        if module.affine or module.track_running_stats:
            continue
        batched = call.input.ndim == 2 + int(type(module).__name__[-2])
        new = size_of(analysis.axes[call.input][1 if batched else 0], sizes)
        where = Attribute(call.path, "num_features")
        if new != module.num_features:
            changes[where] = AttributeChange(where, module.num_features, new)
    return list(changes.values())


def _undone_scalings(applied: Plan | None, plan: Plan) -> tuple[Scaling, ...]:
    """A program has the traced model's scale: what an earlier cut, as a module, made up for is taken back."""
    if applied is None or applied.delivery != "module":
        return ()
    moved = moved_scalings(applied.scalings, plan.tensors)
    return tuple(replace(scaling, factor=1 / scaling.factor) for scaling in moved)


def _why_not(
    plan: Plan, network: Network, sizes: dict[Axis, int], *, exact: bool, scaled: bool
) -> str:
    """Why the cut module does not do what the algebra says; empty if it does."""
    run = network.run
    assert network.skeleton is not None, "asked only while there is one"
    because = _confirm(
        network.skeleton, run.example.map(_meta), plan, run.analysis, sizes, scaled=scaled
    )
    if not because or because == DIVIDES_BY_WIDTH or run.is_meta:
        return because
    whole = network.whole(plan)
    because = _confirm(run.model, run.example, whole, run.analysis, sizes, scaled=scaled)
    by_outputs = exact and because not in ("", DIVIDES_BY_WIDTH, OTHER_NUMBERS)
    runs = by_outputs and not because.startswith(DOES_NOT_RUN)
    return "" if runs and _agrees_with_twin(run, whole) else because


def _confirm(
    model: nn.Module,
    example: Example,
    plan: Plan,
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    *,
    scaled: bool,
) -> str:
    try:
        found = record(cut_module(model, plan), example)
    except Exception as error:  # noqa: BLE001 - user code may raise anything at sizes it was not written for
        lines = str(error).strip().splitlines()
        where = f", {place}" if (place := line_of(error)) else ""
        return f"{DOES_NOT_RUN} ({type(error).__name__}: {lines[0] if lines else ''}{where})"
    replaced = tuple(shape.module for shape in plan.attentions)
    because = difference(analysis, sizes, found, scaled=scaled, replaced=replaced)
    # Outputs may decide between two ways of computing the same, but a scale that follows a size changes what is
    # computed, and on one example perhaps by very little.
    scales = {shape.scale for shape in plan.attentions}
    new = _floats(found) - _floats(analysis.program) - {f"{scale:.10g}" for scale in scales}
    return OTHER_NUMBERS if because and because != DIVIDES_BY_WIDTH and new else because


def _floats(program: Program) -> set[str]:
    """Every number with a point that operations are called with."""
    found: set[str] = set()
    pending: list[Any] = [call.arguments for call in program.calls]
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
    """Whether the cut module gives the outputs of the zeroed twin, in float64."""
    double = copy_with(run.model, {}).double()
    example = run.example.map(lambda t: t.double() if t.is_floating_point() else t)
    try:
        small, twin = cut_module(double, plan), zero(double, plan)
        with torch.no_grad(), in_eval_mode(small), in_eval_mode(twin):
            pairs = zip(tensors_in(example.run(small)), tensors_in(example.run(twin)), strict=True)
            return all(_close(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001 - as above
        return False


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    return bool(((a - b).abs().amax() <= AGREEMENT * b.abs().amax()).item()) if a.numel() else True


def difference(
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    found: Program,
    *,
    scaled: bool = False,
    replaced: tuple[str, ...] = (),
) -> str:
    """The first call that is not as predicted, outside modules that are `replaced` by ones that do the same."""
    expected, calls = (_telling(p.calls, replaced) for p in (analysis.program, found))
    for call, other in zip(expected, calls, strict=False):
        where = f"{call.name} ({call.line})"
        if call.op is not other.op:
            return f"another operation is called: {other.name} instead of {where}"
        axes = analysis.facts[call].axes
        shapes = [tuple(size_of(expr, sizes) for expr in own) for own in axes]
        got = [value.shape for value in other.outputs]
        if shapes != got:
            return f"{where} gives {_listed(got)} instead of {_listed(shapes)}"
        if wrong := _different_argument(call, other, analysis, sizes):
            return f"{where} is called with {wrong}"
        if not scaled and _scale_changed(call, analysis, sizes):
            return DIVIDES_BY_WIDTH
    if len(expected) != len(calls):
        return f"{len(calls)} operations are called instead of {len(expected)}"
    return ""


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")


def _scale_changed(call: Call, analysis: Analysis, sizes: Mapping[Axis, int]) -> bool:
    scale = analysis.facts[call].frozen.get("scale")
    if scale is None:
        return False
    width = size_of(analysis.axes[call.arguments["query"]][-1], sizes)
    return not isclose(scale, 1 / sqrt(width))


def _telling(calls: list[Call], replaced: tuple[str, ...]) -> list[Call]:
    """Without calls that come and go with strides, devices and dtypes and change nothing."""
    return [
        call
        for call in calls
        if call.name.split(".")[0] not in _NEUTRAL
        and not any(call.module == path or call.module.startswith(f"{path}.") for path in replaced)
    ]


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
    """Without tensors, devices and profiling handles: those of a meta run differ and do not matter."""
    argument = map_values(argument, lambda _: None)
    beside = (torch.device, torch.layout, torch.memory_format, torch.ScriptObject)
    return None if isinstance(argument, beside) else argument


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is float and type(b) is float:
        return a == b or isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")
