"""What `apoptosis compare` and the demo show: the table, its conditions, and what a run would take."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from apoptosis.cli.figures import duration
from apoptosis.cli.names import counted
from apoptosis.cli.result_tables import num_batches, plain_table
from apoptosis.cli.subject import Subject
from apoptosis.cli.timing import seconds_of, training_step_s
from apoptosis.comparison import Comparison
from apoptosis.criteria import CRITERIA
from apoptosis.report import conditions, table_cells
from apoptosis.workflow import CompareOptions, Contestant

__all__ = ["DryRun", "show_comparison", "show_dry_run"]


def show_comparison(found: Comparison, written: Sequence[Path], console: Console) -> None:
    """The table and all that a reader must know to trust it."""
    heads, rows = table_cells(found)
    table = plain_table(*((head, "right" if place else "left") for place, head in enumerate(heads)))
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if row[0] in found.notable() else "")
    console.print()
    console.print(table)
    console.print()
    for line in conditions(found):
        console.print(Text(line), soft_wrap=True)
    if written:
        console.print(Text(f"\nWritten: {', '.join(map(str, written))}"), soft_wrap=True)


@dataclass(frozen=True)
class DryRun:
    """How many networks, and about how long: from one scoring by each criterion and one step of training."""

    model: str
    contestants: tuple[str, ...]
    budgets: tuple[float, ...]
    num_seeds: int
    steps: int
    epochs: int
    scoring_s: dict[str, float]
    """Of one scoring, by criterion."""
    step_s: float | None
    """Of one step of training, where there are any."""
    batches: int | None

    @staticmethod
    def of(
        subject: Subject,
        contestants: Sequence[Contestant],
        budgets: tuple[float, ...],
        options: CompareOptions,
    ) -> "DryRun":
        """Time them. The network is left as it was."""
        data = subject.data
        training = data.training if options.fit.epochs else None
        return DryRun(
            model=subject.named.name,
            contestants=tuple(one.name for one in contestants),
            budgets=budgets,
            num_seeds=len(options.seeds),
            steps=options.steps,
            epochs=options.fit.epochs,
            scoring_s={
                one.name: seconds_of(
                    lambda name=one.criterion: CRITERIA[name].units(
                        subject.model, subject.structure, data.scoring, data.task
                    )
                )
                for one in contestants
            },
            step_s=None if training is None else training_step_s(subject, options.fit),
            batches=None if training is None else num_batches(training),
        )

    @property
    def num_networks(self) -> int:
        """To prune, and to fine-tune if that is asked for."""
        return len(self.contestants) * len(self.budgets) * self.num_seeds

    @property
    def pruning_s(self) -> float:
        """At most about: networks get smaller and faster on the way."""
        return sum(self.scoring_s.values()) * self.steps * len(self.budgets) * self.num_seeds

    @property
    def tuning_s(self) -> float | None:
        """At most about; None where the number of batches is not known."""
        if self.step_s is None or self.batches is None:
            return None if self.epochs else 0.0
        return self.step_s * self.batches * self.epochs * self.num_networks

    def as_data(self) -> dict[str, Any]:
        """Plain JSON."""
        own = {"networks": self.num_networks, "pruning_s": self.pruning_s}
        return {**asdict(self), **own, "tuning_s": self.tuning_s}


def show_dry_run(found: DryRun, console: Console) -> None:
    """How many, how long, and that nothing was written."""
    console.print(
        Text(
            f"{found.model}: {counted(len(found.contestants), 'contestant')} × "
            f"{counted(len(found.budgets), 'budget')} × {counted(found.num_seeds, 'seed')} = "
            f"{counted(found.num_networks, 'network')}, each in {counted(found.steps, 'step')}"
            + (
                f", then {counted(found.epochs, 'epoch')} of fine-tuning.\n"
                if found.epochs
                else ".\n"
            )
        ),
        soft_wrap=True,
    )
    table = plain_table(("criterion", "left"), ("one scoring", "right"), ("all steps", "right"))
    per_scoring = found.pruning_s / (sum(found.scoring_s.values()) or 1)
    for name, seconds in found.scoring_s.items():
        table.add_row(Text(name), f"{seconds:.2f} s", duration(seconds * per_scoring))
    console.print(table)
    tuning = "as long as the data are" if found.tuning_s is None else duration(found.tuning_s)
    console.print(
        f"\nAt most about {duration(found.pruning_s)} of pruning"
        + (f" and {tuning} of fine-tuning." if found.epochs else ".")
        + " Nothing was written.",
        soft_wrap=True,
    )
