"""The table of criteria: what the command line, the documentation and the tests know them by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

from torch import nn

from apoptosis.criteria.aggregation import (
    Aggregation,
    UnitScores,
    find_aggregation,
    normalised,
    unit_scores,
)
from apoptosis.criteria.data_free import magnitude, random
from apoptosis.criteria.gates import gates
from apoptosis.criteria.oba import oba
from apoptosis.criteria.obd import obd
from apoptosis.criteria.obs import obs_units
from apoptosis.criteria.saliency import SALIENCIES, Saliency, find_saliency
from apoptosis.criteria.scores import Scores
from apoptosis.criteria.taylor import taylor, taylor_units
from apoptosis.errors import ConfigError
from apoptosis.modes import outside_inference_mode
from apoptosis.soundness import check_numbers
from apoptosis.structure import Structure
from apoptosis.task import Batch, Task

__all__ = ["CRITERIA", "Criterion", "find_criterion"]


@dataclass(frozen=True)
class Criterion:
    """A criterion with its options settled: of parameters, which are gathered into units, or of units themselves."""

    name: str
    summary: str
    score: Callable[[nn.Module, Iterable[Batch], Task | None], Scores] | None = None
    score_units: (
        Callable[[nn.Module, Structure, Iterable[Batch], Task | None], UnitScores] | None
    ) = None
    aggregation: Aggregation = Aggregation()
    """How its scores are gathered unless one says otherwise."""
    saliency: Saliency = SALIENCIES["balanced"]
    """How its scores rank single weights unless one says otherwise."""
    reads_data: bool = True
    steps: int = 20
    """How often a network is scored and cut by it, unless one says otherwise."""
    repair: tuple[str, ...] = ()
    """What its scores count on being done afterwards, by name."""
    align: bool = False
    """Whether attention heads are turned into their principal axes first, unless one says otherwise."""

    def __post_init__(self) -> None:
        if (self.score is None) == (self.score_units is None):
            raise ConfigError(
                f"The criterion {self.name!r} has {'neither' if self.score is None else 'both'} of `score` and "
                "`score_units`; it takes one: `score` gives Scores of parameters, `score_units` UnitScores."
            )

    @outside_inference_mode
    def units(
        self,
        model: nn.Module,
        structure: Structure,
        batches: Iterable[Batch],
        task: Task | None = None,
        aggregation: Aggregation | str | None = None,
    ) -> UnitScores:
        """Score the units of a model; `aggregation` is the criterion's own unless given."""
        check_numbers(model)
        if self.score is not None:
            scores = self.score(model, batches, task)
            found = unit_scores(scores, structure, self.gathered(aggregation))
        else:
            assert self.score_units is not None, "a criterion scores one or the other"
            found = self.score_units(model, structure, batches, task)
            if not isinstance(found, UnitScores):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"The criterion {self.name!r} gave a {type(found).__name__} where UnitScores were expected."
                )
            if aggregation is not None:
                how = find_aggregation(aggregation).normalise
                values = {name: normalised(own, how) for name, own in found.values.items()}
                # A group's own scale is not that of what it shares with others.
                kept = found.interactions if how == "none" else {}
                found = replace(found, values=values, interactions=kept)
        return replace(found, criterion=self.name)

    def seeded(self, seed: int) -> "Criterion":
        """The same with other random numbers; itself where it draws none.

        >>> CRITERIA["taylor"].seeded(3) is CRITERIA["taylor"]
        True
        """
        score: Callable[..., Any] = self.score or self.score_units  # pyright: ignore[reportAssignmentType]
        if "seed" not in signature(score).parameters:
            return self
        seeded = partial(score, seed=seed)
        return replace(self, score=seeded) if self.score else replace(self, score_units=seeded)

    def weighed(self, saliency: Saliency | str | None) -> Saliency:
        """The saliency asked for, or its own."""
        return self.saliency if saliency is None else find_saliency(saliency)

    def gathered(self, aggregation: Aggregation | str | None) -> Aggregation:
        """The aggregation asked for, or its own."""
        return self.aggregation if aggregation is None else find_aggregation(aggregation)


_ENTRIES = (
    Criterion("oba", "θ ⊙ Hθ, the paper's products (connectivity)", oba),
    Criterion(
        "oba-functional", "θ ⊙ Hθ, curvature of the network alone", partial(oba, kind="functional")
    ),
    Criterion("oba-hessian", "θ ⊙ Hθ, the Hessian of the loss", partial(oba, kind="hessian")),
    Criterion("oba-ggn", "θ ⊙ Hθ, Gauss-Newton", partial(oba, kind="ggn")),
    Criterion("taylor", "θ ⊙ g", taylor),
    Criterion(
        "taylor-gate",
        "|∂L/∂γ| of a factor γ on each unit",
        score_units=partial(taylor_units, form="gate"),
    ),
    Criterion(
        "taylor-activation",
        "mean over samples of |mean over positions of a ⊙ ∂ℓ/∂a|",
        score_units=partial(taylor_units, form="activation"),
    ),
    Criterion(
        "gates",
        "½ diag of Gauss-Newton by a factor on each unit, with interactions",
        score_units=gates,
    ),
    Criterion(
        "obs",
        "what a unit costs when its readers are refitted, along the cheapest path",
        score_units=obs_units,
        steps=1,
        repair=("refit", "refit_blocks"),
        align=True,
    ),
    Criterion("obd-hessian", "½ θ² diag H, by Hutchinson", partial(obd, diagonal="hessian")),
    Criterion("obd-ggn", "½ θ² diag of Gauss-Newton, by Hutchinson", partial(obd, diagonal="ggn")),
    Criterion(
        "obd-fisher", "½ θ² mean squared gradient per sample", partial(obd, diagonal="fisher")
    ),
    *(
        Criterion(name, summary, score, saliency=SALIENCIES["plain"], reads_data=False)
        for name, summary, score in (
            ("magnitude", "|θ|", magnitude),
            ("magnitude-l2", "θ²", partial(magnitude, power=2.0)),
            ("random", "uniform on (0, 1)", random),
        )
    ),
)

CRITERIA = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find_criterion(name: str) -> Criterion:
    """The criterion called `name`, or an error that lists all."""
    if not isinstance(name, str) or name not in CRITERIA:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"The criterion {name!r} was asked for; there are {', '.join(CRITERIA)}.")
    return CRITERIA[name]
