"""`apoptosis compare`: one network pruned by several criteria, under conditions that are the same for all.

All that can be refused is refused before the work. Every network that is finished is noted in OUT.progress, so that a
comparison that was stopped goes on; tables and plots are written at the end.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from apoptosis.cli.bars import progress_bars
from apoptosis.cli.compare_facts import commit, versions
from apoptosis.cli.compare_tables import DryRun, show_comparison, show_dry_run
from apoptosis.cli.names import check_name
from apoptosis.cli.places import check_comparison, free_place
from apoptosis.cli.resuming import Asked, noted
from apoptosis.cli.subject import Subject, SubjectOptions, find_subject, seeded, train_if_new_
from apoptosis.cli.training_options import CompareTuning
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.comparison import Comparison
from apoptosis.criteria import CRITERIA
from apoptosis.errors import DataError
from apoptosis.planning import Budget, check_reachable
from apoptosis.repair import REPAIRS
from apoptosis.report import write_comparison
from apoptosis.workflow import (
    CompareOptions,
    Contestant,
    ContestData,
    compare,
    contestants_of,
    default_selection,
)

__all__ = ["ComparisonOptions", "run_compare"]

DEFAULT_CRITERIA = ("oba", "taylor")


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """What `apoptosis compare` can be told."""

    subject: SubjectOptions
    budgets: tuple[float, ...]
    names: tuple[str, ...] = ()
    uniform: bool = False
    steps: int = CompareOptions.steps
    repair: tuple[str, ...] = ()
    tuning: CompareTuning = CompareTuning()
    num_seeds: int = 1
    out: Path | None = None
    run: Asked = field(default_factory=Asked)
    dry_run: bool = False
    as_json: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        """From the seed of the subject on."""
        return tuple(range(self.subject.seed, self.subject.seed + self.num_seeds))

    @property
    def place(self) -> Path:
        """Where tables and plots go: as asked, or a name that nothing has yet."""
        return self.out or free_place(self.subject.model, "compare")

    @cached_property
    def contestants(self) -> tuple[Contestant, ...]:
        """Those that were asked for, and the baselines.

        Raises:
            ConfigError: there is no such criterion.
        """
        names = self.names or DEFAULT_CRITERIA
        if "all" in names:
            names = tuple(CRITERIA)
        for name in names:
            check_name("criterion", name, CRITERIA)
        again = [Contestant(name, "uniform") for name in names if self.uniform]
        return contestants_of([*names, *again])

    def conditions(self) -> CompareOptions:
        """What is the same for all."""
        return CompareOptions(
            seeds=self.seeds,
            steps=self.steps,
            repair=self.repair,
            fit=self.tuning.fit(self.subject.seed),
        )


def run_compare(options: ComparisonOptions) -> None:
    """Compare, write and show; or, for a dry run, say what it would take."""
    console = Console(stderr=True)
    _check(options)
    with seeded(options.subject), progress_bars(console):
        subject = find_subject(options.subject, console)
        data = _contest_data(options, subject)
        _check_budgets(options, subject)
        if options.dry_run:
            found = DryRun.of(subject, options.contestants, options.budgets, options.conditions())
        else:
            found, written = _compared(options, subject, data, console)
    if options.as_json:
        print(json.dumps(found.as_data(), indent=1, allow_nan=False))
    elif isinstance(found, DryRun):
        show_dry_run(found, Console())
    else:
        show_comparison(found, written, Console())  # pyright: ignore[reportPossiblyUnboundVariable]


def _compared(
    options: ComparisonOptions, subject: Subject, data: ContestData, console: Console
) -> tuple[Comparison, list[Path]]:
    place = options.place
    grounds = _Grounds(options, subject, data, console)
    with noted(options.run, place, subject.model.state_dict()) as journal, in_typed_words():
        found = compare(
            grounds.model,
            options.contestants,
            options.budgets,
            grounds.data,
            options.conditions(),
            journal=journal,
        )
        found = replace(found, facts={**_facts(options), **found.facts})
        return found, write_comparison(found, place)


class _Grounds:
    """Model and data of every seed: the same for all, but the network of the digits, trained anew on other splits."""

    def __init__(
        self, options: ComparisonOptions, subject: Subject, data: ContestData, console: Console
    ) -> None:
        self._options, self._console = options, console
        self._found: tuple[int, Subject, ContestData] = (options.subject.seed, subject, data)
        self._is_trained = False

    def model(self, seed: int) -> nn.Module:
        """The dense network of a seed."""
        own, subject, _ = self._of(seed)
        if not self._is_trained:
            train_if_new_(subject, own, self._console)
            self._console, self._is_trained = Console(quiet=True), True  # said once is enough
        return subject.model

    def data(self, seed: int) -> ContestData:
        """The batches of a seed."""
        return self._of(seed)[2]

    def _of(self, seed: int) -> tuple[SubjectOptions, Subject, ContestData]:
        last, subject, data = self._found
        own = replace(self._options.subject, seed=seed)
        if last != seed and own.is_new:
            subject = find_subject(own, self._console)
            data, self._is_trained = _contest_data(self._options, subject), False
            self._found = (seed, subject, data)
        return own, subject, data


def _check(options: ComparisonOptions) -> None:
    """Refuse what was mistyped before anything is loaded."""
    _ = options.contestants
    for share in options.budgets:
        with in_typed_words():
            Budget(flops=share)
    for name in options.repair:
        check_name("repair", name, REPAIRS)
    options.conditions()
    if options.out is not None:
        check_comparison(options.out, options.subject.inputs)


def _contest_data(options: ComparisonOptions, subject: Subject) -> ContestData:
    data, name = subject.data, options.subject.data
    if data.evaluation is None:
        raise DataError(
            f"{name} has no batches to judge on, and those that criteria have seen would flatter. Let the function "
            "return a tuple: batches to score on, batches to evaluate on."
        )
    if options.tuning.epochs and data.training is None:
        raise DataError(
            f"--epochs {options.tuning.epochs} was asked for, and {name} has no training data. Name data that have "
            "some, or leave out --epochs to compare without fine-tuning."
        )
    return ContestData(
        scoring=data.scoring,
        test=data.evaluation,
        training=data.training,
        validation=data.validation,
        task=data.task,
    )


def _check_budgets(options: ComparisonOptions, subject: Subject) -> None:
    selection = default_selection(subject.model)
    for widths in {one.widths for one in options.contestants}:
        for share in options.budgets:
            with in_typed_words():
                own = replace(selection, widths=widths)
                check_reachable(subject.structure, Budget(flops=share), own)


def _facts(options: ComparisonOptions) -> dict[str, Any]:
    subject = asdict(options.subject) | {"weights": None}
    del subject["dense"]
    if options.subject.weights is not None:
        subject["weights"] = str(options.subject.weights)
    return {
        **subject,
        "seeds": list(options.seeds),
        "commit": commit(),
        "versions": versions(),
    }
