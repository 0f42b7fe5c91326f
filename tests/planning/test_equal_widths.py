"""`widths="uniform"`: layers of one size keep equally many units, whatever budget, limit and criterion."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.structure import Structure, trace
from oracles.best_plans import assert_promises


class Repeated(nn.Module):
    """Blocks of two hidden layers, wide and narrow, on one stream, as a language model repeats them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(6, 24) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(24, 6) for _ in range(depth))
        self.small = nn.ModuleList(nn.Linear(6, 12) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(12, 6) for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for up, down, small, back in zip(self.up, self.down, self.small, self.back, strict=True):
            x = x + down(torch.relu(up(x)))
            x = x + back(torch.relu(small(x)))
        return self.head(x)


@cache
def repeated(depth: int) -> Structure:
    return trace(Repeated(depth), torch.zeros(2, 6))


def scores(structure: Structure, seed: int, *, interact: bool) -> UnitScores:
    generator = torch.Generator().manual_seed(seed)
    values = {
        group.name: torch.rand(group.size, generator=generator, dtype=torch.float64)
        for group in structure.groups
    }
    interactions: dict[tuple[str, ...], Tensor] = {}
    for name, own in values.items() if interact else ():
        half = torch.rand(len(own), len(own), generator=generator, dtype=torch.float64).tril(-1)
        interactions[name,] = 0.1 * (half + half.T)
    return UnitScores(values, "made up", interactions=interactions)


@given(
    st.integers(1, 5),
    st.dictionaries(st.sampled_from(("flops", "params", "units")), st.floats(0.3, 1), min_size=1),
    st.sampled_from((1, 1, 2, 3, 5, 8)),
    st.sampled_from((1, 2, 7)),
    st.integers(0, 99),
    st.booleans(),
)
@settings(max_examples=60)
def test_layers_of_one_size_keep_equally_many(depth, shares, multiple, floor, seed, interact):
    structure = repeated(depth)
    selection = Selection(
        widths="uniform", round_to=multiple, floor=floor, kinds=("hidden", "stream")
    )
    units, budget = scores(structure, seed, interact=interact), Budget(**shares)
    try:
        plan = make_plan(structure, units, budget, selection)
    except BudgetError:
        return
    left: dict[int, set[int]] = {}
    for group in structure.groups:
        kept = plan.counts().get(group.name, (group.size, 0))[0]
        left.setdefault(group.size, set()).add(kept)
    assert all(len(kept) == 1 for kept in left.values()), left
    if not interact:
        assert_promises(structure, units, budget, selection, plan)


def test_three_layers_end_at_one_width():
    structure = repeated(3)
    units = scores(structure, 0, interact=False)
    plan = make_plan(structure, units, Budget(params=0.7), Selection(widths="uniform"))
    assert {plan.counts()[f"up.{n}"][0] for n in range(3)} == {16}
    assert {plan.counts()[f"small.{n}"][0] for n in range(3)} == {8}


def test_a_share_of_its_own_leaves_the_others_alike():
    structure = repeated(3)
    selection = Selection(widths="uniform", shares={"up.0": 0.25})
    plan = make_plan(structure, scores(structure, 0, interact=False), Budget(params=0.7), selection)
    assert plan.counts()["up.0"][0] == 6
    assert plan.counts()["up.1"] == plan.counts()["up.2"] != plan.counts()["up.0"]


@pytest.mark.parametrize("interact", [False, True])
def test_widths_ranked_together_stay_free(interact):
    structure = repeated(3)
    units = scores(structure, 1, interact=interact)
    plan = make_plan(structure, units, Budget(params=0.7), Selection())
    assert len({plan.counts().get(f"up.{n}", (24, 24))[0] for n in range(3)}) > 1
