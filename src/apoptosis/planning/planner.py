"""`make_plan`: from unit scores and a budget to a plan."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from apoptosis.criteria import UnitScores
from apoptosis.errors import NonFiniteError, PlanMismatchError
from apoptosis.planning.budget import Budget
from apoptosis.planning.bundles import order_of
from apoptosis.planning.joint import in_joint_order
from apoptosis.planning.limits import Limits, limits_of, refuse, starting_point
from apoptosis.planning.selection import Selection
from apoptosis.structure import Plan, Structure

__all__ = ["kept_within", "make_plan", "plan_within"]


def make_plan(
    structure: Structure, units: UnitScores, budget: Budget, selection: Selection | None = None
) -> Plan:
    """The plan that removes the least score and meets the budget.

    Args:
        structure: of the network that was scored.
        units: one score per unit; the lowest go first.
        budget: shares of this network that may stay. All are met, from exact costs.
        selection: how to rank and what to leave alone.

    Returns:
        A plan for `cut`. One that keeps everything, if the budget asks for nothing to go.

    Raises:
        BudgetError: it cannot be met; with the nearest that can be, and what stands in the way.
        NonFiniteError: a score is NaN or infinite.
        PlanMismatchError: the scores are of another network.

    >>> from torch import nn
    >>> from apoptosis.criteria import magnitude, unit_scores
    >>> from apoptosis.structure import trace
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> structure = trace(net, torch.zeros(1, 8))
    >>> make_plan(structure, unit_scores(magnitude(net), structure), Budget(flops=0.5))
    Plan(1 groups, 32 of 64 units, as module)
    """
    selection = selection or Selection()
    return plan_within(
        structure, units, selection, limits_of(structure, budget.shares(), selection)
    )


def plan_within(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> Plan:
    """As `make_plan`, within limits in numbers."""
    kept = kept_within(structure, units, selection, limits)
    return structure.plan(kept) if kept else structure.identity()


def kept_within(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> dict[str, NDArray[np.int64]]:
    """The units that stay of every group that shrinks, in the order of their numbers."""
    _check_scores(structure, units)
    moves, levels = starting_point(structure, units, selection, limits)
    if moves.excess(moves.last) > 0:
        refuse(structure, units, selection, limits)
    if units.interactions and selection.interactions == "joint":
        units, selection = in_joint_order(units, moves, levels), replace(selection, per="unit")
        moves, levels = starting_point(structure, units, selection, limits)
    kept: dict[str, NDArray[np.int64]] = {}
    for bundle, level in zip(moves.bundles, moves.spend(levels), strict=True):
        for name, gone in zip(bundle.names, bundle.gone[level], strict=True):
            if gone:
                kept[name] = np.sort(order_of(units, name)[gone:])
    return kept


def _check_scores(structure: Structure, units: UnitScores) -> None:
    for name, values in units.values.items():
        size = structure[name].size
        if tuple(values.shape) != (size,):
            raise PlanMismatchError(
                f"The scores of group {name!r} have shape {tuple(values.shape)}; it has {size} units. They are of "
                "another network: score the one that was traced, and after a cut use `structure.after(plan)`."
            )
        if not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).sum())
            raise NonFiniteError(
                f"{bad} of {size} scores of group {name!r} ({units.criterion}) are NaN or infinite: no ranking. "
                "Look for NaN in the model's weights or in the data, or score in float32."
            )
    for groups, matrix in units.interactions.items():
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError(
                f"Interactions of {', '.join(groups)} ({units.criterion}) are NaN or infinite. Look for NaN in the "
                'model\'s weights or in the data, or leave them out: Selection(interactions="ignore").'
            )
