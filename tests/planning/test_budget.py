"""Budgets and selections as values: what nobody can mean is refused, with what one can."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from apoptosis.criteria import UnitScores
from apoptosis.errors import ConfigError
from apoptosis.planning import Budget, Selection, make_plan, spending
from apoptosis.structure import Structure, trace
from oracles.shrinking import small_case

MEASURES = ("flops", "params", "units")


def mlp() -> tuple[Structure, UnitScores]:
    case = small_case("mlp")
    structure = trace(case.model(), case.inputs())
    values = {g.name: torch.arange(g.size, dtype=torch.float64) for g in structure.groups}
    return structure, UnitScores(values, "made up")


def test_a_budget_says_something() -> None:
    with pytest.raises(ConfigError, match=r"flops.*params.*units"):
        Budget()


@pytest.mark.parametrize("what", MEASURES)
@pytest.mark.parametrize(
    "share", [0, 0.0, -0.5, 1.0001, 2, 50, math.nan, math.inf, -math.inf, True, False, "0.5", [0.5]]
)
def test_a_share_lies_above_0_and_at_most_at_1(what: str, share: Any) -> None:
    with pytest.raises(ConfigError, match=what):
        Budget(**{what: share})


@pytest.mark.parametrize("what", MEASURES)
@pytest.mark.parametrize("share", [1e-9, 0.5, 1.0, 1])
def test_a_share_within_is_kept_as_it_is(what: str, share: float) -> None:
    budget = Budget(**{what: share})
    assert getattr(budget, what) == share
    assert [getattr(budget, other) for other in MEASURES if other != what] == [None, None]


def test_several_shares_at_once() -> None:
    budget = Budget(flops=0.5, params=0.7)
    assert (budget.flops, budget.params, budget.units) == (0.5, 0.7, None)
    with pytest.raises(ConfigError, match="params"):
        Budget(flops=0.5, params=0)


def test_a_budget_stays_as_it_was_made() -> None:
    budget = Budget(flops=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError, match="flops"):
        budget.flops = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("widths", "local", ("global", "uniform")),
        ("widths", None, ("global", "uniform")),
        ("per", "flop", ("unit", "cost")),
        ("per", True, ("unit", "cost")),
        ("kinds", ("neuron",), ("hidden", "channel", "head")),
        ("kinds", "hidden", ("hidden",)),
        ("names", "*", ("*",)),
        ("round_to", 0, ("round_to",)),
        ("round_to", -8, ("round_to",)),
        ("round_to", 1.5, ("round_to",)),
        ("round_to", True, ("round_to",)),
        ("floor", 0, ("floor",)),
        ("floor", -1, ("floor",)),
        ("floor", 2.5, ("floor",)),
        ("floor", True, ("floor",)),
        ("cap", -0.1, ("cap",)),
        ("cap", 1.5, ("cap",)),
        ("cap", math.nan, ("cap",)),
        ("cap", "half", ("cap",)),
        ("shares", {"0": 1.5}, ("1.5",)),
        ("shares", {"0": -0.5}, ("-0.5",)),
        ("shares", {"0": math.nan}, ("nan",)),
        ("shares", {"0": "half"}, ("half",)),
        ("shares", [0.5], ("shares",)),
    ],
)
def test_an_option_nobody_can_mean_is_refused(
    field: str, value: Any, told: tuple[str, ...]
) -> None:
    """When the selection is made, or, where the structure must be asked, when it is used."""
    structure, units = mlp()
    with pytest.raises(ConfigError, match=r"\w") as caught:
        make_plan(structure, units, Budget(flops=0.5), Selection(**{field: value}))
    assert [word for word in told if word not in str(caught.value)] == []


def test_a_selection_that_chooses_nothing_is_refused() -> None:
    structure, units = mlp()
    with pytest.raises(ConfigError, match="fits no group"):
        make_plan(structure, units, Budget(flops=0.5), Selection(names=("layer9.*",)))


def test_shares_of_no_group_are_refused() -> None:
    """A pattern with a slip of the pen would otherwise leave the group to the budget."""
    structure, units = mlp()
    with pytest.raises(ConfigError, match="layer9"):
        make_plan(structure, units, Budget(flops=0.5), Selection(shares={"layer9.*": 0.5}))


def test_options_are_given_by_keyword_and_stay() -> None:
    with pytest.raises(TypeError, match="positional"):
        Selection("global")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="floor"):
        Selection().floor = 3  # type: ignore[misc]


def test_spending_is_recounted_from_the_plan() -> None:
    structure, _ = mlp()
    plan = structure.plan({"0": range(4)})
    lines = {line.what: line for line in spending(structure, plan, Budget(flops=0.7, units=0.8))}
    assert {what for what, line in lines.items() if line.asked < 1} == {"flops", "units"}
    flops, units = lines["flops"], lines["units"]
    assert (flops.asked, flops.dense, flops.left) == (0.7, 2 * 98, 2 * (4 * 4 + 4 * 6 + 6 * 3))
    assert (units.asked, units.dense, units.left) == (0.8, 14, 10)
    assert (flops.got, units.got) == (flops.left / flops.dense, 10 / 14)
    (params,) = (own for own in spending(structure, plan, Budget(params=0.9)) if own.asked < 1)
    assert (params.dense, params.left) == (115, 4 * 5 + 6 * 5 + 3 * 7)
