"""`one_shot`: prune down to the budget, then fine-tune once. `Pruning` says how to prune."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.criteria import Aggregation, Criterion
from apoptosis.modes import outside_inference_mode
from apoptosis.planning import Budget, Selection
from apoptosis.records import Outcome
from apoptosis.repair import Repair
from apoptosis.structure import Plan
from apoptosis.task import Task
from apoptosis.training import FitOptions
from apoptosis.workflow.pruning import prune
from apoptosis.workflow.tuning import DEFAULT_TUNING, Material, fine_tuned, part_of

__all__ = ["Pruning", "one_shot", "pruned"]


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What `prune` may be told, as one object for the runs that call it."""

    criterion: Criterion | str | None = None
    steps: int | None = None
    aggregation: Aggregation | str | None = None
    selection: Selection | None = None
    align: bool | None = None
    repair: tuple[Repair | str, ...] | None = None
    repair_between: bool = False
    example_inputs: Any = None


@outside_inference_mode
def one_shot(  # noqa: PLR0913 - each word is one a user may want to say
    model: nn.Module,
    budget: Budget,
    data: Material,
    task: Task | None = None,
    *,
    pruning: Pruning | None = None,
    fit: FitOptions | None = None,
    journal: Journal | None = None,
) -> Outcome[Plan]:
    """A smaller network that meets the budget, fine-tuned; the given one is untouched.

    Args:
        model: a trained network; also the teacher, where `fit.distil` asks for one.
        budget: what may stay.
        data: batches to score on, to train on, and to choose an epoch by.
        task: what a batch is; classification unless said.
        pruning: how to prune.
        fit: how to fine-tune; 20 epochs of SGD unless said.
        journal: where notes are kept; a run that was killed goes on from them to the same end.

    Returns:
        What `prune` returns; `settings["training"]` has a record of the epochs.

    >>> from apoptosis.data import digits
    >>> from apoptosis.models import digits_cnn
    >>> parts = digits()
    >>> data = Material(scoring=parts.train.batches(400), training=parts.train.batches(64, shuffle_seed=0))
    >>> outcome = one_shot(digits_cnn(), Budget(flops=0.5), data, fit=FitOptions(epochs=1))
    >>> len(outcome.settings["training"][0]["epochs"])
    1
    """
    small = pruned(model, budget, data, task, pruning or Pruning(), part_of(journal, "prune"))
    return fine_tuned(small, model, data, task, fit or DEFAULT_TUNING, part_of(journal, "fit"))


def pruned(  # noqa: PLR0913 - a step of several workflows, which have all of these at hand
    model: nn.Module,
    budget: Budget,
    data: Material,
    task: Task | None,
    how: Pruning,
    journal: Journal | None,
) -> Outcome[Plan]:
    """`prune`, told by a `Pruning`."""
    return prune(
        model,
        data.scoring,
        budget,
        task,
        criterion=how.criterion,
        steps=how.steps,
        aggregation=how.aggregation,
        selection=how.selection,
        align=how.align,
        repair=how.repair,
        repair_between=how.repair_between,
        example_inputs=how.example_inputs,
        journal=journal,
    )
