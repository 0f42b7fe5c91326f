"""Optimal Brain Damage: ½ θ² h, with h the diagonal of a curvature matrix.

The loss change of removing one weight at a minimum, all others staying. h is the diagonal

- `hessian`: of the exact Hessian, by Hutchinson's estimate with `probes` sign vectors per batch;
- `ggn`: of the generalised Gauss-Newton matrix, by the same estimate, never negative in expectation;
- `fisher`: the mean over *samples* of the squared gradient, labels drawn from the model (or those of the data). The
  square of a batch's mean gradient, as some public code has it, is none of these.
"""

from collections.abc import Iterable

from torch import nn

from apoptosis.criteria.scores import Scores, trainable
from apoptosis.curvature import curvature_diagonal, fisher_diagonal
from apoptosis.errors import ConfigError
from apoptosis.modes import in_eval_mode
from apoptosis.soundness import check_numbers
from apoptosis.task import Batch, Task

__all__ = ["obd"]

DIAGONALS = ("hessian", "ggn", "fisher")


def obd(  # noqa: PLR0913 - three diagonals, each with its own dial
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    diagonal: str = "hessian",
    probes: int = 8,
    labels: str = "sampled",
    seed: int = 0,
) -> Scores:
    """½ θ² h, in eval mode.

    Args:
        model: any module; nothing of it changes.
        batches: data to score on.
        task: what a batch is and what its loss is; classification unless said.
        diagonal: `hessian`, `ggn` or `fisher`.
        probes: sign vectors per batch, for the first two.
        labels: `sampled` or `data`, for `fisher`.
        seed: for signs and labels.

    Raises:
        ConfigError: no such diagonal.
    """
    if diagonal not in DIAGONALS:
        raise ConfigError(
            f"The diagonal {diagonal!r} was asked for; there are {', '.join(DIAGONALS)}."
        )
    check_numbers(model)
    with in_eval_mode(model):
        if diagonal == "fisher":
            found = fisher_diagonal(model, batches, task, labels=labels, seed=seed)
            options = {"diagonal": diagonal, "labels": labels, "seed": seed}
        else:
            found = curvature_diagonal(
                model, batches, task, kind=diagonal, probes=probes, seed=seed
            )
            options = {"diagonal": diagonal, "probes": probes, "seed": seed}
    parameters = trainable(model)
    values = {name: 0.5 * parameters[name] ** 2 * h for name, h in found.product.items()}
    return Scores(values, "obd", options, found.count, found.fallbacks, found.unreached, found.loss)
