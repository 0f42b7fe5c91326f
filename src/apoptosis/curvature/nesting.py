"""Arguments and results of operations, however nested: tensors and duals in tuples, lists, dicts and named tuples."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from apoptosis.curvature.duals import Dual

__all__ = ["mapped", "replaced", "supplied", "tensors_of"]


def replaced(arguments: Any, by: Callable[[Dual], Any]) -> Any:
    """The same arguments with each `Dual` replaced."""
    if isinstance(arguments, Dual):
        return by(arguments)
    if type(arguments) in (tuple, list):
        return type(arguments)([replaced(item, by) for item in arguments])
    if type(arguments) is dict:
        return {key: replaced(item, by) for key, item in arguments.items()}
    return arguments


def supplied(arguments: Any, supply: Iterator[Any]) -> Any:
    """The same arguments with the next of `supply` in the place of each `Dual`."""
    return replaced(arguments, lambda _: next(supply))


def tensors_of(result: Any) -> list[Tensor]:
    """Every tensor of a result."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for item in result for t in tensors_of(item)]
    return []


def mapped(result: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same arrangement with `function` applied to each tensor."""
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, (tuple, list)):
        parts = [mapped(part, function) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result
