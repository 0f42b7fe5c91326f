"""What all commands that make a network smaller show alike: evaluations, where the result lies, what to type next."""

from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from apoptosis.cli.figures import metric, metric_name
from apoptosis.cli.finishing import Finished
from apoptosis.cli.names import counted, quoted
from apoptosis.criteria import CRITERIA
from apoptosis.records import StepRecord
from apoptosis.task import Batch

__all__ = [
    "beside",
    "has_batch_norms",
    "load_lines",
    "num_batches",
    "plain_table",
    "scored_on",
    "scoring_cost",
    "show_evaluation",
    "show_next",
    "show_place",
    "step_as_data",
]


JUDGE = "To have figures, let the data function return (batches, batches with labels)."


def plain_table(*columns: tuple[str, str]) -> Table:
    """A table without a frame; a column is its name and its side."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def scored_on(history: Iterable[StepRecord], counted_in: str) -> str:
    """What was read, to end a headline with."""
    num = max((step.count for step in history), default=0)
    return f" on {counted(num, counted_in)}" if num else ", which reads no data"


def show_evaluation(run: Finished[Any], console: Console) -> None:
    """Before and after side by side; or why there is nothing to show."""
    before, after = run.before, run.after
    facts = run.outcome.settings["evaluation"]
    console.print()
    if before is None or after is None:
        console.print(Text(f"Not evaluated: {facts['none_because']} {JUDGE}"), soft_wrap=True)
        return
    told = counted(before.count, facts["counted_in"])
    on = f"on {told} held out" if facts["on"] == "held out" else "on the scoring data"
    table = plain_table((on, "left"), ("before", "right"), ("after", "right"))
    table.add_row("loss", f"{before.loss:.4g}", f"{after.loss:.4g}")
    for name in before.metrics:
        table.add_row(
            Text(metric_name(name)), metric(name, before.metrics), metric(name, after.metrics)
        )
    console.print(table)


def show_place(run: Finished[Any], console: Console) -> None:
    """Where it was saved, and how to have it again."""
    if run.replaced:
        console.print(Text(f"Replaced the earlier checkpoint in {run.saved}"), soft_wrap=True)
    console.print(Text(f"Saved: {run.saved}"), soft_wrap=True)
    console.print("Load it again:")
    for line in load_lines(run):
        console.print(Text(f"  {line}"), soft_wrap=True)


def load_lines(run: Finished[Any]) -> list[str]:
    """Python that makes the small network again."""
    return [
        "import apoptosis as ap",
        *run.named.imports.splitlines(),
        f"small = ap.load({quoted(run.saved.as_posix())}, dense={run.named.maker})",
    ]


def show_next(command: str, why: str, console: Console) -> None:
    """What to type next."""
    console.print(Text(f"Next: {command}\n      ({why})"), soft_wrap=True)


def beside(out: Path | None, what: str) -> Path | None:
    """A place next to this one. A default place needs not be named: it takes a name that is free."""
    return None if out is None else out.with_name(f"{out.name}-{what}")


def step_as_data(step: StepRecord, what: str) -> dict[str, Any]:
    """One step or stage as plain data; `what` it is called."""
    return {
        what: step.step,
        "loss": step.loss,
        "samples": step.count,
        "removed": dict(step.removed),
        "macs": step.macs,
        "params": step.params,
        "seconds": step.seconds,
    }


def scoring_cost(criterion: str, passes: int, batches: int | None) -> str:
    """How often the data would be read; `batches` is None where their number is not known."""
    if not CRITERIA[criterion].reads_data:
        return f"{counted(passes, 'scoring')}; {criterion} reads no data."
    told = counted(passes, "scoring pass", "scoring passes")
    if batches is None:
        return f"{told} over the data."
    return f"{told} over {counted(batches, 'batch', 'batches')} each, {passes * batches} in all."


def num_batches(batches: Iterable[Batch]) -> int | None:
    """None where it is not known without reading them."""
    return len(batches) if isinstance(batches, Sized) else None


def has_batch_norms(model: nn.Module) -> bool:
    """Whether there are statistics that could be measured anew."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return any(norm.running_mean is not None for norm in norms)
