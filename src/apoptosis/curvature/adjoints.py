"""How the rules' backwards run: once, and unseen by the mode that is on while checkpointed blocks run again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["adjoint"]


def adjoint(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an `autograd.Function` that is a tangent rule."""

    @wraps(backward)
    def unseen(ctx: Any, *adjoints: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return backward(ctx, *adjoints)

    return once_differentiable(unseen)
