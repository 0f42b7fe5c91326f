"""What every command that makes a network does with the work: evaluate before and after, and save at once.

Until the network is saved nothing is written but notes to go on from (`resuming`), which are then removed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from torch import nn

from apoptosis.checkpoint import Journal, save
from apoptosis.cli.figures import evaluation_as_data
from apoptosis.cli.named_models import NamedModel, joined
from apoptosis.cli.names import sentence
from apoptosis.cli.origins import is_checkpoint
from apoptosis.cli.resuming import Asked, noted
from apoptosis.cli.splits import split_seed
from apoptosis.cli.subject import Subject, train_if_new_
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.errors import NonFiniteError
from apoptosis.masks import MaskPlan
from apoptosis.records import Outcome
from apoptosis.structure import Plan
from apoptosis.training import Evaluation, evaluate

__all__ = ["Finished", "Work", "finish", "subject_as_data"]

AnyPlan = TypeVar("AnyPlan", bound=Plan | MaskPlan)


@dataclass(frozen=True)
class Work(Generic[AnyPlan]):
    """What is to be done, and where the result goes."""

    do: Callable[[Journal], Iterable[Outcome[AnyPlan]]]
    """One network, or one for each round, saved as soon as it comes; the last is the result."""
    place: Path
    asked: Asked
    earlier: tuple[Path, ...] = ()
    """Where the rounds before the last are saved."""
    trains_new: bool = True
    """A network that is new is trained first, where the work itself does not."""


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
    asked: Asked
    earlier: "tuple[Finished[AnyPlan], ...]" = ()
    """Results of the rounds before the last."""

    @property
    def training(self) -> list[dict[str, Any]]:
        """Records of all trainings, as plain data."""
        return list(self.outcome.settings.get("training", []))


def finish(
    subject: Subject, options: SubjectOptions, work: Work[AnyPlan], console: Console
) -> Finished[AnyPlan]:
    """Train a network that is new, do the work, judge it and save it."""
    weights = subject.model.state_dict() if work.trains_new else None
    with noted(work.asked, work.place, weights) as journal:
        if work.trains_new:
            train_if_new_(subject, options, console, journal)
        before, unjudged = _evaluated_before(subject)
        start = time.perf_counter()
        rounds: list[Finished[AnyPlan]] = []
        places = iter((*work.earlier, work.place))
        with _rounds_told(rounds):
            for outcome in work.do(journal):
                own = _Round(outcome, next(places), before, unjudged, time.perf_counter() - start)
                rounds.append(_saved(subject, options, work, own))
    return replace(rounds[-1], earlier=tuple(rounds[:-1]))


@contextmanager
def _rounds_told(rounds: "list[Finished[Any]]") -> Iterator[None]:
    """Whose training fails after others were saved is told where these are."""
    try:
        yield
    except NonFiniteError as error:
        if not rounds:
            raise
        saved = ", ".join(str(own.saved) for own in rounds)
        raise NonFiniteError(
            f"Round {len(rounds) + 1}: {error} What came before is saved: {saved}"
        ) from error


@dataclass(frozen=True)
class _Round(Generic[AnyPlan]):
    outcome: Outcome[AnyPlan]
    place: Path
    before: Evaluation | None
    unjudged: str
    seconds: float


def _saved(
    subject: Subject, options: SubjectOptions, work: Work[AnyPlan], done: _Round[AnyPlan]
) -> Finished[AnyPlan]:
    after = None if done.before is None else _evaluated(subject, done.outcome.model)
    to_save, named = joined(subject.named, done.outcome)
    evaluations = {
        "on": "scoring data" if subject.data.evaluation is None else "held out",
        "counted_in": subject.counted_in,
        "before": evaluation_as_data(done.before),
        "after": evaluation_as_data(after),
    }
    if done.unjudged:
        evaluations["none_because"] = done.unjudged
    facts = subject_as_data(options, named)
    settings = {**done.outcome.settings, "subject": facts, "evaluation": evaluations}
    replaced = is_checkpoint(done.place)
    saved = save(done.place, replace(to_save, settings=settings))
    return Finished(
        replace(done.outcome, settings=settings),
        done.before,
        after,
        done.seconds,
        saved,
        replaced,
        named,
        subject.counted_in,
        work.asked,
    )


def subject_as_data(options: SubjectOptions, named: NamedModel) -> dict[str, Any]:
    """What was worked on, for `run.json`: with the model that makes the network again when the checkpoint is read."""
    facts = asdict(options) | {"weights": _text(options.weights), "model": named.name}
    facts["split_seed"] = split_seed(options)
    del facts["dense"]  # of use on the line alone
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
