"""Filters channels last in memory for a while. Numbers stay the same; kernels that like images so are faster."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["channels_last"]


@contextmanager
def channels_last(model: nn.Module) -> Iterator[None]:
    """Every four-dimensional parameter and buffer so inside the block, as it lay afterwards.

    >>> model = nn.Conv2d(4, 2, 3)
    >>> with channels_last(model):
    ...     model.weight.stride()
    (36, 1, 12, 4)
    >>> model.weight.stride()
    (36, 9, 3, 1)
    """
    found = [t for t in (*model.parameters(), *model.buffers()) if t.dim() == 4]
    before = [t.stride() for t in found]
    for tensor in found:
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for tensor, strides in zip(found, before, strict=True):
            laid = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
            )
            tensor.data = laid.copy_(tensor.data)
