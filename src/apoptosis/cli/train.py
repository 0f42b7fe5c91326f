"""`apoptosis train` and `apoptosis finetune`: a network trained, judged and saved as a checkpoint.

A network of a checkpoint keeps its plan, so that what comes out is loaded as the checkpoint was. Any other is saved
with the plan that keeps everything.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import Finished, Work, finish
from apoptosis.cli.places import check_folder, free_place
from apoptosis.cli.resuming import Asked, check_may_begin
from apoptosis.cli.sources import make_model
from apoptosis.cli.subject import Subject, find_named_data, find_subject, material_of, seeded
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import FineTuning, Training
from apoptosis.cli.training_tables import TrainDryRun, TrainResult, show_dry_run, show_result
from apoptosis.errors import ApoptosisError, ConfigError
from apoptosis.masks import MaskPlan, identity_masks, masks_of
from apoptosis.records import Outcome
from apoptosis.structure import Plan
from apoptosis.training import FitOptions
from apoptosis.workflow.tuning import fine_tuned

__all__ = ["TrainOptions", "run_train"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `apoptosis train` and `apoptosis finetune` can be told."""

    subject: SubjectOptions
    training: Training
    asked: Asked
    teacher: str | None = None
    out: Path | None = None
    dry_run: bool = False
    as_json: bool = False

    @property
    def place(self) -> Path:
        """Where the result is saved: as asked, or a name that says what it is and that nothing has yet."""
        what = "tuned" if isinstance(self.training, FineTuning) else "trained"
        return self.out or free_place(self.subject.model, what)


def run_train(options: TrainOptions) -> None:
    """Train, save, and show what came out; or, for a dry run, say what it would take."""
    console = Console(stderr=True)
    fit, place = options.training.fit(options.subject.seed), options.place
    options = replace(options, out=place)  # a free name stays the same one
    _check_teacher(options, fit)
    check_folder(place, {**options.subject.inputs, "--teacher": options.teacher})
    if not options.dry_run:
        check_may_begin(options.asked, place)
    with seeded(options.subject), progress_bars(console):
        data = find_named_data(options.subject, options.training.training_batch_size)
        trains = not isinstance(options.training, FineTuning)
        subject = find_subject(options.subject, console, traced=False, trains=trains, data=data)
        teacher = _teacher(options, subject)
        found = (
            TrainDryRun.of(subject, options.subject, fit, teacher if fit.distil else None, place)
            if options.dry_run
            else TrainResult(options.subject, _trained(options, subject, fit, teacher, console))
        )
    if options.as_json:
        print(json.dumps(found.as_data(), indent=1, allow_nan=False))
    elif isinstance(found, TrainDryRun):
        show_dry_run(found, Console())
    else:
        show_result(found, Console())


def _trained(
    options: TrainOptions, subject: Subject, fit: FitOptions, teacher: nn.Module, console: Console
) -> Finished[Any]:
    def work(journal: Journal) -> tuple[Outcome[Plan | MaskPlan], ...]:
        start = _start(subject)
        material = material_of(subject)
        task = subject.data.task
        return (fine_tuned(start, teacher, material, task, fit, journal.part("fit")),)

    own = Work(work, options.place, options.asked, trains_new=False)
    return finish(subject, options.subject, own, console)


def _start(subject: Subject) -> Outcome[Any]:
    """The network before it is trained, and the plan that it is saved with."""
    model, named = subject.model, subject.named
    if named.saved is not None:
        return replace(named.saved, model=model)
    if (masks := masks_of(model)) is not None:  # they came with --weights
        return Outcome(model, masks, example_inputs=subject.example_inputs)
    try:
        plan = subject.structure.identity()
    except ApoptosisError:  # it cannot be traced; masks that keep everything need no trace
        return Outcome(model, identity_masks(model), example_inputs=subject.example_inputs)
    return Outcome(model, plan, example_inputs=subject.example_inputs)


def _check_teacher(options: TrainOptions, fit: FitOptions) -> None:
    if fit.distil and options.teacher is None:
        raise ConfigError(
            f"--distil {fit.distil:g} follows a teacher, and none was named. Name one: --teacher runs/dense"
        )
    if options.teacher is not None and not fit.distil:
        raise ConfigError(
            f"--teacher {options.teacher} was named, and nothing of the loss follows it. Say how much: --distil 0.5"
        )


def _teacher(options: TrainOptions, subject: Subject) -> nn.Module:
    """The model itself where there is no teacher: nobody asks it."""
    if options.teacher is None:
        return subject.model
    device = next(subject.model.parameters()).device
    made = make_model(options.teacher, options.subject.dense or ())
    return made.model.to(device).eval()
