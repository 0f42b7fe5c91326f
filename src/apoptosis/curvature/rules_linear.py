"""Operations that are linear in every floating-point tensor they take: the tangent is the operation on the tangents.

ŷ = f(x̂). Value and tangent each go through torch's own operation and its own derivative, views stay views, and there
is no curvature to keep. Affine operations (padding with a constant, filling) drop their constant in the tangent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.curvature.duals import Dual, lift
from apoptosis.curvature.rules import (
    Rule,
    Sample,
    inputs,
    is_continuous,
    register,
    sample,
    tangent_rule,
    tangents_of,
    values_of,
)
from apoptosis.curvature.switches import Switches

__all__: list[str] = []


def apply_linear(
    _kept: Switches, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """ŷ = f(x̂)."""
    value = func(*values_of(args), **values_of(kwargs))
    first = args[0] if args else _named_input(kwargs)
    if not isinstance(first, Dual):  # const.expand_as(dual): only the shape is read
        return value
    if first.tangent is None:
        return _pair(value, None)
    rest = {k: v for k, v in kwargs.items() if v is not first}
    if not args:
        return _pair(value, func(first.tangent, **values_of(rest)))
    return _pair(value, func(first.tangent, *values_of(args[1:]), **values_of(rest)))


def _named_input(kwargs: dict[str, Any]) -> Any:
    return next((kwargs[name] for name in ("input", "self", "tensor") if name in kwargs), None)


def _pair(value: Any, tangent: Any) -> Any:
    if isinstance(value, (tuple, list)):
        tangents = [None] * len(value) if tangent is None else tangent
        return tuple(_pair(v, t) for v, t in zip(value, tangents, strict=True))
    if isinstance(value, Tensor) and is_continuous(value):
        return Dual(value, tangent)
    return value


def _has_tangent(value: Any) -> bool:
    if isinstance(value, Dual):
        return value.tangent is not None
    if isinstance(value, dict):
        return any(map(_has_tangent, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_tangent, value))


def _joined(
    _kept: Switches, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """ŷ = f(x̂₁, …, x̂ₙ), with zeros for constants."""
    value = func(*values_of(args), **values_of(kwargs))
    if not _has_tangent((args, kwargs)):
        return Dual(value)
    return Dual(value, func(*_zeroed(args), **_zeroed(kwargs)))


def _zeroed(value: Any) -> Any:
    """Arguments of an operation linear in all its tensors jointly: tangents, and zeros for what has none."""
    if isinstance(value, Dual):
        return tangents_of(value)
    if isinstance(value, Tensor) and is_continuous(value):
        return torch.zeros_like(value)
    if type(value) in (tuple, list):
        return type(value)([_zeroed(item) for item in value])
    if type(value) is dict:
        return {key: _zeroed(item) for key, item in value.items()}
    return value


@tangent_rule(
    "add",
    family="linear",
    samples=lambda: [
        sample(*inputs((2, 3), (3,))),
        sample(*inputs((3,), (2, 3)), alpha=2),
        sample(inputs((2, 3))[0], 1.5),
    ],
)
def add(_kept: Switches, x: Any, other: Any, *, alpha: float = 1) -> Dual:
    """(x + a·y)' = x' + a·y'."""
    x, other = lift(x), lift(other)
    value = torch.add(x.value, other.value, alpha=alpha)
    second = other.tangent if alpha == 1 or other.tangent is None else other.tangent * alpha
    if x.tangent is not None and second is not None:
        return Dual(value, x.tangent + second)
    return Dual(value, _spread(x.tangent if second is None else second, value))


@tangent_rule(
    "sub",
    family="linear",
    samples=lambda: [
        sample(*inputs((2, 3), (3,))),
        sample(*inputs((3,), (2, 3)), alpha=2),
        sample(inputs((2, 3))[0], 1.5),
    ],
)
def sub(kept: Switches, x: Any, other: Any, *, alpha: float = 1) -> Dual:
    """(x − a·y)' = x' − a·y'."""
    return add(kept, x, other, alpha=-alpha)


