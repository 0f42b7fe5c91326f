"""The penalty that holds on samples nobody fitted, against least squares on the samples themselves."""

import pytest
import torch
from torch import Tensor

from apoptosis.criteria.held_out import RIDGES, missed_by_ridge


def moment(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def drawn(num: int, width: int, rank: int, *, seed: int, noise: float = 0.3) -> Tensor:
    """What `rank` sources and a little noise of each input's own make."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(
        rank, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    sources = torch.randn(num, rank, generator=generator, dtype=torch.float64)
    own = torch.randn(num, width, generator=generator, dtype=torch.float64)
    return sources @ mixing + noise * own


def chosen(halves: tuple[Tensor, Tensor], width: int) -> float:
    columns = torch.arange(width)[:, None]
    missed = missed_by_ridge(halves, torch.eye(width).double(), columns, has_bias=False)
    return RIDGES[int(missed.argmin())]


@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_what_ridge_regression_on_one_half_misses_of_the_other(has_bias: bool):
    kernel, width = 2, 12
    a, b = (drawn(30, width, 4, seed=seed) for seed in (1, 2))
    if has_bias:
        a, b = (torch.cat([x, torch.ones(30, 1).double()], 1) for x in (a, b))
    weights = torch.randn(5, a.shape[1], generator=torch.Generator().manual_seed(3)).double()
    columns = torch.arange(width).reshape(-1, kernel)
    found = missed_by_ridge((moment(a), moment(b)), weights, columns, has_bias=has_bias)

    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    gone = columns[order[: len(columns) // 4]].flatten()
    kept = [i for i in range(a.shape[1]) if i not in gone.tolist()]
    for number, ridge in enumerate(RIDGES):
        wanted = 0.0
        for own, other in ((a, b), (b, a)):
            size = own[:, :width].square().sum(0).mean()  # of A's diagonal, times the samples
            penalty = torch.diag((ridge * size).sqrt() * torch.ones(len(kept)).double())
            if has_bias:
                penalty[-1] = 0
            rows = torch.cat([own[:, kept], penalty])
            targets = torch.cat([own[:, gone], torch.zeros(len(kept), len(gone)).double()])
            fit = torch.linalg.lstsq(rows, targets).solution
            missed = (other[:, gone] - other[:, kept] @ fit).square().mean(0)
            wanted += float(missed @ weights[:, gone].square().sum(0))
        assert float(found[number]) == pytest.approx(wanted, rel=1e-8)


def test_few_samples_want_a_larger_penalty_than_many():
    few, many = (
        tuple(moment(drawn(num, 40, 3, seed=seed, noise=2)) for seed in (1, 2))
        for num in (45, 20_000)
    )
    assert chosen(many, 40) <= 1e-3
    assert chosen(few, 40) >= 1e-2


def test_nothing_is_missed_where_there_is_nothing_to_tell_by():
    whole = moment(drawn(50, 8, 3, seed=1))
    columns, weights = torch.arange(8)[:, None], torch.eye(8).double()
    one_sample = missed_by_ridge((whole, torch.zeros_like(whole)), weights, columns, has_bias=False)
    assert not one_sample.any()
    three = missed_by_ridge((whole[:3, :3],) * 2, weights[:3, :3], columns[:3], has_bias=False)
    assert not three.any()
