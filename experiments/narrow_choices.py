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
    mended: bool = False
    """Batch norms are measured anew after every step."""

    def named(self, draw: int) -> Criterion:
        """The criterion; chance has another seed in every draw."""
        if self.criterion == "random":
            return Criterion("random", "chance", partial(random, seed=draw))
        return CRITERIA[self.criterion]


ENTRIES = Aggregation(absolute="entry", roles=("producer", "consumer"))
CONSUMERS = Aggregation(absolute="slice", roles=("consumer",))
PRICED = Selection(per="cost")

REPORTED: tuple[Choice, ...] = tuple(
    Choice(
        f"{name} {steps} {how.absolute}{' mended' if mended else ''}",
        name,
        steps,
        how,
        PRICED,
        mended,
    )
    for name, how in (
        ("obd-ggn", ENTRIES),
        ("obd-fisher", ENTRIES),
        ("oba", ENTRIES),
        ("oba-hessian", ENTRIES),
        ("oba-ggn", ENTRIES),
        ("oba-ggn", CONSUMERS),
        ("taylor", ENTRIES),
        ("taylor", CONSUMERS),
    )
    for steps in (5, 20)
    for mended in (False, True)
)
