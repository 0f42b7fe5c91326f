"""What belongs to the caller and must not be written to: parameters, buffers, batches.

A model may write to them in its forward: statistics, caches, `x.relu_()` on its input; directly, through a view or
`.data`, or as `out=` of an operation. Each such write is recognised by its memory and goes to a private copy, which
stands for the original for the rest of the pass.
"""

import torch
from torch import Tensor

from apoptosis.errors import ModelError

__all__ = ["Originals"]


class Originals:
    """Finds which of the caller's tensors a tensor is, or shares memory with."""

    def __init__(self) -> None:
        """Of nobody yet."""
        self._by_storage: dict[int, list[Tensor]] = {}
        self._copies: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Protect `tensor`, and keep it alive."""
        self._by_storage.setdefault(_storage(tensor), []).append(tensor)

    def find(self, tensor: Tensor) -> Tensor | None:
        """The original that `tensor` is, or is a view of."""
        storage = _storage(tensor)
        candidates = self._by_storage.get(storage, ())
        for original in candidates:
            if original is tensor:
                return original
        # Several may share one storage: the weights of a recurrent layer on CUDA do.
        sharing = [original for original in candidates if storage and _spans(original, tensor)]
        return sharing[0] if sharing else None

    def put_copy(self, original: Tensor, copy: Tensor) -> None:
        """Let `copy` stand for `original` from now on."""
        self._copies[id(original)] = copy

    def seen_through(self, tensor: Tensor) -> Tensor | None:
        """What a view or alias of an original shows after a write: the same part of the private copy."""
        if not self._copies or (original := self.find(tensor)) is None:
            return None
        copy = self._copies.get(id(original))
        if copy is None:
            return None
        if tensor.dtype != original.dtype or copy.stride() != original.stride():
            raise ModelError(
                f"The model writes to a part of one of its tensors, of shape {tuple(original.shape)} and strides "
                f"{original.stride()}, as another dtype or through memory that overlaps; that cannot be done on a "
                "private copy. Let it write to the whole tensor, or score it in a mode in which it does not write."
            )
        if original.requires_grad and not tensor.requires_grad:
            copy = copy.detach()
        offset = tensor.storage_offset() - original.storage_offset() + copy.storage_offset()
        return copy.as_strided(tensor.shape, tensor.stride(), offset)


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # wrappers of torch.func
        return 0


def _spans(original: Tensor, tensor: Tensor) -> bool:
    start = original.data_ptr()
    last = sum((n - 1) * s for n, s in zip(original.shape, original.stride(), strict=True))
    return start <= tensor.data_ptr() <= start + last * original.element_size()
