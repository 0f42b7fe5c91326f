"""An operation is the same by position and by name, and torch's names are `input`, `dim`, `weight`, not our rules'."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from apoptosis.curvature import RULES, curvature_product, reference_product
from apoptosis.curvature.calls import by_position, identify
from apoptosis.curvature.rules import Rule, Sample, inputs
from oracles.compare import EXACT, assert_products_close
from oracles.operations import call, problem

CASTS = {"bfloat16", "half", "float", "cuda"}


def named(name: str, sample: Sample) -> Sample | None:
    """The sample with all that torch takes by name; None where it takes nothing so."""
    like = get_testing_overrides().get(call(name))
    if like is None:
        return None
    try:
        bound = inspect.signature(like).bind(*sample.args, **sample.kwargs).arguments
    except TypeError:
        return None
    found = Sample((), dict(bound))
    try:
        problem(name, found)
    except Exception:  # noqa: BLE001 - torch does not take it so
        return None
    return found


CASES = [
    pytest.param(rule, sample, id=f"{rule.name}-{index}")
    for rule in RULES.values()
    if rule.name not in CASTS
    for index, own in enumerate(rule.samples()[:2])
    if (sample := named(rule.name, own)) is not None
]


@pytest.mark.parametrize(("rule", "sample"), CASES)
def test_a_rule_covers_its_operation_by_name(rule: Rule, sample: Sample) -> None:
    model, batch, task = problem(rule.name, sample)
    found = curvature_product(model, [batch], task, kind="hessian")
    expected = reference_product(model, [batch], task, kind="hessian")
    assert_products_close(found.product, expected.product, tolerance=EXACT, scale=100.0)


def test_most_rules_are_tried() -> None:
    assert len({case.values[0].name for case in CASES}) > 120
    assert {"sort", "topk", "kthvalue", "cummax", "cummin"} <= {c.values[0].name for c in CASES}


class Named(nn.Module):
    """Layers of torch's functions, every argument by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(inputs((4, 2, 3))[0])
        self.gamma, self.beta = nn.Parameter(inputs((4,))[0]), nn.Parameter(inputs((4,))[0] / 2)
        self.weight = nn.Parameter(inputs((3, 4))[0])

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(input=x, weight=self.conv, padding=1)
        y = torch.layer_norm(
            input=y.mean(dim=-1), normalized_shape=(4,), weight=self.gamma, bias=self.beta
        )
        y = (
            torch.relu_(input=y * 1)
            + torch.pdist(input=y).sum()
            + torch.cdist(x1=y, x2=y + 2).sum()
        )
        y = y * torch.topk(input=y, k=2, dim=1)[0].sum(dim=1, keepdim=True)
        return F.linear(input=y, weight=self.weight)


@pytest.mark.parametrize("kind", ["hessian", "ggn", "connectivity"])
def test_a_network_of_named_arguments(kind: str) -> None:
    batch = (inputs((4, 2, 5))[0], torch.tensor([0, 1, 2, 0]))
    found = curvature_product(Named(), [batch], kind=kind)
    expected = reference_product(Named(), [batch], kind=kind)
    assert_products_close(found.product, expected.product, tolerance=EXACT)


@pytest.mark.parametrize(
    ("function", "args", "names", "moved"),
    [
        (torch.topk, (), ["input", "k"], 2),
        (torch.topk, (), ["input", "k", "sorted"], 2),
        (torch.where, (), ["input", "other", "condition"], 3),
        (torch.add, (), ["input", "other", "alpha"], 2),
        (Tensor.sum, (1,), ["dim"], 1),
        (torch.ops.aten.topk.default, (), ["self", "k"], 2),
        (F.softmax, (), ["input", "dim"], 0),
    ],
)
def test_what_is_moved(function: Any, args: tuple[Any, ...], names: list[str], moved: int) -> None:
    found, rest = by_position(identify(function), args, dict.fromkeys(names, 0))
    assert (len(found) - len(args), len(rest)) == (moved, len(names) - moved)
