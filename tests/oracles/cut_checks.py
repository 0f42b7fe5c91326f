"""What every cut of every network must satisfy, checked against oracles that know nothing of axes.

The cut network equals its zeroed twin; parameters are recounted; multiply-accumulates are counted by torch as the cut
network runs; plans compose, survive JSON, and leave the given model as it was.
"""

import copy
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from apoptosis.structure import Plan, Structure, cut, trace, zero
from oracles.random_choice import Pick
from oracles.random_networks import RandomNetwork

__all__ = ["TOLERANCE", "Finding", "Report", "check", "counted_macs"]

TOLERANCE = 1e-11
"""Relative, float64. A cut sums fewer numbers than its twin, in another order."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be."""

    kind: str
    plan: dict[str, list[int]]
    detail: str


@dataclass
class Report:
    """What was seen of one network."""

    groups: int = 0
    exact: int = 0
    tallies: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def check(network: RandomNetwork, *, alone: int = 2, joint: int = 2) -> Report:
    """Cut every group by itself in `alone` ways, then `joint` random choices of many groups at once."""
    return _Check(network).run(alone, joint)


def counted_macs(model: nn.Module, inputs: Tensor) -> int:
    """Multiply-accumulates by torch's counter: mm, bmm, convolutions, attention by its parts.

    It sees neither mv, dot, bilinear nor recurrent cells, and no einsum that torch turns into elementwise products:
    one that sums over nothing, or over axes of size 1.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # what it fuses is not counted
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            _run(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    flops = counter.get_total_flops()
    assert flops % 2 == 0, "a multiply-accumulate is two operations"
    return flops // 2


class _Check:
    def __init__(self, network: RandomNetwork) -> None:
        self.network, self.model = network, network.model
        self.pick = Pick(network.blueprint.seed + 1)
        self.example = network.inputs(network.batch, 0)
        self.report = Report()
        self.before = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.sizes = _attributes(self.model)
        self.inputs = [network.inputs(network.batch, 1), network.inputs(network.batch, 2)]
        other = network.inputs(network.batch + 3, 3)
        self.other_batch = _runs(self.model, other)
        if self.other_batch:
            self.inputs.append(other)
        self.outputs = [_run(self.model, x) for x in self.inputs]

    def run(self, alone: int, joint: int) -> Report:
        report = self.report
        try:
            structure = trace(self.model, self.example)
        except Exception as error:  # noqa: BLE001 - a crash is what is looked for
            self._found("crash in trace", {}, _told(error))
            return report
        report.groups = len(structure.groups)
        report.exact = sum(g.exact for g in structure.groups)
        self._dense_costs(structure)
        for group in structure.groups:
            if group.size <= group.smallest:
                continue
            for number in range(alone):
                self._try(structure, {group.name: self._some(group, one=number == 0)})
        for number in range(joint if structure.groups else 0):
            kept = self._joint(structure, exact=number % 2 == 0)
            if kept:
                self._try(structure, kept, thorough=True)
        self._unchanged()
        return report

    def _joint(self, structure: Structure, *, exact: bool) -> dict[str, list[int]]:
        chance = self.pick.of(0.4, 0.8, 1.0)
        chosen = [g for g in structure.groups if g.exact or not exact]
        kept = {g.name: self._some(g) for g in chosen if self.pick.coin(chance)}
        return {n: own for n, own in kept.items() if len(own) < structure[n].size}

    def _some(self, group: Any, *, one: bool = False) -> list[int]:
        """Units to keep; with `one`, all but one."""
        most = max(group.size - 1, group.smallest)
        number = most if one else self.pick.random.randint(group.smallest, most)
        return sorted(self.pick.random.sample(range(group.size), number))

    def _try(
        self, structure: Structure, kept: dict[str, list[int]], *, thorough: bool = False
    ) -> None:
        try:
            plan = structure.plan(kept)
            small = cut(self.model, plan)
            self.report.tallies["plans"] += 1
            self.report.tallies[plan.delivery] += 1
            self._same_as_twin(structure, plan, small, kept)
            self._costs(structure, plan, small, kept)
            if thorough:
                self._round_trips(plan, small, kept)
                self._composes(structure, plan, small, kept)
        except Exception as error:  # noqa: BLE001 - a crash is what is looked for
            self._found("crash", kept, _told(error))

    def _same_as_twin(
        self, structure: Structure, plan: Plan, small: nn.Module, kept: dict[str, list[int]]
    ) -> None:
        twin = zero(self.model, plan)
        exact = all(structure[name].exact for name in kept)
        self.report.tallies["cuts of exact groups" if exact else "cuts of inexact groups"] += 1
        worst, acts = 0.0, False
        for x, dense in zip(self.inputs, self.outputs, strict=True):
            try:
                got = _run(small, x)
            except Exception as error:
                if len(x) == len(self.example):
                    raise
                self._found("other batch", kept, f"{plan!r}: {_told(error)}")
                continue
            expected = _run(twin, x)
            if [t.shape for t in got] != [t.shape for t in expected]:
                self._found(
                    "shape", kept, f"{[t.shape for t in got]} {[t.shape for t in expected]}"
                )
                return
            acts |= _distance(expected, dense) > TOLERANCE
            worst = max(worst, _distance(got, expected))
        if exact:
            self.report.tallies["cuts that change the output"] += acts
            if not worst <= max(TOLERANCE, 1e3 * self._noise(twin) if worst > TOLERANCE else 0):
                self._found("wrong", kept, f"{plan!r} differs from its twin by {worst:.1e}")
        elif worst <= TOLERANCE:
            self.report.tallies["inexact yet equal"] += 1

    def _noise(self, twin: nn.Module) -> float:
        """How far rounding moves the output: weights changed by their last digits."""
        other = copy.deepcopy(twin)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1 + 2e-16 * torch.randn_like(p).sign())
        return _distance(_run(other, self.inputs[0]), _run(twin, self.inputs[0]))

    def _dense_costs(self, structure: Structure) -> None:
        params = sum(p.numel() for p in self.model.parameters())
        if structure.params() != params:
            self._found("params", {}, f"{structure.params()}, recounted {params}")
        if self.network.counted:
            macs = counted_macs(self.model, self.example)
            if structure.macs() != macs:
                self._found("macs", {}, f"{structure.macs()}, counted {macs}")

    def _costs(
        self, structure: Structure, plan: Plan, small: nn.Module, kept: dict[str, list[int]]
    ) -> None:
        params = sum(p.numel() for p in small.parameters())
        if structure.params(plan) != params:
            self._found("params", kept, f"{structure.params(plan)}, recounted {params}")
        shapes = structure.after(plan).shapes
        found = {n: tuple(t.shape) for n, t in small.state_dict().items()}
        if found != shapes:
            wrong = set(shapes.items()) ^ set(found.items())
            self._found("shapes", kept, f"predicted or found, not both: {sorted(wrong)}")
        if structure.after(plan).macs() != structure.macs(plan):
            self._found(
                "macs after", kept, f"{structure.after(plan).macs()} {structure.macs(plan)}"
            )
        if self.network.counted and not (self.network.einsum and _has_ones(structure, plan)):
            macs = counted_macs(small, self.example)
            if structure.macs(plan) != macs:
                self._found("macs", kept, f"{structure.macs(plan)}, counted {macs} ({plan!r})")

    def _round_trips(self, plan: Plan, small: nn.Module, kept: dict[str, list[int]]) -> None:
        x = self.inputs[0]
        expected = _run(small, x)
        read = Plan.from_json(plan.to_json())
        again = cut(self.model, read, example_inputs=self.example)
        if not _identical(_run(again, x), expected):
            self._found("json", kept, "the plan read back cuts otherwise")
        other = copy.deepcopy(small)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1.0)
        other.load_state_dict(small.state_dict())
        if not _identical(_run(other, x), expected):
            self._found("state_dict", kept, "a copy that loads the state computes otherwise")
        frozen = {n: p.requires_grad for n, p in self.model.named_parameters()}
        if {n: p.requires_grad for n, p in small.named_parameters()} != frozen:
            self._found("frozen", kept, "requires_grad is not kept")

    def _composes(
        self, structure: Structure, plan: Plan, small: nn.Module, kept: dict[str, list[int]]
    ) -> None:
        after = structure.after(plan)
        more = {
            g.name: self._some(g)
            for g in after.groups
            if g.size > g.smallest and self.pick.coin(0.6)
        }
        if not more:
            return
        self.report.tallies["composed"] += 1
        later = after.plan(more)
        both = plan.then(later)
        smallest, at_once = cut(small, later), cut(self.model, both)
        detail = f"then {more}, {plan!r} {later!r}"
        for x in self.inputs:
            if len(x) == len(self.example) and not _identical(_run(smallest, x), _run(at_once, x)):
                self._found("then", kept, f"two cuts differ from one: {detail}")
        if all(structure[name].exact for name in {*kept, *more}):
            twin = zero(self.model, both)
            worst = max(_distance(_run(at_once, x), _run(twin, x)) for x in self.inputs[:2])
            if not worst <= max(TOLERANCE, 1e3 * self._noise(twin) if worst > TOLERANCE else 0):
                self._found("wrong", kept, f"composed, differs by {worst:.1e}: {detail}")
        if structure.macs(both) != after.macs(later):
            self._found("macs after", kept, f"composed: {detail}")

    def _unchanged(self) -> None:
        now = self.model.state_dict()
        same = all(torch.equal(now[k], v) for k, v in self.before.items())
        outputs = [_run(self.model, x) for x in self.inputs]
        same &= all(_identical(a, b) for a, b in zip(outputs, self.outputs, strict=True))
        if not same or _attributes(self.model) != self.sizes:
            self._found("changed", {}, "the given model is not as it was")

    def _found(self, kind: str, kept: dict[str, list[int]], detail: str) -> None:
        self.report.findings.append(Finding(kind, kept, detail))


def _run(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = model(x.clone())
    if isinstance(found, dict):
        found = tuple(found.values())
    return list(found) if isinstance(found, tuple) else [found]


def _has_ones(structure: Structure, plan: Plan) -> bool:
    return any(group.size == 1 for group in structure.after(plan).groups)


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        _run(model, x)
    except Exception:  # noqa: BLE001 - some networks have the batch in their code
        return False
    return True


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        scale = max(float(y.abs().max()), 1e-9)
        own = float((x - y).abs().max()) / scale
        worst = float("inf") if np.isnan(own) else max(worst, own)
    return worst


def _identical(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _attributes(model: nn.Module) -> list[tuple[str, str, Any]]:
    return [
        (path, name, type(value).__name__ + repr(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, list, tuple))
    ]


def _told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[:-6:-1])
    return f"{type(error).__name__}: {str(error)[:400]} [{where}]"
