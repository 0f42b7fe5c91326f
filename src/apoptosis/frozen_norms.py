"""Batch norms in eval mode as what they are then, an affine map per channel.

torch's backward of such a norm takes as long as the convolutions on a CPU: a step of a narrow ResNet32 on 100 images
has 0.47 s of one thread, and 0.29 s this way. Steps on networks whose norms keep their statistics run within
`frozen_norms`.

Numbers are those of torch's to rounding. What is not exactly one of torch's own norms, is in train mode, has no
statistics or weights, or reads fewer than 32 bits is left to itself; so is everything on a GPU, where a small network
waits for launches and this has ten of them for one of torch's (27 ms a step in the place of 15 on an H200).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["frozen_norms"]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WIDE = (torch.float32, torch.float64)


@contextmanager
def frozen_norms(model: nn.Module) -> Iterator[None]:
    """Inside the block the model's norms in eval mode have a faster backward.

    >>> norm = nn.BatchNorm1d(2).eval()
    >>> with frozen_norms(norm):
    ...     norm(torch.ones(1, 2)).grad_fn.name()
    'AddcmulBackward0'
    >>> norm(torch.ones(1, 2)).grad_fn.name()
    'NativeBatchNormBackward0'
    """
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) in NORMS and "forward" not in vars(module):
                vars(module)["forward"] = partial(_forward, module)
                stack.callback(vars(module).pop, "forward")
        yield


def _forward(norm: Any, x: Tensor) -> Tensor:
    numbers: tuple[Any, ...] = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    is_wide = x.dtype in WIDE and not torch.is_autocast_enabled(x.device.type)
    if norm.training or x.is_cuda or not is_wide or any(own is None for own in numbers):
        return type(norm).forward(norm, x)
    norm._check_input_dim(x)
    weight, bias, mean, variance = numbers
    factor = weight * torch.rsqrt(variance + norm.eps)
    shift = bias - mean * factor
    shape = (-1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, factor.view(shape))
