"""Prices where layers see fewer positions than they read numbers: by way of positions, as by way of inputs."""

import numpy as np
import pytest
import torch
from torch import nn

from apoptosis.criteria import obs_units
from apoptosis.criteria.obs import _inverse
from apoptosis.curvature import Products, grams
from apoptosis.structure import trace


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ridge", [1e-5, 1e-3, 0.5])
def test_the_inverse_by_positions_is_that_by_inputs(has_bias, ridge):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x[3] = 0
    if has_bias:
        x[-1] = torch.rand(5, generator=generator) + 0.5  # the root of how often each counts
    free = 12 - has_bias
    found = _inverse(Products(x[None], is_thin=True), ridge, has_bias=has_bias)
    penalty = torch.zeros(12).double()
    penalty[:free] = ridge * x[:free].square().sum(1).mean()
    want = torch.linalg.inv(x @ x.T + penalty.diag())[:free, :free]
    torch.testing.assert_close(found[:free, :free], want, rtol=1e-7, atol=1e-7 * float(want.max()))


def test_without_a_penalty_it_is_by_inputs():
    x = torch.eye(6).double()[:, :2] + 1
    with pytest.raises(RuntimeError, match="positive"):
        _inverse(Products(x[None], is_thin=True), 0.0, has_bias=False)


class Wide(nn.Module):
    """Convolutions of 72 and 8 inputs on maps of 3 × 3, a depthwise one, and a head of 9."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.stem(x).relu()).relu()
        return self.head(self.depthwise(x).relu().mean((2, 3)))


def test_scores_are_the_same_whichever_way_they_are_found(monkeypatch):
    torch.manual_seed(0)
    model, x = Wide().double(), torch.randn(4, 2, 3, 3, dtype=torch.float64)
    structure, thin = trace(model, x[:1]), []
    product = grams._product

    def noted(columns):
        thin.append(columns.shape[2])
        return product(columns)

    monkeypatch.setattr(grams, "_product", noted)
    found = obs_units(model, structure, [x[:3], x[3:]]).values
    assert thin, "else nothing was tried"
    monkeypatch.setattr(grams, "THIN", 10**9)
    want = obs_units(model, structure, [x[:3], x[3:]]).values
    assert set(found) == set(want)
    assert len(found) > 1
    for name, own in want.items():
        torch.testing.assert_close(found[name], own, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num", [2, 40])
def test_channels_of_a_depthwise_convolution_cost_what_each_reader_says(has_bias, num, monkeypatch):
    """All at once, against one by one; of few samples and of many."""
    torch.manual_seed(0)
    model = Wide().double()
    if has_bias:
        model.depthwise.bias = nn.Parameter(torch.randn(8).double())
    x = torch.randn(num, 2, 3, 3, dtype=torch.float64)
    structure = trace(model, x[:1])
    found, seen = obs_units(model, structure, [x]).values, []
    unique = np.unique

    def never(owners):
        seen.append(len(owners))
        return [*unique(owners), -1] if len(seen) % 2 else unique(owners)

    class Numpy:
        flatnonzero = staticmethod(np.flatnonzero)
        unique = staticmethod(never)

    monkeypatch.setattr("apoptosis.criteria.obs.np", Numpy)
    want = obs_units(model, structure, [x]).values
    assert seen
    for name, own in want.items():
        torch.testing.assert_close(found[name], own, rtol=1e-8, atol=1e-14)
