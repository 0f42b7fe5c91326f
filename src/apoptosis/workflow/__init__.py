"""Whole runs: `prune` takes a network to a budget in many small steps, scored anew at each.

Gets models and data as arguments, returns records.
"""

from apoptosis.workflow.arguments import first_sample
from apoptosis.workflow.pruning import DEFAULT_CRITERION, DEFAULT_STEPS, default_selection, prune

__all__ = ["DEFAULT_CRITERION", "DEFAULT_STEPS", "default_selection", "first_sample", "prune"]
