"""Who goes in one step of `prune`, and which groups stay whole so that there is something left to mend.

Code often has the number and the width of heads written into it, and a network cut there is delivered as a program,
which no refit can mend. Where scores count on a refit that is worth more than what the heads save, as long as the
budget can be met without crushing all the others. That is decided once in a run, by the first scores and the whole
budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from apoptosis.workflow.choosing import MOST_GONE

__all__ = ["Chosen", "Spared", "next_part", "spared_for_repair"]

DIMS, HEADS = ("qk_dim", "v_dim", "head_dim"), ("head", "kv_head", "query_head")
IN_THE_WAY = (DIMS, (*DIMS, *HEADS))
"""Kinds that are left whole together, for the network to stay a module; as few as will do."""


@dataclass(frozen=True)
class Chosen:
    """What goes in a step, and the limits that held."""

    part: Plan
    limits: Limits


@dataclass(frozen=True)
class Spared:
    """Kinds of groups that stay whole, and what in the network would be in the way of a refit otherwise."""

    kinds: tuple[str, ...]
    because: str

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Spared":
        """As notes have it."""
        return cls(tuple(data["kinds"]), data["because"])

    def as_data(self) -> dict[str, Any]:
        """As settings and notes have it."""
        return {"kinds": list(self.kinds), "because": self.because}

    def leave(self, structure: Structure, selection: Selection) -> Selection:
        """The same selection without them."""
        return _sparing(self.kinds, structure, selection) or selection


def next_part(  # noqa: PLR0913 - both networks, who is worth what, and how far to go
    dense: Structure,
    structure: Structure,
    units: UnitScores,
    budget: Budget,
    selection: Selection,
    progress: float,
) -> Chosen:
    """Who goes until `progress` of the way is done; there every share s is s^progress."""
    shares = {pattern: share**progress for pattern, share in selection.shares.items()}
    here = replace(selection, shares=shares)
    asked = {name: share**progress for name, share in budget.shares().items()}
    limits = limits_of(dense, asked, here)
    if progress < 1:  # shares are rounded to whole units, and may not fit in on the way
        limits = within_reach(structure, units, here, limits)
    return Chosen(plan_within(structure, units, here, limits), limits)


def spared_for_repair(
    dense: Structure, units: UnitScores, budget: Budget, selection: Selection
) -> Spared | None:
    """What to leave whole so that the network stays a module; None where it does anyway, or cannot.

    Kinds or shares of groups that were asked for are not touched.
    """
    found = next_part(dense, dense, units, budget, selection, 1.0).part
    if found.delivery == "module":
        return None
    for kinds in IN_THE_WAY:
        others = _sparing(kinds, dense, selection)
        if others is None:
            continue
        try:
            gently = replace(others, cap=min(others.cap, MOST_GONE))
            check_reachable(dense, budget, gently, units)
            other = next_part(dense, dense, units, budget, others, 1.0).part
        except BudgetError:
            continue
        if other.delivery == "module":
            return Spared(kinds, found.delivery_because)
    return None


def _sparing(kinds: Sequence[str], structure: Structure, selection: Selection) -> Selection | None:
    """The same without groups of these kinds; None where that is not left open, or nothing else may go."""
    groups = selection.groups(structure)
    spared = [group.name for group in groups if group.kind in kinds]
    shared = any(fnmatchcase(name, pattern) for name in spared for pattern in selection.shares)
    if selection.kinds is not None or shared or len(spared) in (0, len(groups)):
        return None
    names = (*selection.names, *(f"!{escape(name)}" for name in spared))
    return replace(selection, names=names)
