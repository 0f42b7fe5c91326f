"""How far fits hold on samples that nobody fitted, against least squares on the samples themselves."""

import pytest
import torch
from torch import Tensor

from apoptosis.criteria.held_out import RIDGES, optimism
from apoptosis.curvature import Products


def moment(x: Tensor, *, is_thin: bool = False) -> Products:
    return Products(x.T[None], is_thin=True) if is_thin else Products((x.T @ x)[None])


def drawn(num: int, width: int, *, seed: int, noise: float) -> Tensor:
    """What three sources make of inputs, and noise of each input's own."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sources = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    own = torch.randn(num, width, generator=generator, dtype=torch.float64)
    return sources @ mixing + noise * own


def left(x: Tensor, seen: Tensor, gone: list[int], width: int, ridge: float) -> float:
    """Ridge regression by more rows, judged column by column."""
    kept = [i for i in range(x.shape[1]) if i not in gone]
    penalty = (ridge * x[:, :width].square().sum(0).mean()).sqrt() * torch.eye(len(kept)).double()
    if x.shape[1] > width:
        penalty[-1] = 0
    rows = torch.cat([x[:, kept], penalty])
    targets = torch.cat([x[:, gone], torch.zeros(len(kept), len(gone)).double()])
    fit = torch.linalg.lstsq(rows, targets).solution
    missed = (seen[:, gone] - seen[:, kept] @ fit).square().sum(0) / seen[:, gone].square().sum(0)
    return float(missed.clamp(max=1).mean())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("noise", [0.3, 3.0])
@pytest.mark.parametrize("is_thin", [False, True])
def test_it_is_what_ridge_regression_fails_to_explain_of_the_other_half(
    has_bias: bool, noise: float, is_thin: bool
):
    kernel, width, ridge = 2, 12, 1e-3
    a, b = (drawn(30, width, seed=seed, noise=noise) for seed in (1, 2))
    if has_bias:
        a, b = (torch.cat([x, torch.ones(30, 1).double()], 1) for x in (a, b))
    columns = torch.arange(width).reshape(-1, kernel)
    halves = (moment(a, is_thin=is_thin), moment(b, is_thin=is_thin))
    found = optimism(halves, columns, ridge=ridge, has_bias=has_bias)

    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    gone = columns[order[: len(columns) // 4]].flatten().tolist()
    both = torch.cat([a, b])
    inside = left(both, both, gone, width, ridge)
    outside = min(left(a, b, gone, width, own) + left(b, a, gone, width, own) for own in RIDGES) / 2
    assert found == pytest.approx(max(0.0, (outside - inside) / (1 - inside)), rel=1e-8)
    assert (found > 0.15) is (noise > 1)


def test_the_more_samples_the_less_is_claimed_in_vain():
    found = [
        optimism(
            tuple(moment(drawn(num, 40, seed=seed, noise=1)) for seed in (1, 2)),
            torch.arange(40)[:, None],
            ridge=1e-4,
            has_bias=False,
        )
        for num in (25, 100, 10_000)
    ]
    assert found[0] > 2 * found[1] > 20 * found[2]


def test_one_column_of_great_energy_does_not_speak_for_the_others():
    """Two that are copies of each other, ten thousand times as large, among others that nothing tells."""
    a, b = (drawn(60, 40, seed=seed, noise=50) for seed in (1, 2))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    for x in (a, b):
        x[:, order[0]] = 1e4 * x[:, order[-1]]
        x[:, order[-1]] *= 1e4
    columns = torch.arange(40)[:, None]
    assert optimism((moment(a), moment(b)), columns, ridge=1e-12, has_bias=False) > 0.5


def test_channels_that_are_always_zero_change_nothing():
    a, b = (drawn(30, 12, seed=seed, noise=2) for seed in (1, 2))
    there = torch.tensor([0, 1, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17])  # of 9 channels of two columns
    wide = []
    for x in (a, b):
        wide.append(torch.zeros(30, 18).double())
        wide[-1][:, there] = x
    found, want = (
        optimism(
            (moment(one), moment(other)),
            torch.arange(one.shape[1]).reshape(-1, 2),
            ridge=1e-4,
            has_bias=False,
        )
        for one, other in (wide, (a, b))
    )
    assert want > 0.1
    assert found == pytest.approx(want, rel=1e-9)


def test_of_one_half_nothing_is_believed():
    whole = moment(drawn(50, 8, seed=1, noise=1))
    columns, one_sample = torch.arange(8)[:, None], (whole, Products(0 * whole.own))
    assert optimism(one_sample, columns, ridge=1e-4, has_bias=False) == 1


def test_it_is_nothing_where_there_is_nothing_to_tell_by():
    whole, columns = moment(drawn(50, 8, seed=1, noise=1)).own, torch.arange(8)[:, None]
    few = (Products(whole[:, :3, :3]), Products(whole[:, :3, :3]))
    assert optimism(few, columns[:3], ridge=1e-4, has_bias=False) == 0
    silent = Products(torch.zeros_like(whole))
    silent.own[0, 0, 0] = 1
    assert optimism((silent, silent), columns, ridge=1e-4, has_bias=False) == 0
