"""In which order units went over many steps, and what may come back of them at the end.

A step can only take whole units, and may save more than it was to; later steps do not undo it. Together they can end
well below the budget. No weight has changed meanwhile, so units can come back: planned once more from the dense network
with the order of removal for a score, the first to go go again until the budget is met, and what is left of it goes to
the last.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apoptosis.criteria import UnitScores
from apoptosis.errors import PlanMismatchError
from apoptosis.planning import Limits, Selection, plan_within
from apoptosis.structure import Plan, Structure

__all__ = ["RemovalOrder"]

PARTS = ""  # no group has this name


class RemovalOrder:
    """When each unit of a dense network went."""

    def __init__(self, dense: Structure) -> None:
        self._dense = dense
        self._parts = 0
        self._when: dict[str, Tensor] = {}

    def note(self, before: Plan, part: Plan, units: UnitScores) -> None:
        """`part` removes units from what `before` has left; within a step the lowest scores went first."""
        for name in units.values.keys() - self._when.keys():
            size = self._dense[name].size
            self._when[name] = torch.full((size,), torch.inf, dtype=torch.float64)
        gone: list[tuple[str, int, float]] = []
        for name, kept in part.kept.items():
            there = before.kept.get(name, np.arange(self._dense[name].size))
            for place in np.setdiff1d(np.arange(len(there)), kept):
                gone.append((name, int(there[place]), float(units.values[name][place])))
        gone.sort(key=lambda unit: unit[2])
        for rank, (name, unit, _) in enumerate(gone):
            self._when[name][unit] = self._parts + rank / len(gone)
        self._parts += 1

    def as_tensors(self) -> dict[str, Tensor]:
        """All that was noted, so that a run can go on from it."""
        return self._when | {PARTS: torch.tensor(self._parts)}

    def read_(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `as_tensors` gave."""
        self._when = {name: own for name, own in tensors.items() if name != PARTS}
        self._parts = int(tensors[PARTS])

    def with_budget_spent(self, plan: Plan, selection: Selection, limits: Limits) -> Plan | None:
        """A plan from the dense network that spends what `plan` leaves of the budget; None if that is all.

        Widths that are to be uniform stay as they are.
        """
        if selection.widths == "uniform" or not self._when:
            return None
        never = float(self._parts + 1)
        values = {name: own.nan_to_num(posinf=never) for name, own in self._when.items()}
        ranked = UnitScores(values, "order of removal")
        try:
            found = plan_within(self._dense, ranked, replace(selection, per="unit"), limits)
        except PlanMismatchError:  # widths between those that were tried, which the code cannot run
            return None
        return found if _more(found, plan) else None


def _more(found: Plan, plan: Plan) -> bool:
    """Whether a plan keeps more of every group than another, or as much, and more of one."""
    names = plan.kept.keys() | found.kept.keys()
    sizes = plan.sizes
    counts = [
        (
            len(found.kept[name]) if name in found.kept else sizes[name],
            len(plan.kept[name]) if name in plan.kept else sizes[name],
        )
        for name in names
    ]
    return any(new > old for new, old in counts) and all(new >= old for new, old in counts)
