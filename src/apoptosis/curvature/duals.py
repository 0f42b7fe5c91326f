"""Values that carry a tangent, and where the tangent is kept.

A *dual* is a value x with its tangent x̂ = d/dt x(θ + tδ). The model only ever sees the value, an ordinary tensor;
its `Record` hangs on that very tensor, so it lives exactly as long as the value does. The model's own parameters and
buffers are never written to: their records are kept in a table beside (`Ledger`).

Two states need care. A tangent that is None is an exact zero: known, and free. A value may also have *moved*: after an
in-place operation on a tensor nobody has a view of, the result lives in a new tensor and the old object points to it.

Records end with their pass (`Ledger.close`): a tensor that outlives it, in an attribute of the model or in a cycle with
its own tangent, keeps nothing else alive, and is not known to the next pass.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.originals import Originals

__all__ = ["Dual", "Ledger", "Record", "alias_tangent", "lift", "map_dual", "same_data"]

_SLOT = "_apoptosis_record"


@dataclass(slots=True)
class Dual:
    """A value and its tangent. `weight`: the value depends on parameters alone, not on the batch."""

    value: Tensor
    tangent: Tensor | None = None
    weight: bool = False


@dataclass(slots=True, weakref_slot=True)
class Record:
    """What is known of one tensor object. `has_views`: others see its memory, so that it cannot move."""

    tangent: Tensor | None
    weight: bool = False
    moved: Tensor | None = None
    has_views: bool = False
    closed: bool = False


class Ledger:
    """Finds the record of a tensor: a parameter, a buffer, an activation, or a view of one."""

    def __init__(self, tangents: dict[Tensor, Tensor | None]) -> None:
        """Start with the parameters and their tangents (None: not moved by the direction)."""
        self._beside: dict[int, Record] = {}
        self._model: set[int] = set()
        self._originals = Originals()
        self._records: list[weakref.ref[Record]] = []
        for parameter, tangent in tangents.items():
            self.own(parameter, Record(tangent, weight=True))

    def own(self, tensor: Tensor, record: Record | None = None) -> None:
        """Keep the record of `tensor`, which belongs to the model, beside it, and never write to it."""
        self._model.add(id(tensor))
        self.protect(tensor, record)

    def protect(self, tensor: Tensor, record: Record | None = None) -> None:
        """Keep the record of `tensor`, which belongs to the caller, beside it, and never write to it."""
        if id(tensor) not in self._beside:
            self._originals.add(tensor)
            self._beside[id(tensor)] = record or Record(None)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter or buffer of the model."""
        return id(tensor) in self._model

    def close(self) -> None:
        """Forget everything: what outlives the pass keeps no tangent alive."""
        for reference in self._records:
            if (record := reference()) is not None:
                record.tangent = record.moved = None
                record.closed = True
        self._beside.clear()

    def current(self, tensor: Tensor) -> tuple[Tensor, Record | None]:
        """The tensor that now stands for `tensor`, and its record."""
        record = self._record(tensor)
        while record is not None and record.moved is not None:
            tensor = record.moved
            record = self._record(tensor)
        if record is None and (seen := self._originals.seen_through(tensor)) is not None:
            tensor, record = seen, self._record(seen)
        if record is None and tensor._base is not None:
            record = self._view_record(tensor)
        return tensor, record

    def original_of(self, tensor: Tensor) -> Tensor | None:
        """The caller's tensor that `tensor` is, or shares memory with."""
        return self._originals.find(tensor)

    def writable(self, tensor: Tensor) -> Tensor:
        """Where to write in place of `tensor`: itself, or a private copy if it is the caller's."""
        tensor, record = self.current(tensor)
        original = self._originals.find(tensor)
        if original is None:
            return tensor
        self._make_private(original)
        found = self.current(original)[0]
        if tensor is not original:
            view = self._originals.seen_through(tensor)
            assert view is not None, "its original is private now"
            found = view
            if record is not None:
                self.write(tensor, Record(None, moved=view))
        return found

    def _make_private(self, original: Tensor) -> None:
        record = self._record(original)
        tangent = None if record is None else record.tangent
        with torch.enable_grad():  # a parameter that is overwritten still gets its gradient
            copy = original.clone()
            if tangent is not None:
                follows = same_data(original, tangent)
                tangent = alias_tangent(copy, tangent) if follows else tangent.clone()
        weight = record is not None and record.weight
        self.write(copy, Record(tangent, weight, has_views=True))
        self.write(original, Record(None, moved=copy))
        self._originals.put_copy(original, copy)

    def write(self, tensor: Tensor, record: Record) -> None:
        """Remember `record` for `tensor`."""
        self._records.append(weakref.ref(record))
        if id(tensor) in self._beside:
            self._beside[id(tensor)] = record
        else:
            setattr(tensor, _SLOT, record)

    def note_alias(self, tensor: Tensor) -> None:
        """Somebody now sees the memory of `tensor` through another tensor, which autograd does not know of."""
        for seen in (tensor, tensor._base):
            if seen is not None and (record := self._record(seen)) is not None:
                record.has_views = True

    def note_view(self, tensor: Tensor) -> None:
        """Somebody now holds `tensor`; if it is a view, its base can no longer be moved."""
        if (base := tensor._base) is not None:
            record = self._record(base)
            if record is None:
                record = Record(None)
                self.write(base, record)
            record.has_views = True

    def _record(self, tensor: Tensor) -> Record | None:
        record = self._beside.get(id(tensor)) or getattr(tensor, _SLOT, None)
        return None if record is None or record.closed else record

    def _view_record(self, view: Tensor) -> Record | None:
        """The record of a view taken before its base became a dual."""
        base = view._base
        assert base is not None, "asked for a view"
        record = self._record(base)
        if record is None or (record.tangent is None and not view.requires_grad):
            return None
        tangent = record.tangent
        if tangent is not None:
            offset = view.storage_offset() - base.storage_offset() + tangent.storage_offset()
            tangent = tangent.as_strided(view.shape, view.stride(), offset)
        found = Record(tangent, record.weight)
        self.write(view, found)
        return found


