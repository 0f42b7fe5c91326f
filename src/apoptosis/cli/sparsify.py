"""`apoptosis prune` of single weights: most of them zero, kept so by masks, and saved without the zeros.

All that can be refused is refused before the work, as for whole units (`prune`); what follows is the same too
(`finishing`). The model is not traced: its shapes stay.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import ceil, prod

from rich.console import Console
from torch import nn

from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import finish
from apoptosis.cli.names import check_name, counted
from apoptosis.cli.places import check_folder
from apoptosis.cli.sparsify_options import SparsifyOptions
from apoptosis.cli.sparsify_tables import (
    SparsifyDryRun,
    SparsifyResult,
    show_dry_run,
    show_result,
)
from apoptosis.cli.subject import Subject, find_subject, seeded
from apoptosis.cli.typed_words import in_typed_words, name_options
from apoptosis.criteria import CRITERIA, SALIENCIES
from apoptosis.errors import BudgetError, ConfigError, ModelError
from apoptosis.masks import Layer, MaskPlan, Pattern, maskable
from apoptosis.planning import Sparsity
from apoptosis.planning.sparsity import SCOPES
from apoptosis.records import Outcome
from apoptosis.repair import check_has_batch_norms
from apoptosis.workflow import BATCH_NORM_POLICIES, sparsify

__all__ = ["run_sparsify"]

FEW = 4
"""So many layers are named one by one; more are gathered under patterns."""

_NUMBER = r"(?<![^.])\d+(?![^.])"


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
            else _sparsified(options, subject, sparsity, layers, console)
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
    layers: Mapping[str, Layer],
    console: Console,
) -> SparsifyResult:
    def work() -> Outcome[MaskPlan]:
        with _share_of_every_layer(sparsity, layers), in_typed_words():
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
    return SparsifyResult(options, subject.named, run)


@contextmanager
def _share_of_every_layer(sparsity: Sparsity, layers: Mapping[str, Layer]) -> Iterator[None]:
    """An advice to keep a share of every layer names one that leaves something of the smallest."""
    try:
        yield
    except BudgetError as error:
        least = 1 / min(prod(layer.shape) for layer in layers.values())
        if sparsity.density >= least:
            raise
        enough = ceil(least * 1e4) / 1e4
        advice = str(error).replace("(--scope layer)", f"(--scope layer --keep {enough:g})")
        told = BudgetError(advice)
        told.reachable = error.reachable
        raise told from error


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
        message = str(error).replace("Leave this repair out", "Leave out --batch-norm re-estimate")
        raise ModelError(message) from error


def _layers(model: nn.Module, sparsity: Sparsity) -> dict[str, Layer]:
    with in_typed_words():
        if isinstance(sparsity.pattern, Pattern):
            _check_divides(sparsity.pattern, maskable(model, sparsity.names))
        return sparsity.layers(model)


def _check_divides(pattern: Pattern, layers: Mapping[str, Layer]) -> None:
    """The library's refusal with all names in it, so that who types them succeeds at once."""
    odd = {name: own for name, own in layers.items() if own.shape[own.dim] % pattern.m}
    if not odd:
        return
    inputs = {name: counted(own.shape[own.dim], "input") for name, own in odd.items()}
    some = [f"{name} ({num})" for name, num in list(inputs.items())[:FEW]]
    more = f" and {len(odd) - FEW} more" if len(odd) > FEW else ""
    remedy = f"Leave them whole: {name_options(_left_out(odd, layers))}."
    if len(odd) == len(layers):
        remedy = (
            "No layer is left so: take another M, or a share without a pattern, --unstructured --keep "
            f"{pattern.density:g}."
        )
    raise ConfigError(
        f"--pattern {pattern} takes weights {pattern.m} at a time along a layer's inputs, and {pattern.m} does not "
        f"divide those of {', '.join(some)}{more}. {remedy}"
    )


def _left_out(odd: Mapping[str, Layer], layers: Mapping[str, Layer]) -> list[str]:
    """Patterns that fit the odd layers and no others: names, or where there are many, names with `*` for a number."""
    if len(odd) <= FEW:
        return [f"!{name}" for name in odd]
    patterns: list[str] = []
    for name in odd:
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            patterns.append(max(_wider(name, odd, layers), key=lambda one: _num_fitting(one, odd)))
    return [f"!{pattern}" for pattern in patterns]


def _wider(name: str, odd: Mapping[str, Layer], layers: Mapping[str, Layer]) -> list[str]:
    """The name itself, and with `*` for one of its numbers or for all, where that fits odd layers alone."""
    numbers = list(re.finditer(_NUMBER, name))
    wide = [f"{name[: found.start()]}*{name[found.end() :]}" for found in numbers]
    wide.append(re.sub(_NUMBER, "*", name))
    return [name, *(one for one in wide if _num_fitting(one, odd) == _num_fitting(one, layers))]


def _num_fitting(pattern: str, names: Mapping[str, Layer]) -> int:
    return sum(fnmatchcase(name, pattern) for name in names)
