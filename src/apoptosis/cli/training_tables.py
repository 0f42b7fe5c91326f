"""What is shown of a training: its epochs with the one that was kept, and figures on data that decided nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from apoptosis.cli.config_trust import names_code
from apoptosis.cli.figures import duration, metric, metric_name, number, seconds
from apoptosis.cli.finishing import Finished
from apoptosis.cli.names import counted
from apoptosis.cli.result_tables import (
    load_lines,
    num_batches,
    plain_table,
    show_evaluation,
    show_next,
    show_place,
)
from apoptosis.cli.subject import Subject, material_of
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.timing import training_step_s
from apoptosis.training import FitOptions

__all__ = ["TrainDryRun", "TrainResult", "show_dry_run", "show_result", "training_lines"]

MOST_EPOCHS = 12
"""A table shows so many; the JSON has all."""


@dataclass(frozen=True)
class TrainResult:
    """One run of `train` or `finetune`."""

    options: SubjectOptions
    run: Finished[Any]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """Of this run; a checkpoint's earlier ones stand in its record."""
        return self.run.training[-1]["epochs"]

    def as_data(self) -> dict[str, Any]:
        """Everything the tables show, as plain data."""
        return {
            "model": self.options.model,
            "data": self.options.data,
            "training": self.run.training[-1],
            "evaluation": self.run.outcome.settings["evaluation"],
            "seconds": self.run.seconds,
            "saved": str(self.run.saved),
            "replaced": self.run.replaced,
            "load": load_lines(self.run),
            "next": next_command(self)[0],
        }


@dataclass(frozen=True)
class TrainDryRun:
    """What a training would take: so many steps, each as long as the one that was tried on a copy."""

    model: str
    data: str
    params: int
    """That would be trained."""
    epochs: int
    batches: int | None
    """Of one epoch; None where nobody knows without reading them."""
    step_s: float
    out: Path

    @staticmethod
    def of(
        subject: Subject,
        options: SubjectOptions,
        fit: FitOptions,
        teacher: nn.Module | None,
        out: Path,
    ) -> "TrainDryRun":
        """Take one step with a copy of the network.

        Raises:
            DataError: there is nothing to train on.
        """
        training = material_of(subject).training
        assert training is not None, "looked at by `material_of`"
        return TrainDryRun(
            model=options.model,
            data=options.data,
            params=sum(p.numel() for p in subject.model.parameters() if p.requires_grad),
            epochs=fit.epochs,
            batches=num_batches(training),
            step_s=training_step_s(subject, fit, teacher),
            out=out,
        )

    @property
    def training_s(self) -> float | None:
        """About: without validation, and where every batch is like the first."""
        return None if self.batches is None else self.epochs * self.batches * self.step_s

    def as_data(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "out": str(self.out), "training_s": self.training_s}


def show_dry_run(dry: TrainDryRun, console: Console) -> None:
    """How many steps, how long, and that nothing was written."""
    steps = (
        "as many steps as there are batches"
        if dry.batches is None
        else f"{counted(dry.batches, 'step')} each"
    )
    took = f"One step took {seconds(dry.step_s)}"
    if dry.training_s is not None:
        took += f", so all take about {duration(dry.training_s)}, validation not counted"
    for line in (
        f"{dry.model} would be trained on {dry.data}: {number(dry.params)} parameters, "
        f"{counted(dry.epochs, 'epoch')}, {steps}. Nothing was written.",
        f"{took}.",
        f"It would be saved in {dry.out}",
    ):
        console.print(Text(line), soft_wrap=True)


def show_result(result: TrainResult, console: Console) -> None:
    """The tables, and what to do with the result."""
    run = result.run
    console.print(
        Text.assemble(
            (result.options.model, "bold"),
            f" trained for {counted(len(result.epochs), 'epoch')} ({run.seconds:.1f} s)\n",
        )
    )
    console.print(_epochs_table(run.training[-1]))
    for line in training_lines(run.training[-1:]):
        console.print(Text(line), soft_wrap=True)
    show_evaluation(run, console)
    console.print()
    show_place(run, console)
    show_next(*next_command(result), console)


