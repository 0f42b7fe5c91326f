"""Which attributes of which modules hold sizes: found by following integers, not by guessing from equal values.

Before a model is recorded, each integer attribute of its modules becomes a `TracedInt`: an `int` that remembers where
it came from through arithmetic (`embed_dim // num_heads`). Where one arrives as an argument of an operation whose rule
says which axes that argument measures, the attribute is known to hold that size, and what it must become after a cut.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

__all__ = [
    "Attribute",
    "Derived",
    "Origin",
    "TracedInt",
    "evaluate",
    "leaves",
    "read_attribute",
    "show",
    "traced_attributes",
    "write_attribute_",
]


@dataclass(frozen=True)
class Attribute:
    """An integer that a module holds; `place` where it stands in a tuple or list.

    `name` has a point where the integer stands in a configuration: `config.num_heads`.
    """

    module: str
    name: str
    place: int | None = None


@dataclass(frozen=True)
class Derived:
    """The result of arithmetic on integers, some of them traced."""

    operator: str
    left: "Origin"
    right: "Origin"


Origin: TypeAlias = Attribute | Derived | int


class TracedInt(int):
    """An integer that knows its origin."""

    origin: Origin

    def __new__(cls, value: int, origin: Origin) -> "TracedInt":
        """An int of that value."""
        made = super().__new__(cls, value)
        made.origin = origin
        return made

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


_OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
}
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}


def _traced(name: str) -> None:
    plain = getattr(int, f"__{name}__")

    def forward(self: TracedInt, other: Any) -> Any:
        value = plain(self, other)
        if type(value) is not int or not isinstance(other, int) or isinstance(other, bool):
            return value
        return TracedInt(value, Derived(name, self.origin, _origin(other)))

    def backward(self: TracedInt, other: Any) -> Any:
        value = getattr(int, f"__r{name}__")(self, other)
        if type(value) is not int or isinstance(other, bool):
            return value
        return TracedInt(value, Derived(name, _origin(other), self.origin))

    setattr(TracedInt, f"__{name}__", forward)
    setattr(TracedInt, f"__r{name}__", backward)


for _name in _OPERATORS:
    _traced(_name)


def _negative(self: TracedInt) -> TracedInt:
    return TracedInt(-int(self), Derived("sub", 0, self.origin))


TracedInt.__neg__ = _negative  # type: ignore[method-assign]


def _origin(number: int) -> Origin:
    return number.origin if isinstance(number, TracedInt) else int(number)


def evaluate(origin: Origin, values: dict[Attribute, int]) -> int:
    """What a derived integer becomes when attributes change."""
    if isinstance(origin, int):
        return origin
    if isinstance(origin, Attribute):
        return values[origin]
    left, right = evaluate(origin.left, values), evaluate(origin.right, values)
    return _OPERATORS[origin.operator](left, right)


def leaves(origin: Origin) -> Iterator[Attribute]:
    """The attributes an integer was made of."""
    if isinstance(origin, Attribute):
        yield origin
    elif isinstance(origin, Derived):
        yield from leaves(origin.left)
        yield from leaves(origin.right)


def show(origin: Origin) -> str:
    """How an integer came about, as a person would write it.

    >>> show(Derived("floordiv", Attribute("encoder.attn", "width"), 4))
    '(encoder.attn.width // 4)'
    """
    if isinstance(origin, Attribute):
        place = "" if origin.place is None else f"[{origin.place}]"
        return f"{origin.module}.{origin.name}{place}".lstrip(".")
    if isinstance(origin, Derived):
        return f"({show(origin.left)} {_SYMBOLS[origin.operator]} {show(origin.right)})"
    return str(origin)


def read_attribute(module: nn.Module, where: Attribute) -> int | None:
    """The integer a module holds there; None if it holds none."""
    found: Any = module
    for name in where.name.split("."):
        found = getattr(found, name, None)
    if where.place is not None:
        items = found if isinstance(found, (tuple, list)) else ()
        found = items[where.place] if where.place < len(items) else None
    return found if type(found) is int else None


def write_attribute_(module: nn.Module, where: Attribute, value: int) -> None:
    """Set the integer; a configuration that others share is copied first."""
    *path, last = where.name.split(".")
    holder: Any = module
    for name in path:
        own = copy.copy(getattr(holder, name))
        vars(holder)[name] = own
        holder = own
    if where.place is None:
        new: Any = value
    else:
        items = list(getattr(holder, last))
        items[where.place] = value
        new = type(getattr(holder, last))(items)
    # A configuration may check or translate what is set; this is the raw item that was read.
    if path:
        vars(holder)[last] = new
    else:
        setattr(holder, last, new)


@contextmanager
def traced_attributes(model: nn.Module) -> Iterator[None]:
    """Every integer attribute traced inside the block, as it was afterwards."""
    changed: list[tuple[nn.Module, str, Any, Any]] = []
    try:
        for path, module in model.named_modules():
            for name, found in list(vars(module).items()):
                traced = _with_origins(found, path, name)
                if traced is not found:
                    changed.append((module, name, found, traced))
                    vars(module)[name] = traced
        yield
    finally:
        for module, name, found, traced in reversed(changed):
            if vars(module).get(name) is traced:
                vars(module)[name] = found


def _with_origins(found: Any, path: str, name: str) -> Any:
    """An integer, or integers in a list or a configuration, with their origins."""
    if type(found) is int:
        return TracedInt(found, Attribute(path, name))
    if type(found) in (tuple, list) and found and all(type(item) is int for item in found):
        return type(found)(
            TracedInt(item, Attribute(path, name, place)) for place, item in enumerate(found)
        )
    if type(found).__name__.endswith("Config") and hasattr(found, "__dict__"):
        twin = copy.copy(found)
        for key, item in vars(found).items():
            if type(item) is int:
                vars(twin)[key] = TracedInt(item, Attribute(path, f"{name}.{key}"))
        return twin
    return found
