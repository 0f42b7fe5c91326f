"""Choose the units to remove in one step of `prune`, and the groups that stay whole.

A plan may be one that neither the model's own code nor a program can run: code that has a width written into it, and
looks at values of a batch elsewhere. The groups that this concerns are found by trying the plan's groups by
themselves, and stay whole; the budget is then met by the others.

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

import numpy as np
from numpy.typing import NDArray

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError, PlanMismatchError
from apoptosis.planning import (
    Budget,
    Limits,
    Selection,
    check_reachable,
    kept_within,
    limits_of,
    within_reach,
)
from apoptosis.structure import Plan, Structure
from apoptosis.workflow.choosing import MOST_GONE

__all__ = ["Chosen", "Spared", "groups_to_spare", "next_deliverable", "next_part"]

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
    """Kinds of groups that stay whole, as a refit would be lost otherwise, and groups that nothing can run when cut."""

    kinds: tuple[str, ...] = ()
    because: str = ""
    groups: tuple[str, ...] = ()
    groups_because: str = ""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Spared":
        """As notes have it."""
        groups, why = data.get("groups", ()), data.get("groups_because", "")
        return cls(tuple(data["kinds"]), data["because"], tuple(groups), why)

    def as_data(self) -> dict[str, Any]:
        """As settings and notes have it."""
        found: dict[str, Any] = {"kinds": list(self.kinds), "because": self.because}
        if self.groups:
            found |= {"groups": list(self.groups), "groups_because": self.groups_because}
        return found

    def leave(self, structure: Structure, selection: Selection) -> Selection:
        """The same selection without them."""
        kept = _without(self.groups, selection)
        return (_sparing(self.kinds, structure, kept) or kept) if self.kinds else kept


def next_part(  # noqa: PLR0913 - both networks, who is worth what, and how far to go
    dense: Structure,
    structure: Structure,
    units: UnitScores,
    budget: Budget,
    selection: Selection,
    progress: float,
) -> Chosen:
    """The units to remove until `progress` of the way is done; there every share s is s^progress."""
    kept, limits = _kept(dense, structure, units, budget, selection, progress)
    return Chosen(structure.plan(kept) if kept else structure.identity(), limits)


def groups_to_spare(  # noqa: PLR0913 - as `next_part`, and what for
    dense: Structure,
    units: UnitScores,
    budget: Budget,
    selection: Selection,
    *,
    for_repair: bool,
) -> Spared | None:
    """The groups to leave whole so that the plan can be delivered, `for_repair` as a module; None if there are none.

    Kinds or shares of groups that were asked for are not touched.

    Raises:
        BudgetError: without the groups that cannot be cut the budget is out of reach.
        PlanMismatchError: no plan can be delivered, or a group that was asked for cannot.
    """
    chosen, spared = next_deliverable(dense, dense, units, budget, selection, 1.0)
    if (found := chosen.part).delivery == "module" or not for_repair:
        return spared
    selection = spared.leave(dense, selection) if spared else selection
    for kinds in IN_THE_WAY:
        others = _sparing(kinds, dense, selection)
        if others is None:
            continue
        try:
            gently = replace(others, cap=min(others.cap, MOST_GONE))
            check_reachable(dense, budget, gently, units)
            other = next_part(dense, dense, units, budget, others, 1.0).part
        except (BudgetError, PlanMismatchError):
            continue
        if other.delivery == "module":
            return replace(spared or Spared(), kinds=kinds, because=found.delivery_because)
    return spared


def next_deliverable(  # noqa: PLR0913, PLR0917 - as `next_part`
    dense: Structure,
    structure: Structure,
    units: UnitScores,
    budget: Budget,
    selection: Selection,
    progress: float,
    spared: Spared | None = None,
) -> tuple[Chosen, Spared | None]:
    """As `next_part`, with as few groups left whole as make the plan one that can be delivered, beside those before.

    Raises:
        BudgetError: without the groups that cannot be cut the budget is out of reach.
        PlanMismatchError: no plan can be delivered, or kinds or shares were asked for.
    """
    while True:
        here = spared.leave(dense, selection) if spared else selection
        try:
            return next_part(dense, structure, units, budget, here, progress), spared
        except PlanMismatchError as error:
            if selection.kinds is not None or selection.shares:
                raise
            kept, _ = _kept(dense, structure, units, budget, here, progress)
            stuck = _stuck(structure, kept)
            if not stuck or {group.name for group in here.groups(dense)} <= stuck:
                raise
            before = spared or Spared()
            spared = replace(
                before,
                groups=(*before.groups, *sorted(stuck)),
                groups_because=before.groups_because or str(error),
            )
            _check_without(spared, dense, units, budget, selection)


def _check_without(
    spared: Spared, dense: Structure, units: UnitScores, budget: Budget, selection: Selection
) -> None:
    try:
        check_reachable(dense, budget, spared.leave(dense, selection), units)
    except BudgetError as error:
        names = ", ".join(spared.groups[:6]) + (", …" if len(spared.groups) > 6 else "")
        refusal = BudgetError(
            f"{error} These groups cannot be cut ({names}): {spared.groups_because}"
        )
        refusal.reachable = error.reachable
        raise refusal from error


def _stuck(structure: Structure, kept: Mapping[str, NDArray[np.int64]]) -> set[str]:
    """The groups of a plan that cannot be delivered by themselves; kind by kind first, which is quicker."""
    parts = list(dict.fromkeys(_tied(structure, name, kept) for name in kept))
    by_kind: dict[frozenset[str], list[frozenset[str]]] = {}
    for part in parts:
        by_kind.setdefault(frozenset(structure[name].kind for name in part), []).append(part)
    suspects = [
        part
        for own in by_kind.values()
        if not _runs(structure, kept, frozenset().union(*own))
        for part in own
    ]
    stuck = [part for part in suspects if not _runs(structure, kept, part)]
    if not stuck:  # each by itself can; one after the other, until one cannot
        together: frozenset[str] = frozenset()
        for part in suspects or parts:
            if _runs(structure, kept, together | part):
                together |= part
            else:
                stuck.append(part)
    return set().union(*stuck)


def _tied(structure: Structure, name: str, kept: Mapping[str, NDArray[np.int64]]) -> frozenset[str]:
    return frozenset(other for other in structure.step(name) if other in kept)


def _runs(
    structure: Structure, kept: Mapping[str, NDArray[np.int64]], names: frozenset[str]
) -> bool:
    try:
        structure.plan({name: kept[name] for name in names})
    except PlanMismatchError:
        return False
    return True


def _kept(  # noqa: PLR0913, PLR0917 - as `next_part`
    dense: Structure,
    structure: Structure,
    units: UnitScores,
    budget: Budget,
    selection: Selection,
    progress: float,
) -> tuple[dict[str, NDArray[np.int64]], Limits]:
    shares = {pattern: share**progress for pattern, share in selection.shares.items()}
    here = replace(selection, shares=shares)
    asked = {name: share**progress for name, share in budget.shares().items()}
    limits = limits_of(dense, asked, here)
    if progress < 1:  # shares are rounded to whole units, and may not fit in on the way
        limits = within_reach(structure, units, here, limits)
    return kept_within(structure, units, here, limits), limits


def _sparing(kinds: Sequence[str], structure: Structure, selection: Selection) -> Selection | None:
    """The same without groups of these kinds; None where that is not left open, or nothing else may go."""
    groups = selection.groups(structure)
    spared = [group.name for group in groups if group.kind in kinds]
    shared = any(fnmatchcase(name, pattern) for name in spared for pattern in selection.shares)
    if selection.kinds is not None or shared or len(spared) in (0, len(groups)):
        return None
    return _without(spared, selection)


def _without(groups: Sequence[str], selection: Selection) -> Selection:
    """The same without groups of these names."""
    return replace(selection, names=(*selection.names, *(f"!{escape(name)}" for name in groups)))
