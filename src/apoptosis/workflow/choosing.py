"""What an expert would ask for: criterion, steps and repair where nothing is said (docs/choosing.md argues for it).

`obs` in one step, then a refit of layers and one of blocks: it reads no labels, prices units as they cost once the rest
has been refitted, and kept most of nearly all networks that were measured without training. It prices what linear
layers read. Where too little of a network is that to meet the budget, or the task does not show its predictions, `oba`
in many steps is taken: it scores whatever has parameters that require grad. Where too little of a network does,
`taylor-gate` scores activations. The repairs follow either way, if there are layers to refit.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from apoptosis.criteria import (
    Aggregation,
    Criterion,
    UnitScores,
    find_criterion,
    magnitude,
    priced_groups,
    unit_scores,
)
from apoptosis.errors import BudgetError
from apoptosis.planning import Budget, Selection, check_reachable
from apoptosis.repair import Repair
from apoptosis.structure import Structure
from apoptosis.task import Task

__all__ = [
    "DEFAULT_CRITERION",
    "FALLBACK_CRITERION",
    "FROZEN_CRITERION",
    "choose_criterion",
    "settled",
]

DEFAULT_CRITERION = "obs"
FALLBACK_CRITERION = "oba"
FROZEN_CRITERION = "taylor-gate"
MOST_GONE = 0.9
"""Of groups that can be priced: a budget that would take more of them is to be spread over others too."""


def choose_criterion(  # noqa: PLR0913 - all that `prune` knows by then
    model: nn.Module,
    structure: Structure,
    budget: Budget,
    selection: Selection,
    task: Task,
    *,
    aggregation: Aggregation | str | None = None,
) -> str:
    """The name of the criterion to use where none was asked for; with an aggregation, one that scores parameters."""
    if aggregation is not None:
        return FALLBACK_CRITERION
    if task.rows is None:
        return _without_rows(model, structure, budget, selection)
    names = priced_groups(model, structure)
    priced = UnitScores({name: torch.zeros(structure[name].size) for name in names}, "none")
    with_care = replace(selection, cap=min(selection.cap, MOST_GONE))
    if _is_reachable(structure, budget, with_care, None):
        can_price = _is_reachable(structure, budget, with_care, priced)
    else:  # everything has to go to its limits, whoever chooses
        can_price = _is_reachable(structure, budget, selection, priced)
    return DEFAULT_CRITERION if can_price else _without_rows(model, structure, budget, selection)


def _without_rows(
    model: nn.Module, structure: Structure, budget: Budget, selection: Selection
) -> str:
    """A criterion of parameters, or of activations where too few parameters require grad to meet the budget."""
    if all(p.requires_grad for p in model.parameters()):
        return FALLBACK_CRITERION
    if any(p.requires_grad for p in model.parameters()):
        gathered = find_criterion(FALLBACK_CRITERION).aggregation
        scored = unit_scores(magnitude(model), structure, gathered)
        if _is_reachable(structure, budget, selection, scored):
            return FALLBACK_CRITERION
    return FROZEN_CRITERION


def _is_reachable(
    structure: Structure, budget: Budget, selection: Selection, units: UnitScores | None
) -> bool:
    try:
        check_reachable(structure, budget, selection, units)
    except BudgetError:
        return False
    return True


def settled(
    criterion: Criterion | str,
    steps: int | None,
    repair: Iterable[Repair | str] | None,
    *,
    by_itself: bool = False,
) -> tuple[Criterion, int, tuple[Repair | str, ...]]:
    """The criterion, and how often and with what repair: as asked, or as is good for it.

    Where nobody chose the criterion (`by_itself`) the network is repaired as after the default one, whoever it is: a
    refit brings most of what was lost back after any of them.
    """
    how = criterion if isinstance(criterion, Criterion) else find_criterion(criterion)
    if repair is None:
        repair = find_criterion(DEFAULT_CRITERION).repair if by_itself else how.repair
    return how, how.steps if steps is None else steps, tuple(repair)
