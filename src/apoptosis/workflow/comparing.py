"""`compare`: which criterion keeps most? One dense network, many ways to make it smaller, nothing else different.

    for every seed, contestant and budget:   prune, judge, fine-tune, judge

Within a seed all contestants get the same dense network, the same samples to score on, the same number of steps and
repairs, the same fine-tuning: epochs, schedule, order of batches. Only who goes differs. Two contestants are in every
comparison, asked for or not: chance, which any criterion must beat, and the plainest thing people do, the same share of
every group by the norm of its weights.

Every trial is a function of the dense network and its cell (seed, contestant, budget) alone, and leaves a note in a
journal if there is one; cells that are noted are not run again.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from apoptosis.alignment import align_heads
from apoptosis.comparison import (
    Comparison,
    Dense,
    Judged,
    Trial,
    dense_from_data,
    trial_from_data,
)
from apoptosis.criteria import find_criterion
from apoptosis.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from apoptosis.modes import outside_inference_mode
from apoptosis.planning import Budget
from apoptosis.progress import track
from apoptosis.soundness import check_numbers
from apoptosis.structure import Structure, network_digest
from apoptosis.task import Batch, Task
from apoptosis.training import evaluate, fit_
from apoptosis.turns import one_at_a_time
from apoptosis.workflow.arguments import check_data
from apoptosis.workflow.contest import (
    BASELINES,
    CompareOptions,
    Contestant,
    ContestData,
    LaterPasses,
    Repeatable,
    contestants_of,
)
from apoptosis.workflow.notes import NETWORK
from apoptosis.workflow.pricing import traced_for_costs
from apoptosis.workflow.pruning import default_selection, prune

__all__ = ["compare"]

T = TypeVar("T", Dense, Trial)
NOTHING: Mapping[str, str] = MappingProxyType({})
NO_FIGURES = {"loss": None, "accuracy": None}
"""Of a network whose training has failed."""


class Notes(Protocol):
    """What is asked of a journal."""

    def read(self, name: str) -> Any:
        """A note with `.facts`, or None."""

    def write(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep the facts under that name."""


@outside_inference_mode
@one_at_a_time
def compare(
    model: nn.Module | Callable[[int], nn.Module],
    contestants: Iterable[Contestant | str],
    budgets: Iterable[float],
    data: ContestData | Callable[[int], ContestData],
    options: CompareOptions | None = None,
    *,
    journal: Notes | None = None,
) -> Comparison:
    """Prune one network in many ways, under conditions that are the same for all.

    Args:
        model: a trained network; or a function of the seed that gives one, where every seed has its own.
        contestants: names of criteria, or `Contestant`s; `BASELINES` join them.
        budgets: shares of the MACs that may stay.
        data: batches for each purpose; or a function of the seed.
        options: what is the same for all.
        journal: where finished trials are noted, and looked up when a run goes on.

    Returns:
        Figures of every trial; `report` has tables and plots of them.

    Raises:
        BudgetError: a budget cannot be met by one of the contestants.
        ConfigError: an unknown criterion, no budget, or one out of range.
        DataError: there is nothing to fine-tune on and epochs are asked for, or batches can be read only once.

    >>> from apoptosis.data import digits
    >>> from apoptosis.models import digits_cnn
    >>> parts = digits()
    >>> data = ContestData(scoring=parts.train.batches(400), test=parts.test.batches(300))
    >>> found = compare(digits_cnn(), ["taylor"], [0.5], data, CompareOptions(steps=1))
    >>> [trial.contestant for trial in found.trials]
    ['taylor', 'magnitude-l2-uniform', 'random']
    """
    options = options or CompareOptions()
    entrants, shares = contestants_of(contestants), _shares(budgets)
    cells = [(s, e, share) for s in options.seeds for e in entrants for share in shares]
    dense: list[Dense] = []
    trials: list[Trial] = []
    ground: _Ground | None = None
    for seed, entrant, share in track(cells, "comparing"):
        if ground is None or ground.seed != seed:
            ground = _Ground(seed, model, data, options)
            begun = {NETWORK: network_digest(model)} if isinstance(model, nn.Module) else {}
            dense.append(_noted(journal, f"{seed}-dense", ground.judge, dense_from_data, begun))
        run = partial(ground.run, entrant, share)
        trials.append(_noted(journal, f"{seed}-{entrant.name}-{share}", run, trial_from_data))
    return Comparison(
        dense=tuple(dense),
        trials=tuple(trials),
        contestants={e.name: {"criterion": e.criterion, "widths": e.widths} for e in entrants},
        baselines=tuple(baseline.name for baseline in BASELINES),
        facts={
            "options": json.loads(json.dumps(asdict(options))),
            "n": {
                "scoring": max(trial.scored for trial in trials),
                "test": dense[0].test.count,
                "validation": None if (own := dense[0].validation) is None else own.count,
            },
        },
    )


