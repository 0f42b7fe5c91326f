"""Layers are fitted to what becomes of their outputs: sums with their other term, and what a ReLU shows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.repair import Refit, lockstep
from apoptosis.structure import Plan, cut, trace
from oracles.building import Net, built

CLOSE = {"rtol": 1e-7, "atol": 1e-9}


@pytest.fixture(autouse=True, params=["in step", "by stages"])
def way(request, monkeypatch) -> str:
    if request.param == "by stages":
        monkeypatch.setattr(lockstep, "MOST_BATCHES", 0)
    return request.param


class Block(nn.Module):
    """Tokens: a branch of two layers and a norm, added to what it reads; rectified, if that is asked for."""

    def __init__(self, width: int, inner: int, *, rectified: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.rectified = rectified

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.norm(self.down(torch.tanh(self.up(x))))
        return F.relu(total) if self.rectified else total


def stream(*, rectified: bool = False) -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 6),
            Block(6, 9, rectified=rectified),
            Block(6, 8, rectified=rectified),
            nn.Linear(6, 3),
        )
    )


def data(seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(80, 5, generator=generator, dtype=torch.float64)


def halved(model: nn.Module, x: Tensor, *names: str) -> tuple[Plan, nn.Module]:
    structure = trace(model, x[:2])
    sizes = {group.name: group.size for group in structure.groups}
    plan = structure.plan({name: range(sizes[name] // 2) for name in names})
    return plan, cut(model, plan)


def batches(x: Tensor) -> list[tuple[Tensor, None]]:
    return [(x[:30], None), (x[30:], None)]


def test_the_end_of_a_branch_is_asked_for_what_the_whole_sum_lacks():
    """By `lstsq` on all that the second block's sum misses, where the first block has lost units already."""
    model, x = stream(), data()
    plan, small = halved(model, x, "1.up", "2.up")
    found = Refit(ridge=0.0)(model, small, plan, batches(x))
    with torch.no_grad():
        there = model[:2](x), model[:3](x)
        here = found[:2](x)
        assert (here - there[0]).abs().max() > 1e-2  # there is an error to make up for
        hidden = torch.tanh(found[2].up(here))
        norm = found[2].norm
        a = norm.weight * (norm.running_var + norm.eps).rsqrt()
        wanted = (there[1] - here - (norm.bias - a * norm.running_mean)) / a
        want = torch.linalg.lstsq(hidden, wanted).solution.T
    torch.testing.assert_close(found[2].down.weight, want, **CLOSE)


def test_without_a_sum_the_same_layer_is_asked_for_less():
    """The oracle of the test above can fail: matching the branch alone gives other weights and a larger error."""
    model, x = stream(), data()
    plan, small = halved(model, x, "1.up", "2.up")
    found = Refit(ridge=0.0)(model, small, plan, batches(x))
    with torch.no_grad():
        hidden = torch.tanh(found[2].up(found[:2](x)))
        branch = model[2].down(torch.tanh(model[2].up(model[:2](x))))
        alone = torch.linalg.lstsq(hidden, branch).solution.T
        before = (found[:3](x) - model[:3](x)).square().sum()
        found[2].down.weight.copy_(alone)
        after = (found[:3](x) - model[:3](x)).square().sum()
    assert after > 1.01 * before


@pytest.mark.parametrize("rounds", [1, 4])
def test_rounds_ahead_of_a_relu_are_those_of_majorisation_by_hand(rounds):
    """A loop over `lstsq` whose target is replaced by what is there, wherever nobody sees the difference."""
    model = built(
        lambda: nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2)
        )
    )
    x = data()
    plan, small = halved(model, x, "0")
    found = Refit(ridge=0.0, rounds=rounds)(model, small, plan, batches(x))
    with torch.no_grad():
        hidden = torch.tanh(small[0](x))
        rows = torch.cat([hidden, torch.ones(80, 1, dtype=torch.float64)], 1)
        wanted = model[2](torch.tanh(model[0](x)))
        solution = torch.linalg.lstsq(rows, wanted).solution
        errors = [(F.relu(rows @ solution) - F.relu(wanted)).square().sum()]
        for _ in range(rounds):
            z = rows @ solution
            target = wanted.clone()
            target[(wanted <= 0) & (z <= 0)] = z[(wanted <= 0) & (z <= 0)]
            target[(wanted <= 0) & (z > 0)] = 0
            solution = torch.linalg.lstsq(rows, target).solution
            errors.append((F.relu(rows @ solution) - F.relu(wanted)).square().sum())
    torch.testing.assert_close(found[2].weight, solution[:-1].T, **CLOSE)
    torch.testing.assert_close(found[2].bias, solution[-1], **CLOSE)
    assert errors[-1] < errors[0]


def test_more_of_what_is_seen_is_met_with_rounds_than_without():
    model, x = stream(rectified=True), data()
    plan, small = halved(model, x, "1.up", "2.up")

    def missed(rounds: int) -> float:
        found = Refit(ridge=0.0, rounds=rounds)(model, small, plan, batches(x))
        with torch.no_grad():
            return float((found[:2](x) - model[:2](x)).square().sum())

    assert missed(5) < missed(1) < missed(0)


