"""How the rules' backwards run: once, and unseen by the mode that is on while checkpointed blocks run again."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Saved", "adjoint"]

Saved: TypeAlias = tuple[Any, ...]


def adjoint(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward `(ctx, saved, *adjoints)` of an `autograd.Function` that is a tangent rule."""

    @wraps(backward)
    def unseen(ctx: Any, *adjoints: Any) -> Any:
        saved = ctx.saved_tensors  # may run a checkpointed block again, for which the mode must be on
        with torch._C.DisableTorchFunction():
            return backward(ctx, saved, *adjoints)

    return once_differentiable(unseen)
