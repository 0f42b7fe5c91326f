"""What a pruning run leaves behind: the small network, how it came about, and what was asked and got.

Records are plain data made by the workflows, kept by checkpoints and drawn by reports. Costs are MACs of one forward
pass over the example inputs, and parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from apoptosis.masks import MaskPlan
    from apoptosis.structure import Plan

__all__ = ["Outcome", "ScoreSummary", "Spending", "StepRecord"]

AnyPlan = TypeVar("AnyPlan", bound="Plan | MaskPlan", covariant=True)


@dataclass(frozen=True)
class ScoreSummary:
    """The spread of one group's unit scores, or of what ranks one tensor's weights."""

    lowest: float
    median: float
    highest: float


@dataclass(frozen=True)
class Spending:
    """One line of a budget: what may stay, what stays, as shares of the dense network; and the absolute numbers."""

    what: str
    asked: float
    got: float
    dense: int
    left: int

    def __str__(self) -> str:
        asked = f"asked {self.asked:.1%}, got" if self.asked < 1 else "nothing asked, got"
        return f"{self.what}: {asked} {self.got:.2%} ({self.left:,} of {self.dense:,})"


@dataclass(frozen=True)
class StepRecord:
    """One step: the network was scored, units were removed.

    Where single weights are removed, they are the units, and their tensor is the group.
    """

    step: int
    loss: float | None
    """Mean loss of the network that was scored, before the removal; None where the criterion reads no data."""
    count: int
    """Samples the scores are a mean over."""
    scores: Mapping[str, ScoreSummary]
    removed: Mapping[str, int]
    """Units that went, by group; below zero where some came back in the last step to spend the budget."""
    left: Mapping[str, int]
    """Units that stayed, of every group; of every tensor that was ranked, where single weights went."""
    macs: int | None
    """None where single weights went: a MAC with a zero is still done."""
    params: int
    """Those that are not zero, where single weights went."""
    seconds: float


@dataclass(frozen=True)
class Outcome(Generic[AnyPlan]):
    """A smaller network and its history. `str(outcome)` shows asked and got side by side."""

    model: nn.Module
    plan: AnyPlan
    """From the dense network to `model`, all steps as one: units cut, or single weights masked."""
    history: tuple[StepRecord, ...] = ()
    spent: tuple[Spending, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Criterion, aggregation, selection, steps, seeds: what is needed to do it again. Plain JSON values."""
    example_inputs: Any = field(default=None, repr=False)
    """What the model was traced on."""
    dense: nn.Module | None = field(default=None, repr=False)
    """What `plan` leads from: the network given, or the same in other coordinates where heads were aligned, of which
    the plan is one. None where it is no single network, as in rounds after the first, and from a checkpoint."""

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}, {self.plan}"]
        if few := self.settings.get("few_groups"):
            names = ", ".join(list(few["groups"])[:3])
            lines.append(
                f"few groups pay for all: {names}; Selection(cap=0.5) or widths='uniform' spreads it"
            )
        return "\n  ".join([*lines, *map(str, self.spent)])
