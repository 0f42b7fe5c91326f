"""`apoptosis demo`: from nothing to an answer in about a minute on a laptop. Which criterion keeps most?

Train a small network on the digits, prune it by every criterion to a half and to a quarter of its MACs, fine-tune each
result alike, and compare: what `apoptosis compare` does, with everything chosen. Then a closer look at the scores: how
well does each criterion order single channels?

All on one thread. Operations of so small a network last microseconds: a second thread saves little of them, and where
another process has its core, each operation waits for it.
"""

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from apoptosis.checkpoint import write_json
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.compare_facts import commit, versions
from apoptosis.cli.compare_tables import show_comparison
from apoptosis.cli.demo_ranking import measure_ranking, show_ranking
from apoptosis.cli.places import check_comparison
from apoptosis.comparison import Comparison
from apoptosis.criteria import CRITERIA
from apoptosis.data import DataSet, Split, digits
from apoptosis.models import DigitsCNN, digits_cnn
from apoptosis.report import RankingReport, plot_ranking, write_comparison
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import CompareOptions, ContestData, compare

__all__ = ["DemoOptions", "run_demo"]

BATCH_SIZE = 64
SCORING_BATCH_SIZE = 400
BUDGETS = (0.5, 0.25)
CONDITIONS = CompareOptions(
    steps=5,
    repair=("refit",),
    fit=FitOptions(epochs=3, learning_rate=0.02, schedule="cosine"),
)
"""The same for all criteria; chosen so that two cores need about a minute, and for nothing else."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `apoptosis demo` can be told."""

    out: Path
    seed: int = 0
    epochs: int = 6
    as_json: bool = False


def run_demo(options: DemoOptions) -> None:
    """Measure, write the folder, then show the tables or the JSON."""
    check_comparison(options.out, {})
    options.out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the work
    with progress_bars(Console(stderr=True)), _one_thread():
        comparison, ranking = measure(options)
        written = [
            *write_comparison(comparison, options.out),
            plot_ranking(ranking, options.out / "ranking.png"),
            write_json(options.out / "ranking.json", ranking.as_json()),
        ]
    if options.as_json:
        found = {"comparison": comparison.as_data(), "ranking": ranking.as_json()}
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        _show(options, comparison, ranking, Console())
        names = ", ".join(path.name for path in written)
        Console().print(Text(f"\nWritten to {options.out}: {names}"), soft_wrap=True)
        _show_next(options, comparison, Console())


def measure(options: DemoOptions) -> tuple[Comparison, RankingReport]:
    """Train one network and do all with it; no file is written and nothing printed."""
    parts = digits(seed=options.seed)
    model = digits_cnn(seed=options.seed)
    fit_(
        model,
        parts.train.batches(BATCH_SIZE, shuffle_seed=options.seed),
        options=FitOptions(epochs=options.epochs, seed=options.seed),
    )
    comparison = _compared(options, model, parts)
    ranking = measure_ranking(model, parts, SCORING_BATCH_SIZE)
    facts = {"seed": options.seed, "epochs": options.epochs, "device": "cpu"}
    return comparison, replace(
        ranking, facts={**facts, **ranking.facts, "versions": versions(), "commit": commit()}
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside the block; as many as before come back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compared(options: DemoOptions, model: DigitsCNN, parts: DataSet[Split]) -> Comparison:
    assert parts.test is not None, "the digits have test images"
    assert parts.validation is not None, "and images to choose by"
    data = ContestData(
        scoring=parts.train.batches(SCORING_BATCH_SIZE),
        test=parts.test.batches(SCORING_BATCH_SIZE),
        validation=parts.validation.batches(SCORING_BATCH_SIZE),
        training=lambda seed: parts.train.batches(BATCH_SIZE, shuffle_seed=seed),
    )
    conditions = replace(CONDITIONS, seeds=(options.seed,))
    found = compare(model, list(CRITERIA), BUDGETS, data, conditions)
    about: dict[str, Any] = {
        "model": "digits_cnn",
        "data": "digits",
        "device": "cpu",
        "seeds": [options.seed],
        "epochs": options.epochs,
        "versions": versions(),
        "commit": commit(),
    }
    return replace(found, facts={**about, **found.facts})


def _show(
    options: DemoOptions, comparison: Comparison, ranking: RankingReport, console: Console
) -> None:
    console.print(
        f"\n[bold]1. Which criterion keeps most?[/] A CNN of the digits, trained for {options.epochs} epochs, cut to "
        f"{_listed(BUDGETS)} of its MACs by each, then fine-tuned.",
        soft_wrap=True,
    )
    show_comparison(comparison, (), console)
    console.print(Text(_chance(comparison)), soft_wrap=True)
    console.print(
        "\n[bold]2. Which criterion knows what a channel is worth?[/] Spearman correlation of its scores with the true "
        "loss change of removing each channel:\n",
        soft_wrap=True,
    )
    show_ranking(ranking, console)


def _show_next(options: DemoOptions, comparison: Comparison, console: Console) -> None:
    again = ["apoptosis", "compare", "digits_cnn", "--data", "digits", "--criterion", "all"]
    again += ["--keep-flops", ",".join(f"{share:g}" for share in BUDGETS)]
    again += ["--steps", str(CONDITIONS.steps), "--repair", "refit"]
    again += ["--epochs", str(CONDITIONS.fit.epochs), "--seeds", "3"]
    best = comparison.contestants[comparison.best_first()[0]]
    small = ["apoptosis", "prune", "digits_cnn", "--data", "digits", "--keep-flops", "0.5"]
    small += ["--criterion", best["criterion"], "--widths", best["widths"]]
    small += ["--repair", "refit", "--epochs", str(CONDITIONS.fit.epochs)]
    if options.seed:
        small += ["--seed", str(options.seed)]
    for why, words in (("Was it luck?", again), ("Next, the network itself:", small)):
        console.print(Text(f"{why} {shlex.join(words)}"), soft_wrap=True)


def _chance(comparison: Comparison) -> str:
    """Standard error of a share p of n answers: √(p (1 − p) / n)."""
    share, num = 0.95, comparison.facts["n"]["test"]
    error = 100 * math.sqrt(share * (1 - share) / num)
    return f"An accuracy of 95 % over {num} images has a standard error of {error:.1f} points."


def _listed(shares: tuple[float, ...]) -> str:
    return " and ".join(f"{share:.0%}" for share in shares)
