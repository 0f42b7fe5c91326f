"""Whole runs, in many small steps, scored anew at each: `prune` cuts units, `sparsify` zeroes single weights.

Gets models and data as arguments, returns records.
"""

from apoptosis.workflow.arguments import first_sample
from apoptosis.workflow.pruning import DEFAULT_CRITERION, DEFAULT_STEPS, default_selection, prune
from apoptosis.workflow.sparsifying import (
    BATCH_NORM_POLICIES,
    DEFAULT_STAGES,
    sparsify,
)

__all__ = [
    "BATCH_NORM_POLICIES",
    "DEFAULT_CRITERION",
    "DEFAULT_STAGES",
    "DEFAULT_STEPS",
    "default_selection",
    "first_sample",
    "prune",
    "sparsify",
]
