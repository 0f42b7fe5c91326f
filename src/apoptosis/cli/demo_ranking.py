"""The second part of the demo: does a criterion know what a channel is worth?

Score the channels of a trained network by every criterion, remove each of them in turn, and compare. A channel is a
unit of a group of the network's structure: the stem and the branch beside it add up, so theirs go together. Scores and
truth are taken on the same training images: the question is whether a criterion knows the loss, not whether it
generalises.
"""

import math
import time

from rich.console import Console
from rich.table import Table
from torch import nn

from apoptosis.criteria import CRITERIA, spearman, unit_truth
from apoptosis.data import DataSet, Split
from apoptosis.progress import track
from apoptosis.report import Agreement, RankingReport
from apoptosis.structure import trace
from apoptosis.training import evaluate

__all__ = ["measure_ranking", "show_ranking"]


def measure_ranking(model: nn.Module, parts: DataSet[Split], batch_size: int) -> RankingReport:
    """Score and remove; the model is left as it was."""
    assert parts.test is not None, "the digits have test images"
    batches = parts.train.batches(batch_size)
    images, _ = next(iter(batches))
    structure = trace(model, images[:1])
    truth = unit_truth(model, structure, batches)
    agreements: list[Agreement] = []
    for name, criterion in track(list(CRITERIA.items()), "scoring"):
        start = time.perf_counter()
        predicted = criterion.units(model, structure, batches).values
        seconds = time.perf_counter() - start
        groups = {group: spearman(predicted[group], true) for group, true in truth.items()}
        agreements.append(Agreement(name, groups, seconds))
    train, test = evaluate(model, batches), evaluate(model, parts.test.batches(batch_size))
    return RankingReport(
        agreements=tuple(agreements),
        channels={group: len(true) for group, true in truth.items()},
        facts={
            "n": len(parts.train),
            "train_loss": train.loss,
            "test_loss": test.loss,
            "test_accuracy": test.metrics["correct"],
        },
    )


def show_ranking(report: RankingReport, console: Console) -> None:
    """The table, and what it means."""
    console.print(_table(report))
    console.print(f"\n{_meaning(report)}", soft_wrap=True)


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
