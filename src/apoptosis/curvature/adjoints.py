"""How the rules remember and run backward.

Backwards run once, and unseen by the mode that is on while checkpointed blocks run again. What is remembered is
remembered detached: the tensor object itself carries its record and so its tangent, which would stay in memory
although the rule has no use for it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from apoptosis.errors import LostTangentError

__all__ = ["Saved", "adjoint", "apply_pair", "save"]

Saved: TypeAlias = tuple[Any, ...]


def adjoint(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward `(ctx, saved, *adjoints)` of an `autograd.Function` that is a tangent rule."""

    @wraps(backward)
    def unseen(ctx: Any, *adjoints: Any) -> Any:
        # May run a checkpointed block again, for which the mode must be on.
        saved = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled():
                raise LostTangentError(
                    "The model differentiates a part of itself in its forward (torch.autograd.grad with create_graph) "
                    "and uses the result. How that depends on parameters cannot be followed. Use reference_product "
                    "with a kind other than connectivity, or write the derivative out."
                )
            return backward(ctx, saved, *adjoints)

    return unseen


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Remember tensors for the backward, without the tangents that hang on them."""
    ctx.save_for_backward(*(None if t is None else t.detach() for t in tensors))


def apply_pair(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, Tensor]:
    """Value and tangent by a custom function; torch leaves its `apply` without types."""
    return cast("tuple[Tensor, Tensor]", function.apply(*args))
