"""Which units go: budgets in exact costs, selection by score, plans.

`Budget` says how much may stay, `Selection` how to choose; `bundles` turns groups, ties, floors and rounding into the
moves that are allowed; `moves` takes the cheapest of them until every budget is met; `make_plan` resolves the result
into a `Plan`. This room reads scores and structures. It runs no model.
"""

from apoptosis.planning.budget import Budget, spending
from apoptosis.planning.limits import Limits, check_reachable, limits_of, within_reach
from apoptosis.planning.planner import make_plan, plan_within
from apoptosis.planning.selection import Selection

__all__ = [
    "Budget",
    "Limits",
    "Selection",
    "check_reachable",
    "limits_of",
    "make_plan",
    "plan_within",
    "spending",
    "within_reach",
]
