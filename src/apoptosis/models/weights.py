"""How weights start: drawn from a seed of their own, convolutions as He et al. (2015) propose."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["he_normal_", "seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on `seed` alone inside the block; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def he_normal_(model: nn.Module) -> None:
    """Draw every convolution's weights from N(0, 2/(outputs · kernel)): gradients keep their size through ReLUs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
