"""Sizes of tensors that Python reads while a model is recorded, and what it does with them.

A recorded program keeps the way that Python took. Where a size steered it (`if h * w < 100`) or became a plain number
(`1 / n`), the program holds for other inputs only if that comes out the same. So while a model is recorded, `x.shape`
gives integers that know whose sizes they are, through arithmetic, and that note each decision and each conversion.

What no integer can notice (`range(n)`, `names[:n]`, C code) is left to trying the program at other sizes (`replay`).
"""

import operator
import sys
from collections.abc import Callable
from dis import opmap
from typing import Any, Protocol

from apoptosis.structure.attributes import Derived, Origin, TracedInt
from apoptosis.structure.program import Formula, SizeOf, Value, Worked

__all__ = ["OPERATORS", "Note", "ReadSize", "read_shape"]


class Note(Protocol):
    """Takes down a use of a size: `left operator right` came out as `outcome`."""

    def __call__(
        self,
        operator: str,
        left: Formula,
        right: Formula,
        *,
        outcome: bool,
        unseen: bool = False,
    ) -> None:
        """Take it down."""
        ...


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHERS = (
    *("truediv", "pow", "divmod", "and", "or", "xor", "lshift", "rshift"),
    *("float", "round", "ceil", "abs", "invert"),
)
"""What gives a number that is followed no further."""


class ReadSize(TracedInt):
    """A size that Python holds, or a number made of sizes; `origin` follows attributes, `formula` sizes."""

    formula: Formula
    note: Note

    def __new__(cls, value: int, origin: Origin, formula: Formula, note: Note) -> "ReadSize":
        """An int of that value."""
        made = int.__new__(cls, value)
        made.origin, made.formula, made.note = origin, formula, note
        return made

    def used(self, *, unseen: bool = False) -> None:
        """Note that it went on as a plain number."""
        self.note("eq", self.formula, _plain(self), outcome=True, unseen=unseen)

    def __bool__(self) -> bool:
        outcome = _plain(self) != 0
        self.note("ne", self.formula, 0, outcome=outcome)
        return outcome

    def __hash__(self) -> int:
        # A key that is found is compared as well; `n in sizes` goes another way where it is not.
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == opmap["CONTAINS_OP"]:
            self.used()
        return hash(_plain(self))

    def __int__(self) -> int:
        self.used(unseen=True)
        return _plain(self)

    def __neg__(self) -> int:
        return 0 - self

    def __pos__(self) -> int:
        return self


def read_shape(value: Value, note: Note) -> list[ReadSize]:
    """The sizes of a tensor, as Python gets them."""
    return [ReadSize(size, size, SizeOf(value, dim), note) for dim, size in enumerate(value.shape)]


def _plain(number: int) -> int:
    return int.__index__(number)


def _formula(number: Any) -> Formula:
    if isinstance(number, ReadSize):
        return number.formula
    return _plain(number) if isinstance(number, int) else number


def _origin(number: int) -> Origin:
    return number.origin if isinstance(number, TracedInt) else _plain(number)


def _worked(name: str, left: Any, right: Any, value: int, note: Note) -> ReadSize:
    sides = _origin(left), _origin(right)
    followed = name != "mod" and not all(isinstance(side, int) for side in sides)
    origin = Derived(name, *sides) if followed else value
    return ReadSize(value, origin, Worked(name, _formula(left), _formula(right)), note)


def _arithmetic(name: str) -> None:
    plain, reflected = getattr(int, f"__{name}__"), getattr(int, f"__r{name}__")

    def forward(self: ReadSize, other: Any) -> Any:
        value = plain(self, other)
        if type(value) is int:
            return _worked(name, self, other, value, self.note)
        return _gone(self, other, value)

    def backward(self: ReadSize, other: Any) -> Any:
        value = reflected(self, other)
        if type(value) is int:
            return _worked(name, other, self, value, self.note)
        return _gone(self, other, value)

    setattr(ReadSize, f"__{name}__", forward)
    setattr(ReadSize, f"__r{name}__", backward)


def _gone(self: ReadSize, other: Any, value: Any) -> Any:
    """Arithmetic with what is no integer; a tensor's is an operation, which is recorded with its argument."""
    if not hasattr(other, "__torch_function__"):
        self.used()
    return value


def _comparison(name: str) -> None:
    plain = getattr(int, f"__{name}__")

    def compare(self: ReadSize, other: Any) -> Any:
        if isinstance(other, float):
            outcome = OPERATORS[name](_plain(self), other)
        else:
            outcome = plain(self, other)
        if outcome is not NotImplemented:
            self.note(name, self.formula, _formula(other), outcome=outcome)
        return outcome

    setattr(ReadSize, f"__{name}__", compare)


def _other(name: str) -> None:
    def unary(self: ReadSize, *args: Any) -> Any:
        value = getattr(int, f"__{name}__")(self, *args)
        return _gone(self, args[0] if args else None, value)

    setattr(ReadSize, f"__{name}__", unary)
    if hasattr(int, f"__r{name}__"):

        def backward(self: ReadSize, *args: Any) -> Any:
            return _gone(self, args[0], getattr(int, f"__r{name}__")(self, *args))

        setattr(ReadSize, f"__r{name}__", backward)


for _name in _ARITHMETIC:
    _arithmetic(_name)
for _name in _COMPARISONS:
    _comparison(_name)
for _name in _OTHERS:
    _other(_name)
