"""What every command that makes a network smaller does with the work: evaluate before and after, and save at once.

Until the network is saved nothing is written.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from torch import nn

from apoptosis.checkpoint import save
from apoptosis.cli.figures import evaluation_as_data
from apoptosis.cli.named_models import NamedModel, is_checkpoint, joined
from apoptosis.cli.names import sentence
from apoptosis.cli.subject import Subject, train_if_new_
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.masks import MaskPlan
from apoptosis.records import Outcome
from apoptosis.structure import Plan
from apoptosis.training import Evaluation, evaluate

__all__ = ["Finished", "finish", "subject_as_data"]

AnyPlan = TypeVar("AnyPlan", bound=Plan | MaskPlan)


@dataclass(frozen=True)
class Finished(Generic[AnyPlan]):
    """What came out, how well it does, and where it lies."""

    outcome: Outcome[AnyPlan]
    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    saved: Path
    replaced: bool
    named: NamedModel
    """What the saved network is loaded into."""
    counted_in: str


def finish(
    subject: Subject,
    options: SubjectOptions,
    find_place: Callable[[], Path],
    work: Callable[[], Outcome[AnyPlan]],
    console: Console,
) -> Finished[AnyPlan]:
    """Train a network that is new, do the work, judge it and save it, in a place that is free by then."""
    train_if_new_(subject, options, console)
    before, unjudged = _evaluated_before(subject)
    start = time.perf_counter()
    outcome = work()
    seconds = time.perf_counter() - start
    after = None if before is None else _evaluated(subject, outcome.model)
    to_save, named = joined(subject.named, outcome)
    facts = subject_as_data(options, named)
    judged_on = "scoring data" if subject.data.evaluation is None else "held out"
    evaluations = {
        "on": judged_on,
        "counted_in": subject.counted_in,
        "before": evaluation_as_data(before),
        "after": evaluation_as_data(after),
    }
    if unjudged:
        evaluations["none_because"] = unjudged
    settings = {**outcome.settings, "subject": facts, "evaluation": evaluations}
    place = find_place()
    replaced = is_checkpoint(place)
    saved = save(place, replace(to_save, settings=settings))
    outcome = replace(outcome, settings=settings)
    return Finished(outcome, before, after, seconds, saved, replaced, named, subject.counted_in)


def subject_as_data(options: SubjectOptions, named: NamedModel) -> dict[str, Any]:
    """What was worked on, for `run.json`: with the model that makes the network again when the checkpoint is read."""
    facts = asdict(options) | {"weights": _text(options.weights), "model": named.name}
    return facts if named.folder is None else facts | {"checkpoint": str(named.folder)}


def _evaluated_before(subject: Subject) -> tuple[Evaluation | None, str]:
    """None, and why, where there are no data but those that are scored, and the task cannot judge on these."""
    try:
        return _evaluated(subject, subject.model), ""
    except Exception as error:
        # No labels, or metrics that do not fit them; what else fails, fails again when scored.
        if subject.data.evaluation is not None:
            raise
        return None, sentence((str(error).strip().splitlines() or [type(error).__name__])[0])


def _evaluated(subject: Subject, model: nn.Module) -> Evaluation:
    data = subject.data
    batches = data.scoring if data.evaluation is None else data.evaluation
    return evaluate(model, batches, data.task)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
