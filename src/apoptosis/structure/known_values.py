"""Numbers of meta tensors that can be known all the same: counts, positions, masks made of nothing but sizes.

Code that looks at such a number (`if mask.all():`) runs on real tensors and would stop on the meta device. So whatever
is small and made from numbers alone is computed on the CPU beside, and answers when Python asks.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["KnownValues"]

LARGEST = 100_000  # entries; more than any mask or table of positions that code looks at

_ASKING = {
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
}


class KnownValues:
    """Twins on the CPU of meta tensors whose numbers follow from numbers alone."""

    def __init__(self) -> None:
        """None are known yet."""
        self._twins: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation; if its numbers are known, also on the twins."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not self._concerned(tensors, kwargs):
            return func(*args, **kwargs)
        twins = {id(tensor): self._twin(tensor) for tensor in tensors}
        if any(twin is None for twin in twins.values()):
            self._forget(func, args, kwargs)
            return func(*args, **kwargs)

        def swapped(item: Any) -> Any:
            if isinstance(item, Tensor):
                return twins[id(item)]
            return torch.device("cpu") if isinstance(item, torch.device) else item

        if func in _ASKING:
            return func(*tree_map(swapped, args), **tree_map(swapped, kwargs))
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if all(tensor.numel() <= LARGEST for tensor in made):
            known = func(*tree_map(swapped, args), **tree_map(swapped, kwargs))
            for tensor, twin in zip(made, _tensors(known), strict=True):
                self._twins[id(tensor)] = (weakref.ref(tensor), twin)
        return result

    def _concerned(self, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether anything is on the meta device, or will be."""
        device = kwargs.get("device")
        makes = device is not None and torch.device(device).type == "meta"
        return makes or any(tensor.is_meta for tensor in tensors)

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What unknown numbers are written to is known no longer, nor is what shares its memory."""
        schema = func._schema.arguments
        given = {a.name: x for a, x in zip(schema, args, strict=False)} | kwargs
        for argument in schema:
            written = given.get(argument.name)
            if (
                argument.is_write
                and isinstance(written, Tensor)
                and (twin := self._twin(written)) is not None
            ):
                memory = twin.untyped_storage().data_ptr()
                self._twins = {
                    identity: (reference, own)
                    for identity, (reference, own) in self._twins.items()
                    if own.untyped_storage().data_ptr() != memory
                }

    def _twin(self, tensor: Tensor) -> Tensor | None:
        if not tensor.is_meta:
            return tensor
        reference, twin = self._twins.get(id(tensor), (None, None))
        return twin if reference is not None and reference() is tensor else None


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]
