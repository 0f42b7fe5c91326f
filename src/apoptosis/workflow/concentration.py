"""Warnings about plans that take nearly all from few groups: the budget is met, and such a network seldom works.

A criterion whose scores are of another size in every layer ranks whole layers before others. Then few groups are
hollowed out: they keep less than a quarter of what the median group keeps. Of a ResNet20 on the digits, without repair,
the smallest share that any of 13 groups keeps, and the share of 300 test images that are right:

    MACs gone     obs        oba        taylor     taylor-activation  magnitude-l2  random
    30 %          .27 .78    .48 .87    .42 .83    .22 .45            .08 .12       .09 .12
    50 %          .18 .28    .30 .32    .23 .38    .09 .12            .02 .11       .02 .11

One seed a row; at 30 % scored on 300 images after three epochs of training, at 50 % on 100 after one (dense .91). The
bounds below were chosen by looking at this table, so it does not show how well they do on other networks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from apoptosis.planning import Selection
from apoptosis.structure import Plan, Structure

__all__ = ["Concentration", "concentration_of"]

HOLLOW = 0.25
"""Of what the median group keeps; one that keeps no larger share of its units is hollowed out."""
FEW = 1 / 3
"""Of the groups that may shrink: where more are hollowed out, there are not few of them."""
LITTLE = 0.2
"""Of the cost; a plan that saves less has no need of many groups."""


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
    """What to tell of a plan; None where it takes from many groups, hollows none out, or saves little.

    Args:
        dense: the structure that the plan is of.
        plan: who is left.
        selection: which groups might have given something.
        what: the budget's measure: `params` counts parameters, all others MACs.
    """
    counts, open_ = plan.counts(), selection.groups(dense)
    left = {group.name: 1.0 for group in open_}
    left |= {name: kept / size for name, (kept, size) in counts.items()}
    hollow = {
        name: own for name, own in counts.items() if left[name] <= HOLLOW * median(left.values())
    }
    cost = dense.params if what == "params" else dense.macs
    saves_little = cost(plan) > (1 - LITTLE) * cost()
    if not hollow or len(hollow) > FEW * len(left) or saves_little:
        return None
    saved = {name: cost() - cost({name: kept}) for name, (kept, _) in counts.items()}
    share = sum(saved[name] for name in hollow) / max(1, sum(saved.values()))
    return Concentration(hollow, share)
