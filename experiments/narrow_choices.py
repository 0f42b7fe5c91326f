"""What `narrow_criteria.py report` runs: one row per way of pruning."""

from dataclasses import dataclass, field
from functools import partial

from apoptosis.criteria import AGGREGATIONS, CRITERIA, Aggregation, Criterion, random
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


ENTRIES = Aggregation(absolute="entry", roles=("producer", "consumer"))
PAPER = AGGREGATIONS["paper"]
PRICED, PLAIN = Selection(per="cost"), Selection(per="unit")
UNIFORM = Selection(widths="uniform", per="unit")
INTERNAL = Selection(per="cost", names=("layer*.conv1",))
"""Only channels inside blocks, no streams."""

INTERNAL_PLAIN = Selection(per="unit", names=("layer*.conv1",))
MEANS = Aggregation(
    absolute="entry",
    roles=("producer", "carrier", "consumer"),
    over_slices="mean",
    normalise="mean",
)
"""Torch-Pruning's way."""

# Long ones first, so that workers end together.
REPORTED: tuple[Choice, ...] = (
    *(
        Choice(f"{name}, entries per MAC, {steps} steps", name, steps, ENTRIES, PRICED)
        for name, steps in (
            ("obd-ggn", 20),
            ("oba", 50),
            ("obd-fisher", 20),
            ("oba", 20),
            ("oba-hessian", 20),
            ("oba-ggn", 20),
            ("taylor", 20),
            ("oba", 10),
            ("magnitude", 20),
            ("oba", 5),
        )
    ),
    *(
        Choice(f"{name}, the paper's way, 20 steps", name, 20, PAPER, PLAIN)
        for name in ("oba", "taylor", "magnitude")
    ),
    *(
        Choice(f"{name}, 20 steps", name, 20, None, PLAIN)
        for name in ("taylor-gate", "taylor-activation")
    ),
    *(
        Choice(f"{name}, entries per MAC, block channels, 20 steps", name, 20, ENTRIES, INTERNAL)
        for name in ("oba", "taylor")
    ),
    *(
        Choice(f"{name}, entries per MAC", name, 1, ENTRIES, PRICED)
        for name in CRITERIA
        if CRITERIA[name].score is not None
    ),
    *(
        Choice(f"{name}, the paper's way", name, 1, PAPER, PLAIN)
        for name in ("oba", "oba-hessian", "taylor", "obd-ggn", "obd-fisher", "magnitude", "random")
    ),
    *(
        Choice(f"{name}, uniform widths", name, 1, ENTRIES, UNIFORM)
        for name in ("oba", "taylor", "obd-ggn", "magnitude", "random")
    ),
    *(Choice(name, name, 1, None, PLAIN) for name in ("taylor-gate", "taylor-activation")),
    *(
        Choice(f"{name}, entries per MAC, block channels", name, 1, ENTRIES, INTERNAL)
        for name in ("oba", "taylor", "obd-ggn", "magnitude", "random")
    ),
    *(
        Choice(f"magnitude-l2, mean-normalised{where}", "magnitude-l2", 1, MEANS, selection)
        for where, selection in (("", PLAIN), (", block channels", INTERNAL_PLAIN))
    ),
)
