"""Repairs take as much memory as there is, and go on with less where that was too much."""

import os
import threading

import pytest
import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError
from apoptosis.repair import Refit, RefitBlocks, lockstep, memory
from apoptosis.repair.memory import is_full, room_on
from apoptosis.structure import Plan, cut, trace
from oracles.building import built

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("free", "room"), [(0, 2**28), (2**31 + 5, 2**29), (2**32, 2**30), (40 * 2**30, 2**31)]
)
def test_a_quarter_of_what_is_free_may_be_filled_in_powers_of_two(free, room, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    assert room_on(CPU) == room


def test_machines_with_enough_memory_take_the_same(monkeypatch):
    """What a layer is fitted on depends on it, and runs are to be repeatable."""
    for device in (CPU, torch.device("cuda")):
        rooms = set[int]()
        for free in (33 * 2**30, 70 * 2**30, 140 * 2**30):
            monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
            rooms.add(room_on(device))
        assert len(rooms) == 1


def test_what_is_free_here_is_what_the_system_says(tmp_path, monkeypatch):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free_bytes(CPU) <= pages
    most, used = tmp_path / "max", tmp_path / "current"
    most.write_text("3000\n")
    used.write_text("1000\n")
    monkeypatch.setattr(memory, "LIMITS", ((str(most), str(used)),))
    assert memory.free_bytes(CPU) == 2000
    most.write_text("max\n")  # no limit
    assert memory.free_bytes(CPU) > 2000


def test_where_nobody_says_it_is_a_guess(monkeypatch):
    monkeypatch.setattr(memory, "_available", lambda: None)
    monkeypatch.setattr(memory, "LIMITS", ())
    assert memory.free_bytes(CPU) == memory.UNKNOWN_BYTES
    assert memory.free_bytes(torch.device("meta")) == memory.UNKNOWN_BYTES


def test_what_says_that_memory_is_full():
    assert is_full(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_full(MemoryError())
    assert is_full(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_full(RuntimeError("shapes do not fit"))
    assert not is_full(ValueError("can't allocate memory"))


class Tight(nn.Module):
    """Memory is full as often as `fails` says: at calls of the second layer with so many samples or more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 12), nn.Linear(12, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if isinstance(self.second, nn.Linear) and self.second.in_features < 12:
            Tight.calls += 1
            if len(x) >= Tight.most or Tight.calls in Tight.fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.head(self.second(y).tanh())

    calls, most, fails = 0, 10**9, range(0)


@pytest.fixture
def tight(monkeypatch) -> tuple[nn.Module, list[Tensor], Plan, nn.Module]:
    monkeypatch.setattr(lockstep, "FEWEST_SAMPLES", 16)
    for name, value in (("calls", 0), ("most", 10**9), ("fails", range(0))):
        monkeypatch.setattr(Tight, name, value)
    model = built(Tight).eval()
    generator = torch.Generator().manual_seed(3)
    batches = list(torch.randn(64, 5, generator=generator, dtype=torch.float64).split(8))
    plan = trace(model, batches[0][:1]).plan({"first": range(7)})
    return model, batches, plan, cut(model, plan)


def error(found: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    x = torch.cat(batches)
    with torch.no_grad():
        return float((found(x) - model(x)).square().mean())


@pytest.mark.parametrize("repair", [Refit(), RefitBlocks()])
def test_where_memory_is_full_on_the_way_half_of_the_batches_go_on(repair, tight, monkeypatch):
    model, batches, plan, small = tight
    monkeypatch.setattr(
        type(repair), "_by_stages", lambda *_: pytest.fail("too slow"), raising=False
    )
    monkeypatch.setattr(
        type(repair), "_by_passes", lambda *_: pytest.fail("too slow"), raising=False
    )
    before = error(small, model, batches)
    looked_at = 2  # what runs before the march: looking around, and the recording
    monkeypatch.setattr(Tight, "calls", 0)
    monkeypatch.setattr(Tight, "fails", range(looked_at + 6, looked_at + 7))
    threads = threading.active_count()
    found = repair(model, small, plan, batches)
    assert Tight.calls > looked_at + 6, "else memory was never full"
    assert threading.active_count() == threads
    assert error(found, model, batches) < before


def test_where_too_few_would_be_left_layers_are_fitted_batch_by_batch(tight, monkeypatch):
    model, batches, plan, small = tight
    monkeypatch.setattr(lockstep, "FEWEST_SAMPLES", 64)
    monkeypatch.setattr(Tight, "fails", range(8, 9))
    found = Refit(ridge=1e-4)(model, small, plan, batches)
    monkeypatch.setattr(Tight, "fails", range(0))
    monkeypatch.setattr(lockstep, "MOST_BATCHES", 0)
    want = Refit(ridge=1e-4)(model, small, plan, batches)
    for name, own in want.state_dict().items():
        torch.testing.assert_close(found.get_parameter(name), own)


@pytest.mark.parametrize("full_at", ["gathered", "_solve"])
def test_where_there_is_no_room_to_solve_half_of_the_batches_are_let_go(
    full_at, tight, monkeypatch
):
    from apoptosis.repair.networks import Networks

    model, batches, plan, small = tight
    where = Networks if full_at == "gathered" else Refit
    real, seen, before = getattr(where, full_at), [], error(small, model, batches)

    def full_once(*args):
        seen.append(1)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    monkeypatch.setattr(where, full_at, full_once)
    monkeypatch.setattr(Refit, "_by_stages", lambda *_: pytest.fail("too slow"))
    found = Refit()(model, small, plan, batches)
    assert len(seen) > 2
    assert error(found, model, batches) < before


@pytest.mark.parametrize("repair", [Refit(), RefitBlocks(batch_size=64)])
def test_batches_that_are_too_large_are_taken_in_pieces(repair, tight, monkeypatch):
    model, batches, plan, small = tight
    before, whole = error(small, model, batches), [torch.cat(batches)]
    monkeypatch.setattr(Tight, "most", 20)
    found = repair(model, small, plan, whole)
    monkeypatch.setattr(Tight, "most", 10**9)
    assert error(found, model, batches) < before


@pytest.mark.parametrize("repair", [Refit(), RefitBlocks()])
def test_where_one_sample_does_not_fit_it_is_said_in_words(repair, tight, monkeypatch):
    model, batches, plan, small = tight
    monkeypatch.setattr(Tight, "most", 1)
    state = {name: own.clone() for name, own in small.state_dict().items()}
    with pytest.raises(ModelError, match=r"no room for a single sample \(CUDA out of memory"):
        repair(model, small, plan, batches)
    assert all(torch.equal(own, state[name]) for name, own in small.state_dict().items())
