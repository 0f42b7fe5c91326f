"""Values that carry a tangent, and where the tangent is kept.

A *dual* is a value x with its tangent x̂ = d/dt x(θ + tδ). The model only ever sees the value, an ordinary tensor;
its `Record` hangs on that very tensor, so it lives exactly as long as the value does. The model's own parameters and
buffers are never written to: their records are kept in a table beside (`Ledger`).

Two states need care. A tangent that is None is an exact zero: known, and free. A value may also have *moved*: after an
in-place operation on a tensor nobody has a view of, the result lives in a new tensor and the old object points to it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Dual", "Ledger", "Record", "lift", "same_data"]

_SLOT = "_apoptosis_record"


@dataclass(slots=True)
class Dual:
    """A value and its tangent. `weight`: the value depends on parameters alone, not on the batch."""

    value: Tensor
    tangent: Tensor | None = None
    weight: bool = False


@dataclass(slots=True)
class Record:
    """What is known of one tensor object."""

    tangent: Tensor | None
    weight: bool = False
    moved: Tensor | None = None
    has_views: bool = False


class Ledger:
    """Finds the record of a tensor: a parameter, a buffer, an activation, or a view of one."""

    def __init__(self, tangents: dict[Tensor, Tensor | None]) -> None:
        """Start with the parameters and their tangents (None: not moved by the direction)."""
        self._owned = {id(p): Record(t, weight=True) for p, t in tangents.items()}
        self._alive: list[Tensor] = list(tangents)

    def own(self, tensor: Tensor) -> None:
        """Keep the record of `tensor` here, never on the tensor itself: it belongs to the model."""
        self._owned.setdefault(id(tensor), Record(None))
        self._alive.append(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter or buffer of the model."""
        return id(tensor) in self._owned

    def current(self, tensor: Tensor) -> tuple[Tensor, Record | None]:
        """The tensor that now stands for `tensor`, and its record."""
        record = self._record(tensor)
        while record is not None and record.moved is not None:
            tensor = record.moved
            record = self._record(tensor)
        if record is None and tensor._base is not None:
            record = self._view_record(tensor)
        return tensor, record

    def write(self, tensor: Tensor, record: Record) -> None:
        """Remember `record` for `tensor`."""
        if id(tensor) in self._owned:
            self._owned[id(tensor)] = record
        else:
            setattr(tensor, _SLOT, record)

    def note_view(self, tensor: Tensor) -> None:
        """Somebody now holds `tensor`; if it is a view, its base can no longer be moved."""
        if (base := tensor._base) is not None:
            record = self._record(base)
            if record is None:
                record = Record(None)
                self.write(base, record)
            record.has_views = True

    def _record(self, tensor: Tensor) -> Record | None:
        return self._owned.get(id(tensor)) or getattr(tensor, _SLOT, None)

    def _view_record(self, view: Tensor) -> Record | None:
        """The record of a view taken before its base became a dual."""
        base = view._base
        assert base is not None, "asked for a view"
        record = self._record(base)
        if record is None or record.tangent is None:
            return None
        offset = view.storage_offset() - base.storage_offset() + record.tangent.storage_offset()
        found = Record(record.tangent.as_strided(view.shape, view.stride(), offset), record.weight)
        self.write(view, found)
        return found


def lift(x: Any) -> Dual:
    """`x` as a dual: itself, or a constant."""
    return x if isinstance(x, Dual) else Dual(x)


def same_data(x: Tensor, tangent: Tensor | None) -> bool:
    """Whether the tangent is the value: δ = θ, the case in which layers cost one product less."""
    return (
        tangent is not None
        and tangent.data_ptr() == x.data_ptr()
        and tangent.stride() == x.stride()
        and tangent.shape == x.shape
        and tangent.dtype == x.dtype
    )


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
