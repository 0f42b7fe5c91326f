"""`apoptosis prune` of whole units: a model, data and a budget in; a smaller network, saved and loadable, out.

All that can be refused is refused before the work: names, budget, the place to save to. Then the network is evaluated,
pruned, evaluated again and saved at once; until then nothing is written.
"""

import json

from rich.console import Console

from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import finish
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_folder
from apoptosis.cli.prune_options import PruneOptions
from apoptosis.cli.prune_tables import DryRun, PruneResult, show_dry_run, show_result
from apoptosis.cli.subject import Subject, find_subject, seeded
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.criteria import AGGREGATIONS, CRITERIA
from apoptosis.errors import ConfigError
from apoptosis.masks import MaskPlan
from apoptosis.planning import Budget, Selection, check_reachable
from apoptosis.planning.selection import PRICES, WIDTHS
from apoptosis.records import Outcome
from apoptosis.repair import REPAIRS
from apoptosis.structure import KINDS, Plan
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
        _check_keeps_no_masks(subject)
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
    def work() -> Outcome[Plan]:
        with in_typed_words():
            return prune(
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

    run = finish(subject, options.subject, lambda: options.place, work, console)
    return PruneResult(options, run)


def _check_keeps_no_masks(subject: Subject) -> None:
    """A checkpoint has one plan: a cut of this one would be saved without its masks."""
    named = subject.named
    if named.saved is not None and isinstance(named.saved.plan, MaskPlan):
        raise ConfigError(
            f"{named.folder} is a network whose single weights were removed; cut in units, it would be saved without "
            "its masks. Prune units first and single weights then: --unstructured."
        )


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
