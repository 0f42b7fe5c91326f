"""Streamed least squares give what torch's solver gives on all of the data at once."""

import pytest
import torch
from torch import Tensor

from apoptosis.repair import normal_equations
from apoptosis.repair.normal_equations import RIDGES, NormalEquations

GROUPS, OUTPUTS, INPUTS, POSITIONS = 2, 3, 5, 40


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GROUPS, INPUTS, POSITIONS, generator=generator, dtype=torch.float64)
    r = torch.randn(GROUPS, OUTPUTS, POSITIONS, generator=generator, dtype=torch.float64)
    return x, r


def sums_of(x: Tensor, r: Tensor, *sizes: int) -> NormalEquations:
    sums = NormalEquations()
    for number, parts in enumerate(zip(x.split(sizes, 2), r.split(sizes, 2), strict=True)):
        sums.add(*parts, half=number % 2)
    return sums


def by_lstsq(x: Tensor, r: Tensor, penalty: Tensor | None = None) -> Tensor:
    """On the whole design matrix, the penalty as rows of its own, wanted to be zero."""
    if penalty is not None:
        x = torch.cat([x, penalty.sqrt()], 2)
        r = torch.cat([r, r.new_zeros(*r.shape[:2], penalty.shape[2])], 2)
    return torch.linalg.lstsq(x.mT, r.mT).solution.mT


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (10, 10, 20)])
def test_without_a_penalty_it_is_lstsq(sizes):
    x, r = drawn()
    found = sums_of(x, r, *sizes).solve(0.0, has_bias=False)
    torch.testing.assert_close(found, by_lstsq(x, r), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ridge", [1e-4, 0.3])
def test_the_penalty_is_relative_to_the_mean_square_and_spares_the_bias(ridge, has_bias):
    x, r = drawn()
    if has_bias:
        x[:, -1] = 1
    free = INPUTS - has_bias
    size = ridge * x[:, :free].square().sum((1, 2)) / free
    penalty = size[:, None, None] * torch.eye(INPUTS, dtype=torch.float64)
    penalty[:, free:, free:] = 0
    found = sums_of(x, r, 25, 15).solve(ridge, has_bias=has_bias)
    torch.testing.assert_close(found, by_lstsq(x, r, penalty), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(found, by_lstsq(x, r), rtol=1e-9, atol=1e-11)


def test_rows_keep_to_the_weights_they_have():
    x, r = drawn()
    kept = torch.rand(GROUPS, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)) < 0.6
    kept[0, 0], kept[1, 2] = False, True
    found = sums_of(x, r, 40).solve(0.0, kept, has_bias=False)
    for g in range(GROUPS):
        for m in range(OUTPUTS):
            own = kept[g, m]
            want = torch.zeros(INPUTS, dtype=torch.float64)
            if own.any():
                want[own] = torch.linalg.lstsq(x[g, own].T, r[g, m, :, None]).solution[:, 0]
            torch.testing.assert_close(found[g, m], want, rtol=1e-10, atol=1e-12)


def test_a_bias_is_kept_whatever_the_mask_says_of_weights():
    x, r = drawn()
    x[:, -1] = 1
    nothing = torch.zeros(GROUPS, OUTPUTS, INPUTS - 1, dtype=torch.bool)
    found = sums_of(x, r, 40).solve(0.0, nothing, has_bias=True)
    torch.testing.assert_close(found[..., -1], r.mean(2))
    assert not found[..., :-1].any()


@pytest.mark.parametrize("ridge", [0.0, 1e-4])
def test_dead_and_repeated_inputs_are_no_obstacle(ridge):
    """With a penalty a dead input gets no weight; without one the smallest of all solutions is taken."""
    x, r = drawn()
    x[:, 1] = 0
    x[:, 3] = x[:, 0]
    sums = sums_of(x, r, 40)
    found = sums.solve(ridge, has_bias=False)
    assert found.isfinite().all()
    assert not found[:, :, 1].any() or found[:, :, 1].abs().max() < 1e-12
    torch.testing.assert_close(found[:, :, 3], found[:, :, 0], rtol=1e-6, atol=1e-9)
    best = sums.left(by_lstsq(x[:, [0, 2, 4]], r) @ torch.eye(5).double()[[0, 2, 4]])
    assert sums.left(found) == pytest.approx(best, rel=1e-10 if not ridge else 1e-6)


def test_inputs_that_are_all_dead_change_nothing():
    x, r = drawn()
    assert not sums_of(x * 0, r, 40).solve(1e-4, has_bias=False).any()


def test_what_is_left_is_counted_from_the_sums():
    x, r = drawn()
    sums = sums_of(x, r, 13, 27)
    change = torch.randn(GROUPS, OUTPUTS, INPUTS).double()
    assert sums.left(change) == pytest.approx(float((r - change @ x).square().sum()), rel=1e-12)
    nothing = sums.left(torch.zeros_like(change))
    assert sums.left(sums.solve(0.0, has_bias=False)) < nothing
    assert nothing == pytest.approx(float(r.square().sum()))


def halves_of(x: Tensor, r: Tensor) -> NormalEquations:
    return sums_of(x, r, POSITIONS // 2, POSITIONS // 2)


@pytest.mark.parametrize("noise", [0.01, 1.0, 30.0])
def test_the_ridge_is_the_one_that_holds_best_on_the_other_half(noise):
    """Each half solved with `lstsq` and the penalty as rows, judged on the data of the other, for every ridge."""
    x, r = drawn()
    r = noise * r + drawn(1)[1][:, :, :INPUTS] @ x
    parts = list(zip(x.chunk(2, 2), r.chunk(2, 2), strict=True))

    def missed(ridge: float) -> float:
        total = 0.0
        for (a, ra), (b, rb) in (parts, parts[::-1]):
            size = ridge * a.square().sum((1, 2)) / INPUTS
            penalty = size[:, None, None] * torch.eye(INPUTS, dtype=torch.float64)
            nothing = torch.zeros(GROUPS, OUTPUTS, INPUTS, dtype=torch.float64)
            change = by_lstsq(a, ra, penalty) if ridge < float("inf") else nothing
            total += float((rb - change @ b).square().sum())
        return total

    assert halves_of(x, r).best_ridge(has_bias=False) == min(RIDGES, key=missed)


def few_kept(rows: int, inputs: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of two weights each, which explain most: all inputs together would learn these samples by heart."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(GROUPS, inputs, POSITIONS, generator=generator, dtype=torch.float64)
    kept = torch.rand(GROUPS, rows, inputs, generator=generator).argsort(2) < 2
    noise = torch.randn(GROUPS, rows, POSITIONS, generator=generator, dtype=torch.float64)
    return x, kept.double() @ x + noise, kept


def missed_by_rows(x: Tensor, r: Tensor, kept: Tensor, ridge: float) -> float:
    """Each row by `lstsq` on the inputs that it keeps, of either half, judged on the data of the other."""
    parts = list(zip(x.chunk(2, 2), r.chunk(2, 2), strict=True))
    total = 0.0
    for (a, ra), (b, rb) in (parts, parts[::-1]):
        size = ridge * a.square().sum((1, 2)) / a.shape[1]
        for g in range(kept.shape[0]):
            for m in range(kept.shape[1]):
                own = kept[g, m]
                penalty = size[g].sqrt() * torch.eye(int(own.sum()), dtype=torch.float64)
                design = torch.cat([a[g, own].T, penalty])
                wanted = torch.cat([ra[g, m], ra.new_zeros(len(penalty))])
                change = torch.linalg.lstsq(design, wanted[:, None]).solution[:, 0]
                if ridge == float("inf"):
                    change = torch.zeros_like(change)
                total += float((rb[g, m] - change @ b[g, own]).square().sum())
    return total


def test_the_ridge_of_masked_rows_is_the_one_that_holds_best_with_their_masks():
    x, r, kept = few_kept(rows=6)
    finite = RIDGES[:-1]
    want = min(finite, key=lambda ridge: missed_by_rows(x, r, kept, ridge))
    sums = halves_of(x, r)
    assert sums.best_ridge(kept, has_bias=False) == want
    assert sums.best_ridge(has_bias=False) > want, "else the masks would not have mattered"


def test_some_of_many_masked_rows_tell_the_ridge_of_all(monkeypatch):
    x, r, kept = few_kept(rows=80)
    sums, solved = halves_of(x, r), []
    real = normal_equations._solved

    def counted(gram: Tensor, cross: Tensor) -> Tensor:
        solved.append(cross.shape)
        return real(gram, cross)

    monkeypatch.setattr(normal_equations, "_solved", counted)
    found = sums.best_ridge(kept, has_bias=False)
    assert len(solved) == 2 * (len(RIDGES) - 1) * normal_equations.MOST_ROWS
    missed = {ridge: missed_by_rows(x, r, kept, ridge) for ridge in RIDGES[:-1]}
    assert missed[found] < 1.01 * min(missed.values())


def test_what_is_only_noise_is_left_alone():
    x, r = drawn(3)  # neither has to do with the other
    assert halves_of(x, r).best_ridge(has_bias=False) >= 0.1


def test_an_endless_penalty_leaves_everything():
    x, r = drawn()
    assert not halves_of(x, r).solve(float("inf"), has_bias=False).any()
    kept = torch.ones(GROUPS, OUTPUTS, INPUTS, dtype=torch.bool)
    assert not halves_of(x, r).solve(float("inf"), kept, has_bias=False).any()


def test_one_sample_alone_has_no_other_half_to_ask():
    x, r = drawn()
    assert sums_of(x, r, POSITIONS).best_ridge(has_bias=False) == RIDGES[0]


def test_beginning_again_keeps_what_went_in_and_forgets_what_was_missing():
    x, r = drawn()
    sums = halves_of(x, r)
    sums.begin_again(alike=True)
    for half, parts in enumerate(zip(x.chunk(2, 2), (2 * r).chunk(2, 2), strict=True)):
        sums.add(*parts, half=half)
    assert sums.count == POSITIONS
    torch.testing.assert_close(
        sums.solve(0.1, has_bias=False), 2 * halves_of(x, r).solve(0.1, has_bias=False)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["inputs", "missing"])
def test_bad_numbers_are_noticed(bad, place):
    x, r = drawn()
    assert sums_of(x, r, 40).is_finite
    (x if place == "inputs" else r)[0, 0, 0] = bad
    assert not sums_of(x, r, 40).is_finite
