"""Check by running what the algebra says: every exact group, cut and compared with its zeroed twin.

The rules are proved on samples and the solution is sound by construction; this is the belt to those braces, for a model
with operations of its own or before a long run. The check uses random weights, since trained ones can hide a wrong cut
behind dead units, and two inputs, in float64 where the model runs so and gives finite numbers; else in its own type,
else with its own weights. How much the two may differ follows from the coarsest numbers that the model computes with.
A group that fails is pinned, with that reason; so is one that cannot be cut. What could not be compared is listed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import gcd, inf, lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError, PlanMismatchError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.structure.arrangement import tensors_in
from apoptosis.structure.cutting import cut
from apoptosis.structure.groups import Group, PinnedAxis
from apoptosis.structure.network import Run
from apoptosis.structure.plan import Plan
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example, record
from apoptosis.structure.structure import Structure
from apoptosis.structure.surgery import copy_with, zero
from apoptosis.structure.twins import (
    TOLERANCE,
    as_double,
    compare,
    constant_noise,
    randomised,
    redrawn,
)

__all__ = ["Verification", "verify"]

TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-4, torch.float16: 2e-2}
"""By the coarsest numbers on the way. A wrong cut is off by a percent or more; a sum of a thousand numbers in another
order by 30 roundings (6e-8, 5e-4), and layers after it make that a few times larger."""
COARSEST = 1e-1
"""For bfloat16, one rounding of which is 4e-3, and narrower types."""


@dataclass(frozen=True)
class Verification:
    """The structure without groups that failed, each group's relative error, and what could not be compared."""

    structure: Structure
    errors: dict[str, float]
    tolerances: Mapping[str, float] = field(default_factory=dict[str, float])
    """How much a cut group and its zeroed twin may differ, relative to the largest number of an output."""
    unchecked: Mapping[str, str] = field(default_factory=dict[str, str])
    """Groups that were not compared, and why."""

    @property
    def failed(self) -> dict[str, float]:
        """Groups that were not what they promised."""
        return {
            name: error
            for name, error in self.errors.items()
            if not error <= self.tolerances.get(name, TOLERANCE)
        }


@dataclass(frozen=True)
class _Ground:
    """A model, inputs and a tolerance to compare cuts with."""

    model: nn.Module
    examples: list[Example]
    tolerance: float
    draws: bool
    """True if the model draws random numbers."""


def verify(
    structure: Structure, *, seed: int = 0, groups: Iterable[str] | None = None
) -> Verification:
    """Cut a random unit of each exact group (and of those tied to it), and compare with the zeroed twin.

    A group tied to an inexact one is cut without it, as a program; where the model cannot be one, it is not compared.

    Args:
        structure: as `trace` gave it.
        seed: draws weights, inputs and units.
        groups: names of those to check; all exact ones unless given.

    Raises:
        ModelError: the model has no numbers (it is on the meta device).

    >>> from apoptosis.structure import trace
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> verify(trace(net, torch.zeros(1, 4))).failed
    {}
    """
    run = structure._network.run
    if run.is_meta:
        raise ModelError(
            "The model is on the meta device and has no numbers to check. Trace it with real weights."
        )
    generator = torch.Generator().manual_seed(seed)
    names = (
        list(groups)
        if groups is not None
        else [g.name for g in structure.groups if g.exact and g.size > 1]
    )
    grounds = list(_grounds(run, generator))
    if not grounds:
        why = "the outputs hold no finite numbers, with random weights or with the model's own"
        return Verification(structure, {}, unchecked=dict.fromkeys(names, why))
    errors, tolerances = dict[str, float](), dict[str, float]()
    unchecked, refused = dict[str, str](), dict[str, str]()
    for name in track(names, "checking cuts"):
        kept, tied = _one_unit_less(structure, name, generator)
        try:
            plan = replace(structure.plan(kept), basis=None)  # for other weights
        except PlanMismatchError as refusal:
            unchecked[name] = f"{tied}{refusal}"
            if not tied:
                refused[name] = str(refusal)
            continue
        errors[name], tolerances[name] = _compared(grounds, plan)
    checked = Verification(structure, errors, tolerances)
    reasons = refused | {
        name: f"cut and zeroed twin of group {name!r} differ by {error:.1e}, relative"
        for name, error in checked.failed.items()
    }
    pinned = tuple(_as_pinned(structure[name], why) for name, why in reasons.items())
    kept_groups = tuple(group for group in structure.groups if group.name not in reasons)
    return Verification(
        replace(structure, groups=kept_groups, pinned=(*structure.pinned, *pinned)),
        errors,
        tolerances,
        unchecked,
    )


