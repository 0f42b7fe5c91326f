"""Every rule of the table on its own samples: against finite differences, and the reference path in every kind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import KINDS, RULES, curvature_product, reference_product
from apoptosis.curvature.rules import Rule, Sample, inputs, register
from apoptosis.task import Task
from oracles.compare import EXACT, FINITE, assert_products_close
from oracles.differences import finite_difference_product

CASTS = {"bfloat16", "half", "float", "cuda"}  # leave float64, or need a device
CASES = [
    pytest.param(rule, index, id=f"{rule.name}-{index}")
    for rule in RULES.values()
    if rule.name not in CASTS
    for index in range(len(rule.samples()))
]


class Operation(nn.Module):
    """One operation; the floating-point tensors of its sample are parameters, buffers where they are statistics."""

    def __init__(self, name: str, args: Sample) -> None:
        super().__init__()
        self.name = name
        self.tensors = nn.ParameterList()
        self.arguments = [self._keep(value) for value in args.args]
        self.named = {key: self._keep(value) for key, value in args.kwargs.items()}

    def forward(self, _nothing: Tensor) -> Tensor:
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


def problem(rule: Rule, index: int) -> tuple[nn.Module, Any, Task]:
    model = Operation(rule.name, rule.samples()[index]).double()
    size = model(torch.zeros(1)).numel()
    weights = torch.linspace(-1, 1.3, size, dtype=torch.float64)
    task = replace(
        Task.classification(),
        loss=lambda outputs, _batch: (torch.sin(outputs) * weights).sum(),
        count=lambda _batch: 1,
    )
    return model, torch.zeros(1, dtype=torch.float64), task


def some_direction(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(("rule", "index"), CASES)
def test_rule_agrees_with_finite_differences(rule: Rule, index: int) -> None:
    model, batch, task = problem(rule, index)
    for direction in (None, some_direction(model)):
        found = curvature_product(model, [batch], task, kind="hessian", direction=direction)
        assert not found.fallbacks
        expected = finite_difference_product(model, batch, task, "hessian", direction)
        assert_products_close(found.product, expected, tolerance=FINITE, scale=100.0)


@pytest.mark.parametrize(("rule", "index"), CASES)
def test_rule_agrees_with_reference_in_every_kind(rule: Rule, index: int) -> None:
    model, batch, task = problem(rule, index)
    for kind in KINDS:
        for direction in (None, some_direction(model)):
            options = {"kind": kind, "direction": direction, "gradient": True}
            found = curvature_product(model, [batch], task, **options)
            expected = reference_product(model, [batch], task, **options)
            assert_products_close(found.product, expected.product, tolerance=EXACT, scale=100.0)
            assert_products_close(found.gradient, expected.gradient, tolerance=EXACT, scale=100.0)


def test_a_rule_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="'mul' has a rule already"):
        register(RULES["mul"])


def test_a_rule_needs_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        register(replace(RULES["mul"], name="unproved", samples=list))


def test_rename_of_first_argument() -> None:
    """Functions called with `input=` reach the rule."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(inputs((3, 3))[0])

        def forward(self, x: Tensor) -> Tensor:
            y = torch.softmax(input=torch.matmul(x, self.weight), dim=1)
            return torch.reshape(input=torch.mul(input=y, other=y), shape=(-1, 3))

    batch = (inputs((4, 3))[0], torch.tensor([0, 1, 2, 0]))
    found = curvature_product(Named(), [batch], kind="hessian")
    expected = reference_product(Named(), [batch], kind="hessian")
    assert not found.fallbacks
    assert_products_close(found.product, expected.product, tolerance=EXACT)
