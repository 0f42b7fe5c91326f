"""What a torch function is called, whichever of its many spellings was used.

`x + y`, `torch.add(x, y)`, `x.add(y)` and `x += y` reach a `TorchFunctionMode` as different objects. A `Call` names
the operation once (`add`) and says whether it writes into its first argument. Functions written in Python (most of
`torch.nn.functional`) are not operations: they are *entered*, so that the operations inside are seen instead.
Arguments too may be spelled in several ways; `by_position` leaves one.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "body_of", "by_position", "functional_of", "identify"]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass(frozen=True)
class Call:
    """One torch function: its name, and how it is to be treated."""

    name: str
    in_place: bool = False
    is_getter: bool = False
    is_python: bool = False


@cache
def identify(func: Callable[..., Any]) -> Call:
    """The operation behind a function that a `TorchFunctionMode` was handed."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        owner = func.__self__  # pyright: ignore[reportFunctionMemberAccess]
        return Call(owner.__name__, is_getter=True)
    if name == "__set__":
        return Call("__set__", is_getter=True)
    if isinstance(func, types.FunctionType):
        return Call(name, is_python=True)
    if isinstance(
        func, torch._ops.OpOverload
    ):  # `torch.ops.aten.add.Tensor`: what recorded programs call
        name = func._schema.name.removeprefix("aten::")
    if name == "__setitem__":
        return Call(name, in_place=True)
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare.startswith("i") and hasattr(Tensor, f"{bare[1:]}_"):
            return Call(bare[1:], in_place=True)
        if bare.startswith("r") and hasattr(Tensor, bare[1:]) and bare not in ("rsub", "round"):
            return Call(_ALIASES.get(bare[1:], bare[1:]))
        return Call(_ALIASES.get(bare, bare))
    if name.endswith("_") and not name.endswith("__"):
        return Call(_ALIASES.get(name[:-1], name[:-1]), in_place=True)
    return Call(_ALIASES.get(name, name))


def by_position(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, those given by name by position as far as torch's own signature goes.

    `torch.topk(input=x, k=2)` becomes `torch.topk(x, 2)`. What may only be named stays so, and so does all after a gap.
    """
    if not kwargs or call.is_python or call.is_getter:
        return args, kwargs
    moved = _names_in_order(call.name, len(args), frozenset(kwargs))
    rest = {name: value for name, value in kwargs.items() if name not in moved}
    return (*args, *(kwargs[name] for name in moved)), rest


@cache
def _names_in_order(name: str, given: int, names: frozenset[str]) -> tuple[str, ...]:
    """Which of these names follow `given` arguments by position, in the order of the overload that has them all."""
    packet = getattr(torch.ops.aten, name, None)
    for variant in packet.overloads() if packet is not None else ():
        schema = getattr(packet, variant)._schema.arguments
        # torch's functions in Python call `self` by another name.
        known = ["input" if a.name == "self" and "self" not in names else a.name for a in schema]
        needed = {
            name
            for name, a in zip(known[given:], schema[given:], strict=True)
            if not a.has_default_value()
        }
        if not needed <= names <= {*known[given:], "out"}:
            continue
        found: list[str] = []
        for own, argument in zip(known[given:], schema[given:], strict=True):
            if own not in names or argument.kwarg_only:
                break
            found.append(own)
        return tuple(found)
    return ()


@cache
def functional_of(name: str) -> Callable[..., Any] | None:
    """The version of an operation that returns its result instead of writing it."""
    for owner in (Tensor, torch, torch.nn.functional):
        if callable(found := getattr(owner, name, None)):
            return found
    return None


@cache
def body_of(func: types.FunctionType) -> Callable[..., Any]:
    """The same Python function without its own question whether somebody overrides it.

    Calling `func` itself with the mode on would hand it straight back to the mode, for ever. Everything its body calls
    still asks, but for functions it wraps (torch's `boolean_dispatch`), which would ask on its behalf.
    """
    unasked = {name: _nobody for name in _CHECKS if name in func.__globals__}
    body = types.FunctionType(
        func.__code__,
        {**func.__globals__, **unasked},
        func.__name__,
        func.__defaults__,
        tuple(_body_in(cell, func) for cell in func.__closure__ or ()) or None,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _body_in(cell: types.CellType, owner: types.FunctionType) -> types.CellType:
    wrapped = cell.cell_contents
    if not isinstance(wrapped, types.FunctionType) or wrapped is owner:
        return cell
    return types.CellType(body_of(wrapped))


def _nobody(*_: object) -> bool:
    return False


_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "concat": "cat",
    "concatenate": "cat",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "log_sigmoid": "logsigmoid",
    "getitem": "__getitem__",
    "ger": "outer",
}
