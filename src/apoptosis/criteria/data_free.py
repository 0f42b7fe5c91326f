"""Criteria that read no data: the weights' magnitude, and chance.

They take batches and a task like all others, so that every criterion is called alike, and do not touch them.
"""

from collections.abc import Iterable

import torch
from torch import nn

from apoptosis.criteria.scores import Scores, trainable
from apoptosis.errors import ConfigError
from apoptosis.task import Batch, Task

__all__ = ["magnitude", "random"]


def magnitude(
    model: nn.Module,
    batches: Iterable[Batch] = (),  # noqa: ARG001 - called like every criterion
    task: Task | None = None,  # noqa: ARG001
    *,
    power: float = 1.0,
) -> Scores:
    """|θ|ᵖ: the simplest thing that works, and the baseline every table must carry."""
    if not power > 0:
        raise ConfigError(
            f"power={power} was asked for; magnitudes grow with the weights only for a power above 0."
        )
    values = {
        name: p.to(torch.promote_types(p.dtype, torch.float32)).abs() ** power
        for name, p in trainable(model).items()
    }
    return Scores(values, "magnitude", {"power": power})


def random(
    model: nn.Module,
    batches: Iterable[Batch] = (),  # noqa: ARG001 - called like every criterion
    task: Task | None = None,  # noqa: ARG001
    *,
    seed: int = 0,
) -> Scores:
    """Uniform on (0, 1): what any criterion must beat."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.rand(
            p.shape, generator=generator, dtype=torch.promote_types(p.dtype, torch.float32)
        ).to(p.device)
        for name, p in trainable(model).items()
    }
    return Scores(values, "random", {"seed": seed})
