"""First-order Taylor: θ ⊙ g, with g the gradient of the mean loss over all samples.

Removing weight q changes the loss by −θ_q g_q to first order. On a chain of bias-free ReLU layers OBA's score is this
one times the number of layers less one.
"""

from collections.abc import Iterable

from torch import nn

from apoptosis.criteria.scores import Scores, trainable
from apoptosis.curvature import mean_gradient
from apoptosis.modes import in_eval_mode
from apoptosis.task import Batch, Task

__all__ = ["taylor"]


def taylor(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    micro_batch: int | None = None,
) -> Scores:
    """θ ⊙ g, signed, in eval mode."""
    with in_eval_mode(model):
        found = mean_gradient(model, batches, task, micro_batch=micro_batch)
    parameters = trainable(model)
    values = {name: parameters[name] * gradient for name, gradient in found.product.items()}
    return Scores(values, "taylor", {}, found.count, unreached=found.unreached)