@tangent_rule(
    "rsub",
    family="linear",
    samples=lambda: [sample(inputs((2, 3))[0], 1.5), sample(*inputs((2, 3), (3,)))],
)
def rsub(kept: Switches, x: Any, other: Any, *, alpha: float = 1) -> Dual:
    """(y − a·x)' = y' − a·x'."""
    return add(kept, other if isinstance(other, Dual) else _constant(other, x), x, alpha=-alpha)


def _constant(number: Any, like: Dual) -> Dual:
    if isinstance(number, Tensor):
        return Dual(number)
    return Dual(torch.as_tensor(number, dtype=like.value.dtype, device=like.value.device))


def _spread(tangent: Tensor | None, value: Tensor) -> Tensor | None:
    """A tangent of its own for `value`: broadcast with it, never shared with another value."""
    if tangent is None:
        return None
    if tangent.shape != value.shape:
        tangent = tangent.expand_as(value)
    return tangent.to(value.dtype) if tangent.dtype != value.dtype else tangent.clone()


@tangent_rule(
    "where",
    family="linear",
    samples=lambda: [
        sample(torch.tensor([[True, False, True]] * 2), *inputs((2, 3), (3,))),
        sample(torch.tensor([[True, False, True]] * 2), inputs((2, 3))[0], 0.5),
    ],
)
def where(_kept: Switches, condition: Tensor, x: Any = None, other: Any = None) -> Any:
    """where(c, x, y)' = where(c, x', y')."""
    if isinstance(condition, Dual):  # the method form x.where(c, y)
        condition, x = x, condition
    if x is None:
        return torch.where(condition)
    condition = values_of(condition)
    x, other = lift(x), lift(other)
    value = torch.where(condition, x.value, other.value)
    if x.tangent is None and other.tangent is None:
        return Dual(value)
    zero = value.new_zeros(())
    return Dual(
        value,
        torch.where(
            condition,
            zero if x.tangent is None else x.tangent,
            zero if other.tangent is None else other.tangent,
        ),
    )


@tangent_rule(
    "masked_fill",
    family="linear",
    samples=lambda: [
        sample(inputs((2, 3))[0], torch.tensor([True, False, False]), 7.0),
        sample(inputs((2, 3))[0], torch.tensor([True, False, False]), inputs(())[0]),
    ],
)
def masked_fill(_kept: Switches, x: Any, mask: Tensor, value: Any) -> Dual:
    """Filled entries take the filling's tangent, which is 0 for a constant."""
    x, filling = lift(x), lift(value)
    if filling.tangent is None:
        tangent = None if x.tangent is None else x.tangent.masked_fill(mask, 0)
    else:
        start = torch.zeros_like(x.value) if x.tangent is None else x.tangent
        tangent = start.masked_fill(mask, filling.tangent)
    return Dual(x.value.masked_fill(mask, filling.value), tangent)


@tangent_rule(
    "pad",
    family="linear",
    samples=lambda: [
        sample(inputs((1, 2, 3))[0], (1, 2)),
        sample(inputs((1, 2, 3))[0], (1, 2), "constant", 3.0),
        sample(inputs((1, 2, 4))[0], (1, 2), mode="reflect"),
        sample(inputs((1, 2, 4))[0], (1, 2), mode="circular"),
    ],
)
def pad(
    _kept: Switches, x: Dual, pad: Any, mode: str = "constant", value: float | None = None
) -> Dual:
    """Padding is linear but for the constant that is padded with."""
    padded = F.pad(x.value, pad, mode, value)
    return Dual(padded, None if x.tangent is None else F.pad(x.tangent, pad, mode))


