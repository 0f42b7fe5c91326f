"""What a fair comparison of criteria leaves behind: plain numbers, no networks.

A trial is one network: pruned by one contestant (a criterion and a rule for widths) to one budget with one seed,
judged, fine-tuned, judged again. All trials of a seed start from the same dense network and the same data. Figures are
taken on test data; whatever is chosen, such as who comes first in a table, is chosen on validation data.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import mean, stdev
from typing import Any

__all__ = [
    "Comparison",
    "Dense",
    "Judged",
    "Spread",
    "Trial",
    "dense_from_data",
    "trial_from_data",
]


@dataclass(frozen=True)
class Judged:
    """Means over `count` samples; None where a figure is not finite, or not known to the task."""

    loss: float | None
    accuracy: float | None
    count: int


@dataclass(frozen=True)
class Dense:
    """The network that all trials of a seed start from."""

    seed: int
    test: Judged
    validation: Judged | None
    widths: Mapping[str, int]
    """Units by group."""
    layer_macs: Mapping[str, int]
    """MACs by module, in the order of the forward pass."""

    @property
    def macs(self) -> int:
        """Of one forward pass over the example inputs."""
        return sum(self.layer_macs.values())


@dataclass(frozen=True)
class Trial:
    """One pruned network. `tuned_test` and `tuned_validation` are None where nothing was fine-tuned."""

    contestant: str
    seed: int
    asked: float
    """Share of the MACs that may stay."""
    got: float
    test: Judged
    validation: Judged | None
    tuned_test: Judged | None
    tuned_validation: Judged | None
    scored: int
    """Samples that the criterion read; 0 where it reads none."""
    prune_s: float
    tune_s: float
    widths: Mapping[str, int]
    layer_macs: Mapping[str, int]

    @property
    def final_test(self) -> Judged:
        """After fine-tuning, where there was any."""
        return self.tuned_test or self.test

    @property
    def final_validation(self) -> Judged | None:
        """After fine-tuning, where there was any."""
        return self.tuned_validation or self.validation


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and the standard deviation of a sample where there are several.

    >>> str(Spread.of([0.9, 0.8])), str(Spread.of([0.5])), str(Spread.of([0.5, None]))
    ('0.850 ± 0.071', '0.500', '–')
    """

    mean: float | None
    deviation: float | None
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> "Spread":
        """A figure that is missing anywhere has no mean: a mean over the seeds that went well would flatter."""
        found = list(values)
        numbers = [value for value in found if value is not None]
        if not numbers or len(numbers) < len(found):
            return Spread(None, None, len(found))
        deviation = stdev(numbers) if len(numbers) > 1 else None
        return Spread(mean(numbers), deviation, len(numbers))

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, form: str, scale: float = 1) -> str:
        """Written out, both numbers in the same form."""
        if self.mean is None:
            return "–"
        own = f"{self.mean * scale:{form}}"
        return own if self.deviation is None else f"{own} ± {self.deviation * scale:{form}}"


@dataclass(frozen=True)
class Comparison:
    """All trials in the order in which they were made, and what is needed to make them again."""

    dense: tuple[Dense, ...]
    trials: tuple[Trial, ...]
    contestants: Mapping[str, Mapping[str, str]]
    """By name: its criterion and its rule for widths."""
    baselines: tuple[str, ...] = ()
    """Those that are in every comparison."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def budgets(self) -> list[float]:
        """The largest first."""
        return sorted({trial.asked for trial in self.trials}, reverse=True)

    @property
    def is_tuned(self) -> bool:
        """Whether there are figures after fine-tuning."""
        return any(trial.tuned_test is not None for trial in self.trials)

    @property
    def measure(self) -> str:
        """What tables and plots show: `accuracy` where the task knows it, else `loss`."""
        return "accuracy" if all(d.test.accuracy is not None for d in self.dense) else "loss"

    @property
    def chosen_on(self) -> str | None:
        """The data that decide who comes first: `validation`, or None where there are none and nobody is chosen."""
        return None if any(t.final_validation is None for t in self.trials) else "validation"

    def figure(self, judged: Judged | None) -> float | None:
        """The measure of this comparison."""
        if judged is None:
            return None
        return judged.accuracy if self.measure == "accuracy" else judged.loss

    def of(self, contestant: str, budget: float | None = None) -> list[Trial]:
        """Trials of one contestant, at one budget or at all."""
        return [t for t in self.trials if t.contestant == contestant and budget in (None, t.asked)]

    def spread(
        self, contestant: str, budget: float, judged: Callable[[Trial], Judged | None]
    ) -> Spread:
        """The measure over seeds."""
        return Spread.of(self.figure(judged(trial)) for trial in self.of(contestant, budget))

    def dense_spread(self) -> Spread:
        """The measure of the dense networks over seeds."""
        return Spread.of(self.figure(dense.test) for dense in self.dense)

    def best_first(self) -> list[str]:
        """Contestants by their mean accuracy (else loss) on validation data over budgets and seeds, losses for ties.

        In the order in which they were named where there are no validation data: test data choose nothing.
        """
        names = list(self.contestants)
        if self.chosen_on is None:
            return names
        return sorted(names, key=self._place)

    def notable(self) -> list[str]:
        """Whom to show where not all can be: the first that was named, the best, and the baselines."""
        best = self.best_first()[:1] if self.chosen_on else []
        return list(dict.fromkeys([*list(self.contestants)[:1], *best, *self.baselines]))

    def as_data(self) -> dict[str, Any]:
        """Plain JSON without NaN; `from_data` reads it."""
        return {
            **self.facts,
            "figures_on": "test",
            "chosen_on": self.chosen_on,
            "best_first": self.best_first(),
            "contestants": {name: dict(own) for name, own in self.contestants.items()},
            "baselines": list(self.baselines),
            "dense": [asdict(dense) for dense in self.dense],
            "trials": [asdict(trial) for trial in self.trials],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "Comparison":
        """The comparison that `as_data` wrote."""
        here = {field.name for field in fields(Comparison)} - {"facts"}
        own = {*here, "figures_on", "chosen_on", "best_first"}
        return Comparison(
            dense=tuple(map(dense_from_data, data["dense"])),
            trials=tuple(map(trial_from_data, data["trials"])),
            contestants=data["contestants"],
            baselines=tuple(data["baselines"]),
            facts={name: value for name, value in data.items() if name not in own},
        )

    def _place(self, contestant: str) -> tuple[float, float]:
        judged = [trial.final_validation for trial in self.of(contestant)]
        accuracy = Spread.of(own.accuracy for own in judged if own is not None).mean
        loss = Spread.of(own.loss for own in judged if own is not None).mean
        return (-(accuracy or 0.0), math.inf if loss is None else loss)


def trial_from_data(data: Mapping[str, Any]) -> Trial:
    """The trial of which `data` is the dictionary."""
    return Trial(**_with_judged(data))


def dense_from_data(data: Mapping[str, Any]) -> Dense:
    """The dense network of which `data` is the dictionary."""
    return Dense(**_with_judged(data))


def _with_judged(data: Mapping[str, Any]) -> dict[str, Any]:
    names = ("test", "validation", "tuned_test", "tuned_validation")
    found = dict(data)
    for name in found.keys() & names:
        found[name] = None if found[name] is None else Judged(**found[name])
    return found