class _Ground:
    """What all trials of a seed share; made when it is first needed, for a run that goes on may not need it."""

    def __init__(
        self,
        seed: int,
        model: nn.Module | Callable[[int], nn.Module],
        data: ContestData | Callable[[int], ContestData],
        options: CompareOptions,
    ) -> None:
        self.seed, self._model, self._data, self._options = seed, model, data, options

    @cached_property
    def model(self) -> nn.Module:
        found = self._model if isinstance(self._model, nn.Module) else self._model(self.seed)
        check_numbers(found, "The network to compare on")
        return found

    @cached_property
    def data(self) -> ContestData:
        data = self._data if isinstance(self._data, ContestData) else self._data(self.seed)
        epochs = self._options.fit.epochs
        if epochs and data.training is None:
            raise DataError(
                f"epochs={epochs} of fine-tuning were asked for, and there are no training data. Give some, or "
                "compare without fine-tuning: epochs=0."
            )
        for batches in (data.scoring, data.test, data.validation):
            if batches is not None:
                check_data(batches)
        return data

    @cached_property
    def task(self) -> Task:
        return self.data.task or Task.classification()

    @cached_property
    def structure(self) -> Structure:
        return traced_for_costs(self.model, self.data.scoring, self.task).structure

    @cached_property
    def start(self) -> nn.Module:
        """What everybody prunes."""
        if not self._options.align:
            return self.model
        return align_heads(self.model, self.structure, self.data.scoring, self.task).model

    def judge(self) -> Dense:
        """The dense network."""
        test, validation = self._judged(self.model)
        widths = {group.name: group.size for group in self.structure.groups}
        return Dense(self.seed, test, validation, widths, self.structure.macs_by_module())

    def run(self, contestant: Contestant, share: float) -> Trial:
        """One cell, whatever has been run before."""
        with _seeded(self.model, self.seed):
            network, start = self.start, time.perf_counter()
            outcome = prune(
                network,
                self.data.scoring,
                Budget(flops=share),
                self.task,
                criterion=find_criterion(contestant.criterion).seeded(self.seed),
                steps=self._options.steps,
                selection=replace(default_selection(self.model), widths=contestant.widths),
                align=False,  # it is
                repair=self._options.repair,
            )
            pruned = time.perf_counter()
            test, validation = self._judged(outcome.model)
            tune_s, again = self._tuned(outcome.model)
        counts = outcome.plan.counts()
        return Trial(
            contestant=contestant.name,
            seed=self.seed,
            asked=share,
            got=next(spent.got for spent in outcome.spent if spent.what == "flops"),
            test=test,
            validation=validation,
            tuned_test=again[0],
            tuned_validation=again[1],
            scored=max(step.count for step in outcome.history),
            prune_s=pruned - start,
            tune_s=tune_s,
            widths={
                group.name: counts[group.name][0] if group.name in counts else group.size
                for group in self.structure.groups
            },
            layer_macs=self.structure.macs_by_module(outcome.plan),
        )

    def _judged(self, model: nn.Module) -> tuple[Judged, Judged | None]:
        test = _judge(model, self.data.test, self.task)
        validation = self.data.validation
        return test, None if validation is None else _judge(model, validation, self.task)

    def _tuned(self, model: nn.Module) -> tuple[float, tuple[Judged | None, Judged | None]]:
        """Fine-tune it where that is asked for; the seconds it took, and how it does then.

        One whose loss becomes NaN has no figures, and the others go on.
        """
        options, training = self._options.fit, self.data.training
        if not options.epochs or training is None:
            return 0.0, (None, None)
        batches = training(self.seed) if callable(training) else training
        if batches is training and isinstance(training, Repeatable):
            batches = LaterPasses(training, options.epochs * self._options.seeds.index(self.seed))
        start = time.perf_counter()
        own = replace(options, seed=self.seed)
        try:
            fit_(model, batches, self.task, own, validation=self.data.validation)
        except NonFiniteError:
            before = self._judged(model)
            gone = [None if judged is None else replace(judged, **NO_FIGURES) for judged in before]
            return time.perf_counter() - start, (gone[0], gone[1])
        return time.perf_counter() - start, self._judged(model)


def _judge(model: nn.Module, batches: Iterable[Batch], task: Task) -> Judged:
    found = evaluate(model, batches, task)
    return Judged(_finite(found.loss), _finite(found.metrics.get("correct")), found.count)


def _finite(value: float | None) -> float | None:
    """JSON has no NaN, and a network that was cut too far may give one."""
    return value if value is not None and math.isfinite(value) else None


def _shares(budgets: Iterable[float]) -> list[float]:
    shares = sorted(dict.fromkeys(budgets), reverse=True)
    if not shares:
        raise ConfigError("No budget was asked for. Say which shares of the MACs may stay: [0.5].")
    for share in shares:
        Budget(flops=share)
    return shares


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _noted(
    journal: Notes | None,
    name: str,
    run: Callable[[], T],
    read: Callable[[Mapping[str, Any]], T],
    begun: Mapping[str, str] = NOTHING,
) -> T:
    """What was noted under this name, or what `run` gives, which is noted with what tells the network.

    Raises:
        CheckpointError: the note is of another network.
    """
    if journal is None:
        return run()
    if (note := journal.read(name)) is not None:
        if note.facts.get(NETWORK, begun.get(NETWORK)) != begun.get(NETWORK):
            raise CheckpointError(
                "The notes are of a comparison of another network: weights or buffers of this one are others. Give the "
                "network that it began with, or begin again in a new folder."
            )
        return read({key: own for key, own in note.facts.items() if key != NETWORK})
    found = run()
    journal.write(name, {**asdict(found), **begun})  # pyright: ignore[reportArgumentType] - records alone are noted
    return found
