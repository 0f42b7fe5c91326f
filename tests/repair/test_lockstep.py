"""Runs in step come to what a pass for each stage comes to; where they cannot, nobody notices."""

import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from apoptosis.repair import Refit, lockstep
from apoptosis.repair.lockstep import OutOfStepError, march
from apoptosis.repair.reaching import quietly
from apoptosis.repair.survey import look_around
from apoptosis.structure import Plan, cut, trace
from apoptosis.task import Task
from oracles.building import built

TASK = Task.classification()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, 6, 3, padding=1), nn.Conv2d(6, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.b(self.norm(self.a(x)).relu_())).relu()


class Remembering(nn.Module):
    """Keeps what it has seen on itself, and reads it after its layers were called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)
        self.head = nn.Linear(5, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        y = self.second(self.first(x).relu())
        return self.head(y + self.kept)


class Parting(nn.Module):
    """The way depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        return self.left(y) if float(x.sum()) > 0 else self.right(y)


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), Block(4), Block(4), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3)
    )


def case(make, *shape: int) -> tuple[nn.Module, list[Tensor], Plan]:
    """Half of the units inside blocks go, or of the first layer."""
    model = built(make).eval()
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(7, *shape, generator=generator, dtype=torch.float64) for _ in range(5)]
    structure = trace(model, batches[0][:1])
    names = [g.name for g in structure.groups if g.name == "first" or g.name.endswith(".a")]
    kept = {name: range(0, structure[name].size, 2) for name in names}
    return model, batches, structure.plan(kept)


def refitted(model, batches, plan, monkeypatch, *, by_stages: bool) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        if by_stages:
            patch.setattr(lockstep, "MOST_BATCHES", 0)
        return Refit(ridge=1e-4)(model, cut(model, plan), plan, batches, TASK).state_dict()


@pytest.mark.parametrize(
    ("make", "shape"), [(residual, (3, 6, 6)), (Remembering, (5,)), (Parting, (5,))]
)
def test_both_ways_lead_to_the_same_weights(make, shape, monkeypatch):
    model, batches, plan = case(make, *shape)
    found = refitted(model, batches, plan, monkeypatch, by_stages=False)
    want = refitted(model, batches, plan, monkeypatch, by_stages=True)
    changed = cut(model, plan).state_dict()
    assert any(not torch.equal(found[name], changed[name]) for name in found)
    for name, own in found.items():
        torch.testing.assert_close(own, want[name], rtol=1e-9, atol=1e-11)


def marched(model, batches, plan, layers=None) -> None:
    small = cut(model, plan)
    with quietly(model, small):
        around = look_around(model, small, plan, batches[0], TASK)
        stations = [layer.station for layer in around.layers]
        with march(model, small, stations, batches, TASK) as going:
            for _ in going.stops():
                pass


def test_a_network_is_run_once_over_each_batch(monkeypatch):
    model, batches, plan = case(residual, 3, 6, 6)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    marched(model, batches, plan)
    looked_at, networks, recorded = 1, 2, 1  # the cut one has the hook too
    assert len(calls) == networks * (len(batches) + looked_at) + recorded


def test_batches_that_come_in_another_order_each_time_stay_in_step(monkeypatch):
    model, batches, plan = case(residual, 3, 6, 6)
    loader = DataLoader(torch.cat(batches), batch_size=7, shuffle=True)
    monkeypatch.setattr(Refit, "_by_stages", lambda *_: pytest.fail("went the slow way"))
    Refit(ridge=1e-4)(model, cut(model, plan), plan, loader, TASK)


def test_ways_that_part_are_noticed():
    model, batches, plan = case(Parting, 5)
    assert len({float(batch.sum()) > 0 for batch in batches}) == 2
    with pytest.raises(OutOfStepError, match="different ways"):
        marched(model, batches, plan)


def test_networks_that_remember_are_noticed(monkeypatch):
    """Without the comparison at the end their weights would be wrong."""
    model, batches, plan = case(Remembering, 5)
    want = refitted(model, batches, plan, monkeypatch, by_stages=True)
    monkeypatch.setattr("apoptosis.repair.networks.Networks.check", lambda *_: None)
    wrong = refitted(model, batches, plan, monkeypatch, by_stages=False)
    assert any((wrong[name] - own).abs().max() > 1e-6 for name, own in want.items())


