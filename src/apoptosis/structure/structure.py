"""`trace`: a model's structure, and everything that can be asked of it without running the model again."""

import hashlib
import inspect
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.errors import ConfigError, PlanMismatchError, TraceError
from apoptosis.structure.analysis import Analysis, analyse
from apoptosis.structure.attributes import Attribute, leaves, traced_attributes
from apoptosis.structure.axes import Axis, Indices, kept_indices, size_of
from apoptosis.structure.delivery import DIVIDES_BY_WIDTH, Unsolvable, confirm, solve_attributes
from apoptosis.structure.groups import (
    Group,
    PinnedAxis,
    Tie,
    find_groups,
    find_pinned,
    find_ties,
)
from apoptosis.structure.kinds import KINDS
from apoptosis.structure.plan import Plan, TensorCut
from apoptosis.structure.recording import OWN_FOLDERS, Example, model_tensors, record
from apoptosis.structure.rewriting import CutProgram, why_not_a_program
from apoptosis.structure.scaling import find_scalings
from apoptosis.structure.surgery import AnyModel, check_fits, copy_with, cut_module, cut_tensors

__all__ = ["Structure", "cut", "trace"]


def trace(model: nn.Module, example_inputs: Any) -> "Structure":
    """Run a model once and solve its axes.

    Args:
        model: any module; it is not changed, and runs in eval mode without gradients.
        example_inputs: what to call it with: a tensor, a tuple of positional or a dict of keyword arguments. Tensors may
            be on the meta device if the model is.

    Returns:
        The structure: groups of units that are cut together, pinned axes with reasons, costs of any plan.

    Raises:
        TraceError: the model does not run on these inputs.
        ModelError: the model cannot be copied.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> structure = trace(net, torch.zeros(1, 3, 8, 8))
    >>> [(group.name, group.kind, group.size) for group in structure.groups]
    [('0', 'channel', 8)]
    >>> plan = structure.plan({"0": [0, 2, 5]})
    >>> structure.macs(), structure.macs(plan)
    (12384, 4644)
    >>> cut(net, plan)[3]
    Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
    """
    example = Example.of(example_inputs)
    shadow = copy_with(model, _shared(model))
    try:
        with traced_attributes(shadow):
            program = record(shadow, example)
    except Exception as error:
        raise TraceError(_why_it_failed(model, example, error)) from error
    analysis = analyse(program)
    groups = [g for g in find_groups(analysis) if _has_parameter(g, model)]
    run = _Run(analysis, example, inspect.signature(model.forward), model)
    return Structure(
        groups=tuple(groups),
        ties=tuple(find_ties(analysis, groups)),
        pinned=tuple(find_pinned(analysis)),
        shapes={name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()},
        _run=run,
        _sizes={},
        _skeleton=copy_with(model, {id(t): _meta(t) for t in model_tensors(model).values()}),
        _attributes=_attribute_values(analysis, model),
    )


def cut(model: AnyModel, plan: Plan, *, example_inputs: Any = None) -> AnyModel | CutProgram:
    """A new, smaller model; the given one is untouched.

    A plan says how the network is delivered: as the model's own class, or as a rewritten program. A program is made
    from the trace; a plan that was read from JSON has none, and needs `example_inputs` to trace again.
    """
    held = check_fits(model, plan)
    if plan.delivery == "module":
        return cut_module(model, plan)
    source = plan.source
    if source is None:
        if example_inputs is None:
            raise PlanMismatchError(
                "This plan is delivered as a rewritten program, and was read from a file. Pass `example_inputs` to `cut`, so "
                "that the model can be traced again."
            )
        source = trace(model, example_inputs)
    return source.program(model, plan, cut_tensors(held, plan))


@dataclass(frozen=True, eq=False)
class _Run:
    """What one run of the model left behind."""

    analysis: Analysis
    example: Example
    signature: inspect.Signature
    model: nn.Module

    @cached_property
    def meta_example(self) -> Example:
        return self.example.map(_meta)

    @property
    def is_meta(self) -> bool:
        return any(p.device.type == "meta" for p in self.model.parameters())


