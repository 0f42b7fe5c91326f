"""Plans that take nearly all from few groups: told, because such a network seldom works, and the budget looks met.

A criterion whose scores are of another size in every layer ranks whole layers before others. Then a few groups are
hollowed out, down to a tenth of their units or less, and give most of what the budget asks for, while nearly all others
stay as they are. What each group gives is what it saves if it alone is cut so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apoptosis.planning import Selection
from apoptosis.structure import Plan, Structure

__all__ = ["Concentration", "concentration_of"]

HOLLOW = 0.1
"""A group that keeps no larger share of its units is hollowed out."""
MOST = 0.5
"""Of what is saved; what hollow groups give, for them to be told."""
FEW = 1 / 3
"""Of the groups that may shrink."""


@dataclass(frozen=True)
class Concentration:
    """Groups that were hollowed out, and the share of all savings that they give."""

    groups: Mapping[str, tuple[int, int]]
    """Kept and former number of units."""
    share: float

    def as_data(self) -> dict[str, Any]:
        """As settings have it."""
        groups = {name: list(own) for name, own in self.groups.items()}
        return {"groups": groups, "share": self.share}


def concentration_of(
    dense: Structure, plan: Plan, selection: Selection, what: str = "flops"
) -> Concentration | None:
    """What to tell of a plan; None where it takes from many groups, or hollows none out.

    Args:
        dense: the structure that the plan is of.
        plan: who is left.
        selection: which groups might have given something.
        what: the budget's measure: `params` counts parameters, all others MACs.
    """
    counts, open_ = plan.counts(), selection.groups(dense)
    hollow = {name: (kept, size) for name, (kept, size) in counts.items() if kept <= HOLLOW * size}
    if not hollow or len(hollow) > FEW * len(open_):
        return None
    cost = dense.params if what == "params" else dense.macs
    saved = {name: cost() - cost({name: kept}) for name, (kept, _) in counts.items()}
    share = sum(saved[name] for name in hollow) / max(1, sum(saved.values()))
    return Concentration(hollow, share) if share >= MOST else None