@pytest.mark.parametrize(("limit", "value"), [("MOST_BATCHES", 4), ("room_on", lambda _: 100)])
def test_too_much_at_once_is_refused(limit, value, monkeypatch):
    model, batches, plan = case(residual, 3, 6, 6)
    monkeypatch.setattr(lockstep, limit, value)
    with pytest.raises(OutOfStepError):
        marched(model, batches, plan)


def test_no_thread_is_left_whatever_happens(monkeypatch):
    model, batches, plan = case(residual, 3, 6, 6)
    before = threading.active_count()
    refitted(model, batches, plan, monkeypatch, by_stages=False)
    assert threading.active_count() == before
    broken = [*batches[:3], torch.full_like(batches[0], torch.nan)]
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        refitted(model, broken, plan, monkeypatch, by_stages=False)
    assert threading.active_count() == before
    odd = [*batches[:3], torch.ones(7, 2, 6, 6, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match="channels"):
        refitted(model, odd, plan, monkeypatch, by_stages=False)
    assert threading.active_count() == before


def narrowing() -> nn.Module:
    """Large maps first, single numbers last."""
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, padding=1), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )


def images(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randn(num, 2, 7, 7, generator=generator, dtype=torch.float64).split(6))


def test_where_maps_are_large_some_set_out_and_the_others_follow(monkeypatch):
    """The convolution is fitted on the first batches alone, what comes after the maps on all."""
    model, batches = built(narrowing), images(30)
    plan = trace(model, batches[0][:1]).plan({"0": range(4)})
    small = cut(model, plan)
    refit = Refit(ridge=0.0)
    monkeypatch.setattr(lockstep, "FEWEST_SAMPLES", 6)
    of_channel = (
        6 * 49 * 8
    )  # bytes, of a batch; the first layer has 2 + 4 and 2 + 8 of them, the second 4 + 6 and 8 + 6
    monkeypatch.setattr(lockstep, "room_on", lambda _: 2 * 3 * 16 * of_channel)
    monkeypatch.setattr(Refit, "_by_stages", lambda *_: pytest.fail("went the slow way"))
    monkeypatch.setattr(lockstep, "LOOKING_BACK", 1)
    found = refit(model, small, plan, batches, TASK)
    monkeypatch.setattr(lockstep, "room_on", lambda _: 2**32)
    of_some = refit(model, small, plan, batches[:3], TASK)
    of_all = refit(model, small, plan, batches, TASK)
    torch.testing.assert_close(found[2].weight, of_some[2].weight, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[2].weight, of_all[2].weight, rtol=1e-6)
    x = torch.cat(batches)
    with torch.no_grad():
        rows = torch.cat([found[:6](x), torch.ones(30, 1, dtype=x.dtype)], 1)
        want = torch.linalg.lstsq(rows, model(x)).solution.T
    torch.testing.assert_close(found[6].weight, want[:, :-1], rtol=1e-7, atol=1e-9)


def test_runs_that_become_too_large_are_let_go(monkeypatch):
    """Maps that grow: who has set out stops, and nobody waits for them."""
    model = built(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 1), nn.Upsample(scale_factor=4)),
            *(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)),
        )
    )
    batches = images(30)
    plan = trace(model, batches[0][:1]).plan({"0": range(4)})
    small, before = cut(model, plan), threading.active_count()
    monkeypatch.setattr(lockstep, "FEWEST_SAMPLES", 6)
    monkeypatch.setattr(lockstep, "room_on", lambda _: 300 * 6 * 49 * 8)  # 256 after growing
    monkeypatch.setattr(Refit, "_by_stages", lambda *_: pytest.fail("went the slow way"))
    found = Refit(ridge=1e-6)(model, small, plan, batches, TASK)
    assert threading.active_count() == before
    x = torch.cat(batches)
    with torch.no_grad():
        gaps = [(net(x) - model(x)).square().mean() for net in (found, small)]
    assert gaps[0] < gaps[1]


def test_logits_of_all_batches_are_not_kept():
    """They can be more than all that passes layers, as those of a language model are."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            made = 2 * self.b(self.a(x).relu())
            alive.add(made)
            most = max(most, len(alive))
            return made

    model = Noting()
    batches = list(torch.randn(20, 2, 4).unbind(0))
    plan = trace(model, batches[0]).plan({"a": [0, 1, 2]})
    small, most = cut(model, plan), 0
    Refit()(model, small, plan, batches)
    assert 0 < most <= 6
