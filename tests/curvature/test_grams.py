"""Sums of products against the products themselves."""

import pytest
import torch

from apoptosis.curvature import grams
from apoptosis.curvature.grams import Gram, Products


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


@pytest.mark.parametrize(("sizes", "is_thin"), [((1, 2), True), ((2, 1, 1), True), ((3, 2), False)])
def test_few_positions_are_kept_as_they_are_and_say_the_same(sizes, is_thin):
    generator = torch.Generator().manual_seed(3)
    total, want = Gram(), torch.zeros(2, 8, 8).double()
    for number, size in enumerate(sizes, 1):
        x = torch.randn(2, 8, size, generator=generator, dtype=torch.float64)
        total.add_(x, 1 / number)
        want += 3 * x @ x.mT / number
        x.zero_()  # somebody else's
    found = total.products(3.0)
    assert found.is_thin is is_thin
    assert total.is_empty
    torch.testing.assert_close(found.matrix, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.diagonal, want.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close((found + found).matrix, 2 * want)
    torch.testing.assert_close((found + Products(want)).matrix, 2 * want)
    alone = found.of_group(1, torch.device("cpu"))
    torch.testing.assert_close(alone.matrix, want[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_among_few_positions_is_seen(bad):
    x = torch.ones(1, 9, 2, dtype=torch.float64)
    x[0, 4, 1] = bad
    total = Gram()
    total.add_(x)
    assert not total.is_finite
