"""Arguments to prove rules on."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Sample",
    "integers",
    "sample",
    "tensor",
]


@dataclass(frozen=True)
class Sample:
    """Arguments to prove a rule on. Floating-point tensors among them are taken for parameters."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    free: str
    """Sizes of the axes that are left free, `~` after those with a statistic; "refused" where the rule declines."""
    read: int | None = None
    """How many of the results somebody reads; None for all."""


def sample(*args: Any, free: str, read: int | None = None, **kwargs: Any) -> Sample:
    """A `Sample` as it would be called."""
    return Sample(args, kwargs, free, read)


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """A deterministic float64 tensor for samples, of both signs and away from kinks at 0."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape) + 100 * seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x + 0.1 * x.sign()


def integers(*shape: int, below: int) -> Tensor:
    """A deterministic tensor of indices for samples, all of them used where there are enough places."""
    return (torch.arange(prod(shape)) * 7 % below).reshape(shape)
