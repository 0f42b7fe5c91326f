"""Inputs and results of a model, however arranged: which tensors are in there, and the same arrangement with others.

Known are tuples (named ones too), lists, dicts and dataclasses, which covers the outputs of every library we met. Of
any other object the attributes are looked at, but it cannot be rebuilt. A key-value cache is the exception: it is the
model's own memory between two calls, no result, and nobody outside depends on its shapes.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["leaves_in", "rearranged", "tensors_in"]

Leaf = TypeVar("Leaf")


def leaves_in(result: Any, leaf: type[Leaf]) -> list[Leaf]:
    """Every tensor (or other `leaf`) of an arrangement, in order."""
    found: list[Leaf] = []

    def note(item: Leaf) -> Leaf:
        found.append(item)
        return item

    rearranged(result, note, leaf)
    return found


def tensors_in(result: Any) -> list[Tensor]:
    """Every tensor of an arrangement, in order."""
    return leaves_in(result, Tensor)


def rearranged(
    result: Any, by: Callable[[Any], Any], leaf: type | tuple[type, ...] = Tensor
) -> Any:
    """The same arrangement with `by` applied to each tensor (or other `leaf`); what cannot be rebuilt becomes None."""
    if isinstance(result, leaf):
        return by(result)
    if isinstance(result, tuple):
        parts = [rearranged(item, by, leaf) for item in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    if isinstance(result, list):
        return [rearranged(item, by, leaf) for item in result]
    if isinstance(result, Mapping):
        return _rebuilt(result, {key: rearranged(item, by, leaf) for key, item in result.items()})
    if is_dataclass(result) and not isinstance(result, type):
        twin = copy.copy(result)
        for f in fields(result):
            object.__setattr__(twin, f.name, rearranged(getattr(result, f.name), by, leaf))
        return twin
    if result is None or isinstance(result, (bool, int, float, complex, str, bytes)):
        return result
    _look_into(result, by, leaf)
    return None


def _look_into(result: object, by: Callable[[Any], Any], leaf: type | tuple[type, ...]) -> None:
    """Show `by` the tensors that an unknown object holds, however deep."""
    pending, seen = [result], set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen or _is_cache(item):
            continue
        seen.add(id(item))
        if isinstance(item, leaf):
            by(item)
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (tuple, list, set, frozenset, deque)):
            pending += item
        elif type(item).__module__ not in ("builtins", "torch", "numpy"):
            slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            pending += [getattr(item, name) for name in slots if hasattr(item, name)]
            pending += getattr(item, "__dict__", {}).values()


def _is_cache(item: object) -> bool:
    """transformers' key-value caches."""
    kind = type(item)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Cache")


def _rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(like) is dict:
        return items
    try:  # a subclass of dict, often a dataclass with required fields besides
        return type(like)(**items)
    except TypeError:
        return items
