"""Scores of units by criteria that need modules, of a network that is delivered as a program and has none.

Its twin has them: the dense network with zeros where units have gone (`zero`), which gives what the cut one gives where
cutting is exact. The twin is scored on the dense structure, and scores of units that are still there are kept. Units
that have gone cost nothing there and give nothing, so that the others are worth what they are worth in the cut network
(by `obs` nearly so: its penalty is in parts of a mean over inputs, zeros among them).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from apoptosis.criteria import Criterion, UnitScores
from apoptosis.errors import ModelError
from apoptosis.structure import CutProgram, Plan, Structure, zero
from apoptosis.task import Batch, Task

__all__ = ["scored_on_twin"]


def scored_on_twin(
    how: Criterion, dense: nn.Module, whole: Structure, small: nn.Module, plan: Plan
) -> Criterion:
    """The same criterion, asked about the twin where `small` has no modules to show it; itself elsewhere.

    Args:
        how: the criterion.
        dense: the network that the plan is of.
        whole: its structure.
        small: what the plan makes of it.
        plan: who is left.

    Raises:
        ModelError: the twin gives something else, for a group that was cut is not exact.
    """
    score = how.score_units
    if score is None or not isinstance(small, CutProgram) or isinstance(dense, CutProgram):
        return how
    _check_exact(how, whole, plan)

    def score_units(
        _: nn.Module, structure: Structure, batches: Iterable[Batch], task: Task | None
    ) -> UnitScores:
        names = {group.name for group in structure.groups}
        asked = tuple(group for group in whole.groups if group.name in names)
        found = score(zero(dense, plan), replace(whole, groups=asked), batches, task)
        return _of_those_left(found, plan)

    return replace(how, score_units=score_units)


def _check_exact(how: Criterion, whole: Structure, plan: Plan) -> None:
    for name in plan.kept:
        if not whole[name].exact:
            raise ModelError(
                f"{how.name} was to score a network that is delivered as a program ({plan.delivery_because}), which "
                "has no modules to show its units. The dense network with zeros in their places cannot stand in, for "
                f"group {name!r} was cut and is not exact: {whole[name].inexact_because}. Prune in one step, or score "
                f"by a criterion of parameters, such as `oba`; or leave the group whole: Selection(names=['!{name}'])."
            )


def _of_those_left(found: UnitScores, plan: Plan) -> UnitScores:
    left = {name: torch.as_tensor(own) for name, own in plan.kept.items()}
    values = {name: own[left[name]] if name in left else own for name, own in found.values.items()}
    interactions = {
        names: own[places][:, places]
        for names, own in found.interactions.items()
        for places in [_places(names, found.values, left)]
    }
    return replace(found, values=values, interactions=interactions)


def _places(
    names: tuple[str, ...], values: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> Tensor:
    """Where units that are left stand in a matrix over all units of some groups."""
    start, found = 0, list[Tensor]()
    for name in names:
        own = left[name] if name in left else torch.arange(len(values[name]))
        found.append(start + own)
        start += len(values[name])
    return torch.cat(found)
