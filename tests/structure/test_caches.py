"""Numbers that forward keeps for the size it saw last (anchors of a detector): a trace does not depend on them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.checkpoint import load, save
from apoptosis.records import Outcome
from apoptosis.structure import cut, trace


class Detector(nn.Module):
    """Its places are made anew whenever the shape of its input changes; classes hold what they are at first."""

    shape: tuple[int, ...] | None = None
    places = torch.empty(0)
    export = False
    scale = torch.tensor(2.0)

    def __init__(self, *, literal: bool) -> None:
        super().__init__()
        self.literal = literal
        self.body = nn.Conv2d(3, 16, 3, padding=1)
        self.mixed = nn.Conv2d(16, 12, 1)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.mixed(torch.relu(self.body(x))))
        if self.literal:  # a number in the code, so no attribute can express a cut
            x = x.view(x.shape[0], 12, x.shape[2], x.shape[3])
        out = self.head(x).flatten(2)
        if self.shape != x.shape:
            rows = torch.arange(x.shape[2], dtype=x.dtype) + 0.5
            columns = torch.arange(x.shape[3], dtype=x.dtype) + 0.5
            grid = torch.meshgrid(rows, columns, indexing="ij")
            self.places, self.shape = torch.stack(grid).flatten(1), x.shape
        if self.export:
            return out
        return torch.cat([self.places + out[:, :2], out[:, 2:].exp() * self.scale], dim=1)


X = torch.randn(2, 3, 6, 6)


def fresh(kind: type[Detector]) -> Detector:
    torch.manual_seed(0)
    return kind(literal=True).eval()


def warmed(*sizes: tuple[int, int]) -> Callable[[type[Detector]], Detector]:
    def make(kind: type[Detector]) -> Detector:
        model = fresh(kind)
        for num, side in sizes:
            model(torch.randn(num, 3, side, side))
        return model

    return make


MADE: dict[str, Callable[[type[Detector]], Detector]] = {
    "fresh": fresh,
    "same size": warmed((2, 6)),
    "twice as many": warmed((4, 6)),
    "another size": warmed((2, 10)),
    "several": warmed((1, 6), (6, 6), (3, 8)),
}


@pytest.mark.parametrize("before", MADE)
@pytest.mark.parametrize("after", MADE)
def test_a_checkpoint_of_a_program_loads_whatever_ran_before(
    before: str, after: str, tmp_path: Path
) -> None:
    model = MADE[before](Detector)
    plan = trace(model, X).plan({"mixed": range(7), "body": range(9)})
    assert plan.delivery == "program"
    small = cut(model, plan)
    save(tmp_path, Outcome(small, plan, example_inputs=X))
    back = load(tmp_path, lambda: MADE[after](Detector))
    assert torch.equal(back(X), small(X))


@pytest.mark.parametrize("before", MADE)
def test_the_model_keeps_what_it_had(before: str) -> None:
    model = MADE[before](Detector)
    model.export = True
    held = dict(vars(model))
    structure = trace(model, X)
    assert vars(model).keys() == held.keys()
    assert all(vars(model)[name] is item for name, item in held.items())
    assert structure.macs() == trace(fresh(Detector), X).macs()


@pytest.mark.parametrize("before", MADE)
def test_options_that_a_user_has_set_stay(before: str) -> None:
    """They stand in instances over values of the class too, and no run sets them."""
    model = MADE[before](Detector)
    model.scale = torch.tensor(5.0)
    small = cut(model, trace(model, X).plan({"mixed": range(7)}))
    twin = fresh(Detector)
    twin.scale = torch.tensor(5.0)
    torch.testing.assert_close(small(X), cut(twin, trace(twin, X).plan({"mixed": range(7)}))(X))
    model.export = True
    assert cut(model, trace(model, X).plan({"mixed": range(7)}))(X).shape == (2, 4, 36)


def test_scored_on_its_own_batches_it_is_delivered() -> None:
    model = warmed((4, 6))(Detector)
    task = ap.Task.classification(lambda z, y: z.square().mean() + 0 * y.sum())
    batches = [(torch.randn(4, 3, 6, 6), torch.zeros(4).long())]
    outcome = ap.prune(
        model, batches, ap.Budget(flops=0.6), task, criterion="taylor", steps=2, repair=[]
    )
    assert outcome.model(batches[0][0]).shape == (4, 4, 36)


class HalvesItself(nn.Module):
    cache = None

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.a.weight.mul_(0.5)
        self.cache = torch.ones(x.shape[0], 1)
        return self.a(x)


def test_looking_for_caches_leaves_the_weights_alone() -> None:
    model = HalvesItself()
    model(torch.zeros(2, 4))
    before = model.a.weight.detach().clone()
    ap.trace(model, torch.zeros(2, 4))
    torch.testing.assert_close(model.a.weight.detach(), before, rtol=0, atol=0)
