"""Which units go: budgets in exact costs, selection by score, plans.

`Budget` says how much may stay, `Selection` how to choose; `bundles` turns groups, ties, floors and rounding into the
moves that are allowed; `moves` takes the cheapest of them until every budget is met, and `joint` puts them in order
where scores say what units cost together; `make_plan` resolves the result into a `Plan`. For single weights, `Sparsity`
says how many stay and `make_masks` which, by an exact threshold (`thresholds`). This room reads scores and structures.
It runs no model.
"""

from apoptosis.planning.budget import Budget, spending
from apoptosis.planning.limits import Limits, check_reachable, limits_of, within_reach
from apoptosis.planning.masking import check_not_emptied, check_shares, make_masks
from apoptosis.planning.planner import kept_within, make_plan, plan_within
from apoptosis.planning.selection import Selection
from apoptosis.planning.sparsity import Sparsity
from apoptosis.planning.thresholds import Threshold, threshold

__all__ = [
    "Budget",
    "Limits",
    "Selection",
    "Sparsity",
    "Threshold",
    "check_not_emptied",
    "check_reachable",
    "check_shares",
    "kept_within",
    "limits_of",
    "make_masks",
    "make_plan",
    "plan_within",
    "spending",
    "threshold",
    "within_reach",
]
