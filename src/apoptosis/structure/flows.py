"""Where a result is zero at removed units, given where the operands are: the words in which rules say it.

`zero_flow` reads them.
"""

from dataclasses import dataclass

from apoptosis.structure.program import Value

__all__ = [
    "AllOf",
    "AnyOf",
    "Divided",
    "Everywhere",
    "Flow",
    "Joined",
    "Moved",
    "Nowhere",
    "Pole",
    "Through",
    "aligned",
    "through",
]


class Flow:
    """Where a result is zero at removed units, given where the operands are."""


@dataclass(frozen=True)
class Through(Flow):
    """Zero along an output's dimension wherever the value is along `dims[that dimension]`."""

    value: Value
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class Moved(Flow):
    """The value's entries in another shape: zero for an axis where it was along every dimension with that axis."""

    value: Value


@dataclass(frozen=True)
class Joined(Flow):
    """Values laid side by side: zero for an axis where each value that has the axis is."""

    values: tuple[Value, ...]
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class AnyOf(Flow):
    """A product: zero where any factor is."""

    flows: tuple[Flow, ...]


@dataclass(frozen=True)
class Divided(Flow):
    """A quotient: zero where the numerator is and the denominator is not, for 0/0 is no number."""

    numerator: Flow
    denominator: Flow


@dataclass(frozen=True)
class Pole(Flow):
    """Zero nowhere, and infinite where the value is zero: logarithms, reciprocals."""

    value: Flow


@dataclass(frozen=True)
class AllOf(Flow):
    """A sum: zero where all terms are."""

    flows: tuple[Flow, ...]


@dataclass(frozen=True)
class Everywhere(Flow):
    """Zeros."""


@dataclass(frozen=True)
class Nowhere(Flow):
    """Nothing is known to be zero."""


def through(value: Value, offset: int = 0) -> Flow:
    """The zeros of a value, dimension by dimension; `offset` where the result has more leading dimensions."""
    return Through(value, tuple([None] * offset + list(range(value.ndim))))


def aligned(value: Value, ndim: int) -> Flow:
    """The zeros of a value that is broadcast to `ndim` dimensions."""
    return through(value, ndim - value.ndim)