def training_lines(trainings: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each training: how long, and which epoch was kept and why."""
    return [_line(number, len(trainings), own) for number, own in enumerate(trainings, 1)]


def next_command(result: TrainResult) -> tuple[str, str]:
    """A dense network can be pruned; a pruned one be put beside the one it was made from."""
    run, data = result.run, result.options.data
    model, dense = result.options.model, result.options.dense or []
    dense = [*dense, model] if names_code(model) else dense  # the checkpoint alone is not enough
    if run.named.saved is None:
        asked = type(run.asked)("prune", {}, {"model": [str(run.saved)], "data": [data]})
        return asked.line(dense=dense, keep_flops=0.5, epochs=3), "half the network, fine-tuned"
    asked = type(run.asked)("evaluate", {}, {"model": [str(run.named.folder), str(run.saved)]})
    return asked.line(dense=dense, data=data), "before and after in one table"


def _line(number: int, of: int, training: Mapping[str, Any]) -> str:
    epochs, kept = training["epochs"], training["kept"]
    which = f"Training {number} of {of}" if of > 1 else "Training"
    if not epochs:
        return f"{which}: no epochs."
    losses = f"loss {epochs[0]['loss']:.4g} in epoch 1"
    if len(epochs) > 1:
        losses += f", {epochs[-1]['loss']:.4g} in epoch {len(epochs)}"
    judged = training["before"] if kept == 0 else epochs[kept - 1]["validation"]
    if judged is None:
        return f"{which}: {losses}; the last epoch is kept, for there are no validation data."
    best = ", ".join(
        [
            f"loss {_number(judged['loss'])}",
            *(f"{metric_name(n)} {_metric(n, v)}" for n, v in judged["metrics"].items()),
        ]
    )
    if kept == 0:
        given = "epoch 0 is kept, the network before training: no epoch did better on validation"
        return f"{which}: {losses}; {given}: {best}."
    return f"{which}: {losses}; epoch {kept} is kept, on validation: {best}."


def _epochs_table(training: Mapping[str, Any]) -> Table:
    epochs, kept = training["epochs"], training["kept"]
    judged = [own["validation"] for own in epochs if own["validation"] is not None]
    names = list(judged[0]["metrics"]) if judged else []
    columns = ["epoch", "rate", "training loss"]
    if judged:
        columns += ["validation loss", *(f"validation {metric_name(name)}" for name in names)]
    table = plain_table(*((name, "right") for name in [*columns, "time"]), ("", "left"))
    given: Mapping[str, Any] = {"validation": training["before"]}
    first = [0] if training["before"] is not None else []
    for epoch in [*first, *(place + 1 for place in _some(len(epochs), kept - 1))]:
        own = epochs[epoch - 1] if epoch else given
        rates = [f"{own['learning_rate']:.3g}", f"{own['loss']:.4g}"] if epoch else ["–", "–"]
        cells = [str(epoch), *rates]
        if judged:
            found: Mapping[str, Any] = own["validation"] or {"loss": None, "metrics": {}}
            cells.append(_number(found["loss"]))
            cells += [_metric(name, found["metrics"].get(name)) for name in names]
        time = seconds(own["seconds"]) if epoch else "–"
        table.add_row(*cells, time, "kept" if epoch == kept else "")
    return table


def _some(num: int, kept: int) -> list[int]:
    """Evenly chosen, the last one too, and the kept one if it is one of them."""
    if num <= MOST_EPOCHS:
        return list(range(num))
    every = {round(i * (num - 1) / (MOST_EPOCHS - 2)) for i in range(MOST_EPOCHS - 1)}
    return sorted(every | ({kept} if kept >= 0 else set()))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _metric(name: str, value: float | None) -> str:
    return "–" if value is None else metric(name, {name: value})
