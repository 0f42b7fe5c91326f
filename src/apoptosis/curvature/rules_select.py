"""Operations that pick entries by their values: the tangent picks the same entries.

Which entry is picked is piecewise constant, so there is no curvature; ties are broken as torch breaks them, because
the indices are torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.duals import Dual, lift
from apoptosis.curvature.rules import (
    Declined,
    Rule,
    Sample,
    inputs,
    register,
    sample,
    tangent_rule,
    values_of,
)
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

aten = torch.ops.aten


def _register_selection(name: str, samples: Callable[[], list[Sample]], dim_at: int) -> None:
    def apply(
        _kept: Switches,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = func(*values_of(args), **values_of(kwargs))
        x = args[0]
        if isinstance(result, Tensor):
            raise Declined
        values, indices = result
        tangent = None
        if x.tangent is not None:
            dim = kwargs.get("dim", args[dim_at] if len(args) > dim_at else -1)
            spread = indices.dim() < x.value.dim()
            at = indices.unsqueeze(dim) if spread else indices
            tangent = x.tangent.gather(dim, at)
            tangent = tangent.squeeze(dim) if spread else tangent
        return type(result)((Dual(values, tangent), indices))

    register(Rule(name, "select", "picks the tangent of what it picks", apply, samples))


_register_selection("sort", lambda: [sample(inputs((3, 4))[0], 1)], 1)
_register_selection("topk", lambda: [sample(inputs((3, 4))[0], 2)], 2)
_register_selection("kthvalue", lambda: [sample(inputs((3, 4))[0], 2, 1)], 2)
_register_selection("cummax", lambda: [sample(inputs((3, 4))[0], 1)], 1)
_register_selection("cummin", lambda: [sample(inputs((3, 4))[0], 1)], 1)


def _register_extremum(name: str) -> None:
    function = getattr(torch, name)

    @tangent_rule(
        name,
        family="select",
        samples=lambda: [
            sample(inputs((3, 4))[0], 1),
            sample(inputs((3, 4))[0], dim=0, keepdim=True),
            sample(inputs((3, 4))[0]),
            sample(*inputs((3, 4), (4,))),
        ],
    )
    def extremum(
        _kept: Switches,
        x: Any,
        dim: Any = None,
        keepdim: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        other: Any = None,
    ) -> Any:
        """The tangent of the largest (smallest) entry; equals share it evenly, as in torch."""
        if isinstance(dim, (Tensor, Dual)) or other is not None:
            return _between(function, x, other if other is not None else dim)
        if dim is None:
            value = function(x.value)
            chosen = (x.value == value.detach()).to(x.value.dtype)
            tangent = None if x.tangent is None else (x.tangent * chosen).sum() / chosen.sum()
            return Dual(value, tangent)
        result = function(x.value, dim, keepdim)
        tangent = None
        if x.tangent is not None:
            at = result.indices if keepdim else result.indices.unsqueeze(dim)
            tangent = x.tangent.gather(dim, at)
            tangent = tangent if keepdim else tangent.squeeze(dim)
        return type(result)((Dual(result.values, tangent), result.indices))


def _between(function: Callable[..., Tensor], x: Any, y: Any) -> Dual:
    x, y = lift(x), lift(y)
    value = function(x.value, y.value)
    first = (x.value == value.detach()).to(value.dtype)
    second = (y.value == value.detach()).to(value.dtype)
    share = first / (first + second)
    parts: list[Tensor] = [
        t * weight for t, weight in ((x.tangent, share), (y.tangent, 1 - share)) if t is not None
    ]
    return Dual(value, sum(parts[1:], parts[0]) if parts else None)


_register_extremum("max")
_register_extremum("min")


def _register_binary(name: str, function: Callable[..., Tensor]) -> None:
    @tangent_rule(name, family="select", samples=lambda: [sample(*inputs((3, 4), (4,)))])
    def binary(_kept: Switches, x: Any, other: Any) -> Dual:
        """The tangent of the larger (smaller); equals share it evenly, as in torch."""
        return _between(function, x, other)


_register_binary("maximum", torch.max)
_register_binary("minimum", torch.min)


def _register_max_pool(dims: int) -> None:
    size = (2, 2, *(5,) * dims)
    with_indices = {
        1: lambda x, *o: torch.nn.functional.max_pool1d_with_indices(x, *o),
        2: lambda x, *o: aten.max_pool2d_with_indices(x, *o),
        3: lambda x, *o: aten.max_pool3d_with_indices(x, *o),
    }[dims]

    @tangent_rule(
        f"max_pool{dims}d",
        family="select",
        samples=lambda: [sample(inputs(size)[0], 2), sample(inputs(size)[0], 3, 2, 1)],
    )
    def max_pool(
        _kept: Switches,
        x: Dual,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Dual:
        """The tangent of each window's largest entry."""
        stride = kernel_size if stride is None or stride == () else stride
        options = [_tuple(o, dims) for o in (kernel_size, stride, padding, dilation)]
        value, indices = with_indices(x.value, *options, ceil_mode)
        if x.tangent is None:
            return Dual(value)
        picked = x.tangent.flatten(-dims).gather(-1, indices.flatten(-dims))
        return Dual(value, picked.view(value.shape))


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (int(value),) * dims if isinstance(value, int) else tuple(value)


for _dims in (1, 2, 3):
    _register_max_pool(_dims)
