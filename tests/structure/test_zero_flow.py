"""Exact or not: what is called exact equals its zeroed twin, what is called inexact does not, and each has a reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from oracles.building import Net, built
from oracles.kept_statistics import twin_with_kept_statistics
from oracles.shrinking import SMALL_CASES, SmallCase

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Between:
    """Something between the layer that makes six units and the one that reads them."""

    id: str
    act: Callable[[Tensor], Tensor]
    because: str = ""


BETWEEN = [
    Between("sigmoid, which is ½ at 0", lambda y: torch.sigmoid(y)),
    Between("cosine, which is 1 at 0", lambda y: torch.cos(y)),
    Between("softplus", lambda y: F.softplus(y)),
    Between("a sum over zeros", lambda y: y * torch.relu(y).sum(-1, keepdim=True)),
    Between("a length", lambda y: F.normalize(y, dim=-1)),
    Between("a sum over what is not zero", lambda y: y * torch.cos(y).sum(-1, True), "a sum runs"),
    Between("a mean", lambda y: y * y.mean(-1, keepdim=True), "a mean runs over it"),
    Between("a variance", lambda y: y * y.var(-1, keepdim=True), "a variance runs over it"),
    Between("layer norm", lambda y: F.layer_norm(y, y.shape[-1:]), "LayerNorm's statistics"),
    Between("RMS norm", lambda y: F.rms_norm(y, y.shape[-1:]), "RMSNorm's mean square"),
    Between("a product with itself", lambda y: y @ (y.mT @ y)),
    Between(
        "linear attention with elu + 1",
        lambda y: (F.elu(y) + 1) @ ((F.elu(y) + 1).mT @ (F.elu(y) + 1)),
        "a sum runs over what is not zero",
    ),
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda b: b.id)
def test_exact_means_equal_to_the_twin(between: Between) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(between.act(net.a(x)))

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = numbers(2, 5, 4)
    structure = ap.trace(model, x)
    group = structure["a"]
    assert group.exact == (not between.because)
    assert between.because in group.inexact_because
    plan = structure.plan({"a": [0, 2, 5]})
    found, twin = ap.cut(model, plan)(x), ap.zero(model, plan)(x)
    if group.exact:
        torch.testing.assert_close(found, twin, **TOLERANCE)
    else:
        assert (found - twin).abs().max() > 1e-3


STATISTICS = {
    "a mean": lambda y: y * y.mean(-1, keepdim=True),
    "a variance": lambda y: y * y.var(-1, keepdim=True),
    "layer norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "RMS norm": lambda y: F.rms_norm(y, y.shape[-1:]),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("as_program", [True, False])
def test_an_inexact_cut_runs_its_statistics_over_what_is_kept(name: str, as_program: bool) -> None:
    """The oracle is the layer's mathematics on sliced weights."""
    act = STATISTICS[name]
    model: Any = built(
        lambda: Net(lambda m, x: m.b(act(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3))
    )
    x, kept = numbers(2, 5, 4), [0, 2, 5]
    structure = ap.trace(model, x)
    plan = structure.plan({"a": kept})
    small = structure.program(model, plan) if as_program else ap.cut(model, plan)
    hidden = x @ model.a.weight[kept].T + model.a.bias[kept]
    expected = act(hidden) @ model.b.weight[:, kept].T + model.b.bias
    torch.testing.assert_close(small(x), expected, **TOLERANCE)


def test_within_a_group_of_group_norm_a_cut_is_inexact_and_whole_groups_are_exact() -> None:
    model: Any = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)))
    x = numbers(5, 4)
    structure = ap.trace(model, x)
    groups = {g.size: g for g in structure.groups}
    assert (groups[2].exact, groups[3].exact) == (True, False)
    assert "GroupNorm" in groups[3].inexact_because
    plan = structure.plan({groups[3].name: [0, 2]})
    rows = [0, 2, 3, 5]
    hidden = x @ model[0].weight[rows].T + model[0].bias[rows]
    normed = F.group_norm(hidden, 2, model[1].weight[rows], model[1].bias[rows])
    expected = normed @ model[2].weight[:, rows].T + model[2].bias
    torch.testing.assert_close(ap.cut(model, plan)(x), expected, **TOLERANCE)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_streams_through_norms_equal_the_twin_whose_norms_see_what_is_kept(case: SmallCase) -> None:
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    for group in structure.groups:
        if group.exact or "GroupNorm" in group.inexact_because:
            continue
        plan = structure.plan({group.name: range(0, group.size, 2)})
        twin, num_norms = twin_with_kept_statistics(model, plan)
        assert num_norms
        assert plan.delivery == "module", plan.delivery_because
        small = ap.cut(model, plan)
        for inputs in (x, case.inputs(5, seed=1)):
            torch.testing.assert_close(small(inputs), twin(inputs), **TOLERANCE)
        assert (ap.zero(model, plan)(x) - twin(x)).abs().max() > 1e-6


def test_inexact_groups_are_chosen_on_request_alone() -> None:
    case = next(case for case in SMALL_CASES if case.id == "fused")
    structure = ap.trace(case.model(), case.inputs())
    assert all(g.exact for g in structure.choose())
    assert not all(g.exact for g in structure.choose(inexact=True))
    assert [g.name for g in structure.choose(kinds=["stream"])] == ["embed"]
