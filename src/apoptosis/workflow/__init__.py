"""Whole runs, in many small steps, scored anew at each: `prune` cuts units, `sparsify` zeroes single weights.

Gets models and data as arguments, returns records.
"""

from apoptosis.workflow.arguments import first_sample
from apoptosis.workflow.comparing import compare
from apoptosis.workflow.contest import (
    BASELINES,
    CompareOptions,
    Contestant,
    ContestData,
    contestants_of,
)
from apoptosis.workflow.pruning import DEFAULT_CRITERION, DEFAULT_STEPS, default_selection, prune
from apoptosis.workflow.sparsifying import (
    BATCH_NORM_POLICIES,
    DEFAULT_WEIGHT_CRITERION,
    default_stages,
    sparsify,
)

__all__ = [
    "BASELINES",
    "BATCH_NORM_POLICIES",
    "DEFAULT_CRITERION",
    "DEFAULT_STEPS",
    "DEFAULT_WEIGHT_CRITERION",
    "CompareOptions",
    "ContestData",
    "Contestant",
    "compare",
    "contestants_of",
    "default_selection",
    "default_stages",
    "first_sample",
    "prune",
    "sparsify",
]
