"""A comparison in words and numbers: a table for people (Markdown), one line per trial (CSV), and everything (JSON)."""

import csv
import io
from pathlib import Path
from typing import Any

from apoptosis.checkpoint import write_file, write_json
from apoptosis.comparison import Comparison, Judged, Spread, Trial
from apoptosis.report.accuracy import plot_accuracy_against_cost
from apoptosis.report.counts import counted
from apoptosis.report.layers import plot_layer_costs

__all__ = ["conditions", "csv_text", "markdown_text", "table_cells", "write_comparison"]


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Tables and pictures, each written whole; the files. The record comes first: by it the folder is known as ours."""
    texts = {
        "comparison.md": markdown_text(comparison),
        "comparison.csv": csv_text(comparison),
    }
    record = write_json(folder / "comparison.json", comparison.as_data())
    return [
        *(_write(folder / name, text) for name, text in texts.items()),
        record,
        plot_accuracy_against_cost(comparison, folder / "accuracy.png"),
        plot_layer_costs(comparison, folder / "layers.png"),
    ]


def table_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, the best first; for any kind of table."""
    heads = ["criterion"]
    for budget in comparison.budgets:
        heads += [f"{budget:.0%}: pruned", "tuned"] if comparison.is_tuned else [f"{budget:.0%}"]
    heads.append("pruning")
    if comparison.is_tuned:
        heads.append("tuning")
    return heads, [_row(comparison, name) for name in comparison.best_first()]


def conditions(comparison: Comparison) -> list[str]:
    """Sentences that every table of it needs beside it: on what figures were taken, and what was chosen by what."""
    facts, num = comparison.facts, len(comparison.dense)
    counts, options = facts.get("n", {}), facts.get("options", {})
    what = f"{'Accuracy in %' if comparison.measure == 'accuracy' else 'Loss'} on test data"
    over = (
        f"; mean ± s.d. of {num} seeds"
        if num > 1
        else "; one seed, so small differences are chance"
    )
    order = (
        f"Order of the rows: by validation data (n = {counts.get('validation', '?')}), mean over all budgets."
        if comparison.chosen_on
        else "There are no validation data, so rows stand as they were asked for and nobody is called best."
    )
    steps = counted(options.get("steps", "?"), "step")
    same = f"The same for all: {steps} on {counted(counts.get('scoring', '?'), 'sample')}"
    repairs = "".join(f", repaired by {name}" for name in options.get("repair", ()))
    epochs = options["fit"]["epochs"] if comparison.is_tuned else 0
    tuned = f", {counted(epochs, 'epoch')} of fine-tuning" if epochs else ""
    if epochs > 1 and comparison.chosen_on and options["fit"].get("keep") == "best":
        tuned += " of which validation data choose the best"
    dense = f"; the dense network has {_text(comparison, comparison.dense_spread())}"
    return [
        f"{what} (n = {counts.get('test', '?')}){over}{dense}.",
        order,
        f"{same}{repairs}{tuned}.",
    ]


def markdown_text(comparison: Comparison) -> str:
    """The table with its conditions, and where it was measured."""
    heads, rows = table_cells(comparison)
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)]), *map(_line, rows)]
    facts = comparison.facts
    names = ("model", "data", "device", "commit")
    about = [f"{name} {facts[name]}" for name in names if facts.get(name) is not None]
    about += [f"{name} {version}" for name, version in facts.get("versions", {}).items()]
    told = "\n".join(conditions(comparison))
    return "\n".join(lines) + f"\n\n{told}\n" + (f"\n{', '.join(about)}\n" if about else "")


def csv_text(comparison: Comparison) -> str:
    """One line per trial; an unknown figure is empty. Widths and MACs of layers stand in the JSON."""
    stream = io.StringIO()
    rows = [_trial_cells(comparison, trial) for trial in comparison.trials]
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _row(comparison: Comparison, name: str) -> list[str]:
    cells = [name]
    for budget in comparison.budgets:
        cells.append(_text(comparison, comparison.spread(name, budget, lambda t: t.test)))
        if comparison.is_tuned:
            tuned = comparison.spread(name, budget, lambda t: t.tuned_test)
            cells.append(_text(comparison, tuned))
    trials = comparison.of(name)
    num = len(comparison.dense)
    cells.append(f"{sum(trial.prune_s for trial in trials) / num:.1f} s")
    if comparison.is_tuned:
        cells.append(f"{sum(trial.tune_s for trial in trials) / num:.1f} s")
    return cells


def _trial_cells(comparison: Comparison, trial: Trial) -> dict[str, Any]:
    about = comparison.contestants[trial.contestant]
    cells: dict[str, Any] = {"contestant": trial.contestant, **about, "seed": trial.seed}
    cells |= {"asked": trial.asked, "got": trial.got, "macs": sum(trial.layer_macs.values())}
    for name in ("test", "validation", "tuned_test", "tuned_validation"):
        judged: Judged | None = getattr(trial, name)
        cells[f"{name}_accuracy"] = None if judged is None else judged.accuracy
        cells[f"{name}_loss"] = None if judged is None else judged.loss
    return cells | {"scored": trial.scored, "prune_s": trial.prune_s, "tune_s": trial.tune_s}


def _text(comparison: Comparison, spread: Spread) -> str:
    return spread.text(".1f", 100) if comparison.measure == "accuracy" else spread.text(".4f")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _write(path: Path, text: str) -> Path:
    return write_file(path, lambda file: file.write_text(text, encoding="utf-8"))
