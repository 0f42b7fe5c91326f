"""Derivatives that leave Python and cannot be followed, and the error that says so."""

import torch
from torch import Tensor

from apoptosis.errors import LostTangentError

__all__ = ["hides", "lost_tangent"]


def hides(tensor: Tensor) -> bool:
    """Whether a tensor that has a record came to be where the mode does not see, so that its record is not true.

    A custom function may return a view of its input or overwrite it; a transform of torch.func wraps its tensors.
    """
    return _is_foreign(tensor) or _is_transformed()


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a custom function that is none of ours made `tensor`."""
    made_by = tensor.grad_fn
    if not isinstance(made_by, torch.autograd.function.BackwardCFunction):
        return False
    function = getattr(type(made_by), "_forward_cls", None)
    return not getattr(function, "__module__", "").startswith("apoptosis.")


def _is_transformed() -> bool:
    """Whether the model runs this inside `vmap` or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def lost_tangent(where: str, tensor: Tensor) -> LostTangentError:
    """The error for a tensor whose derivative went where it cannot be followed."""
    origin = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "a leaf tensor"
    return LostTangentError(
        f"At {where!r}: a tensor of shape {tuple(tensor.shape)} made by {origin} depends on parameters, but how it "
        "does could not be followed. Custom autograd.Function, vmap and other torch.func transforms, scripted modules, "
        "sparse and nested tensors, hooks on gradients, derivatives taken inside the model, and tensors that require "
        "grad without being parameters of the model hide their derivative. Write that part "
        "with ordinary torch operations, register the tensor as a parameter, or use reference_product with a kind "
        "other than connectivity: it differentiates twice what torch recorded."
    )
