"""A budget is refused before anything is done where the smallest network that may be is too large, and there alone."""

import pytest
import torch
from torch import Tensor, nn

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError
from apoptosis.planning import Budget, Selection, check_reachable, limits_of, within_reach
from apoptosis.structure import Structure, cut, trace
from oracles.building import built

INPUTS = torch.zeros(1, 9, dtype=torch.float64)


class Side(nn.Module):
    """Two hidden layers side by side, of other inputs and widths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 12), nn.Linear(9, 8)
        self.c, self.d = nn.Linear(12, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x[:, :3]).relu()) + self.d(self.b(x).relu())


def figures(structure: Structure) -> dict[str, int]:
    units = sum(group.size for group in structure.groups)
    return {"flops": structure.macs(), "params": structure.params(), "units": units}


def traced() -> tuple[nn.Module, Structure]:
    model = built(Side)
    return model, trace(model, INPUTS)


def smallest(selection: Selection, kept: dict[str, int]) -> dict[str, int]:
    """Figures of the network of the fewest units, from that network itself."""
    model, structure = traced()
    small = cut(model, structure.plan({name: range(num) for name, num in kept.items()}))
    return figures(trace(small, INPUTS))


def zeros(structure: Structure) -> UnitScores:
    values = {g.name: torch.zeros(g.size, dtype=torch.float64) for g in structure.groups}
    return UnitScores(values, "zeros")


SELECTIONS = [
    (Selection(), {"a": 1, "b": 1}),
    (Selection(floor=3), {"a": 3, "b": 3}),
    (Selection(cap=0.5), {"a": 6, "b": 4}),
    (Selection(round_to=4), {"a": 4, "b": 4}),
    (Selection(names=("a",)), {"a": 1, "b": 8}),
    (Selection(shares={"b": 0.5}), {"a": 1, "b": 4}),
]


@pytest.mark.parametrize(("selection", "kept"), SELECTIONS, ids=str)
@pytest.mark.parametrize("measure", ["flops", "params"])
def test_a_budget_is_refused_below_the_smallest_network(
    selection: Selection, kept: dict[str, int], measure: str
) -> None:
    _, structure = traced()
    whole, least = figures(structure)[measure], smallest(selection, kept)[measure]
    check_reachable(structure, Budget(**{measure: least / whole}), selection)
    with pytest.raises(BudgetError, match=f"{least:,} of {whole:,}"):
        check_reachable(structure, Budget(**{measure: (least - 1) / whole}), selection)


@pytest.mark.parametrize("missed", ["flops", "params"])
def test_one_of_two_shares_that_cannot_be_met_is_enough(missed: str) -> None:
    _, structure = traced()
    shares = {"flops": 0.9, "params": 0.9} | {missed: 1e-3}
    with pytest.raises(BudgetError, match=f"{missed}=0.001 was asked for"):
        check_reachable(structure, Budget(**shares), Selection())
    check_reachable(structure, Budget(flops=0.9, params=0.9), Selection())


@pytest.mark.parametrize("missed", ["flops", "params"])
def test_on_the_way_what_cannot_be_met_is_raised_to_what_can(missed: str) -> None:
    _, structure = traced()
    selection = Selection(floor=2)
    whole, least = figures(structure), smallest(selection, {"a": 2, "b": 2})
    asked = {"flops": 0.9, "params": 0.9} | {missed: 1e-3}
    limits = limits_of(structure, asked, selection)
    found = within_reach(structure, zeros(structure), selection, limits)
    other = "params" if missed == "flops" else "flops"
    assert found.allowed == {missed: least[missed], other: int(0.9 * whole[other])}
    assert (found.whole, found.asked, found.fewest) == (limits.whole, limits.asked, limits.fewest)


def test_limits_are_shares_of_the_whole_in_whole_numbers() -> None:
    _, structure = traced()
    whole = figures(structure)
    selection = Selection(floor=3, cap=0.75, shares={"b": 0.5})
    found = limits_of(structure, {"flops": 0.3, "units": 0.1 + 0.2, "params": 1.0}, selection)
    assert found.whole == {name: whole[name] for name in ("flops", "units", "params")}
    assert found.allowed["units"] == int(0.3 * whole["units"] + 1e-9)
    assert found.allowed["params"] == whole["params"]
    assert found.allowed["flops"] == int(0.3 * whole["flops"])
    assert found.sizes == {"a": 12, "b": 8}
    assert found.fewest == {"a": 3, "b": 3}
    assert found.fixed == {"b": 4}
