"""One operation as a model, and the two comparisons that a tangent rule has to pass on it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.curvature import KINDS, curvature_product, reference_product
from apoptosis.curvature.rules import Sample
from apoptosis.task import Task
from oracles.compare import EXACT, FINITE, assert_products_close
from oracles.differences import finite_difference_product

__all__ = ["assert_agrees_with_differences", "assert_agrees_with_reference", "call", "problem"]

SCALE = 100.0  # outputs are squared and summed, so products that cancel are measured against this


class Operation(nn.Module):
    """One operation; the floating-point tensors of its sample are parameters, buffers where they are statistics."""

    def __init__(self, name: str, args: Sample) -> None:
        """Keep the sample."""
        super().__init__()
        self.name = name
        self.tensors = nn.ParameterList()
        self.arguments = [self._keep(value) for value in args.args]
        self.named = {key: self._keep(value) for key, value in args.kwargs.items()}

    def forward(self, _nothing: Tensor) -> Tensor:
        """The outputs as one vector, squared."""
        args = [self._find(value) for value in self.arguments]
        named = {key: self._find(value) for key, value in self.named.items()}
        result = call(self.name)(*args, **named)
        parts = result if isinstance(result, (tuple, list)) else [result]
        # A square keeps the operation's tangent apart from its value: a lost one would show.
        return torch.cat([p.reshape(-1) for p in parts if p.is_floating_point()]) ** 2

    def _keep(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._keep(item) for item in value]
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            self.tensors.append(nn.Parameter(value.clone()))
            return _Kept(len(self.tensors) - 1)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def _find(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._find(item) for item in value]
        return self.tensors[value.index] if isinstance(value, _Kept) else value


class _Kept:
    def __init__(self, index: int) -> None:
        self.index = index


def call(name: str) -> Callable[..., Any]:
    """The torch function that an entry of the table names."""
    if name in ("T", "mT", "H", "mH", "real"):
        return lambda x: getattr(x, name)
    if name == "tensordot":
        return torch._C._VariableFunctions.tensordot
    for owner in (torch._C._nn, torch, Tensor, torch.nn.functional, torch.ops.aten):
        function = getattr(owner, name, None)
        if callable(function) and not isinstance(function, torch.dtype):
            return function
    raise LookupError(name)


def problem(name: str, args: Sample) -> tuple[nn.Module, Any, Task]:
    """The operation as a model, with a loss that is curved in it."""
    model = Operation(name, args).double()
    size = model(torch.zeros(1)).numel()
    weights = torch.linspace(-1, 1.3, size, dtype=torch.float64)
    task = replace(
        Task.classification(),
        loss=lambda outputs, _batch: (torch.sin(outputs) * weights).sum(),
        count=lambda _batch: 1,
    )
    return model, torch.zeros(1, dtype=torch.float64), task


def some_direction(model: nn.Module) -> dict[str, Tensor]:
    """A direction that is not θ."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


def assert_agrees_with_differences(model: nn.Module, batch: Any, task: Task) -> Mapping[str, int]:
    """`hessian` along θ and along another direction; gives the operations that fell back."""
    fallbacks: dict[str, int] = {}
    for direction in (None, some_direction(model)):
        found = curvature_product(model, [batch], task, kind="hessian", direction=direction)
        expected = finite_difference_product(model, batch, task, "hessian", direction)
        assert_products_close(found.product, expected, tolerance=FINITE, scale=SCALE)
        fallbacks |= found.fallbacks
    return fallbacks


def assert_agrees_with_reference(model: nn.Module, batch: Any, task: Task) -> None:
    """Product and gradient in every kind, along θ and along another direction."""
    for kind in KINDS:
        for direction in (None, some_direction(model)):
            options = {"kind": kind, "direction": direction, "gradient": True}
            found = curvature_product(model, [batch], task, **options)
            expected = reference_product(model, [batch], task, **options)
            assert_products_close(
                found.product, expected.product, tolerance=EXACT, scale=SCALE, what=kind
            )
            assert_products_close(
                found.gradient, expected.gradient, tolerance=EXACT, scale=SCALE, what="gradient"
            )