@tangent_rule(
    "dropout",
    family="linear",
    samples=lambda: [sample(inputs((2, 3))[0], 0.5, False), sample(inputs((2, 3))[0], 0.0, True)],
)
def dropout(_kept: Switches, x: Dual, p: float, train: bool) -> Dual:  # noqa: FBT001 - torch's
    """Value and tangent lose the same entries; the mask is drawn exactly as torch draws it."""
    if not train or p == 0:
        return x
    mask = torch.dropout(torch.ones_like(x.value), p, train)
    return Dual(x.value * mask, None if x.tangent is None else x.tangent * mask)


@tangent_rule(
    "feature_dropout",
    family="linear",
    samples=lambda: [sample(inputs((2, 3, 2))[0], 0.5, False)],
)
def feature_dropout(_kept: Switches, x: Dual, p: float, train: bool) -> Dual:  # noqa: FBT001
    """As dropout, by whole channels."""
    if not train or p == 0:
        return x
    mask = torch.feature_dropout(torch.ones_like(x.value), p, train)
    return Dual(x.value * mask, None if x.tangent is None else x.tangent * mask)


def _register_names(
    names: dict[str, Callable[[], list[Sample]]], apply: Any, mathematics: str
) -> None:
    for name, samples in names.items():
        register(Rule(name, "linear", mathematics, apply, samples))


def _one(
    *args: Any, shape: tuple[int, ...] = (2, 3, 4), **kwargs: Any
) -> Callable[[], list[Sample]]:
    return lambda: [Sample((inputs(shape)[0], *args), kwargs)]


def _image(*args: Any, size: int = 4, **kwargs: Any) -> Callable[[], list[Sample]]:
    return _one(*args, shape=(2, 3, size, size), **kwargs)


_UNARY: dict[str, Callable[[], list[Sample]]] = {
    # views and copies
    "T": _one(shape=(2, 3)),
    "mT": _one(),
    "H": _one(shape=(2, 3)),
    "mH": _one(),
    "real": _one(),
    "__getitem__": _one((slice(None), 0)),
    "adjoint": _one(),
    "alias": _one(),
    "as_strided": _one((2, 2), (1, 3)),
    "bfloat16": _one(),
    "broadcast_to": _one((5, 2, 3, 4)),
    "chunk": _one(2, dim=2),
    "clone": _one(),
    "contiguous": _one(),
    "cpu": _one(),
    "cuda": _one(),
    "diag": _one(shape=(3,)),
    "diag_embed": _one(),
    "diagonal": _one(0, 1, 2),
    "double": _one(),
    "dsplit": _one(2),
    "expand": _one(5, 2, 3, 4),
    "expand_as": lambda: [sample(inputs((3, 1))[0], torch.zeros(2, 3, 4))],
    "flatten": _one(1),
    "flip": _one((0, 2)),
    "fliplr": _one(),
    "flipud": _one(),
    "float": _one(),
    "gather": lambda: [sample(inputs((3, 4))[0], 1, torch.tensor([[0], [2], [1]]))],
    "half": _one(),
    "hsplit": _one(3),
    "index_select": _one(1, torch.tensor([2, 0])),
    "masked_select": lambda: [sample(inputs((3,))[0], torch.tensor([True, False, True]))],
    "movedim": _one(0, 2),
    "narrow": _one(2, 1, 2),
    "neg": _one(),
    "permute": _one((2, 0, 1)),
    "positive": _one(),
    "ravel": _one(),
    "repeat": _one(2, 1, 3),
    "repeat_interleave": _one(2, dim=1),
    "reshape": _one((4, 6)),
    "reshape_as": _one(torch.zeros(4, 6)),
    "resolve_conj": _one(),
    "resolve_neg": _one(),
    "roll": _one(1, 2),
    "rot90": _one(),
    "select": _one(1, 2),
    "slice_copy": _one(1, 0, 2),
    "split": _one(3, 2),
    "split_with_sizes": _one([1, 3], 2),
    "squeeze": _one(shape=(2, 1, 3)),
    "t": _one(shape=(2, 3)),
    "take": _one(torch.tensor([0, 5])),
    "take_along_dim": lambda: [sample(inputs((3, 4))[0], torch.tensor([[0], [2], [1]]), 1)],
    "tensor_split": _one(2, 2),
    "tile": _one((2, 1)),
    "to": _one(torch.float64),
    "transpose": _one(0, 2),
    "tril": _one(),
    "triu": _one(),
    "type": _one(torch.float64),
    "type_as": _one(torch.zeros(1, dtype=torch.float64)),
    "unbind": _one(1),
    "unflatten": _one(2, (2, 2)),
    "unfold": _one(2, 2, 1),
    "unsafe_chunk": _one(2, dim=2),
    "unsafe_split": _one(2, 2),
    "unsqueeze": _one(1),
    "view": _one(4, 6),
    "view_as": _one(torch.zeros(4, 6)),
    "vsplit": _one(2),
    # sums
    "cumsum": _one(1),
    "diff": _one(),
    "mean": _one(1),
    "nansum": _one(1),
    "sum": _one((0, 2)),
    "sum_to_size": _one(3, 1),
    "trace": _one(shape=(3, 3)),
    # pools and resampling
    "adaptive_avg_pool1d": _one(2),
    "adaptive_avg_pool2d": _image(2),
    "adaptive_avg_pool3d": _one(2, shape=(1, 2, 4, 4, 4)),
    "avg_pool1d": _one(2),
    "avg_pool2d": _image(3, 2, 1),
    "avg_pool3d": _one(2, shape=(1, 2, 4, 4, 4)),
    "channel_shuffle": _one(2, shape=(1, 4, 2, 2)),
    "col2im": _one((3, 3), (2, 2), (1, 1), (0, 0), (1, 1), shape=(1, 8, 4)),
    "im2col": _image((2, 2), (1, 1), (0, 0), (1, 1)),
    "pixel_shuffle": _one(2, shape=(1, 8, 2, 2)),
    "pixel_unshuffle": _one(2, shape=(1, 2, 4, 4)),
    "upsample_bicubic2d": _image((8, 8), False, None),
    "upsample_bilinear2d": _image((8, 8), False, None),
    "upsample_linear1d": _one((8,), False, None),
    "upsample_nearest1d": _one((8,), None),
    "upsample_nearest2d": _image((8, 8), None),
    "upsample_nearest3d": _one((8, 8, 8), None, shape=(1, 2, 4, 4, 4)),
    "upsample_trilinear3d": _one((8, 8, 8), False, None, shape=(1, 2, 4, 4, 4)),
}

