"""Optimal Brain Apoptosis: θ ⊙ Hθ, every weight's exact part in the second-order change of the loss.

The paper expands the loss along δ = θ: entry q of δ ⊙ Hδ collects the interactions of weight q with all others. Which
H is the `kind`: the paper's theorems give `connectivity`. With `first_order` = c the score is θ ⊙ (Hθ + c·g); the
paper's code uses c = 0.

This is not the loss change of removing weight q alone, which is −θ_q g_q + ½ θ_q² H_qq (`obd` has its second part).
"""

from collections.abc import Iterable

from torch import nn

from apoptosis.criteria.scores import Scores, trainable
from apoptosis.curvature import curvature_product
from apoptosis.modes import in_eval_mode
from apoptosis.soundness import check_numbers
from apoptosis.task import Batch, Task

__all__ = ["oba"]


def oba(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    kind: str = "connectivity",
    first_order: float = 0.0,
    micro_batch: int | None = None,
) -> Scores:
    """θ ⊙ Hθ by exact curvature products, in eval mode.

    Args:
        model: any module; nothing of it changes.
        batches: data to score on.
        task: what a batch is and what its loss is; classification unless said.
        kind: `connectivity` (the paper's), `functional`, `hessian` or `ggn`.
        first_order: how much of θ ⊙ g to add; 0 as published.
        micro_batch: at most so many samples at once, to bound memory.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> scores = oba(model, [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))], kind="hessian")
    >>> scores.values["weight"].shape
    torch.Size([2, 3])
    """
    check_numbers(model)
    wants_gradient = first_order != 0
    with in_eval_mode(model):
        found = curvature_product(
            model, batches, task, kind=kind, gradient=wants_gradient, micro_batch=micro_batch
        )
    parameters = trainable(model)
    values = {name: parameters[name] * product for name, product in found.product.items()}
    if found.gradient is not None:
        for name, gradient in found.gradient.items():
            values[name] += first_order * parameters[name] * gradient
    return Scores(
        values,
        "oba",
        {"kind": kind, "first_order": first_order},
        found.count,
        found.fallbacks,
        found.unreached,
        found.loss,
    )
