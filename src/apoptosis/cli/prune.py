"""`apoptosis prune`: a model, data and a budget in; a smaller network, saved and ready to be loaded, out.

All that can be refused is refused before the work: names, budget, the place to save to. Then the network is evaluated,
pruned, evaluated again and saved at once; until then nothing is written.
"""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from apoptosis.checkpoint import save
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_folder
from apoptosis.cli.prune_options import PruneOptions, in_typed_words
from apoptosis.cli.prune_tables import DryRun, PruneResult, show_dry_run, show_result
from apoptosis.cli.subject import Subject, find_subject, seeded, train_if_new_
from apoptosis.criteria import AGGREGATIONS, CRITERIA
from apoptosis.planning import Budget, Selection, check_reachable
from apoptosis.planning.selection import PRICES, WIDTHS
from apoptosis.repair import REPAIRS
from apoptosis.structure import KINDS
from apoptosis.training import Evaluation, evaluate
from apoptosis.workflow import default_selection, prune

__all__ = ["run_prune"]


def run_prune(options: PruneOptions) -> None:
    """Prune, save, and show what came out; or, for a dry run, what would be done."""
    console = Console(stderr=True)
    budget = options.budget()
    _check_names(options)
    options.selection(Selection())
    check_folder(options.place)
    with seeded(options.subject), progress_bars(console):
        subject = find_subject(options.subject, console)
        selection = options.selection(default_selection(subject.model))
        with in_typed_words():
            check_reachable(subject.structure, budget, selection)
        result = (
            DryRun.of(options, subject, budget, selection)
            if options.dry_run
            else _pruned(options, subject, budget, selection, console)
        )
    if options.as_json:
        print(json.dumps(result.as_data(), indent=1, allow_nan=False))
    elif isinstance(result, DryRun):
        show_dry_run(result, Console())
    else:
        show_result(result, Console())


def _pruned(
    options: PruneOptions,
    subject: Subject,
    budget: Budget,
    selection: Selection,
    console: Console,
) -> PruneResult:
    train_if_new_(subject, options.subject, console)
    before = _evaluated_before(subject)
    start = time.perf_counter()
    with in_typed_words():
        outcome = prune(
            subject.model,
            subject.data.scoring,
            budget,
            subject.data.task,
            criterion=options.criterion,
            steps=options.steps,
            aggregation=options.aggregation,
            selection=selection,
            repair=options.repair,
            example_inputs=subject.example_inputs,
        )
    seconds = time.perf_counter() - start
    after = None if before is None else _evaluated(subject, outcome.model)
    facts = asdict(options.subject) | {"weights": _text(options.subject.weights)}
    judged_on = "scoring data" if subject.data.evaluation is None else "held out"
    evaluations = {"on": judged_on, "before": _as_data(before), "after": _as_data(after)}
    outcome = replace(
        outcome, settings={**outcome.settings, "subject": facts, "evaluation": evaluations}
    )
    place = options.place
    replaced = (place.expanduser() / "run.json").is_file()
    saved = save(place, outcome)
    return PruneResult(options, subject.named, outcome, before, after, seconds, saved, replaced)


def _evaluated_before(subject: Subject) -> Evaluation | None:
    """None where there are no data to judge on but those that are scored, and the task cannot judge on these."""
    try:
        return _evaluated(subject, subject.model)
    except (
        Exception
    ):  # no labels, or metrics that do not fit them; what else fails, fails again when scored
        if subject.data.evaluation is not None:
            raise
        return None


def _evaluated(subject: Subject, model: nn.Module) -> Evaluation:
    data = subject.data
    batches = data.scoring if data.evaluation is None else data.evaluation
    return evaluate(model, batches, data.task)


def _as_data(found: Evaluation | None) -> dict[str, Any] | None:
    """Plain JSON, which has no NaN: a network that was cut too far may give one, and is saved all the same."""
    if found is None:
        return None
    metrics = {name: _finite(value) for name, value in found.metrics.items()}
    return {"loss": _finite(found.loss), "metrics": metrics, "count": found.count}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _check_names(options: PruneOptions) -> None:
    check_name("criterion", options.criterion, CRITERIA)
    if options.aggregation is not None:
        check_name("aggregation", options.aggregation, AGGREGATIONS)
    for repair in options.repair:
        check_name("repair", repair, REPAIRS)
    check_name("--widths", options.widths, WIDTHS)
    check_name("--per", options.per, PRICES)
    for kind in options.kinds:
        check_name("kind", kind, KINDS)
