"""Sums of products against the products themselves."""

import pytest
import torch

from apoptosis.curvature import grams
from apoptosis.curvature.grams import Gram


@pytest.mark.parametrize(("groups", "n"), [(1, 7), (1, 8), (1, 3), (3, 9), (2, 1)])
def test_the_sum_is_that_of_the_products(groups, n, monkeypatch):
    """Blocks of four: none, some and a part of one below the diagonal."""
    monkeypatch.setattr(grams, "BLOCK", 4)
    torch.manual_seed(0)
    first, second = (torch.randn(groups, n, p, dtype=torch.float64) for p in (5, 11))
    total = Gram()
    total.add_(first)
    total.add_(second, 0.25)
    found = total.taken(2.0)
    want = 2 * (first @ first.mT + 0.25 * second @ second.mT)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(found, found.mT)
    assert total.is_empty


def test_products_of_float32_are_summed_in_float64():
    x = torch.tensor([[[1.0, 2.0**-13]]])
    total = Gram()
    total.add_(x)
    assert float(total.taken(1.0)) == 1 + 2.0**-26  # float32 has no such number


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 3, 8])
def test_a_bad_value_anywhere_is_seen(bad, place, monkeypatch):
    monkeypatch.setattr(grams, "BLOCK", 4)
    x = torch.ones(2, 9, 3, dtype=torch.float64)
    total = Gram()
    total.add_(x)
    assert total.is_finite
    x[1, place, 2] = bad
    total.add_(x)
    assert not total.is_finite