@dataclass(frozen=True, eq=False)
class Structure:
    """What belongs together in a model, what it costs, and what a cut makes of it."""

    groups: tuple[Group, ...]
    """What can shrink, in the order of the model's tensors."""
    ties: tuple[Tie, ...] = field(repr=False)
    """Groups that must keep equally many units for the model's own code to run."""
    pinned: tuple[PinnedAxis, ...] = field(repr=False)
    """What stays whole, and why."""
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Of every parameter and buffer."""
    _run: _Run = field(repr=False)
    _sizes: dict[Axis, int] = field(repr=False)
    _skeleton: nn.Module | None = field(repr=False)
    _attributes: dict[Attribute, int] = field(repr=False)
    _applied: Plan | None = field(repr=False, default=None)
    """What led here from the traced model."""

    @cached_property
    def fingerprint(self) -> str:
        """Names a network of these tensors and shapes."""
        text = ";".join(f"{name}:{shape}" for name, shape in sorted(self.shapes.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __getitem__(self, name: str) -> Group:
        """The group of that name."""
        if name not in self._by_name:
            raise PlanMismatchError(
                f"There is no group {name!r}. {_did_you_mean(name, self._by_name)}"
            )
        return self._by_name[name]

    def choose(
        self,
        *,
        kinds: Iterable[str] | None = None,
        names: Iterable[str] = ("*",),
        inexact: bool | None = None,
    ) -> list[Group]:
        """Groups by kind and by patterns of their names (`layer1.*`, `!*.downsample*` to leave out).

        Inexact groups are left out unless `inexact` is true, or `kinds` names their kind.
        """
        unknown = [kind for kind in kinds or () if kind not in KINDS]
        if unknown:
            raise ConfigError(f"There is no kind {unknown[0]!r}. The kinds are {', '.join(KINDS)}.")
        wanted = [pattern for pattern in names if not pattern.startswith("!")] or ["*"]
        unwanted = [pattern[1:] for pattern in names if pattern.startswith("!")]
        found: list[Group] = []
        for group in self.groups:
            listed = kinds is None or group.kind in kinds
            exact_enough = group.exact or (kinds is not None if inexact is None else inexact)
            named = any(fnmatchcase(group.name, p) for p in wanted)
            left_out = any(fnmatchcase(group.name, p) for p in unwanted)
            if listed and exact_enough and named and not left_out:
                found.append(group)
        if not found:
            raise ConfigError(
                f"No group is chosen by kinds={kinds}, names={names}. {self._what_there_is()}"
            )
        return found

    def macs(self, plan: Plan | None = None) -> int:
        """Multiply-accumulates of one forward pass over the example inputs, after `plan` if given."""
        sizes = self._sizes_after(plan)
        return sum(
            prod(size_of(expr, sizes) for expr in cost)
            for facts in self._run.analysis.facts.values()
            for cost in facts.costs
        )

    def params(self, plan: Plan | None = None) -> int:
        """Number of parameters, tied ones once, after `plan` if given."""
        sizes = self._sizes_after(plan)
        analysis = self._run.analysis
        total = 0
        for value in dict.fromkeys(analysis.program.tensors.values()):
            if value.names[0] in self._parameters:
                total += prod(size_of(expr, sizes) for expr in analysis.axes[value])
        return total

    def plan(self, kept: Mapping[str, Iterable[int]]) -> Plan:
        """Resolve which units stay into what to slice and what to set; groups that are not named stay whole.

        The model's own code is tried at the new sizes. If it cannot run them, the plan is delivered as a program, and
        says why.
        """
        units = {name: self._checked(name, own) for name, own in kept.items()}
        units = {name: own for name, own in units.items() if len(own) < self[name].size}
        if not units:
            raise ConfigError(f"The plan removes nothing. {self._what_there_is()}")
        axes = {self[name].axis: own for name, own in units.items()}
        after = self._sizes | {axis: len(own) for axis, own in axes.items()}
        tensors = self._cut_tensors(axes)
        shapes = self.shapes | {
            n: t.new_shape for t in tensors for n in t.names if n in self.shapes
        }
        plan = Plan(
            kept=units,
            sizes={group.name: group.size for group in self.groups},
            tensors=tensors,
            attributes=(),
            scalings=(),
            delivery="module",
            delivery_because="",
            fingerprint=self.fingerprint,
            fingerprint_after=replace(self, shapes=shapes).fingerprint,
            source=self,
        )
        return self._delivered(plan, after)

    def after(self, plan: Plan) -> "Structure":
        """The structure of the cut network: sizes shrink, indices are numbered anew; nothing is traced again."""
        sizes = self._sizes_after(plan)
        skeleton = None
        if plan.delivery == "module" and self._skeleton is not None:
            skeleton = cut_module(self._skeleton, plan)
        counts = plan.counts()
        shapes = self.shapes | {
            n: t.new_shape for t in plan.tensors for n in t.names if n in self.shapes
        }
        groups = tuple(
            replace(g, size=counts[g.name][0] if g.name in counts else g.size, sizes=sizes)
            for g in self.groups
        )
        changed = {change.attribute: change.new for change in plan.attributes}
        return replace(
            self,
            groups=groups,
            shapes=shapes,
            _sizes=sizes,
            _skeleton=skeleton,
            _attributes=self._attributes | changed,
            _applied=self._since_trace(plan),
        )

    def program(self, model: nn.Module, plan: Plan, cut: dict[int, Tensor]) -> CutProgram:
        """The rewritten program of a plan, with the tensors of `model` that `cut` does not replace copied."""
        if reason := why_not_a_program(self._run.analysis):
            raise PlanMismatchError(
                f"The model's own code cannot run this plan ({plan.delivery_because}), and it cannot be written as a program "
                f"either: {reason}. Leave out the groups this concerns."
            )
        made: dict[int, Tensor] = dict(cut)
        tensors: dict[str, Tensor] = {}
        persistent = model.state_dict(keep_vars=True)
        for name, tensor in model_tensors(model).items():
            if id(tensor) not in made:
                new = tensor.detach().clone()
                made[id(tensor)] = (
                    nn.Parameter(new, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else new
                )
            tensors[name] = made[id(tensor)]
        sizes = self._sizes_after(plan)
        return CutProgram(
            self._run.analysis,
            sizes,
            tensors,
            self._run.signature,
            self._run.example,
            set(persistent),
        ).train(model.training)

    @cached_property
    def _by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self._run.model.named_parameters(remove_duplicate=False)}

    def _sizes_after(self, plan: Plan | None) -> dict[Axis, int]:
        if plan is None:
            return self._sizes
        if plan.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"The plan was made for another network (fingerprint {plan.fingerprint}, this one is {self.fingerprint}). "
                "After a cut, use `structure.after(plan)`; for another model, trace it."
            )
        return self._sizes | {self[name].axis: len(own) for name, own in plan.kept.items()}

    def _cut_tensors(self, axes: Mapping[Axis, Indices]) -> tuple[TensorCut, ...]:
        analysis = self._run.analysis
        cuts: list[TensorCut] = []
        for value in analysis.tensors():
            exprs = analysis.axes[value]
            touched = [d for d, e in enumerate(exprs) if any(axis in axes for axis in e.axes())]
            if touched:
                kept = {dim: kept_indices(exprs[dim], axes, self._sizes) for dim in touched}
                shape = tuple(size_of(expr, self._sizes) for expr in exprs)
                cuts.append(TensorCut(value.names, shape, kept))
        return tuple(cuts)

    def _checked(self, name: str, kept: Iterable[int]) -> Indices:
        group = self[name]
        units = np.asarray(
            kept if isinstance(kept, np.ndarray) else [int(u) for u in kept], dtype=np.int64
        )
        if len(units) and (units.min() < 0 or units.max() >= group.size):
            wrong = int(units[(units < 0) | (units >= group.size)][0])
            raise PlanMismatchError(
                f"Group {name!r} has units 0 … {group.size - 1}; {wrong} is none of them."
            )
        found = np.unique(units)
        if len(found) < len(units):
            raise PlanMismatchError(
                f"Kept units of group {name!r} are named twice. Name each once."
            )
        if len(found) < group.smallest:
            because = (
                ""
                if group.smallest == 1
                else ": `squeeze()` without a dimension would drop the axis"
            )
            raise PlanMismatchError(
                f"Group {name!r} would keep {len(found)} of {group.size} units; at least {group.smallest} must stay{because}. "
                "An empty layer passes nothing on: to remove it, take the block that contains it out of the model."
            )
        return found

    def _delivered(self, plan: Plan, sizes: dict[Axis, int]) -> Plan:
        """The plan with its attributes, and how it can be delivered."""
        analysis = self._run.analysis
        if self._skeleton is None:
            return replace(
                plan, delivery="program", delivery_because="an earlier cut was delivered so"
            )
        try:
            plan = replace(plan, attributes=solve_attributes(analysis, sizes, self._attributes))
        except Unsolvable as reason:
            return replace(plan, delivery="program", delivery_because=str(reason))
        because = self._why_not_as_module(plan, sizes)
        if because == DIVIDES_BY_WIDTH:
            scalings = find_scalings(analysis, self._sizes, sizes, self._since_trace(plan))
            if scalings is not None:
                plan = replace(plan, scalings=scalings)
                because = self._why_not_as_module(plan, sizes)
        if because:
            return replace(
                plan, attributes=(), scalings=(), delivery="program", delivery_because=because
            )
        return plan

    def _why_not_as_module(self, plan: Plan, sizes: dict[Axis, int]) -> str:
        """Run the cut module, first without data, then, where that fails or differs, with the example."""
        assert self._skeleton is not None, "asked only while there is one"
        analysis, run = self._run.analysis, self._run
        because = confirm(self._skeleton, run.meta_example, plan, analysis, sizes)
        if because and because != DIVIDES_BY_WIDTH and not run.is_meta:
            whole = self._since_trace(plan)
            because = confirm(run.model, run.example, whole, analysis, sizes)
        return because

    def _since_trace(self, plan: Plan) -> Plan:
        return plan if self._applied is None else self._applied.then(plan)

    def _what_there_is(self) -> str:
        if self.groups:
            some = ", ".join(f"{g.name} ({g.kind}, {g.size})" for g in self.groups[:4])
            return f"There are {len(self.groups)} groups: {some}{', …' if len(self.groups) > 4 else ''}."
        reasons = list(dict.fromkeys(f"{pin.tensor}: {pin.reason}" for pin in self.pinned))[:4]
        return f"Nothing in this model can shrink. {'; '.join(reasons)}."


def _shared(model: nn.Module) -> dict[int, Tensor]:
    """Parameters stand for themselves in the copy that is run; buffers, which a run may change, are copied."""
    return {id(p): p for p in model.parameters()}


def _meta(tensor: Tensor) -> Tensor:
    new = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.detach()


def _has_parameter(group: Group, model: nn.Module) -> bool:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return any(tensor in names for tensor, *_ in group.places)


def _attribute_values(analysis: Analysis, model: nn.Module) -> dict[Attribute, int]:
    modules = dict(model.named_modules())
    found: dict[Attribute, int] = {}
    for call in analysis.program.calls:
        for origin in call.taints.values():
            for where in leaves(origin):
                held = getattr(modules[where.module], where.name)
                found[where] = held if where.place is None else held[where.place]
    return found


def _why_it_failed(model: nn.Module, example: Example, error: Exception) -> str:
    shapes = ", ".join(str(tuple(t.shape)) for t in example.tensors()) or "no tensors"
    lines = str(error).strip().splitlines()
    where = _line_of(error)
    return (
        f"{type(model).__name__} did not run on the example inputs ({shapes}): {type(error).__name__}: "
        f"{lines[0] if lines else ''}{f' At {where}.' if where else ''} Example inputs are what you would call the model with: "
        "a tensor, a tuple of arguments, or a dict of keyword arguments, on the model's device."
    )


def _line_of(error: BaseException) -> str:
    """The innermost line outside torch and this room."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(OWN_FOLDERS)]
    return f"{outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name}" if outside else ""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=3, cutoff=0.4)
    return (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"The groups are {', '.join(list(known)[:8])}, …"
    )
