"""Training and evaluation of any model under any task. Gets models and data as arguments."""

from apoptosis.training.evaluation import Evaluation, evaluate
from apoptosis.training.fitting import Epoch, Fit, at_pass, fit_
from apoptosis.training.options import FitOptions
from apoptosis.training.schedules import SCHEDULES

__all__ = ["SCHEDULES", "Epoch", "Evaluation", "Fit", "FitOptions", "at_pass", "evaluate", "fit_"]
