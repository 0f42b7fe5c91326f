"""`apoptosis prune` of single weights: most of them zero, kept so by masks, and saved without the zeros.

All that can be refused is refused before the work, as for whole units (`prune`); what follows is the same too
(`finishing`). The model is not traced: its shapes stay.
"""

import json

from rich.console import Console
from torch import nn

from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import finish
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_folder
from apoptosis.cli.sparsify_options import SparsifyOptions
from apoptosis.cli.sparsify_tables import (
    SparsifyDryRun,
    SparsifyResult,
    show_dry_run,
    show_result,
)
from apoptosis.cli.subject import Subject, find_subject, seeded
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.criteria import CRITERIA, SALIENCIES
from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import Layer, MaskPlan
from apoptosis.planning import Sparsity
from apoptosis.planning.sparsity import SCOPES
from apoptosis.records import Outcome
from apoptosis.repair import check_has_batch_norms
from apoptosis.workflow import BATCH_NORM_POLICIES, sparsify

__all__ = ["run_sparsify"]


def run_sparsify(options: SparsifyOptions) -> None:
    """Zero weights, save, and show what came out; or, for a dry run, what would be done."""
    console = Console(stderr=True)
    _check_names(options)
    sparsity = options.sparsity()
    check_folder(options.place)
    with seeded(options.subject), progress_bars(console):
        subject = find_subject(options.subject, console, traced=False)
        layers = _layers(subject.model, sparsity)
        if options.batch_norm == "re-estimate":
            _check_has_norms(subject.model)
        result = (
            SparsifyDryRun.of(options, subject, sparsity, layers)
            if options.dry_run
            else _sparsified(options, subject, sparsity, console)
        )
    if options.as_json:
        print(json.dumps(result.as_data(), indent=1, allow_nan=False))
    elif isinstance(result, SparsifyDryRun):
        show_dry_run(result, Console())
    else:
        show_result(result, Console())


def _sparsified(
    options: SparsifyOptions,
    subject: Subject,
    sparsity: Sparsity,
    console: Console,
) -> SparsifyResult:
    def work() -> Outcome[MaskPlan]:
        with in_typed_words():
            return sparsify(
                subject.model,
                subject.data.scoring,
                sparsity,
                subject.data.task,
                criterion=options.criterion,
                stages=options.stages,
                saliency=options.saliency,
                batch_norm=options.batch_norm,
            )

    run = finish(subject, options.subject, lambda: options.place, work, console)
    return SparsifyResult(options, run)


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