_INDEX = torch.tensor([0, 2])
_JOINT: dict[str, Callable[[], list[Sample]]] = {
    "cat": lambda: [
        sample(inputs((2, 3), (4, 3)), 0),
        sample([*inputs((2, 3)), torch.ones(1, 3).double()]),
    ],
    "hstack": lambda: [sample(inputs((2, 3), (2, 1)))],
    "index_add": lambda: [sample(inputs((3, 2))[0], 0, _INDEX, inputs((2, 2))[0])],
    "index_copy": lambda: [sample(inputs((3, 2))[0], 0, _INDEX, inputs((2, 2))[0])],
    "index_put": lambda: [sample(inputs((3, 2))[0], (_INDEX,), inputs((2, 2))[0], accumulate=True)],
    "masked_scatter": lambda: [
        sample(inputs((3,))[0], torch.tensor([True, False, True]), inputs((2,))[0])
    ],
    "scatter_add": lambda: [sample(inputs((3, 2))[0], 0, _INDEX[:, None], inputs((2, 1))[0])],
    "select_scatter": lambda: [sample(*inputs((3, 2), (2,)), 0, 1)],
    "slice_scatter": lambda: [sample(*inputs((3, 2), (2, 2)), 0, 1)],
    "stack": lambda: [sample(inputs((2, 3), (2, 3)), 1)],
    "vstack": lambda: [sample(inputs((2, 3), (1, 3)))],
}

_register_names(_UNARY, apply_linear, "f(x)' = f(x')")
_register_names(_JOINT, _joined, "f(x, y)' = f(x', y')")
