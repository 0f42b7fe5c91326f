"""Training and evaluation of any model under any task. Gets models and data as arguments."""

from apoptosis.training.evaluation import Evaluation, evaluate
from apoptosis.training.fitting import Epoch, FitOptions, fit_
from apoptosis.training.schedules import SCHEDULES

__all__ = ["SCHEDULES", "Epoch", "Evaluation", "FitOptions", "evaluate", "fit_"]
