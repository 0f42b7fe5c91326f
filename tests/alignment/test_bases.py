"""The best coordinates of a sum, against the same question asked of numpy in another way."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from apoptosis.alignment.bases import principal_turn

CLOSE = {"rtol": 1e-7, "atol": 1e-8}


def vectors(num: int, dim: int, seed: int) -> Tensor:
    """Samples whose dimensions are correlated and of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num, dim, generator=generator, dtype=torch.float64)
    mixing = torch.eye(dim) + 0.3 * torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return mixed @ mixing * torch.logspace(-0.5, 0.5, dim, dtype=torch.float64)


@given(dim=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_dimensions_lose_what_the_best_approximation_of_all_products_loses(dim: int, seed: int):
    """Eckart and Young: no matrix of rank k is nearer to that of all products of samples than its singular parts."""
    a, b = vectors(9, dim, seed), vectors(11, dim, seed + 1)
    turn, energies = principal_turn(a.T @ a, b.T @ b)
    left, right = a @ turn.T, b @ torch.linalg.inv(turn)
    torch.testing.assert_close(left @ right.T, a @ b.T, **CLOSE)
    strengths = np.linalg.svd((a @ b.T).numpy(), compute_uv=False)[:dim]
    np.testing.assert_allclose(energies, strengths**2, rtol=1e-6, atol=1e-9 * strengths[0] ** 2)
    for kept in range(dim):
        lost = float((left[:, kept:] @ right[:, kept:].T).square().sum())
        assert lost == pytest.approx(float((strengths[kept:] ** 2).sum()), rel=1e-6)


def test_both_sides_carry_the_same_and_no_dimension_shares_with_another():
    a, b = vectors(30, 5, 1), vectors(40, 5, 2)
    turn, energies = principal_turn(a.T @ a, b.T @ b)
    wanted = energies.sqrt().diag()
    left, right = a @ turn.T, b @ torch.linalg.inv(turn)
    torch.testing.assert_close(left.T @ left, wanted, **CLOSE)
    torch.testing.assert_close(right.T @ right, wanted, **CLOSE)
    assert energies.tolist() == sorted(energies.tolist(), reverse=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_fewer_samples_than_dimensions_give_finite_coordinates_of_the_same_sum(side: str):
    few, many = vectors(2, 6, 3), vectors(50, 6, 4)
    a, b = (few, many) if side == "left" else (many, few)
    turn, energies = principal_turn(a.T @ a, b.T @ b)
    assert bool(turn.isfinite().all())
    products = (a @ turn.T) @ torch.linalg.inv(turn).T @ b.T
    torch.testing.assert_close(products, a @ b.T, rtol=0, atol=1e-9 * float((a @ b.T).abs().max()))
    assert float(energies[2:].max()) < 1e-6 * float(energies[0])


@pytest.mark.parametrize("which", ["left", "right", "both"])
def test_nothing_is_turned_where_a_side_is_zero(which: str):
    moment, zero = vectors(9, 3, 5), torch.zeros(3, 3, dtype=torch.float64)
    moment = moment.T @ moment
    sides = {"left": (zero, moment), "right": (moment, zero), "both": (zero, zero)}[which]
    turn, energies = principal_turn(*sides)
    assert torch.equal(turn, torch.eye(3, dtype=torch.float64))
    assert not bool(energies.any())
