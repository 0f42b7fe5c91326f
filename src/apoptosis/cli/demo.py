"""`apoptosis demo`: from nothing to a checked ranking of channels in under a minute on a laptop.

Train a small network on the digits, score its channels by every criterion, remove each of them in turn, and compare. A
channel is a unit of a group of the network's structure: the stem and the branch beside it add up, so theirs go
together. Scores and truth are taken on the same training images: the question is whether a criterion knows the loss,
not whether it generalises.
"""

import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from apoptosis import __version__
from apoptosis.checkpoint import write_json
from apoptosis.cli.bars import progress_bars
from apoptosis.criteria import CRITERIA, spearman, unit_truth
from apoptosis.data import Split, digits
from apoptosis.models import digits_cnn
from apoptosis.progress import track
from apoptosis.report import Agreement, RankingReport, plot_ranking
from apoptosis.structure import trace
from apoptosis.task import Task
from apoptosis.training import Evaluation, FitOptions, evaluate, fit_

__all__ = ["DemoOptions", "run_demo"]

BATCH_SIZE = 64
SCORING_BATCH_SIZE = 400


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `apoptosis demo` can be told."""

    out: Path
    seed: int = 0
    epochs: int = 6
    as_json: bool = False


def run_demo(options: DemoOptions) -> RankingReport:
    """Measure, then show the table or the JSON, and write both files."""
    options.out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the work
    with progress_bars(Console(stderr=True)):
        report = measure_ranking(options)
        written = [
            plot_ranking(report, options.out / "ranking.png"),
            write_json(options.out / "ranking.json", report.as_json()),
        ]
    if options.as_json:
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        _show(report, written, Console())
    return report


def measure_ranking(options: DemoOptions) -> RankingReport:
    """Train, score and remove; no file is written and nothing printed."""
    task = Task.classification()
    data = digits(seed=options.seed)
    assert data.test is not None, "the digits have test images"
    model = digits_cnn(seed=options.seed)
    fit_(
        model,
        data.train.batches(BATCH_SIZE, shuffle_seed=options.seed),
        task,
        FitOptions(epochs=options.epochs, seed=options.seed),
    )
    batches = data.train.batches(SCORING_BATCH_SIZE)
    structure = trace(model, data.train.images[:1])
    truth = unit_truth(model, structure, batches, task)
    agreements: list[Agreement] = []
    for name, criterion in track(list(CRITERIA.items()), "scoring"):
        start = time.perf_counter()
        predicted = criterion.units(model, structure, batches, task).values
        seconds = time.perf_counter() - start
        groups = {group: spearman(predicted[group], true) for group, true in truth.items()}
        agreements.append(Agreement(name, groups, seconds))
    return RankingReport(
        agreements=tuple(agreements),
        channels={group: len(true) for group, true in truth.items()},
        facts=_facts(
            options,
            data.train,
            train=evaluate(model, batches, task),
            test=evaluate(model, data.test.batches(SCORING_BATCH_SIZE), task),
        ),
    )


def _facts(
    options: DemoOptions, scored: Split, *, train: Evaluation, test: Evaluation
) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "epochs": options.epochs,
        "n": len(scored),
        "train_loss": train.loss,
        "test_loss": test.loss,
        "test_accuracy": test.metrics["correct"],
        "device": "cpu",
        "versions": {
            "apoptosis": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "matplotlib": mpl.__version__,
            "python": platform.python_version(),
        },
    }


def _show(report: RankingReport, written: list[Path], console: Console) -> None:
    facts = report.facts
    console.print(
        f"\nDigits CNN after {facts['epochs']} epochs: test accuracy {facts['test_accuracy']:.1%}, "
        f"training loss {facts['train_loss']:.3f} over {facts['n']} images.\n"
        "Spearman correlation of each criterion with the true loss change of removing a channel:\n"
    )
    console.print(_table(report))
    console.print(f"\n{_meaning(report)}")
    console.print(f"\nWritten: {', '.join(map(str, written))}", soft_wrap=True)
    console.print(f"Next: apoptosis demo --seed {facts['seed'] + 1}   (how much of this was luck?)")


def _table(report: RankingReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("criterion")
    for group, channels in report.channels.items():
        table.add_column(f"{group} ({channels})", justify="right")
    table.add_column("mean", justify="right", style="bold")
    table.add_column("scoring", justify="right")
    for row in report.best_first():
        cells = [_correlation(row.groups[group]) for group in report.channels]
        table.add_row(row.criterion, *cells, _correlation(row.mean), f"{row.seconds:.2f} s")
    return table


def _correlation(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.2f}"


def _meaning(report: RankingReport) -> str:
    """Two lines: what was seen, and how much of it could be chance."""
    rows = report.best_first()
    chance = _chance(report)
    close = [row.criterion for row in rows[1:] if rows[0].mean - row.mean < chance]
    return (
        f"[bold]{rows[0].criterion}[/] orders the channels most like their true effect (mean {rows[0].mean:+.2f})"
        + (f"; too close to tell apart from it: {', '.join(close)}." if close else ".")
        + "\nThis is one small network and one seed: scores that know nothing of it would land within "
        f"±{chance:.2f} of zero two times in three."
    )


def _chance(report: RankingReport) -> float:
    """Standard deviation of the mean over groups for independent ranks: 1/√(channels − 1) in each group."""
    variances = [1 / (channels - 1) for channels in report.channels.values()]
    return math.sqrt(sum(variances)) / len(variances)
