"""Who goes in one step of `prune`: as many as the way to the budget wants, and if need be only some kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape

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


@dataclass(frozen=True)
class Chosen:
    """What goes in a step, by which selection, the limits that held, and what settings say of it."""

    part: Plan
    selection: Selection
    limits: Limits
    said: Mapping[str, str] = field(default_factory=dict[str, str])


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
        whole = _with_dims_whole(self.structure, selection)
        if whole is None:
            return found
        try:
            check_reachable(self.dense, self.budget, whole, self.units)
            other = self._next(whole)
        except BudgetError:
            return found
        said = {"dims_left_whole": found.part.delivery_because}
        return replace(other, said=said) if other.part.delivery == "module" else found

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


def _with_dims_whole(structure: Structure, selection: Selection) -> Selection | None:
    """The same, but that all heads keep their dimensions; None where that was not left open, or nothing else may go.

    Code often has the width of a head written into it, and a network cut there is delivered as a program, which no
    refit can mend.
    """
    groups = selection.groups(structure)
    dims = [group for group in groups if group.kind.endswith("_dim")]
    shared = any(fnmatchcase(own.name, pattern) for own in dims for pattern in selection.shares)
    if selection.kinds is not None or shared or len(dims) in (0, len(groups)):
        return None
    return replace(selection, names=(*selection.names, *(f"!{escape(own.name)}" for own in dims)))
