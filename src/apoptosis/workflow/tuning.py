"""Fine-tuning as a part of a run: which batches serve what, how, and what the record says of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.errors import ConfigError
from apoptosis.masks import MaskPlan
from apoptosis.records import Outcome
from apoptosis.structure import Plan
from apoptosis.task import Batch, Task
from apoptosis.training import Epoch, Evaluation, Fit, FitOptions, fit_

__all__ = ["DEFAULT_TUNING", "Material", "fine_tuned", "part_of"]

AnyPlan = TypeVar("AnyPlan", bound=Plan | MaskPlan)

DEFAULT_TUNING = FitOptions(epochs=20, learning_rate=0.02, schedule="cosine")


@dataclass(frozen=True, kw_only=True)
class Material:
    """Batches for each purpose; each can be read again and again.

    Attributes:
        scoring: what criteria read, and repairs.
        training: what the network is fine-tuned on.
        validation: what decides which epoch is kept. Test data have no place here: figures on them come afterwards.
    """

    scoring: Iterable[Batch]
    training: Iterable[Batch] | None = None
    validation: Iterable[Batch] | None = None


def fine_tuned(  # noqa: PLR0913 - a step of three workflows, which have all of these at hand
    outcome: Outcome[AnyPlan],
    dense: nn.Module,
    data: Material,
    task: Task | None,
    options: FitOptions,
    journal: Journal | None,
) -> Outcome[AnyPlan]:
    """Train the network of `outcome`, where it is: nobody else has it yet. Its record gets one line per epoch.

    Raises:
        ConfigError: there are no batches to train on.
    """
    if not options.epochs:
        return outcome
    if data.training is None:
        raise ConfigError(
            f"Fine-tuning for {options.epochs} epochs was asked for, and there are no batches to train on. Give "
            "Material(training=…), or epochs=0."
        )
    fit = fit_(
        outcome.model,
        data.training,
        task,
        options,
        validation=data.validation,
        teacher=dense if options.distil else None,
        journal=journal,
    )
    done = [*outcome.settings.get("training", []), _as_data(fit)]
    return replace(outcome, settings={**outcome.settings, "training": done})


def part_of(journal: Journal | None, name: str, *, on_the_way: bool = False) -> Journal | None:
    """A part of a journal, if there is one."""
    return None if journal is None else journal.part(name, on_the_way=on_the_way)


def _as_data(fit: Fit) -> dict[str, Any]:
    """Plain JSON; `kept` counts epochs from 1, and 0 is the network as it was pruned."""
    return {
        "kept": fit.kept,
        "before": _judged(fit.before),
        "epochs": [_epoch(epoch) for epoch in fit.epochs],
    }


def _epoch(epoch: Epoch) -> dict[str, Any]:
    return {
        "loss": epoch.loss,
        "learning_rate": epoch.learning_rate,
        "seconds": epoch.seconds,
        "validation": _judged(epoch.validation),
    }


def _judged(judged: Evaluation | None) -> dict[str, Any] | None:
    """Without NaN, which JSON has not."""
    if judged is None:
        return None
    return {
        "loss": judged.loss if math.isfinite(judged.loss) else None,
        "metrics": {n: v if math.isfinite(v) else None for n, v in judged.metrics.items()},
        "count": judged.count,
    }
