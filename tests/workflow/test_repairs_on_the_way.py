"""A network that is a program on the way: repairs go on at the last one, and stopped runs end as unbroken ones do."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.checkpoint import Journal, open_journal
from apoptosis.errors import ModelError, NonFiniteError
from apoptosis.planning import Budget, Selection
from apoptosis.repair import Refit
from apoptosis.structure import CutProgram


class InFours(nn.Module):
    """Its code runs with widths of four alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 8)
        self.third = nn.Linear(8, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.first(x).relu()
        if seen.shape[1] % 4:
            raise ValueError("widths of four")
        return self.third(self.second(seen).relu())


BATCHES = [(torch.randn(40, 6, generator=torch.Generator().manual_seed(5)), torch.arange(40) % 3)]
ALONE = {"budget": Budget(units=0.67), "selection": Selection(names=("first",)), "steps": 4}


class Seen:
    """A refit that says what it was given."""

    def __init__(self) -> None:
        self.given: list[bool] = []
        self.__name__ = "seen_refit"

    def __call__(self, dense, small, plan, batches, task):
        self.given.append(isinstance(small, CutProgram))
        return Refit()(dense, small, plan, batches, task)


class Stopped(BaseException):
    """As if the process had ended here."""


def run(journal=None, **how):
    how = {**ALONE, **how}
    return ap.prune(InFours(), BATCHES, how.pop("budget"), journal=journal, **how)


def assert_same(found, expected) -> None:
    assert found.model.state_dict().keys() == expected.model.state_dict().keys()
    for name, own in found.model.state_dict().items():
        assert torch.equal(own, expected.model.state_dict()[name]), name
    assert found.settings == expected.settings
    assert found.plan.delivery == expected.plan.delivery


@pytest.mark.parametrize("between", [False, True])
def test_a_repair_that_was_asked_for_waits_for_modules(between):
    seen = Seen()
    outcome = run(criterion="magnitude", repair=[seen], repair_between=between)
    assert outcome.plan.delivery == "module"
    assert len(outcome.plan.kept["first"]) == 8
    assert seen.given == ([True, True, True, False] if between else [False])
    assert outcome.settings["repair"] == ["seen_refit"]
    assert outcome.settings["repair_left_out"] == {}
    plain = ap.cut(InFours(), outcome.plan)
    assert not torch.equal(outcome.model.second.weight, plain.second.weight), "it was refitted"


@pytest.mark.parametrize("between", [False, True])
def test_a_program_at_the_end_is_refused_to_one_that_was_asked_for(between):
    how = {"criterion": "magnitude", "repair_between": between, "budget": Budget(units=0.6)}
    with pytest.raises(ModelError, match="delivered as a program"):
        run(repair=["refit"], **how)
    assert run(repair=[], **how).plan.delivery == "program"


def test_numbers_that_are_not_finite_are_refused_at_once():
    def failing(dense, small, plan, batches, task):
        seen.append(small)
        raise NonFiniteError("numbers")

    seen = []
    with pytest.raises(NonFiniteError, match="numbers"):
        run(criterion="magnitude", repair=[failing], repair_between=True)
    assert len(seen) == 1


HOWS = {
    "default": {},
    "default repaired between": {"repair_between": True},
    "obs in steps": {"criterion": "obs", "repair_between": True},
    "asked for": {"criterion": "oba", "repair": ["refit"], "repair_between": True},
    "a program at the end": {"budget": Budget(units=0.6), "repair_between": True},
}


@pytest.mark.parametrize("name", HOWS)
def test_stopped_after_any_note_it_ends_the_same(name, tmp_path, monkeypatch):
    how = HOWS[name]
    whole, num = run(**how), len(run(**how).history)
    if name == "a program at the end":
        assert whole.settings["repair_left_out"]
    else:
        assert whole.plan.delivery == "module"
    write = Journal.write
    for stop in range(1, num + 1):
        written = []

        def counting(self, *words, stop=stop, written=written, **more):
            write(self, *words, **more)
            written.append(words)
            if len(written) == stop:
                raise Stopped

        place = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", counting)
            with pytest.raises(Stopped), open_journal(place, {}) as journal:
                run(journal, **how)
        with open_journal(place, {}, resume=True) as journal:
            assert_same(run(journal, **how), whole)


def test_a_default_repair_that_fails_once_is_tried_again_in_every_life(tmp_path, monkeypatch):
    """What came of it at one step decides nothing later, or a run that goes on would not know of it."""
    refit = Refit.__call__

    def choosy(self, dense, small, plan, *more):
        if len(plan.kept["first"]) == 11:
            raise NonFiniteError("eleven")
        return refit(self, dense, small, plan, *more)

    monkeypatch.setattr(Refit, "__call__", choosy)
    monkeypatch.setattr(
        InFours, "forward", lambda self, x: self.third(self.second(self.first(x).relu()).relu())
    )
    how = {"repair_between": True, "steps": 4}
    whole = run(**how)
    assert whole.settings["repair_left_out"] == {}
    write = Journal.write

    def stopping(self, *words, **more):
        write(self, *words, **more)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", stopping)
        with pytest.raises(Stopped), open_journal(tmp_path / "run", {}) as journal:
            run(journal, **how)
    with open_journal(tmp_path / "run", {}, resume=True) as journal:
        assert_same(run(journal, **how), whole)
