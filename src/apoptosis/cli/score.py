"""`apoptosis score`: what each unit of a model is worth to a criterion, group by group."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save as as_bytes

from apoptosis.checkpoint import write_file, write_json
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.names import check_name, counted
from apoptosis.cli.places import check_file
from apoptosis.cli.subject import Subject, SubjectOptions, find_subject, seeded, train_if_new_
from apoptosis.criteria import AGGREGATIONS, CRITERIA, Scores, UnitScores, unit_scores
from apoptosis.errors import ConfigError, NonFiniteError
from apoptosis.structure import Structure
from apoptosis.workflow import DEFAULT_CRITERION

__all__ = ["ScoreOptions", "run_score"]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What `apoptosis score` can be told."""

    subject: SubjectOptions
    criterion: str
    aggregation: str | None = None
    top: int = 10
    out: Path | None = None
    as_json: bool = False


def run_score(options: ScoreOptions) -> None:
    """Score, write the file that was asked for, and show the tables or the JSON."""
    console = Console(stderr=True)
    _check(options)
    with seeded(options.subject), progress_bars(console):
        subject = find_subject(options.subject, console)
        train_if_new_(subject, options.subject, console)
        scores, units = _scored(options, subject)
        _check_finite(units)
        if options.out is not None:
            _write(options, scores, units)
    if options.as_json:
        print(json.dumps(as_data(options, units), indent=1, allow_nan=False))
    else:
        show(options, subject, units, Console())


def as_data(options: ScoreOptions, units: UnitScores) -> dict[str, Any]:
    """The scores of all units, and what made them."""
    return {
        "model": options.subject.model,
        "data": options.subject.data,
        "criterion": units.criterion,
        "options": json.loads(json.dumps(dict(units.options))),
        "samples": units.count,
        "loss": units.loss,
        "units": {name: values.tolist() for name, values in units.values.items()},
        "without_scores": list(units.missing),
        "least": [
            {"group": group, "unit": unit, "score": score}
            for group, unit, score in _least(units, options.top)
        ],
    }


def show(options: ScoreOptions, subject: Subject, units: UnitScores, console: Console) -> None:
    """The tables."""
    on = (
        f" on {counted(units.count, subject.counted_in)}, loss {units.loss:.4g}"
        if units.loss is not None
        else ""
    )
    console.print(
        Text.assemble(
            (options.subject.model, "bold"),
            f" scored by {options.criterion}{on}. The lower a score, the sooner the unit goes.\n",
        )
    )
    console.print(_groups_table(subject.structure, units))
    if units.missing:
        console.print(Text(f"Without scores, and left alone: {', '.join(units.missing[:6])}"))
    if options.top:
        console.print("\nThe least valuable units of all:")
        console.print(_least_table(units, options.top))
    if options.out is not None:
        console.print(Text(f"\nWritten: {options.out}"), soft_wrap=True)
    console.print(Text(f"\nNext: {_next(options)}"), soft_wrap=True)


def _check(options: ScoreOptions) -> None:
    """Refuse before the work."""
    check_name("criterion", options.criterion, CRITERIA)
    if options.aggregation is not None:
        check_name("aggregation", options.aggregation, AGGREGATIONS)
    out = options.out
    if out is None:
        return
    if out.suffix not in (".json", ".safetensors"):
        raise ConfigError(
            f"--out {out}: it ends with {out.suffix or 'nothing'}. Say .json for scores of units, .safetensors for "
            "those of parameters."
        )
    if out.suffix == ".safetensors" and CRITERIA[options.criterion].score is None:
        raise ConfigError(
            f"--out {out}: {options.criterion} scores units, not parameters. Give a name that ends with .json."
        )
    check_file(out, options.subject.inputs)


def _scored(options: ScoreOptions, subject: Subject) -> tuple[Scores | None, UnitScores]:
    criterion, data = CRITERIA[options.criterion], subject.data
    arguments = (data.scoring, data.task)
    if criterion.score is None:
        units = criterion.units(subject.model, subject.structure, *arguments, options.aggregation)
        return None, units
    scores = criterion.score(subject.model, *arguments)
    units = unit_scores(scores, subject.structure, criterion.gathered(options.aggregation))
    return scores, replace(units, criterion=criterion.name)


def _check_finite(units: UnitScores) -> None:
    for name, values in units.values.items():
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(
                f"Scores of group {name!r} are NaN or infinite. Look for NaN in the model's weights and in the data."
            )


def _write(options: ScoreOptions, scores: Scores | None, units: UnitScores) -> None:
    assert options.out is not None, "asked only where there is a file to write"
    if options.out.suffix == ".json":
        write_json(options.out, as_data(options, units))
        return
    assert scores is not None, "refused before the work"
    facts = as_data(options, units)
    kept = ("model", "data", "criterion", "options", "samples", "loss")
    metadata = {name: json.dumps(facts[name]) for name in kept}
    values = {name: value.detach().cpu().contiguous() for name, value in scores.values.items()}
    data = as_bytes(values, metadata)  # safetensors' own writer says of a full disk no OSError
    write_file(options.out, lambda path: path.write_bytes(data))


def _least(units: UnitScores, num: int) -> list[tuple[str, int, float]]:
    """The units of the lowest scores in all groups, the lowest first."""
    every = [
        (group, unit, score)
        for group, values in units.values.items()
        for unit, score in enumerate(values.tolist())
    ]
    return sorted(every, key=lambda one: one[2])[:num]


def _groups_table(structure: Structure, units: UnitScores) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("units", "lowest", "median", "highest"):
        table.add_column(name, justify="right", overflow="fold")
    for name, values in units.values.items():
        spread = (values.min(), values.median(), values.max())
        numbers = [f"{float(value):.3g}" for value in spread]
        table.add_row(Text(name), structure[name].kind, str(len(values)), *numbers)
    return table


def _least_table(units: UnitScores, num: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group", overflow="fold")
    for name in ("unit", "score"):
        table.add_column(name, justify="right", overflow="fold")
    for group, unit, score in _least(units, num):
        table.add_row(Text(group), str(unit), f"{score:.3g}")
    return table


def _next(options: ScoreOptions) -> str:
    subject = options.subject
    words = ["apoptosis", "prune", subject.model, "--data", subject.data]
    if subject.weights is not None:
        words += ["--weights", str(subject.weights)]
    words += ["--keep-flops", "0.5"]
    if options.criterion != DEFAULT_CRITERION:
        words += ["--criterion", options.criterion]
    return shlex.join(words)
