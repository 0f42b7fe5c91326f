"""Notes say which network their run began with, by its numbers: another one of the same shapes is refused in words."""

import copy
import sys
import time

import pytest
import torch
from torch import nn

from apoptosis.checkpoint import Journal, open_journal
from apoptosis.errors import CheckpointError
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget
from apoptosis.structure import digest_of, network_digest
from apoptosis.training import FitOptions
from apoptosis.workflow import CompareOptions, ContestData, compare, iterative, prune
from oracles.interrupted_run import PRUNING, RUNS, material, trained

KINDS = sorted(RUNS.keys() - {"fit"})
"""Notes of a training alone hold the weights themselves."""


class Stopped(BaseException):
    """As if the process had ended here."""


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return trained()


def stopped(kind, dense, place, monkeypatch, after: int = 2) -> None:
    """When so many notes are written."""
    written, write = [], Journal.write

    def counting(self, *words, **more):
        write(self, *words, **more)
        written.append(words)
        if len(written) == after:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", counting)
        with pytest.raises(Stopped), open_journal(place, {}) as journal:
            RUNS[kind](dense, material(), journal)


def others(dense: nn.Module) -> dict[str, nn.Module]:
    """Nearly the same: by one weight, and by one number of a buffer."""
    weight, buffer = copy.deepcopy(dense), copy.deepcopy(dense)
    with torch.no_grad():
        next(weight.parameters()).flatten()[0].add_(1e-6)
        next(own for own in buffer.buffers() if own.is_floating_point())[0].add_(1e-4)
    return {"weight": weight, "buffer": buffer}


@pytest.mark.parametrize("kind", KINDS)
def test_another_network_of_the_same_shapes_is_refused(kind, dense, tmp_path, monkeypatch):
    place = tmp_path / "run"
    stopped(kind, dense, place, monkeypatch)
    before = {path.name: path.read_bytes() for path in place.glob("*.note")}
    for other in others(dense).values():
        with (
            open_journal(place, {}, resume=True) as journal,
            pytest.raises(CheckpointError, match="another network.*Give the network"),
        ):
            RUNS[kind](other, material(), journal)
    assert {path.name: path.read_bytes() for path in place.glob("*.note")} == before
    with open_journal(place, {}, resume=True) as journal:
        RUNS[kind](copy.deepcopy(dense), material(), journal)


def test_a_comparison_of_another_network_is_refused(dense, tmp_path):
    data = material()
    ground = ContestData(scoring=data.scoring, test=data.validation)

    def run(model, journal):
        return compare(
            model, ["magnitude"], [0.5], ground, CompareOptions(steps=1), journal=journal
        )

    with open_journal(tmp_path / "run", {}) as journal:
        first = run(dense, journal)
    with open_journal(tmp_path / "run", {}, resume=True) as journal:
        again = run(copy.deepcopy(dense), journal)
        assert [trial.test for trial in again.trials] == [trial.test for trial in first.trials]
        with pytest.raises(CheckpointError, match="another network"):
            run(others(dense)["weight"], journal)


def test_networks_that_a_run_makes_on_its_way_are_not_looked_at_again(dense, tmp_path, monkeypatch):
    """On a GPU they are not the same to the bit in another process."""
    repaired = prune

    def noisy(model, *words, **more):
        found = repaired(model, *words, **more)
        with torch.no_grad():
            next(found.model.parameters()).mul_(1 + 1e-7 * time.time_ns() % 1e-5)
        return found

    budgets = [Budget(flops=0.8), Budget(flops=0.6)]

    def run(journal):
        fit = FitOptions(epochs=0)
        return iterative(dense, budgets, material(), pruning=PRUNING, fit=fit, journal=journal)

    monkeypatch.setattr(sys.modules["apoptosis.workflow.one_shot"], "prune", noisy)
    for life in range(2):
        with open_journal(tmp_path / "run", {}, resume=life > 0) as journal:
            assert len(run(journal)) == 2


def test_a_digest_sees_every_number_and_name():
    model = digits_cnn(seed=0)
    seen = {network_digest(model), *(network_digest(own) for own in others(model).values())}
    assert len(seen) == 3
    assert network_digest(copy.deepcopy(model)) in seen
    ones = torch.ones(4)
    assert (
        len(
            {
                digest_of({"a": ones}),
                digest_of({"b": ones}),
                digest_of({"a": ones.double()}),
                digest_of({"a": ones.view(2, 2)}),
                digest_of({"a": ones[:0]}),
                digest_of({"a": ones.bfloat16()}),
            }
        )
        == 6
    )
    assert digest_of({"a": torch.eye(3)[:, :2]}) == digest_of({"a": torch.eye(3)[:, :2].clone()})


@pytest.mark.slow
def test_a_digest_costs_little(dense):
    """A gigabyte per second or so: a fifth of that is asked, on a machine that others use."""
    numbers = {"a": torch.randn(2**26)}
    start = time.process_time()
    digest_of(numbers)
    assert time.process_time() - start < 1.3
