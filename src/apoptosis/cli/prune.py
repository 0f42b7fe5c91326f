"""`apoptosis prune` of whole units: a model, data and a budget in; a smaller network, saved and loadable, out.

All that can be refused is refused before the work: names, budget, the place to save to. Then the network is evaluated,
pruned, evaluated again and saved at once; until then nothing is written.
"""

import json
from collections.abc import Callable, Iterator

from rich.console import Console

from apoptosis.checkpoint import Journal
from apoptosis.cli.bars import progress_bars
from apoptosis.cli.finishing import Work, finish
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_folder
from apoptosis.cli.prune_options import NOTHING, PruneOptions
from apoptosis.cli.prune_tables import DryRun, PruneResult, show_dry_run, show_result
from apoptosis.cli.resuming import check_may_begin
from apoptosis.cli.subject import Subject, find_named_data, find_subject, material_of, seeded
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.criteria import AGGREGATIONS, CRITERIA
from apoptosis.errors import ConfigError
from apoptosis.masks import MaskPlan
from apoptosis.planning import Selection, check_reachable
from apoptosis.planning.selection import PRICES, WIDTHS
from apoptosis.records import Outcome
from apoptosis.repair import REPAIRS, find_repairs
from apoptosis.structure import KINDS, Plan
from apoptosis.workflow import Pruning, default_selection, one_shot, prune, rounds_of

__all__ = ["run_prune"]


def run_prune(options: PruneOptions) -> None:
    """Prune, save, and show what came out; or, for a dry run, what would be done."""
    console = Console(stderr=True)
    budgets, place = options.budgets(), options.place
    fit = options.tuning.fit(options.subject.seed)
    _check_names(options)
    options.selection(Selection())
    earlier = options.earlier_places(place)
    for own in (*earlier, place):
        check_folder(own, options.subject.inputs)
    if not options.dry_run:
        check_may_begin(options.asked, place)
    with seeded(options.subject), progress_bars(console):
        data = find_named_data(options.subject, options.tuning.training_batch_size)
        subject = find_subject(options.subject, console, data=data)
        _check_keeps_no_masks(subject)
        selection = options.selection(default_selection(subject.model))
        with in_typed_words():
            check_reachable(subject.structure, budgets[-1], selection)
        if fit.epochs:
            material_of(subject)
        result = (
            DryRun.of(options, subject, budgets[-1], selection)
            if options.dry_run
            else _pruned(
                options,
                Work(_work(options, subject, selection), place, options.asked, earlier),
                subject,
                console,
            )
        )
    if options.as_json:
        print(json.dumps(result.as_data(), indent=1, allow_nan=False))
    elif isinstance(result, DryRun):
        show_dry_run(result, Console())
    else:
        show_result(result, Console())


def _pruned(
    options: PruneOptions, work: Work[Plan], subject: Subject, console: Console
) -> PruneResult:
    return PruneResult(options, finish(subject, options.subject, work, console))


def _work(
    options: PruneOptions, subject: Subject, selection: Selection
) -> Callable[[Journal], Iterator[Outcome[Plan]]]:
    """Pruning alone, with training after it, or in rounds with training after each."""
    model, data = subject.model, subject.data
    budgets, fit = options.budgets(), options.tuning.fit(options.subject.seed)
    how = Pruning(
        criterion=options.asked_criterion,
        steps=options.asked_steps,
        aggregation=options.aggregation,
        selection=selection,
        align=options.align,
        repair=options.repair,
        repair_between=options.repair_between,
    )

    def work(journal: Journal) -> Iterator[Outcome[Plan]]:
        with in_typed_words():
            if not fit.epochs:
                yield prune(
                    model,
                    data.scoring,
                    budgets[-1],
                    data.task,
                    **vars(how),
                    journal=journal.part("prune"),
                )
                return
            material = material_of(subject)
            if len(budgets) == 1:
                yield one_shot(
                    model, budgets[0], material, data.task, pruning=how, fit=fit, journal=journal
                )
            else:
                yield from rounds_of(
                    model, budgets, material, data.task, pruning=how, fit=fit, journal=journal
                )

    return work


def _check_keeps_no_masks(subject: Subject) -> None:
    """A checkpoint has one plan: a cut of this one would be saved without its masks."""
    named = subject.named
    if named.saved is not None and isinstance(named.saved.plan, MaskPlan):
        raise ConfigError(
            f"{named.folder} is a network whose single weights were removed; cut in units, it would be saved without "
            "its masks. Prune units first and single weights then: --unstructured."
        )


def _check_names(options: PruneOptions) -> None:
    if options.asked_criterion is not None:
        check_name("criterion", options.asked_criterion, CRITERIA)
    if options.aggregation is not None:
        check_name("aggregation", options.aggregation, AGGREGATIONS)
    for repair in options.repair or ():
        check_name("repair", repair, (*REPAIRS, NOTHING))
    find_repairs(options.repair or ())  # in this order
    check_name("--widths", options.widths, WIDTHS)
    check_name("--per", options.per, PRICES)
    for kind in options.kinds:
        check_name("kind", kind, KINDS)
