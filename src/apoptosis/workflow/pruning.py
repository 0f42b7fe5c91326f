"""`prune`: score, remove a few units, score again, until the budget is met.

What a unit is worth depends on who else is there, so scores are taken anew after every small removal. With a share b
asked for and T steps, step t leaves at most b^(t/T): each step removes the same part of what is there. The model is
traced once; structures of the networks in between are derived. A step may have to take more than it needed; what that
left of the budget is given back at the end, last removed first. Repairs come last, and where that is asked for after
every step too, always of the dense network cut as planned. Refitting in between helps; measuring batch norms anew has
made later scores worse, not better (experiments/LOG.md).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.criteria import Aggregation, Criterion, UnitScores
from apoptosis.errors import ModelError, NonFiniteError, PlanMismatchError
from apoptosis.modes import outside_inference_mode
from apoptosis.planning import Budget, Limits, Selection, check_reachable, spending
from apoptosis.progress import track
from apoptosis.records import Outcome, ScoreSummary, StepRecord
from apoptosis.repair import Repair, find_repairs, repair_name
from apoptosis.soundness import check_numbers
from apoptosis.structure import (
    CutProgram,
    Example,
    Plan,
    Structure,
    carry_out,
    deliver_,
)
from apoptosis.task import Batch, Task
from apoptosis.training import at_pass
from apoptosis.turns import one_at_a_time
from apoptosis.workflow.arguments import (
    check_choices,
    check_material,
    failures_explained,
)
from apoptosis.workflow.choosing import choose_criterion, settled
from apoptosis.workflow.concentration import concentration_of
from apoptosis.workflow.delivering import check_runs
from apoptosis.workflow.notes import (
    Told,
    check_as_begun,
    choices_of,
    note_units,
    noted_units,
    told_as_begun,
    with_network,
)
from apoptosis.workflow.pricing import traced_for_costs
from apoptosis.workflow.removal_order import RemovalOrder
from apoptosis.workflow.step_choice import Spared, groups_to_spare, next_deliverable
from apoptosis.workflow.turned import aligned_once
from apoptosis.workflow.twins import scored_on_twin

__all__ = ["default_selection", "prune"]


@outside_inference_mode
@one_at_a_time
def prune(  # noqa: PLR0913 - each word is one a user may want to say, and none must be said
    model: nn.Module,
    batches: Iterable[Batch],
    budget: Budget,
    task: Task | None = None,
    *,
    criterion: Criterion | str | None = None,
    steps: int | None = None,
    aggregation: Aggregation | str | None = None,
    selection: Selection | None = None,
    align: bool | None = None,
    repair: Iterable[Repair | str] | None = None,
    repair_between: bool = False,
    example_inputs: Any = None,
    journal: Journal | None = None,
) -> Outcome[Plan]:
    """A smaller network that meets the budget; the given one is untouched.

    Args:
        model: a trained network.
        batches: data to score on, read once per step, for a first sample, where heads are aligned, and for a last look;
            anything that can be iterated again.
        budget: what may stay: `Budget(flops=0.5)`.
        task: what a batch is and what its loss is; classification unless said.
        criterion: what decides which units go; `apoptosis criteria` lists the names. Unless given, `obs` wherever it
            can be used, else `oba` (`choosing`).
        steps: how often the network is scored and cut; 1 for `obs` and 20 for others, unless given.
        aggregation: how scores of parameters are gathered into units; the criterion's own unless given.
        selection: how units are ranked, and which are left alone.
        align: whether attention heads are turned into their principal axes first, the network computing the same, so
            that what their dimensions carry lies in few of them. The plan is then one for the turned network,
            `outcome.dense`. Unless given, for `obs`.
        repair: what to do with the network afterwards, in this order; unless given, a refit of layers and of blocks
            after `obs`, which counts on it, and where no criterion is given, if the network is delivered as modules
            whose numbers are finite; nothing after others. Give `[]` for nothing.
        repair_between: repair after every step, so that the next one scores a network that works.
        example_inputs: what to trace the model with, and to count MACs for. Unless given, the first sample of the
            batches, or the first batch where costs are not linear in it, as in a mixture of experts.
        journal: where a note is kept after every step; a run that was stopped goes on from the last, with the
            criterion, steps and repair it began with where these are not said.

    Returns:
        The small network, the plan that leads to it from `outcome.dense`, and a record of every step.
        `settings["macs_counted_for"]` says what the MACs are those of,
        `settings["repair_left_out"]` why a repair that nobody asked for was not possible,
        `settings["spared"]` which kinds of groups stay whole for the sake of one, which groups because neither the
        model's own code nor a program can run with them cut, and why; `settings["few_groups"]` which ones were
        hollowed out, where they give most of what was saved.

    Raises:
        BudgetError: the budget cannot be met.
        CheckpointError: the journal is of a run that began with other choices.
        ConfigError: an unknown criterion, less than one step, or repairs in an order that undoes one of them.
        DataError: there are no batches, or they can be read only once.
        ModelError: the network is delivered as a program, and what was asked for needs modules; or what was delivered
            does not run on the first batch; or its weights are integers or complex.
        NonFiniteError: it has NaN or infinity among its weights or statistics, or gets some by a repair.

    >>> from apoptosis.data import digits
    >>> from apoptosis.models import digits_cnn
    >>> outcome = prune(digits_cnn(), digits().train.batches(400), Budget(flops=0.5), steps=2)
    >>> [f"{spent.what} {spent.asked:.0%}" for spent in outcome.spent if spent.asked < 1]
    ['flops 50%']
    """
    check_choices(budget, steps, repair, task, selection, align=align)
    check_material(model, batches)
    asked = Told(
        criterion=criterion,
        steps=steps,
        align=align,
        repair=None if repair is None else tuple(repair),
        insists=repair is not None,
    )
    told = told_as_begun(_checked(asked), journal)
    task = task or Task.classification()
    priced = traced_for_costs(model, batches, task, example_inputs)
    dense, example = priced.structure, priced.example
    selection = selection or default_selection(model)
    check_reachable(dense, budget, selection)
    criterion = told.criterion or choose_criterion(
        model, dense, budget, selection, task, aggregation=aggregation
    )
    by_itself = told.criterion is None and aggregation is None
    how, steps, repairs = settled(criterion, told.steps, told.repair, by_itself=by_itself)
    align = how.align if told.align is None else told.align
    mends = _Mends(model, find_repairs(repairs), batches, task, told.insists)
    settings: dict[str, Any] = {
        "criterion": how.name,
        "aggregation": _gathering(how, aggregation),
        "budget": budget.shares(),
        "steps": steps,
        "selection": asdict(selection),
        "align": align,
        "repair": mends.names(),
        "repair_between": repair_between,
    }
    choices = with_network(
        choices_of(settings, how, mends.repairs, insists=told.insists), model, journal
    )
    check_as_begun(journal, choices)
    if align:
        model, said = aligned_once(
            *(model, dense, at_pass(batches, 0), task),
            groups=selection.groups(dense),
            journal=journal,
            choices=choices,
        )
        dense, mends.dense, settings = dense.for_turned(model), model, {**settings, **said}
    order = RemovalOrder(dense)
    plan, history, spared = noted_units(journal, dense, order)
    small, structure = (carry_out(model, plan), dense.after(plan)) if plan.kept else (model, dense)
    if plan.kept and repair_between and len(history) < steps:
        small = mends(small, plan)
    for step in track(range(1, steps + 1), f"pruning by {how.name}"):
        if step <= len(history):
            continue  # in an earlier life
        start = time.perf_counter()
        scoring = scored_on_twin(how, model, dense, small, plan)
        if scoring is not how and repair_between:
            mends.check_leave_alone(how)
        with failures_explained(f"Scoring by {how.name}"):
            units = scoring.units(
                small,
                _open(structure, spared.leave(dense, selection) if spared else selection),
                at_pass(batches, step - 1),  # as an unbroken run would read them
                task,
                aggregation,
            )
        if step == 1:
            check_reachable(dense, budget, selection, units)
            spared = mends.spared(dense, units, budget, selection)
        chosen, spared = next_deliverable(
            dense, structure, units, budget, selection, step / steps, spared
        )
        here = spared.leave(dense, selection) if spared else selection
        if (part := chosen.part).kept:
            order.note(plan, part, units)
            structure, plan = structure.after(part), plan.then(part)
            small = (
                mends(carry_out(model, plan), plan)
                if repair_between and step < steps
                else carry_out(small, part)
            )
        if step == steps > 1 and (full := _at_the_end(dense, plan, order, here, chosen.limits)):
            small, structure, plan = carry_out(model, full), dense.after(full), full
        before = history[-1].left if history else {g.name: g.size for g in dense.groups}
        history.append(_record(step, units, structure, before, time.perf_counter() - start))
        note_units(journal, plan, history, order, choices, spared)
    small = carry_out(model, plan) if repair_between or small is model else small
    return Outcome(
        _finished(small, plan, mends, example),
        plan,
        tuple(history),
        spending(dense, plan, budget, selection),
        settings
        | ({"spared": spared.as_data()} if spared else {})
        | _few_groups(dense, plan, budget, selection)
        | {"repair": mends.done, "repair_left_out": mends.left_out}
        | {"macs_counted_for": priced.counted_for},
        example,
        model,
    )


def _finished(small: nn.Module, plan: Plan, mends: "_Mends", example: Any) -> nn.Module:
    """The cut network tried on the first batch, repaired, and saying of itself what it is."""
    check_runs(small, mends.dense, mends.batches, mends.task)
    small = mends(small, plan, last=True)
    if small is not mends.dense:
        deliver_(small, mends.dense, Example.of(example))
    return small


def _checked(told: Told) -> Told:
    """The same, once names that no table has are told.

    Raises:
        ConfigError: a name is unknown, or repairs are in an order that undoes one of them.
    """
    if told.criterion is not None:
        settled(told.criterion, told.steps, told.repair)
    find_repairs(told.repair or ())
    return told


def _gathering(how: Criterion, aggregation: Aggregation | str | None) -> dict[str, Any] | None:
    """How scores are gathered into units; None where units themselves are scored, as they are."""
    in_units = how.score is None and aggregation is None
    return None if in_units else asdict(how.gathered(aggregation))


@dataclass
class _Mends:
    """Repairs, one after the other, of networks that were cut from `dense` itself.

    What is repaired in between depends on the plan alone, not on the repairs before: a run that goes on needs no more.
    Repairs that nobody asked for by name are left out where they are not possible. Those that were asked for are left
    out between steps where the network is a program, for the last one may be modules again; there they are refused.
    `done` and `left_out` tell of the last network that was to be repaired.
    """

    dense: nn.Module
    repairs: list[Repair]
    batches: Iterable[Batch]
    task: Task
    were_asked_for: bool
    done: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])

    def __call__(self, small: nn.Module, plan: Plan, *, last: bool = False) -> nn.Module:
        self.done, self.left_out = [], {}
        for mend in self.repairs:
            try:
                mended = mend(self.dense, small, plan, at_pass(self.batches, 0), self.task)
                check_numbers(mended, f"The network after {repair_name(mend)}", real=False)
                small = mended
            except (ModelError, NonFiniteError) as error:
                is_program = isinstance(error, ModelError) and isinstance(small, CutProgram)
                if self.were_asked_for and (last or not is_program):
                    raise
                self.left_out[repair_name(mend)] = str(error)
            else:
                self.done.append(repair_name(mend))
        return small

    def __post_init__(self) -> None:
        """Refuse, before work is done, what repairs that were asked for cannot mend however it is cut.

        Raises:
            ModelError: the dense network is a program already, and one of them needs modules.
        """
        for mend in self.repairs if self.were_asked_for else ():
            if callable(check := getattr(mend, "check", None)):
                check(self.dense, self.dense)

    def spared(
        self, dense: Structure, units: UnitScores, budget: Budget, selection: Selection
    ) -> Spared | None:
        """What stays whole to be delivered at all, and for repairs that scores count on, unless they were asked for."""
        mend = bool(self.repairs) and not self.were_asked_for
        return groups_to_spare(dense, units, budget, selection, for_repair=mend)

    def check_leave_alone(self, how: Criterion) -> None:
        """Refuse repairs between steps where scores cannot be taken of what they make.

        Raises:
            ModelError: there are some.
        """
        if self.done:
            raise ModelError(
                f"The network is delivered as a program by now, and {how.name} needs modules: the dense network with "
                f"zeros in the places of removed units is scored, which {', '.join(self.done)} has not repaired. "
                "Leave out repair_between, or score by a criterion of parameters, such as `oba`."
            )

    def names(self) -> list[str]:
        return [repair_name(mend) for mend in self.repairs]


def _at_the_end(
    dense: Structure, plan: Plan, order: RemovalOrder, selection: Selection, limits: Limits
) -> Plan | None:
    """A plan to take in the place of the last one: that spends more, or is modules where steps on the way were not."""
    full = order.with_budget_spent(plan, selection, limits)
    if full is not None or plan.delivery == "module" or not plan.kept:
        return full
    try:
        whole = dense.plan(plan.kept)
    except PlanMismatchError:  # in one cut it can be no program either
        return None
    return whole if whole.delivery == "module" else None


def _few_groups(
    dense: Structure, plan: Plan, budget: Budget, selection: Selection
) -> dict[str, Any]:
    """What settings say of a plan that takes most from few groups."""
    what = "params" if budget.flops is None and budget.params is not None else "flops"
    found = concentration_of(dense, plan, selection, what)
    return {} if found is None else {"few_groups": found.as_data()}


def _open(structure: Structure, selection: Selection) -> Structure:
    """With those groups alone that may shrink: prices of others would be computed for nobody."""
    return replace(structure, groups=tuple(selection.groups(structure)))


def default_selection(model: nn.Module) -> Selection:
    """Widths in multiples of 8 where a GPU computes in 16 bits: others are slower there than the whole network."""
    halves = (torch.float16, torch.bfloat16)
    wants_eights = any(p.is_cuda and p.dtype in halves for p in model.parameters())
    return Selection(round_to=8 if wants_eights else 1)


def _record(
    step: int,
    units: UnitScores,
    structure: Structure,
    before: Mapping[str, int],
    seconds: float,
) -> StepRecord:
    left = {group.name: group.size for group in structure.groups}
    return StepRecord(
        step=step,
        loss=units.loss,
        count=units.count,
        scores={
            name: ScoreSummary(float(own.min()), float(own.median()), float(own.max()))
            for name, own in units.values.items()
        },
        removed={name: before[name] - num for name, num in left.items() if num != before[name]},
        left=left,
        macs=structure.macs(),
        params=structure.params(),
        seconds=seconds,
    )
