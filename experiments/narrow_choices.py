"""What `narrow_criteria.py report` runs: one row per way of pruning."""

from dataclasses import dataclass, field
from functools import partial

from apoptosis.criteria import CRITERIA, Aggregation, Criterion, random
from apoptosis.planning import Selection

__all__ = ["REPORTED", "Choice"]


@dataclass(frozen=True)
class Choice:
    label: str
    criterion: str
    steps: int = 1
    aggregation: Aggregation | None = None
    selection: Selection = field(default_factory=Selection)

    def named(self, draw: int) -> Criterion:
        """The criterion; chance has another seed in every draw."""
        if self.criterion == "random":
            return Criterion("random", "chance", partial(random, seed=draw))
        return CRITERIA[self.criterion]


REPORTED: tuple[Choice, ...] = ()
