"""Whole runs, in many small steps, scored anew at each: `prune` cuts units, `sparsify` zeroes single weights.

With training: `one_shot` fine-tunes once, `iterative` after each of several budgets, `gradual` after each stage of
single weights; `compare` lets criteria compete. Each is a function from top to bottom that gets models and data as
arguments, returns records, and goes on from its notes if a journal has some.
"""

from apoptosis.workflow.arguments import first_sample
from apoptosis.workflow.choosing import (
    DEFAULT_CRITERION,
    FALLBACK_CRITERION,
    choose_criterion,
    settled,
)
from apoptosis.workflow.comparing import compare
from apoptosis.workflow.contest import (
    BASELINES,
    CompareOptions,
    Contestant,
    ContestData,
    contestants_of,
)
from apoptosis.workflow.gradual import Sparsifying, gradual
from apoptosis.workflow.iterative import iterative, rounds_of
from apoptosis.workflow.one_shot import Pruning, one_shot
from apoptosis.workflow.pruning import default_selection, prune
from apoptosis.workflow.sparsifying import (
    BATCH_NORM_POLICIES,
    DEFAULT_WEIGHT_CRITERION,
    default_stages,
    sparsify,
)
from apoptosis.workflow.tuning import DEFAULT_TUNING, Material

__all__ = [
    "BASELINES",
    "BATCH_NORM_POLICIES",
    "DEFAULT_CRITERION",
    "DEFAULT_TUNING",
    "DEFAULT_WEIGHT_CRITERION",
    "FALLBACK_CRITERION",
    "CompareOptions",
    "ContestData",
    "Contestant",
    "Material",
    "Pruning",
    "Sparsifying",
    "choose_criterion",
    "compare",
    "contestants_of",
    "default_selection",
    "default_stages",
    "first_sample",
    "gradual",
    "iterative",
    "rounds_of",
    "one_shot",
    "prune",
    "settled",
    "sparsify",
]
