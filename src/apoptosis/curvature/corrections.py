"""Operations whose double backward in torch is wrong or missing, and equal ones in their place.

- `_weight_norm` (the old `torch.nn.utils.weight_norm`): its double backward is not the derivative of its backward.
- `hardsigmoid`: its backward has no derivative, not even by the adjoint it is linear in.
- recurrent layers: on CUDA they have no second derivative.
- `embedding_bag`, `cdist`, `pdist`: their backwards have no derivative either.
- `embedding` with a padding row: the row's gradient is dropped by convention, so the Jacobian of the gradient is not
  symmetric and double backward gives its transpose. It is run without the convention, and the row is dropped from the
  result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apoptosis.curvature.calls import body_of, by_position, identify
from apoptosis.curvature.recurrent import RECURRENT, is_packed

__all__ = ["EQUAL", "Corrections", "PaddingRows"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v/‖v‖, the norm over all dimensions but `dim` (-1: over all)."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.sqrt((v * v).sum(others, keepdim=True)))


def _hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x / 6 + 0.5, 0, 1)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, *_: Any, **__: Any) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    rows, columns = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return torch.linalg.vector_norm(x[rows] - x[columns], p, -1)


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Look-ups, then sums (mode 0), means (1) or maxima (2) over bags."""
    options: list[Any] = [*rest, *(False, 0, False, None, False, None)[len(rest) :]]
    _, mode, _, by_sample, _, padding = options
    _, bag_of, *others = torch.embedding_bag(weight.detach(), indices, offsets, *rest)
    num_bags = others[0].numel() if mode else len(offsets)
    rows = weight[indices]
    counted = (
        torch.ones_like(rows[:, :1]) if padding in (None, -1) else (indices != padding)[:, None]
    )
    rows = rows if by_sample is None else rows * by_sample[:, None]
    bag_of = (
        torch.bucketize(torch.arange(len(indices), device=offsets.device), offsets, right=True) - 1
    )
    if mode == 2:
        start = torch.full((num_bags, weight.shape[1]), float("-inf"), dtype=rows.dtype)
        at = bag_of[:, None].expand_as(rows)
        return start.scatter_reduce(0, at, rows, "amax"), bag_of, *others
    start = torch.zeros(num_bags, weight.shape[1], dtype=rows.dtype, device=rows.device)
    total = start.index_add(0, bag_of, rows * counted)
    if mode == 1:
        sizes = start[:, :1].index_add(0, bag_of, counted.to(rows.dtype))
        total = total / sizes.clamp(min=1)
    return total, bag_of, *others


EQUAL: dict[str, Callable[..., Any]] = {
    "_weight_norm": _weight_norm,
    "embedding_bag": _embedding_bag,
    "cdist": _cdist,
    "hardsigmoid": _hardsigmoid,
    "pdist": _pdist,
}


class PaddingRows:
    """Which rows of which embedding tables are padding."""

    def __init__(self) -> None:
        """None so far."""
        self._rows: list[tuple[Tensor, int]] = []

    def look_up(self, weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any) -> Tensor:
        """The embedding without the convention, which is noted for `drop`."""
        if padding_idx >= 0:
            self._rows.append((weight, padding_idx))
        return torch.embedding(weight, indices)

    def drop(self, parameters: list[Any], results: list[Tensor | None]) -> None:
        """Zero the noted rows of results by parameter."""
        for weight, row in self._rows:
            for parameter, result in zip(parameters, results, strict=True):
                if parameter is weight and result is not None:
                    result[row] = 0


class Corrections(TorchFunctionMode):
    """Runs a model with the operations above replaced."""

    def __init__(self, padding: PaddingRows) -> None:
        """Note padding rows in `padding`."""
        super().__init__()
        self._padding = padding

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ARG002 - torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace an operation, enter a Python function that may hold one, leave the rest alone."""
        kwargs = kwargs or {}
        call = identify(func)
        if call.name in _PYTHON and call.is_python:
            with self:
                return body_of(func)(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        args, kwargs = by_position(call, args, kwargs)
        if call.name == "embedding":
            return self._padding.look_up(*args, **kwargs)
        if call.name in RECURRENT and not is_packed(call.name, args):
            return RECURRENT[call.name](*args, **kwargs)
        if call.name in EQUAL:
            return EQUAL[call.name](*args, **kwargs)
        return func(*args, **kwargs)


_PYTHON = frozenset(
    {"cdist", "embedding", "embedding_bag", "hardsigmoid", "multi_head_attention_forward"}
)
