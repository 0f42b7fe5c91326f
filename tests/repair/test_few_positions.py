"""Layers that read more numbers than there are positions are fitted by way of positions, as by way of inputs."""

import pytest
import torch
from torch import Tensor

from apoptosis.curvature import DualRidge, grams
from apoptosis.repair.normal_equations import RIDGES, NormalEquations

GROUPS, OUTPUTS, INPUTS, POSITIONS = 2, 3, 30, 12


def drawn(*, has_bias: bool, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(GROUPS, 4, POSITIONS, generator=generator, dtype=torch.float64)
    mixing, wanted = (
        torch.randn(GROUPS, num, 4, generator=generator, dtype=torch.float64)
        for num in (INPUTS, OUTPUTS)
    )
    own = torch.randn(GROUPS, INPUTS, POSITIONS, generator=generator, dtype=torch.float64)
    x = mixing @ sources + 0.3 * own
    if has_bias:
        x[:, -1] = 1
    errors = torch.randn(GROUPS, OUTPUTS, POSITIONS, generator=generator, dtype=torch.float64)
    return x, wanted @ sources + noise * errors + 2


def sums_of(x: Tensor, r: Tensor, *, both: bool = True) -> NormalEquations:
    sums = NormalEquations()
    for number, parts in enumerate(zip(x.split(3, 2), r.split(3, 2), strict=True)):
        sums.add(*parts, half=number % 2 if both else 0)
    return sums


def by_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "THIN", 10**9)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("ridge", [1e-4, 0.1, float("inf")])
def test_the_change_is_that_of_all_sums(has_bias, both, ridge, monkeypatch):
    x, r = drawn(has_bias=has_bias)
    sums = sums_of(x, r, both=both)
    found = sums.solve(ridge, has_bias=has_bias)
    assert all(half.is_thin for half in sums._halves if not half.is_empty)
    by_inputs(monkeypatch)
    dense = sums_of(x, r, both=both)
    want = dense.solve(ridge, has_bias=has_bias)
    assert not any(half.is_thin for half in dense._halves)
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-10)
    assert sums.left(found) == pytest.approx(float((r - want @ x).square().sum()), rel=1e-8)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("noise", [0.01, 1.0, 10.0, 100.0])
def test_the_ridge_is_that_of_all_sums(has_bias, noise, monkeypatch):
    x, r = drawn(has_bias=has_bias, noise=noise)
    found = sums_of(x, r).best_ridge(has_bias=has_bias)
    by_inputs(monkeypatch)
    dense = sums_of(x, r)
    first, second = dense._sums()
    missed = {
        ridge: second.left(first.solved(ridge, has_bias=has_bias))
        + first.left(second.solved(ridge, has_bias=has_bias))
        for ridge in RIDGES
    }
    assert found == min(missed, key=missed.__getitem__) == dense.best_ridge(has_bias=has_bias)


def test_beginning_again_forgets_what_was_missing_and_keeps_what_was_found():
    x, r = drawn(has_bias=True)
    sums = sums_of(x, r)
    once = sums.solve(0.1, has_bias=True)
    sums.begin_again(alike=True)
    for number, parts in enumerate(zip(x.split(3, 2), (2 * r).split(3, 2), strict=True)):
        sums.add(*parts, half=number % 2)
    assert sums.count == POSITIONS
    torch.testing.assert_close(sums.solve(0.1, has_bias=True), 2 * once)
    sums.begin_again(alike=False)
    sums.add(2 * x, r, 0)
    torch.testing.assert_close(
        sums.solve(0.1, has_bias=True), sums_of(2 * x, r, both=False).solve(0.1, has_bias=True)
    )


def test_masked_rows_are_solved_by_inputs():
    x, r = drawn(has_bias=False)
    kept = torch.rand(GROUPS, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)) < 0.2
    found = sums_of(x, r).solve(1e-3, kept, has_bias=False)
    size = 1e-3 * x.square().sum((1, 2)) / INPUTS
    for g in range(GROUPS):
        for m in range(OUTPUTS):
            own = x[g, kept[g, m]]
            gram = own @ own.T + size[g] * torch.eye(len(own)).double()
            want = torch.linalg.solve(gram, own @ r[g, m])
            torch.testing.assert_close(found[g, m, kept[g, m]], want, rtol=1e-8, atol=1e-10)
            assert not found[g, m, ~kept[g, m]].any()


def test_silent_inputs_change_nothing():
    x, r = drawn(has_bias=False)
    assert not sums_of(0 * x, r).solve(1e-4, has_bias=False).any()
    assert sums_of(0 * x, r).best_ridge(has_bias=False) == RIDGES[0]


@pytest.mark.parametrize("counts", [1.0, 4.0])
def test_positions_that_count_often_weigh_more(counts):
    """The constant is then larger with all the rest."""
    x, r = drawn(has_bias=True)
    x, r = x[:1], r[:1]
    weight = torch.ones(POSITIONS).double()
    weight[0] = counts**0.5
    found = DualRidge(x * weight, has_bias=True).weights(r * weight, torch.tensor([2.0]).double())
    often = [x] + [x[..., :1]] * int(counts - 1), [r] + [r[..., :1]] * int(counts - 1)
    design, wanted = (torch.cat(own, 2)[0] for own in often)
    penalty = 2.0 * torch.eye(INPUTS).double()
    penalty[-1, -1] = 0
    want = torch.linalg.solve(design @ design.T + penalty, design @ wanted.T).T
    torch.testing.assert_close(found[0], want, rtol=1e-8, atol=1e-10)
