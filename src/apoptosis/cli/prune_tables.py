"""What `apoptosis prune` of whole units shows: asked and got side by side, widths before and after."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apoptosis.cli.figures import metric, metric_name, number
from apoptosis.cli.finishing import Finished
from apoptosis.cli.names import counted
from apoptosis.cli.prune_options import PruneOptions
from apoptosis.cli.result_tables import (
    beside,
    load_lines,
    num_batches,
    plain_table,
    scored_on,
    scoring_cost,
    show_evaluation,
    show_next,
    show_place,
    step_as_data,
)
from apoptosis.cli.subject import Subject
from apoptosis.cli.training_tables import training_lines
from apoptosis.criteria import Criterion
from apoptosis.errors import BudgetError
from apoptosis.planning import Budget, Selection, check_reachable
from apoptosis.records import Outcome
from apoptosis.structure import Group, Plan, Structure
from apoptosis.task import Task
from apoptosis.workflow import DEFAULT_CRITERION, choose_criterion, settled

__all__ = ["DryRun", "PruneResult", "show_dry_run", "show_result"]

UNREPAIRED = (
    "What is left was trained to work with what is gone. --repair refit gives its layers new weights by least squares, "
    "without labels."
)
ONE_SAMPLE = "one sample"
FELL_BACK = (
    f"{DEFAULT_CRITERION} was not used, though it is the default: it prices too little of this network for such a "
    "budget, or the task does not show its predictions. "
    f"--criterion {DEFAULT_CRITERION} says how far it gets; --repair distil may mend what a refit cannot."
)


@dataclass(frozen=True)
class PruneResult:
    """One run of the command."""

    options: PruneOptions
    run: Finished[Plan]

    @property
    def outcome(self) -> Outcome[Plan]:
        """What came out."""
        return self.run.outcome

    @property
    def removed_something(self) -> bool:
        """Whether the network became smaller at all."""
        return any(kept < size for kept, size in self.outcome.plan.counts().values())

    @property
    def could_be_refitted(self) -> bool:
        """Whether nothing has mended it yet, nor tried to, and it has layers: a program has none."""
        return (
            self.removed_something
            and not self.run.training
            and not self.outcome.settings["repair"]
            and not self.outcome.settings["repair_left_out"]
            and self.outcome.plan.delivery == "module"
        )

    @property
    def fell_back(self) -> bool:
        """Whether nobody chose the criterion, and the default could not be used."""
        return _fell_back(self.options, self.outcome.settings["criterion"])

    def as_data(self) -> dict[str, Any]:
        """Everything the tables show, and the steps, as plain data."""
        plan = self.outcome.plan
        return {
            "model": self.options.subject.model,
            "data": self.options.subject.data,
            "settings": dict(self.outcome.settings),
            "spent": [asdict(line) for line in self.outcome.spent],
            "evaluation": self.outcome.settings["evaluation"],
            "groups": {
                name: {"before": size, "after": len(plan.kept[name]) if name in plan.kept else size}
                for name, size in plan.sizes.items()
            },
            "delivery": plan.delivery,
            "delivery_because": plan.delivery_because,
            "training": self.run.training,
            "rounds": [
                {"saved": str(own.saved), "evaluation": own.outcome.settings["evaluation"]["after"]}
                for own in (*self.run.earlier, self.run)
            ],
            "steps": [step_as_data(step, "step") for step in self.outcome.history],
            "seconds": self.run.seconds,
            "saved": str(self.run.saved),
            "replaced": self.run.replaced,
            "load": load_lines(self.run),
            "next": next_command(self)[0] if self.removed_something else None,
        }


@dataclass(frozen=True)
class DryRun:
    """What would be done, as far as it is known without scoring."""

    options: PruneOptions
    structure: Structure
    groups: list[Group]
    asked: dict[str, float]
    dense: dict[str, int]
    lowest: dict[str, float]
    num_batches: int | None
    criterion: Criterion
    steps: int
    aligns: bool
    repair: tuple[str, ...]

    @staticmethod
    def of(
        options: PruneOptions, subject: Subject, budget: Budget, selection: Selection
    ) -> "DryRun":
        """Look at model and data; nothing is scored."""
        structure, batches = subject.structure, subject.data.scoring
        groups = selection.groups(structure)
        name = options.asked_criterion or choose_criterion(
            subject.model,
            structure,
            budget,
            selection,
            subject.data.task or Task.classification(),
            aggregation=options.aggregation,
        )
        how, steps, repair = settled(
            *(name, options.asked_steps, options.repair), by_itself=_by_itself(options)
        )
        return DryRun(
            options,
            structure,
            groups,
            budget.shares(),
            {
                "flops": structure.macs(),
                "params": structure.params(),
                "units": sum(group.size for group in groups),
            },
            _lowest_shares(structure, selection),
            num_batches(batches),
            how,
            steps,
            how.align if options.align is None else options.align,
            tuple(map(str, repair)),
        )

    @property
    def has_heads(self) -> bool:
        """Whether there is anything that could be aligned."""
        return any(group.kind.endswith("_dim") for group in self.groups)

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.options.subject.model,
            "data": self.options.subject.data,
            "dry_run": True,
            "criterion": self.criterion.name,
            "steps": self.steps,
            "align": self.aligns,
            "repair": list(self.repair),
            "asked": self.asked,
            "dense": self.dense,
            "lowest": self.lowest,
            "groups": {group.name: group.size for group in self.groups},
            "scoring_passes": self.steps if self.criterion.reads_data else 0,
            "batches_per_pass": self.num_batches,
            "training_epochs": self.options.tuning.epochs * len(self.options.budgets()),
            "out": str(self.options.place),
        }


def show_result(result: PruneResult, console: Console) -> None:
    """The tables, and what to do with the result."""
    subject, outcome = result.options.subject, result.outcome
    console.print(
        Text.assemble(
            (subject.model, "bold"),
            f" pruned by {outcome.settings['criterion']} in {counted(len(outcome.history), 'step')}"
            f"{scored_on(outcome.history, result.run.counted_in)} ({result.run.seconds:.1f} s)\n",
        )
    )
    console.print(_spending_table(outcome))
    if (counted_for := outcome.settings.get("macs_counted_for", ONE_SAMPLE)) != ONE_SAMPLE:
        console.print(Text(f"MACs (flops) are those of {counted_for}."), soft_wrap=True)
    show_evaluation(result.run, console)
    for line in training_lines(result.run.training):
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_widths_table(outcome))
    console.print(Text(f"\n{_delivered(outcome)}"))
    if result.could_be_refitted:
        console.print(Text(UNREPAIRED), soft_wrap=True)
    if result.fell_back:
        console.print(Text(FELL_BACK), soft_wrap=True)
    for line in _head_lines(outcome.settings):
        console.print(Text(line), soft_wrap=True)
    if few := outcome.settings.get("few_groups"):
        console.print(Text(_few_groups(few)), soft_wrap=True)
    for name, why in outcome.settings["repair_left_out"].items():
        console.print(Text(f"Not mended by {name}: {why}"), soft_wrap=True)
    for place, own in enumerate(result.run.earlier, 1):
        console.print(Text(_round_line(place, own)), soft_wrap=True)
    show_place(result.run, console)
    if result.removed_something:
        show_next(*next_command(result), console)


def show_dry_run(dry: DryRun, console: Console) -> None:
    """What would be done, and what it would cost."""
    options = dry.options
    console.print(
        Text.assemble(
            (options.subject.model, "bold"),
            f" would be pruned by {dry.criterion.name} in {counted(dry.steps, 'step')}"
            f"{', its heads aligned first' if dry.aligns and dry.has_heads else ''}{_mended(dry.repair)}. "
            "Nothing was scored or written.\n",
        )
    )
    if _fell_back(options, dry.criterion.name):
        console.print(Text(f"{FELL_BACK}\n"), soft_wrap=True)
    table = plain_table(("", "left"), ("asked", "right"), ("lowest", "right"), ("dense", "right"))
    for name, dense in dry.dense.items():
        asked = f"{dry.asked[name]:.1%}" if name in dry.asked else "–"
        table.add_row(name, asked, f"{dry.lowest[name]:.2%}", number(dense))
    console.print(table)
    console.print()
    widths = plain_table(("group", "left"), ("kind", "left"), ("units", "right"))
    for group in dry.groups:
        widths.add_row(Text(group.name), group.kind, str(group.size))
    console.print(widths)
    cost = scoring_cost(dry.criterion.name, dry.steps, dry.num_batches)
    cost += options.tuning.cost(len(options.budgets()))
    console.print(Text(f"\nCost: {cost}"), soft_wrap=True)
    console.print(Text(f"It would be saved in {options.place}"), soft_wrap=True)


def next_command(result: PruneResult) -> tuple[str, str]:
    """Refit it where nothing has mended it; else, compare with the simplest criterion."""
    options, asked = result.options, result.run.asked
    if result.could_be_refitted:
        line = asked.line(repair="refit", out=beside(options.out, "repaired"))
        return line, "with layers refitted to what the dense network gives"
    used = result.outcome.settings["criterion"]
    other = "magnitude-l2" if used != "magnitude-l2" else DEFAULT_CRITERION
    line = asked.line(criterion=other, out=beside(options.out, other))
    return line, "how much of this was the criterion?"


def _by_itself(options: PruneOptions) -> bool:
    """Whether nobody said which criterion, nor how its scores are gathered."""
    return options.asked_criterion is None and options.aggregation is None


def _fell_back(options: PruneOptions, criterion: str) -> bool:
    return _by_itself(options) and criterion != DEFAULT_CRITERION


def _mended(repair: tuple[str, ...]) -> str:
    return f", then mended by {' and '.join(repair)}" if repair else ""


def _head_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """What was aligned or spared, and what was not, groups of one reason together: every layer has the same."""
    spared = settings.get("spared", {})
    if names := spared.get("groups"):
        others = f" and {counted(len(names) - 1, 'other')}" if names[1:] else ""
        yield f"{names[0]}{others} cannot be cut and stay whole: {spared['groups_because']}"
    if spared.get("kinds"):
        kinds = ", ".join(spared["kinds"])
        yield (
            f"Groups of the kinds {kinds} stay whole: the network would become a program, which nothing mends, because "
            f"{spared['because']}"
        )
    if names := settings.get("aligned"):
        yield f"Heads were aligned first: {counted(len(names), 'group')} of their dimensions."
    by_reason: dict[str, list[str]] = {}
    for name, why in settings.get("not_aligned", {}).items():
        by_reason.setdefault(re.sub(r"\d+", "0", why), []).append(name)
    for names in by_reason.values():
        others = f" and {counted(len(names) - 1, 'other')}" if names[1:] else ""
        yield f"Not aligned: {names[0]}{others}, because {settings['not_aligned'][names[0]]}."


def _few_groups(few: Mapping[str, Any]) -> str:
    """A warning: the budget is met, and yet the network may be of no use."""
    names = list(few["groups"])
    told = ", ".join(
        f"{name} (keeps {kept} of {size})" for name, (kept, size) in list(few["groups"].items())[:3]
    )
    others = f" and {counted(len(names) - 3, 'other')}" if names[3:] else ""
    return (
        f"Few groups pay for all: {told}{others} give {few['share']:.0%} of what is saved, and others keep far "
        "more. Such a network seldom works. --cap 0.5 limits what a group may lose, --widths uniform takes from all "
        "alike; or another --criterion, such as obs or oba."
    )


def _spending_table(outcome: Outcome[Plan]) -> Table:
    table = plain_table(
        ("", "left"), ("asked", "right"), ("got", "right"), ("dense", "right"), ("left", "right")
    )
    asked = outcome.settings["budget"]
    for line in outcome.spent:
        table.add_row(
            line.what,
            f"{line.asked:.1%}" if line.what in asked else "–",
            f"{line.got:.2%}",
            number(line.dense),
            number(line.left),
        )
    return table


def _widths_table(outcome: Outcome[Plan]) -> Table:
    table = plain_table(("group", "left"), ("before", "right"), ("after", "right"))
    counts = outcome.plan.counts()
    for name, size in outcome.plan.sizes.items():
        table.add_row(Text(name), str(size), str(counts[name][0] if name in counts else size))
    return table


def _round_line(place: int, run: Finished[Plan]) -> str:
    budget = " ".join(f"{what} {share:g}" for what, share in run.outcome.settings["budget"].items())
    judged = [] if run.after is None else [f"loss {run.after.loss:.4g}"]
    if run.after is not None:
        values = run.after.metrics
        judged += [f"{metric_name(name)} {metric(name, values)}" for name in values]
    return f"Round {place} ({budget}): {', '.join([*judged, f'saved in {run.saved}'])}"


def _delivered(outcome: Outcome[Plan]) -> str:
    plan = outcome.plan
    if plan.delivery == "module":
        return f"Delivered as a module: {type(outcome.model).__name__}, running its own code."
    return f"Delivered as a program, because {plan.delivery_because}."


def _lowest_shares(structure: Structure, selection: Selection) -> dict[str, float]:
    """Asked for next to nothing, the library tells how far it gets."""
    try:
        check_reachable(structure, Budget(flops=1e-15, params=1e-15, units=1e-15), selection)
    except BudgetError as error:
        return dict(error.reachable)
    raise AssertionError("every group keeps a unit")
