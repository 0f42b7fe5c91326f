"""What each parameter and each unit is worth: criteria, found by name in one table.

Start with `table.CRITERIA`; one file per family. Most give signed `Scores` of parameters, which `aggregation` gathers
into `UnitScores`. `ranking` measures how well scores rank units against the truth. What a unit is comes from
`structure`; how many of them go is decided in `planning`.
"""

from apoptosis.criteria.aggregation import AGGREGATIONS, Aggregation, UnitScores, unit_scores
from apoptosis.criteria.data_free import magnitude, random
from apoptosis.criteria.gates import gates
from apoptosis.criteria.oba import oba
from apoptosis.criteria.obd import obd
from apoptosis.criteria.obs import obs_units, priced_groups
from apoptosis.criteria.ranking import spearman, unit_truth
from apoptosis.criteria.saliency import SALIENCIES, Saliency, find_saliency, saliencies
from apoptosis.criteria.scores import Scores
from apoptosis.criteria.table import CRITERIA, Criterion, find_criterion
from apoptosis.criteria.taylor import taylor, taylor_units

__all__ = [
    "AGGREGATIONS",
    "CRITERIA",
    "SALIENCIES",
    "Aggregation",
    "Criterion",
    "Saliency",
    "Scores",
    "UnitScores",
    "find_criterion",
    "find_saliency",
    "gates",
    "magnitude",
    "oba",
    "obd",
    "obs_units",
    "priced_groups",
    "random",
    "saliencies",
    "spearman",
    "taylor",
    "taylor_units",
    "unit_scores",
    "unit_truth",
]