def lift(x: Any) -> Dual:
    """`x` as a dual: itself, or a constant."""
    return x if isinstance(x, Dual) else Dual(x)


def map_dual(x: Dual, function: Callable[[Tensor], Tensor]) -> Dual:
    """A linear function of a dual, of value and tangent alike."""
    tangent = None if x.tangent is None else function(x.tangent)
    return Dual(function(x.value), tangent, x.weight)


def same_data(x: Tensor, tangent: Tensor | None) -> bool:
    """Whether the tangent is the value: δ = θ, the case in which layers cost one product less."""
    return (
        tangent is not None
        and tangent.data_ptr() == x.data_ptr()
        and tangent.stride() == x.stride()
        and tangent.shape == x.shape
        and tangent.dtype == x.dtype
    )


def alias_tangent(copy: Tensor, tangent: Tensor) -> Tensor:
    """The tangent of a copy of a tensor with δ = θ: the copy, so that both share memory as before."""
    alias = copy.detach()
    # Where the gradient is wanted, the tangent needs a path of its own.
    return _Alias.apply(tangent, alias) if tangent.requires_grad else alias  # pyright: ignore


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tangent: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = tangent.dtype
        # Not `copy` itself: what a custom function returns as it came in may not be written to.
        alias = torch.empty(0, dtype=copy.dtype, device=copy.device)
        return alias.set_(copy.untyped_storage(), copy.storage_offset(), copy.shape, copy.stride())

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor, None]:
        return adjoint.to(ctx.dtype), None


def add_tangents(*tangents: Tensor | None) -> Tensor | None:
    """The sum of those that are there."""
    present = [t for t in tangents if t is not None]
    if not present:
        return None
    total = present[0]
    for tangent in present[1:]:
        total = total + tangent
    return total


def sum_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting."""
    return gradient if gradient.shape == shape else gradient.sum_to_size(shape)
