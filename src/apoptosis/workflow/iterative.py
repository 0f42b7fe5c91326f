"""`iterative`: down to one budget after another, fine-tuned at each.

Every round scores the network that the last one trained. Budgets are shares of the dense network, as everywhere; within
a round they become shares of the network that is there, and the plans of all rounds are joined into one from the dense
network.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.errors import ConfigError
from apoptosis.modes import outside_inference_mode
from apoptosis.planning import Budget, spending
from apoptosis.records import Outcome, Spending
from apoptosis.structure import Plan
from apoptosis.task import Task
from apoptosis.training import FitOptions
from apoptosis.workflow.one_shot import Pruning, pruned
from apoptosis.workflow.pricing import traced_for_costs
from apoptosis.workflow.tuning import DEFAULT_TUNING, Material, fine_tuned, part_of

__all__ = ["iterative", "rounds_of"]

SLACK = 1 - 1e-12
"""A share of a share is rounded; it must not come out above what was asked."""


@outside_inference_mode
def iterative(  # noqa: PLR0913 - each word is one a user may want to say
    model: nn.Module,
    budgets: Iterable[Budget],
    data: Material,
    task: Task | None = None,
    *,
    pruning: Pruning | None = None,
    fit: FitOptions | None = None,
    journal: Journal | None = None,
) -> tuple[Outcome[Plan], ...]:
    """A network for every budget, each made of the one before it; the given one is untouched.

    Args:
        model: a trained network; also the teacher, where `fit.distil` asks for one.
        budgets: each asks for less than the one before it.
        data: batches to score on, to train on, and to choose epochs by.
        task: what a batch is; classification unless said.
        pruning: how to prune in every round.
        fit: how to fine-tune in every round; 20 epochs of SGD unless said.
        journal: where notes are kept; a run that was killed goes on from them to the same end.

    Returns:
        One outcome for each budget, all planned from the dense network.

    Raises:
        ConfigError: budgets that do not go down, or shares of groups, which would be of another network in each round.
    """
    return tuple(rounds_of(model, budgets, data, task, pruning=pruning, fit=fit, journal=journal))


def rounds_of(  # noqa: PLR0913 - as `iterative`
    model: nn.Module,
    budgets: Iterable[Budget],
    data: Material,
    task: Task | None = None,
    *,
    pruning: Pruning | None = None,
    fit: FitOptions | None = None,
    journal: Journal | None = None,
) -> Iterator[Outcome[Plan]]:
    """`iterative`, one outcome after the other, each as soon as it is there."""
    asked, how = list(budgets), pruning or Pruning()
    _check(asked, how)
    priced = traced_for_costs(
        model, data.scoring, task or Task.classification(), how.example_inputs
    )
    dense, example = priced.structure, priced.example
    how = replace(how, example_inputs=example)  # every round counts for the same
    before: Outcome[Plan] | None = None
    for number, budget in enumerate(asked, 1):
        here = part_of(journal, f"round{number}", on_the_way=before is not None)
        start = model if before is None else before.model
        relative = budget if before is None else _relative(budget, before.spent)
        found = pruned(start, relative, data, task, how, part_of(here, "prune"))
        counted_for = {"macs_counted_for": priced.counted_for}
        found = replace(found, settings={**found.settings, **counted_for})
        if before is not None:
            plan = before.plan.then(found.plan)
            found = replace(
                found,
                plan=plan,
                history=(*before.history, *found.history),
                spent=spending(dense, plan, budget, how.selection),
                settings={**found.settings, "budget": budget.shares()}
                | {"training": before.settings.get("training", [])},
                example_inputs=example,
                dense=None,  # trained, and perhaps turned, in between
            )
        before = fine_tuned(found, model, data, task, fit or DEFAULT_TUNING, part_of(here, "fit"))
        yield before


def _relative(budget: Budget, spent: tuple[Spending, ...]) -> Budget:
    """The same numbers as shares of what is left."""
    left = {line.what: line.got for line in spent}
    shares = {name: min(1.0, share / left[name] * SLACK) for name, share in budget.shares().items()}
    return Budget(**shares)


def _check(budgets: list[Budget], how: Pruning) -> None:
    if not budgets:
        raise ConfigError(
            "No budgets were asked for. Give some: [Budget(flops=0.6), Budget(flops=0.3)]."
        )
    for first, second in zip(budgets, budgets[1:], strict=False):
        one, other = first.shares(), second.shares()
        if one.keys() != other.keys() or not all(other[name] < one[name] for name in one):
            raise ConfigError(
                f"{second} comes after {first}. Each budget asks for less of the same than the one before it."
            )
    if how.selection is not None and how.selection.shares:
        raise ConfigError(
            "Shares of groups are of the network that a round is given, another one each time. Leave them out, or run "
            "the rounds one by one."
        )
