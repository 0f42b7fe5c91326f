"""Value and tangent side by side in one buffer.

A rule that makes both can allocate them as the two halves of one buffer; the next layer then sees a doubled batch and
needs one call instead of two, without copying. The halves are plain tensors that happen to be neighbours: nothing
depends on it but speed, and a rule that finds them apart makes two calls.
"""

import torch
from torch import Tensor

__all__ = ["empty_stack", "halves", "stack_of", "unviewed"]


def empty_stack(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two uninitialised neighbours of the shape and memory order of `like` (dense, outermost dimension first)."""
    if like.dim() == 0 or not _is_batch_major(like):
        return torch.empty_like(like), torch.empty_like(like)
    shape = (2 * like.shape[0], *like.shape[1:])
    return halves(torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device))


def halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of a doubled batch, as tensors of their own."""
    n = both.shape[0] // 2
    return unviewed(both[:n]), unviewed(both[n:])


def unviewed(x: Tensor) -> Tensor:
    """The same memory as a tensor that is nobody's view.

    A custom function must not hand out views: they share a version counter with their base and cannot be written to.
    """
    return x.data


def stack_of(x: Tensor, tangent: Tensor) -> Tensor | None:
    """The doubled batch that `x` and `tangent` are the halves of, or None."""
    if x.dim() == 0 or x.stride() != tangent.stride() or x.shape != tangent.shape:
        return None
    if x.dtype != tangent.dtype:
        return None
    step = x.stride(0) * x.shape[0]
    if tangent.data_ptr() - x.data_ptr() != step * x.element_size() or not _is_batch_major(x):
        return None
    if tangent.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return None
    return x.as_strided((2 * x.shape[0], *x.shape[1:]), x.stride(), x.storage_offset())


def _is_batch_major(x: Tensor) -> bool:
    """Whether the first dimension is the outermost in memory and the tensor is dense."""
    return x.numel() > 0 and x.stride(0) * x.shape[0] == x.numel() and x.stride(0) == x[0].numel()
