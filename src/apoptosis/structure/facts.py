"""What a rule says about one call, apart from the equations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from apoptosis.structure.axes import Expr
from apoptosis.structure.flows import Flow
from apoptosis.structure.program import Value

__all__ = [
    "ActivationProduct",
    "Facts",
    "PinReason",
    "Size",
]


@dataclass(frozen=True)
class PinReason:
    """Why an axis stays whole: the operation, what it does with the axis, and where."""

    op: str
    reason: str
    module: str = ""
    line: str = ""
    quiet: bool = False
    """Space, time, batch and kernels: nobody expects those to shrink, so they are not reported."""


@dataclass(frozen=True)
class Size:
    """An integer argument that measures `expr`; `negative` where it counts from the end."""

    expr: Expr
    negative: bool = False


@dataclass(frozen=True)
class ActivationProduct:
    """A product of two activations: axes summed over, axes both have, and those of the second alone."""

    operands: tuple[Value, Value]
    contracted: tuple[Expr, ...]
    shared: tuple[Expr, ...]
    own: tuple[Expr, ...]


@dataclass
class Facts:
    """What a rule said about one call, apart from the equations."""

    axes: list[list[Expr]] = field(default_factory=list)
    sizes: dict[tuple[str, int], Size] = field(default_factory=dict)
    frozen: dict[str, Any] = field(default_factory=dict)
    """Arguments whose default depends on a size, with the value they had: to be written out."""
    costs: list[tuple[Expr, ...]] = field(default_factory=list)
    contractions: list[tuple[Expr, tuple[tuple[Value, int], ...]]] = field(default_factory=list)
    statistics: list[tuple[Expr, str]] = field(default_factory=list)
    roles: list[tuple[Value, int, Expr, str]] = field(default_factory=list)
    kinds: list[tuple[Expr, str]] = field(default_factory=list)
    ties: list[tuple[Expr, ...]] = field(default_factory=list)
    floors: list[Expr] = field(default_factory=list)
    grids: list[tuple[Expr, int, str]] = field(default_factory=list)
    """Axes whose size must stay a multiple of a number for the kernel to run, and why."""
    spared: list[tuple[Value, int]] = field(default_factory=list)
    """Dimensions of tensors that the zeroed twin leaves alone: zeros there would be divided by their own length."""
    flows: list[Flow] = field(default_factory=list)
    replacement: Callable[[Callable[[Expr], Any]], tuple[Any, dict[str, Any]]] | None = None
    """The call in a form that can express unequal sizes: a function from size of an axis to operation and arguments."""
    product: ActivationProduct | None = None
    refused: str = ""
    """Why there was no rule."""
