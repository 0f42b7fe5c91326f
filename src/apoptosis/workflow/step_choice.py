"""Who goes in one step of `prune`: as many as the way to the budget wants, and if need be of some kinds alone.

Code often has the number and the width of heads written into it, and a network cut there is delivered as a program,
which no refit can mend. Where scores count on a refit that is worth more than what the heads save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError
from apoptosis.planning import (
    Budget,
    Limits,
    Selection,
    check_reachable,
    limits_of,
    plan_within,
    within_reach,
)
from apoptosis.structure import Plan, Structure

__all__ = ["Chosen", "StepChoice"]

DIMS, HEADS = ("qk_dim", "v_dim", "head_dim"), ("head", "kv_head", "query_head")
IN_THE_WAY = (DIMS, (*DIMS, *HEADS))
"""Kinds that are left whole together, for the network to stay a module; as few as will do."""


@dataclass(frozen=True)
class Chosen:
    """What goes in a step, by which selection, the limits that held, and what settings say of it."""

    part: Plan
    selection: Selection
    limits: Limits
    said: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class StepChoice:
    """A point on the way to a budget: both networks, who is worth what, and how far to go."""

    dense: Structure
    structure: Structure
    units: UnitScores
    budget: Budget
    progress: float

    def chosen(self, selection: Selection, *, keep_module: bool) -> Chosen:
        """Who goes; where `keep_module` and that can be, nobody whose going would make the network a program."""
        found = self._next(selection)
        if not keep_module or found.part.delivery == "module":
            return found
        for kinds in IN_THE_WAY:
            other = self._sparing(kinds, selection)
            if other is not None and other.part.delivery == "module":
                because = found.part.delivery_because
                return replace(other, said={"spared": {"kinds": list(kinds), "because": because}})
        return found

    def _sparing(self, kinds: Sequence[str], selection: Selection) -> Chosen | None:
        """Without groups of these kinds; None where that was not left open, or the budget cannot be met so."""
        groups = selection.groups(self.structure)
        spared = [group.name for group in groups if group.kind in kinds]
        shared = any(fnmatchcase(name, pattern) for name in spared for pattern in selection.shares)
        if selection.kinds is not None or shared or len(spared) in (0, len(groups)):
            return None
        names = (*selection.names, *(f"!{escape(name)}" for name in spared))
        others = replace(selection, names=names)
        try:
            check_reachable(self.dense, self.budget, others, self.units)
            return self._next(others)
        except BudgetError:
            return None

    def _next(self, selection: Selection) -> Chosen:
        here, limits = self._limits(selection)
        if self.progress < 1:  # shares are rounded to whole units, and may not fit in on the way
            limits = within_reach(self.structure, self.units, here, limits)
        return Chosen(plan_within(self.structure, self.units, here, limits), selection, limits)

    def _limits(self, selection: Selection) -> tuple[Selection, Limits]:
        """What holds here: on the way every share s is s^progress."""
        shares = {pattern: share**self.progress for pattern, share in selection.shares.items()}
        here = replace(selection, shares=shares)
        asked = {name: share**self.progress for name, share in self.budget.shares().items()}
        return here, limits_of(self.dense, asked, here)
