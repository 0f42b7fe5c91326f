"""What a model did when it ran once: calls of ATen operations between values, as data.

A `Value` is a tensor at one moment: an in-place operation makes a new one. Its `source` says where it came from.
Arguments of a `Call` are those of the operation with each tensor replaced by its value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Call",
    "Formula",
    "ModuleCall",
    "Program",
    "Reading",
    "SizeOf",
    "Value",
    "Worked",
    "map_values",
    "sizes_of",
    "values_in",
]


@dataclass(eq=False)
class Value:
    """A tensor of the run. `names` are those under which the model holds it, if it does."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str  # "input", "tensor" (the model's own), "constant", "call"
    names: tuple[str, ...] = ()
    number: int = -1  # among the inputs, or among the outputs of its call
    constant: Tensor | None = field(default=None, repr=False)
    fixed: bool = False
    """Depends on no input: a parameter, or made of parameters and constants alone."""
    is_parameter: bool = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class SizeOf:
    """The size of a tensor along one dimension, as Python read it."""

    value: Value
    dim: int


@dataclass(frozen=True)
class Worked:
    """The result of arithmetic on such sizes."""

    operator: str
    left: "Formula"
    right: "Formula"


Formula: TypeAlias = SizeOf | Worked | int | float


@dataclass(frozen=True)
class Reading:
    """A use that Python made of a size: `left operator right` came out as `outcome`.

    `unseen` where the size went on as a plain number that may have steered or not (`int(n)`).
    """

    operator: str
    left: Formula
    right: Formula
    outcome: bool
    unseen: bool
    module: str
    line: str
    when: int
    """How many operations had run before."""


@dataclass(eq=False)
class Call:
    """One operation: its overload, arguments by the names of its schema, outputs, and where it was called."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Value, ...]
    returns: Any
    """The result as the operation gave it, with values for tensors."""
    module: str
    line: str
    overwrites: tuple[Value, ...] = ()
    """Values in whose memory the operation writes, other than its own argument: bases and views of it."""
    taints: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Provenance of integer arguments, by (name, place in the flattened argument)."""
    measures: dict[tuple[str, int], Formula] = field(default_factory=dict)
    """Of which sizes of tensors Python made integer arguments."""
    as_passed: bool = False
    """True if the integers are those that user code passed, one by one: what is no size there is a plain number."""

    @property
    def name(self) -> str:
        """Such as `conv2d`, without namespace for ATen."""
        return str(self.op).removeprefix("aten.")


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module: which, the how-manieth, and the first tensors in and out.

    `entered` and `left` say how many operations had run before, and until it was over.
    """

    path: str
    index: int
    input: Value | None
    output: Value | None
    leaf: bool
    entered: int
    left: int


@dataclass(eq=False)
class Program:
    """A whole run."""

    calls: list[Call] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    tensors: dict[str, Value] = field(default_factory=dict)
    """The model's parameters and buffers that the run touched, by every name they have."""
    outputs: Any = None
    """The model's result with values for tensors."""
    results: list[Value] = field(default_factory=list)
    """Every tensor of the result, also of objects that cannot be rebuilt."""
    modules: list[ModuleCall] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    """Paths of lists and dicts of modules and of parameters."""
    escapes: list[tuple[Value, str, str, str]] = field(default_factory=list)
    """Values whose numbers left torch (`.numpy()`, `.tolist()`), how, the line, and the module whose code did it."""
    draws_outside: bool = False
    """True if random numbers were drawn by Python or numpy, which may have steered it."""
    readings: list[Reading] = field(default_factory=list)
    """Uses that Python made of sizes other than to pass them to operations."""
    read: set[SizeOf] = field(default_factory=set)
    """Sizes that Python asked for."""


def values_in(arguments: Any) -> Iterator[Value]:
    """Every value among nested arguments."""
    if isinstance(arguments, Value):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for item in arguments:
            yield from values_in(item)
    elif isinstance(arguments, dict):
        for item in arguments.values():
            yield from values_in(item)


def sizes_of(formula: Formula) -> Iterator[SizeOf]:
    """The sizes of tensors that a number was made of."""
    if isinstance(formula, SizeOf):
        yield formula
    elif isinstance(formula, Worked):
        yield from sizes_of(formula.left)
        yield from sizes_of(formula.right)


def map_values(arguments: Any, function: Callable[[Value], Any]) -> Any:
    """The same arguments with `function` applied to each value."""
    if isinstance(arguments, Value):
        return function(arguments)
    if type(arguments) in (tuple, list):
        return type(arguments)([map_values(item, function) for item in arguments])
    if type(arguments) is dict:
        return {key: map_values(item, function) for key, item in arguments.items()}
    return arguments
