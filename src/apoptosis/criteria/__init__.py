"""What each parameter is worth: criteria, found by name in one table, giving signed `Scores`.

Start with `table.CRITERIA`; one file per family. `ranking` measures how well scores rank channels against the truth.
This room turns curvature into scores; what a group of parameters is, and what is cut, is decided elsewhere.
"""

from apoptosis.criteria.data_free import magnitude, random
from apoptosis.criteria.oba import oba
from apoptosis.criteria.obd import obd
from apoptosis.criteria.ranking import channel_scores, masking_truth, spearman
from apoptosis.criteria.scores import Scores
from apoptosis.criteria.table import CRITERIA, Criterion, find_criterion
from apoptosis.criteria.taylor import taylor

__all__ = [
    "CRITERIA",
    "Criterion",
    "Scores",
    "channel_scores",
    "find_criterion",
    "magnitude",
    "masking_truth",
    "oba",
    "obd",
    "random",
    "spearman",
    "taylor",
]
