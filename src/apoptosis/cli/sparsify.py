"""`apoptosis prune` of single weights: most of them zero, kept so by masks, and saved without the zeros.

All that can be refused is refused before the work, as for whole units (`prune`); what follows is the same too
(`finishing`). The model is not traced: its shapes stay.
"""

import json
from collections.abc import Callable

from rich.console import Console
from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import Work, finish
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_folder
from apoptosis.cli.resuming import check_may_begin
from apoptosis.cli.sparsify_options import SparsifyOptions
from apoptosis.cli.sparsify_tables import (
    SparsifyDryRun,
    SparsifyResult,
    show_dry_run,
    show_result,
)
from apoptosis.cli.subject import Subject, find_named_data, find_subject, material_of, seeded
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.criteria import CRITERIA, SALIENCIES
from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import Layer, MaskPlan
from apoptosis.planning import Sparsity
from apoptosis.planning.sparsity import SCOPES
from apoptosis.records import Outcome
from apoptosis.repair import check_has_batch_norms
from apoptosis.workflow import BATCH_NORM_POLICIES, Sparsifying, gradual, sparsify

__all__ = ["run_sparsify"]


def run_sparsify(options: SparsifyOptions) -> None:
    """Zero weights, save, and show what came out; or, for a dry run, what would be done."""
    console = Console(stderr=True)
    _check_names(options)
    sparsity, place = options.sparsity(), options.place
    fit = options.tuning.fit(options.subject.seed)
    check_folder(place, options.subject.inputs)
    if not options.dry_run:
        check_may_begin(options.asked, place)
    with seeded(options.subject), progress_bars(console):
        data = find_named_data(options.subject, options.tuning.training_batch_size)
        subject = find_subject(options.subject, console, traced=False, data=data)
        layers = _layers(subject.model, sparsity)
        if options.batch_norm == "re-estimate":
            _check_has_norms(subject.model)
        if fit.epochs:
            material_of(subject)
        result = (
            SparsifyDryRun.of(options, subject, sparsity, layers)
            if options.dry_run
            else _sparsified(
                options,
                Work(_work(options, subject, sparsity), place, options.asked),
                subject,
                console,
            )
        )
    if options.as_json:
        print(json.dumps(result.as_data(), indent=1, allow_nan=False))
    elif isinstance(result, SparsifyDryRun):
        show_dry_run(result, Console())
    else:
        show_result(result, Console())


def _sparsified(
    options: SparsifyOptions, work: Work[MaskPlan], subject: Subject, console: Console
) -> SparsifyResult:
    return SparsifyResult(options, finish(subject, options.subject, work, console))


def _work(
    options: SparsifyOptions, subject: Subject, sparsity: Sparsity
) -> Callable[[Journal], tuple[Outcome[MaskPlan], ...]]:
    """Zeroing alone, or with training after every stage."""
    model, data = subject.model, subject.data
    fit = options.tuning.fit(options.subject.seed)
    how = Sparsifying(
        criterion=options.criterion,
        stages=options.stages,
        saliency=options.saliency,
        batch_norm=options.batch_norm,
    )

    def work(journal: Journal) -> tuple[Outcome[MaskPlan], ...]:
        with in_typed_words():
            if fit.epochs:
                material = material_of(subject)
                outcome = gradual(
                    model, sparsity, material, data.task, sparsifying=how, fit=fit, journal=journal
                )
            else:
                outcome = sparsify(
                    model,
                    data.scoring,
                    sparsity,
                    data.task,
                    **vars(how),
                    journal=journal.part("sparsify"),
                )
        return (outcome,)

    return work


def _check_names(options: SparsifyOptions) -> None:
    check_name("criterion", options.criterion, CRITERIA)
    of_weights = [name for name, entry in CRITERIA.items() if entry.score is not None]
    if options.criterion not in of_weights:
        raise ConfigError(
            f"--criterion {options.criterion} scores whole units, and single weights are to go. Those that score "
            f"weights: {', '.join(of_weights)}."
        )
    if options.saliency is not None:
        check_name("--saliency", options.saliency, SALIENCIES)
    check_name("--batch-norm", options.batch_norm, BATCH_NORM_POLICIES)
    check_name("--scope", options.scope, SCOPES)


def _check_has_norms(model: nn.Module) -> None:
    try:
        check_has_batch_norms(model)
    except ModelError as error:
        message = str(error).partition(" Leave them")[0] + " Leave out --batch-norm re-estimate."
        raise ModelError(message) from error


def _layers(model: nn.Module, sparsity: Sparsity) -> dict[str, Layer]:
    with in_typed_words():
        return sparsity.layers(model)