def _one_unit_less(
    structure: Structure, name: str, generator: torch.Generator
) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
    """What stays of a group and of those tied to it, and which of these were left whole, as they are inexact."""
    inexact = {
        other: structure[other].inexact_because
        for other in structure.step(name)
        if not structure[other].exact and structure[name].exact
    }
    step = {other: num for other, num in structure.step(name).items() if other not in inexact}
    on_grid = lcm(
        *(structure[o].multiple // gcd(structure[o].multiple, n) for o, n in step.items())
    )
    kept = {
        other: np.sort(
            torch.randperm(size := structure[other].size, generator=generator)[
                : size - num * on_grid
            ].numpy()
        )
        for other, num in step.items()
    }
    other, because = next(iter(inexact.items()), ("", ""))
    return kept, f"it is tied to {other!r}, which is inexact: {because}. " if inexact else ""


def _grounds(run: Run, generator: torch.Generator) -> Iterator[_Ground]:
    """Random weights in float64 and in the model's own type; only where neither gives numbers, its own weights."""
    example = run.example
    found = False
    tries: list[tuple[Callable[[], nn.Module], Example]] = [
        (lambda: randomised(run.model, generator), as_double(example)),
        (lambda: randomised(run.model, generator, None), example),
        (lambda: copy_with(run.model, {}).double(), as_double(example)),
        (lambda: copy_with(run.model, {}), example),
    ]
    for number, (make, own) in enumerate(tries):
        if number >= 2 and found:  # noqa: PLR2004 - of those with random weights
            return
        try:
            model = make()
            examples = [own, redrawn(own, generator)]
            program = record(model, own)
            finite = [_has_numbers(model, e) for e in examples]
        except Exception:  # noqa: BLE001 - a model need not run with weights or numbers it was not made for
            continue
        if not any(finite):
            continue
        found = True
        examples = [example for example, good in zip(examples, finite, strict=True) if good]
        draws = any(torch.Tag.nondeterministic_seeded in call.op.tags for call in program.calls)
        made = [value for call in program.calls for value in call.outputs if not value.fixed]
        dtypes = {value.dtype for value in made if value.ndim and value.dtype.is_floating_point}
        tolerance = max((TOLERANCES.get(d, COARSEST) for d in dtypes), default=TOLERANCE)
        yield _Ground(model, examples, tolerance, draws)


def _has_numbers(model: nn.Module, example: Example) -> bool:
    with random_state_put_back(model), torch.no_grad(), in_eval_mode(model):
        outputs = tensors_in(example.map(Tensor.clone).run(model))
    return any(bool(tensor.isfinite().any()) for tensor in outputs)


def _compared(grounds: list[_Ground], plan: Plan) -> tuple[float, float]:
    """The error of a plan, and what it may be. A program has number types written into it, and may need its own."""
    error, tolerance = _error(grounds[0], plan), grounds[0].tolerance
    if error > tolerance and plan.delivery == "program" and len(grounds) > 1:
        return _error(grounds[1], plan), grounds[1].tolerance
    return error, tolerance


def _error(ground: _Ground, plan: Plan) -> float:
    try:
        with ExitStack() as stack:
            if ground.draws:
                stack.enter_context(constant_noise())
            return compare(cut(ground.model, plan), zero(ground.model, plan), ground.examples)
    except Exception:  # noqa: BLE001 - a cut that cannot be run is as wrong as one that differs
        return inf


def _as_pinned(group: Group, why: str) -> PinnedAxis:
    tensor, dim, *_ = group.places[0]
    return PinnedAxis(tensor, dim, group.size, "verify", why, "", "")
