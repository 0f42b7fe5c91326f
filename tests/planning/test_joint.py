"""Joint selection is greedy on marginals, keeps every promise of the planner, and is close to the best set there is."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError, ConfigError, NonFiniteError
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.structure import Plan, Structure, trace
from oracles.best_plans import assert_promises, shares_of
from oracles.building import built
from oracles.random_networks import build, random_blueprint
from oracles.shrinking import small_case

PER_UNIT = Selection(per="unit")


@cache
def traced(id: str) -> Structure:
    case = small_case(id)
    return trace(case.model(), case.inputs())


@cache
def hidden(*widths: int) -> Structure:
    sizes = [3, *widths, 2]
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    return trace(built(lambda: nn.Sequential(*layers)), torch.zeros(1, 3, dtype=torch.float64))


def quadratic(
    structure: Structure, seed: int, *, rank: int = 4, blocks: bool = False
) -> UnitScores:
    """½ diag G − g and G, for a random G of low rank: many units do the same work."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {group.name: group.size for group in structure.groups}
    factor = torch.randn(sum(sizes.values()), rank, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T
    scores = matrix.diagonal() / 2 + 0.3 * torch.randn(len(factor), generator=generator).double()
    values = dict(zip(sizes, scores.split(list(sizes.values())), strict=True))
    parts = dict(zip(sizes, factor.split(list(sizes.values())), strict=True))
    within = {(name,): own @ own.T for name, own in parts.items()}
    return UnitScores(values, "made up", interactions=within if blocks else {tuple(sizes): matrix})


def removed(structure: Structure, plan: Plan) -> set[tuple[str, int]]:
    return {
        (name, unit)
        for name, kept in plan.kept.items()
        for unit in set(range(structure[name].size)) - set(kept.tolist())
    }


def table(structure: Structure, units: UnitScores) -> tuple[list[tuple[str, int]], Tensor, Tensor]:
    """All units, their scores, and the whole matrix between them."""
    every = [(g.name, unit) for g in structure.groups for unit in range(g.size)]
    scores = torch.cat([units.values[g.name] for g in structure.groups])
    matrix = torch.zeros(len(every), len(every), dtype=torch.float64)
    for names, own in units.interactions.items():
        at = [every.index((name, unit)) for name in names for unit in range(structure[name].size)]
        matrix[np.ix_(at, at)] = own
    return every, scores, matrix


def greedy(structure: Structure, units: UnitScores, num: int) -> list[tuple[str, int]]:
    """The order in which units go, no group emptied: at every step all sums over who has gone are taken anew."""
    every, scores, matrix = table(structure, units)
    gone: list[int] = []
    for _ in range(num):
        left = {g.name: g.size - sum(every[u][0] == g.name for u in gone) for g in structure.groups}
        free = [u for u in range(len(every)) if u not in gone and left[every[u][0]] > 1]
        gone.append(min(free, key=lambda u: float(scores[u] + sum(matrix[u, v] for v in gone))))
    return [every[u] for u in gone]


@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_units_go_as_marginals_taken_anew_say(seed, blocks):
    structure = hidden(8, 6)
    units = quadratic(structure, seed, blocks=blocks)
    order = greedy(structure, units, 12)
    for num in range(1, 13):
        plan = make_plan(structure, units, Budget(units=(14 - num) / 14), PER_UNIT)
        assert removed(structure, plan) == set(order[:num])


def test_marginals_that_are_never_updated_would_be_caught():
    structure = hidden(8, 6)
    alone = Selection(per="unit", interactions="ignore")
    other = 0
    for seed in range(4):
        units = quadratic(structure, seed)
        plan = make_plan(structure, units, Budget(units=0.5), alone)
        other += removed(structure, plan) != set(greedy(structure, units, 7))
    assert other == 4


def test_the_set_is_close_to_the_best_of_all_sets():
    """Ten units, all sets of five: within a few percent of the spread on average, and far better than one by one."""
    structure = hidden(10)
    every, alone = [], []
    for seed in range(20):
        units = quadratic(structure, seed)
        _, scores, matrix = table(structure, units)

        def cost(gone, scores=scores, matrix=matrix) -> float:
            between = sum(float(matrix[u, v]) for u, v in combinations(gone, 2))
            return float(scores[list(gone)].sum()) + between

        costs = sorted(cost(gone) for gone in combinations(range(10), 5))
        spread = costs[-1] - costs[0]
        for rule, found in (("joint", every), ("ignore", alone)):
            how = Selection(per="unit", interactions=rule)
            plan = make_plan(structure, units, Budget(units=0.5), how)
            found.append((cost([u for _, u in removed(structure, plan)]) - costs[0]) / spread)
    assert min(every) >= -1e-12
    assert sum(every) / 20 < 0.06
    assert sum(every) < sum(alone) / 2


def test_of_two_units_that_do_the_same_work_one_stays():
    structure = hidden(6)
    twins = torch.tensor([1, 1, 0, 0, 0, 0]).double()[:, None] * torch.tensor([[1, 1, 0, 0, 0, 0]])
    values = torch.tensor([0.5, 0.5, 1.2, 1.3, 1.4, 1.6]).double()
    units = UnitScores({"0": values}, "made up", interactions={("0",): 2 * twins.double()})
    both = make_plan(structure, units, Budget(units=4 / 6), Selection(interactions="ignore"))
    one = make_plan(structure, units, Budget(units=4 / 6))
    assert removed(structure, both) == {("0", 0), ("0", 1)}
    assert removed(structure, one) == {("0", 0), ("0", 2)}


@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_interactions_of_zero_change_nothing(widths):
    structure = traced("residual")
    how = Selection(widths=widths, per="unit")
    for seed in range(3):
        units = quadratic(structure, seed)
        none = {names: torch.zeros_like(own) for names, own in units.interactions.items()}
        without = UnitScores(units.values, "made up", interactions=none)
        plain = UnitScores(units.values, "made up")
        for share in (0.8, 0.5, 0.3):
            plans = [
                make_plan(structure, own, Budget(flops=share), how) for own in (without, plain)
            ]
            assert removed(structure, plans[0]) == removed(structure, plans[1])


class Branches(nn.Module):
    """Layers side by side that read 2 and 8 inputs: a unit saves 3 and 9, whoever else has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 6), nn.Linear(8, 5)
        self.c, self.d = nn.Linear(6, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x[:, :2]))) + self.d(torch.relu(self.b(x)))


@pytest.mark.parametrize("seed", range(5))
def test_per_cost_marginals_are_divided_by_what_a_unit_saves(seed):
    structure = trace(built(Branches), torch.zeros(1, 8, dtype=torch.float64))
    units = quadratic(structure, seed)
    every, scores, matrix = table(structure, units)
    saved, whole = {"a": 3, "b": 9}, 6 * 3 + 5 * 9
    gone: list[int] = []
    for _ in range(9):
        left = {name: sum(every[u][0] == name for u in range(11) if u not in gone) for name in "ab"}
        free = [u for u in range(11) if u not in gone and left[every[u][0]] > 1]
        figure = {u: float(scores[u] + matrix[u, gone].sum()) / saved[every[u][0]] for u in free}
        gone.append(min(figure, key=figure.__getitem__))
        stays = whole - sum(saved[every[u][0]] for u in gone)
        plan = make_plan(structure, units, Budget(flops=stays / whole), Selection(per="cost"))
        assert removed(structure, plan) == {every[u] for u in gone}


def test_units_that_must_go_together_are_chosen_one_after_the_other():
    """In pairs, as widths are even: of each pair the second is chosen at what it costs after the first."""
    structure = hidden(8)
    units = quadratic(structure, 3, rank=2)
    _, scores, matrix = table(structure, units)
    for num in (2, 4, 6):
        gone: list[int] = []
        while len(gone) < num:
            free = [u for u in range(8) if u not in gone]
            gone.append(min(free, key=lambda u: float(scores[u] + matrix[u, gone].sum())))
        plan = make_plan(structure, units, Budget(units=(8 - num) / 8), Selection(round_to=2))
        assert {u for _, u in removed(structure, plan)} == set(gone)


def test_shares_that_are_set_go_first_and_count_for_the_others():
    structure = hidden(8, 6)
    units = quadratic(structure, 2)
    how = Selection(per="unit", shares={"0": 0.5})
    plan = make_plan(structure, units, Budget(units=8 / 14), how)
    first = [unit for name, unit in removed(structure, plan) if name == "0"]
    _, scores, matrix = table(structure, units)
    gone: list[int] = []
    for span, num in ((range(8), 4), (range(8, 14), 2)):
        for _ in range(num):
            free = [u for u in span if u not in gone]
            gone.append(min(free, key=lambda u: float(scores[u] + matrix[u, gone].sum())))
    assert len(first) == 4
    assert {("0", u) if u < 8 else ("1", u - 8) for u in gone} == removed(structure, plan)


selections = st.builds(
    Selection,
    widths=st.sampled_from(("global", "uniform")),
    per=st.sampled_from(("unit", "cost")),
    round_to=st.sampled_from((1, 1, 2, 3)),
    floor=st.sampled_from((1, 2)),
    cap=st.sampled_from((1.0, 0.7)),
)
budgets = st.dictionaries(
    st.sampled_from(("flops", "params", "units")), st.floats(0.2, 1.0), min_size=1
)


@cache
def random_network(seed: int) -> Structure:
    network = build(random_blueprint(seed, longest=3))
    return trace(network.model, network.inputs(network.batch, 0))


@given(st.integers(0, 59), budgets, selections, st.integers(0, 99), st.booleans())
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_every_promise_of_the_planner_holds(network, budget, selection, seed, blocks):
    """Budgets, floors, caps, rounding and ties, and no more goes than has to; who goes is another question."""
    structure = random_network(network)
    assume(any(group.exact for group in structure.groups))
    units = quadratic(structure, seed, blocks=blocks)
    try:
        plan = make_plan(structure, units, Budget(**budget), selection)
    except BudgetError:
        return  # whether it is one does not depend on who goes
    gone = removed(structure, plan)
    order = {
        name: torch.tensor([float((name, unit) not in gone) for unit in range(len(own))])
        for name, own in units.values.items()
    }
    assert_promises(structure, UnitScores(order, "gone"), Budget(**budget), selection, plan)


@given(st.integers(0, 99), st.floats(0.2, 1.0), st.sampled_from(("flops", "params", "units")))
@settings(max_examples=40)
def test_no_unit_that_went_could_come_back(seed, share, what):
    structure = traced("residual")
    plan = make_plan(structure, quadratic(structure, seed), Budget(**{what: share}))
    counts = {name: kept for name, (kept, _) in plan.counts().items()}
    for name in plan.kept:
        assert shares_of(structure, counts | {name: counts[name] + 1})[what] > share, name


def test_what_is_given_stays_as_it_was():
    structure = hidden(8, 6)
    units = quadratic(structure, 0)
    values = {name: own.clone() for name, own in units.values.items()}
    matrix = next(iter(units.interactions.values())).clone()
    make_plan(structure, units, Budget(units=0.5))
    assert torch.equal(next(iter(units.interactions.values())), matrix)
    for name, own in values.items():
        assert torch.equal(units.values[name], own)


def test_interactions_that_are_no_numbers_are_refused():
    structure = hidden(6)
    matrix = torch.full((6, 6), torch.inf, dtype=torch.float64)
    units = UnitScores({"0": torch.zeros(6)}, "made up", interactions={("0",): matrix})
    with pytest.raises(NonFiniteError, match=r"Interactions of 0 \(made up\) are NaN or infinite"):
        make_plan(structure, units, Budget(units=0.5))
    with pytest.raises(ConfigError, match="interactions='all' was asked for; there are joint, ign"):
        Selection(interactions="all")
