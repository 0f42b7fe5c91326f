"""`apoptosis evaluate`: how well models do on data, what they cost and how fast they run, one row each."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from apoptosis.cli.bars import progress_bars
from apoptosis.cli.figures import (
    evaluation_as_data,
    file_size,
    metric,
    metric_name,
    number,
    seconds,
)
from apoptosis.cli.names import counted
from apoptosis.cli.origins import is_checkpoint
from apoptosis.cli.result_tables import plain_table
from apoptosis.cli.splits import check_one_split
from apoptosis.cli.subject import Subject, find_named_data, find_subject, seeded
from apoptosis.cli.subject_options import DataOptions, SubjectOptions
from apoptosis.errors import ApoptosisError, ConfigError
from apoptosis.masks import masks_of
from apoptosis.modes import in_eval_mode
from apoptosis.task import Batch, Task, batch_size
from apoptosis.training import Evaluation, evaluate

__all__ = ["EvaluateOptions", "Row", "run_evaluate"]

RUNS = 15
MOST_SECONDS = 3.0
"""Timing a batch ends after so many runs, or after that time."""
WEIGHT_FILES = ("model.safetensors", "masks.safetensors", "plan.json")
"""Of a checkpoint, what a network needs; the record of the run is not counted."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What `apoptosis evaluate` can be told."""

    data: DataOptions
    models: tuple[str, ...]
    as_json: bool = False


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    judged: Evaluation
    macs: int | None
    params: int
    nonzero: int | None
    """None where no masks are kept."""
    num_bytes: int | None
    """Of the file or checkpoint that the weights came from."""
    seconds: float
    """Of one batch, the median."""
    counted_in: str

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model,
            **(evaluation_as_data(self.judged) or {}),
            "macs": self.macs,
            "params": self.params,
            "nonzero_params": self.params if self.nonzero is None else self.nonzero,
            "bytes": self.num_bytes,
            "seconds_per_batch": self.seconds,
        }


def run_evaluate(options: EvaluateOptions) -> None:
    """Judge every model on the same data, and show the table or the JSON."""
    if len(options.models) > 1 and options.data.weights is not None:
        raise ConfigError(
            f"--weights {options.data.weights} goes into one model, and {len(options.models)} were named. Name one, "
            "or checkpoints, which have weights of their own."
        )
    console = Console(stderr=True)
    rows: list[Row] = []
    with seeded(options.data), progress_bars(console):
        seed = check_one_split(options.models, options.data)
        data = find_named_data(replace(options.data, seed=seed))
        for model in options.models:
            asked = options.data.of(model)
            subject = find_subject(asked, console, traced=False, trains=False, data=data)
            rows.append(_row(subject, asked))
    size = batch_size(next(iter(data.evaluation or data.scoring)))
    facts = {
        "data": options.data.data,
        "on": "held out" if data.evaluation is not None else "scoring data",
        "counted_in": rows[0].counted_in,
        "batch_size": size,
    }
    if options.as_json:
        models = [row.as_data() for row in rows]
        print(json.dumps({**facts, "models": models}, indent=1, allow_nan=False))
        return
    which = "held out" if data.evaluation is not None else "to score on, for no others were given"
    on = counted(rows[0].judged.count, rows[0].counted_in)
    out = Console()
    out.print(Text(f"{options.data.data}: {on} {which}, in batches of {size}\n"))
    _show(rows, out)


def _row(subject: Subject, options: SubjectOptions) -> Row:
    data, model = subject.data, subject.model
    batches = data.scoring if data.evaluation is None else data.evaluation
    parameters = list(model.parameters())
    masked = any(masks_of(module) is not None for module in model.modules())
    return Row(
        options.model,
        evaluate(model, batches, data.task),
        _macs(subject),
        sum(one.numel() for one in parameters),
        sum(int(one.count_nonzero()) for one in parameters) if masked else None,
        _num_bytes(options),
        _seconds(model, next(iter(batches)), data.task),
        subject.counted_in,
    )


def _show(rows: list[Row], console: Console) -> None:
    metrics = list(dict.fromkeys(name for row in rows for name in row.judged.metrics))
    masked = any(row.nonzero is not None for row in rows)
    names = ["loss", *map(metric_name, metrics), "MACs", "params"]
    names += [*(["nonzero"] if masked else []), "file", "time / batch"]
    table = plain_table(("model", "left"), *((name, "right") for name in names))
    for row in rows:
        cells = [f"{row.judged.loss:.4g}", *(metric(name, row.judged.metrics) for name in metrics)]
        cells += ["–" if row.macs is None else number(row.macs), number(row.params)]
        if masked:
            cells.append(number(row.params if row.nonzero is None else row.nonzero))
        cells += ["–" if row.num_bytes is None else file_size(row.num_bytes), seconds(row.seconds)]
        table.add_row(Text(row.model), *cells)
    console.print(table)


def _macs(subject: Subject) -> int | None:
    """None where the model cannot be traced; its loss and its time are known all the same."""
    try:
        return subject.structure.macs()
    except ApoptosisError:
        return None


def _num_bytes(options: SubjectOptions) -> int | None:
    place = options.weights or Path(options.model)
    place = place.expanduser()
    if is_checkpoint(place):
        files = [place / name for name in WEIGHT_FILES]
        return sum(file.stat().st_size for file in files if file.is_file())
    return place.stat().st_size if options.weights is not None else None


def _seconds(model: nn.Module, batch: Batch, task: Task) -> float:
    """The median of several runs, after one that nobody counts."""
    args, kwargs = task.inputs(batch)
    found: list[float] = []
    with in_eval_mode(model), torch.no_grad():
        model(*args, **kwargs)
        _wait()
        while len(found) < RUNS and sum(found) < MOST_SECONDS:
            start = time.perf_counter()
            model(*args, **kwargs)
            _wait()
            found.append(time.perf_counter() - start)
    return median(found)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