def test_a_relu_with_an_upper_end_hides_what_is_above_it():
    model = built(
        lambda: nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.ReLU6(), nn.Linear(4, 2)
        )
    )
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([6.5, 6.2, 0.0, 3.0]))
    x = data()
    plan, small = halved(model, x, "0")

    def missed(rounds: int) -> float:
        found = Refit(ridge=0.0, rounds=rounds)(model, small, plan, batches(x))
        with torch.no_grad():
            return float((found[:4](x) - model[:4](x)).square().sum())

    assert missed(4) < missed(0)


@pytest.mark.parametrize("factor", [0.0, 1e-39, 1e-9])
def test_outputs_that_a_norm_has_silenced_change_nothing(factor):
    """a ≈ 0, as weight decay leaves it: the sum's error is not mended by weights without bounds."""
    model, x = stream(rectified=True), data()
    with torch.no_grad():
        model[2].norm.weight[2] = factor
    plan, small = halved(model, x, "1.up", "2.up")
    found = Refit()(model, small, plan, batches(x))
    torch.testing.assert_close(found[2].down.weight[2], small[2].down.weight[2], rtol=0, atol=0)
    assert all(p.isfinite().all() for p in found.parameters())


def test_a_stream_that_lost_channels_is_met_on_those_that_are_left():
    """Rows of the dense sum, the other term's included."""
    model, x = stream(), data()
    structure = trace(model, x[:2])
    sizes = {group.name: group.size for group in structure.groups}
    names = [name for name in sizes if name not in ("1.up", "2.up")]
    assert names, "there is a stream"
    kept = [0, 2, 3, 5]
    plan = structure.plan({names[0]: kept, "1.up": range(6)})
    found = Refit(ridge=0.0)(model, cut(model, plan), plan, batches(x))
    with torch.no_grad():
        there, here = model[:2](x)[:, kept], found[0](x)
        hidden, norm = torch.tanh(found[1].up(here)), found[1].norm
        a = norm.weight * (norm.running_var + norm.eps).rsqrt()
        wanted = (there - here - (norm.bias - a * norm.running_mean)) / a
        want = torch.linalg.lstsq(hidden, wanted).solution.T
    torch.testing.assert_close(found[1].down.weight, want, **CLOSE)


def test_norms_that_were_measured_anew_before_are_taken_as_they_are_now():
    """a and c of the small network need not be the dense one's."""
    model, x = stream(), data()
    plan, small = halved(model, x, "1.up")
    with torch.no_grad():
        small[1].norm.running_var.mul_(3.0)
        small[1].norm.bias.add_(0.5)
    found = Refit(ridge=0.0)(model, small, plan, batches(x))
    with torch.no_grad():
        hidden, norm = torch.tanh(found[1].up(model[0](x))), small[1].norm
        a = norm.weight * (norm.running_var + norm.eps).rsqrt()
        wanted = (model[:2](x) - model[0](x) - (norm.bias - a * norm.running_mean)) / a
        want = torch.linalg.lstsq(hidden, wanted).solution.T
    torch.testing.assert_close(found[1].down.weight, want, **CLOSE)


class Pair(nn.Module):
    """Two tensors in one argument; the first is what the branch is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.down(torch.tanh(self.up(pair[1]))) + pair[0]


def test_the_other_term_may_come_within_a_tuple():
    model = built(
        lambda: Net(lambda m, x: m.head(m.pair((1.5 * x, x))), pair=Pair(), head=nn.Linear(5, 3))
    )
    x = data()
    plan, small = halved(model, x, "pair.up")
    found = Refit(ridge=0.0)(model, small, plan, batches(x))
    with torch.no_grad():
        before, after = ((m(x) - model(x)).square().sum() for m in (small, found))
    assert after < 0.5 * before


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_sides_that_read_the_same_the_second_sees_the_first_fitted(order):
    """Whichever is called first is fitted to its own outputs, the other to what the sum then lacks."""
    model = built(
        lambda: Net(
            lambda m, x: m.head(_side_by_side(m, torch.tanh(m.stem(x)), order)),
            stem=nn.Linear(5, 12),
            a=nn.Linear(12, 6, bias=False),
            b=nn.Linear(12, 6, bias=False),
            head=nn.Linear(6, 3),
        )
    )
    x = data()
    plan, small = halved(model, x, "stem")
    found = Refit(ridge=0.0)(model, small, plan, batches(x))
    first, second = order
    with torch.no_grad():
        there, here = torch.tanh(model.stem(x)), torch.tanh(small.stem(x))
        want = torch.linalg.lstsq(here, getattr(model, first)(there)).solution.T
        torch.testing.assert_close(getattr(found, first).weight, want, **CLOSE)
        lacks = model.a(there) + model.b(there) - here @ want.T
        want = torch.linalg.lstsq(here, lacks).solution.T
        torch.testing.assert_close(getattr(found, second).weight, want, **CLOSE)


def _side_by_side(m: nn.Module, x: Tensor, order: str) -> Tensor:
    first, second = (getattr(m, name)(x) for name in order)
    return first + second
