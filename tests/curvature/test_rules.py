"""Every rule of the table on its own samples: against finite differences, and the reference path in every kind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import RULES, curvature_product, reference_product
from apoptosis.curvature.rules import Rule, inputs, register
from oracles.compare import EXACT, assert_products_close
from oracles.operations import (
    assert_agrees_with_differences,
    assert_agrees_with_reference,
    problem,
)

CASTS = {"bfloat16", "half", "float", "cuda"}  # leave float64, or need a device
CASES = [
    pytest.param(rule, index, id=f"{rule.name}-{index}")
    for rule in RULES.values()
    if rule.name not in CASTS
    for index in range(len(rule.samples()))
]


@pytest.mark.parametrize(("rule", "index"), CASES)
def test_rule_agrees_with_finite_differences(rule: Rule, index: int) -> None:
    assert not assert_agrees_with_differences(*problem(rule.name, rule.samples()[index]))


@pytest.mark.parametrize(("rule", "index"), CASES)
def test_rule_agrees_with_reference_in_every_kind(rule: Rule, index: int) -> None:
    assert_agrees_with_reference(*problem(rule.name, rule.samples()[index]))


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
