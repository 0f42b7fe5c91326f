"""Plans from scores and budgets: every promise on random networks, and the best there is by trying everything."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.criteria import Aggregation, UnitScores, magnitude, unit_scores
from apoptosis.errors import BudgetError, ConfigError, NonFiniteError, PlanMismatchError
from apoptosis.planning import Budget, Selection, make_plan, spending
from apoptosis.structure import Plan, Structure, cut, trace, zero
from oracles.best_plans import (
    all_choices,
    assert_promises,
    best_subset,
    free_groups,
    lowest,
    removed_score,
    shares_of,
    smallest_choice,
    smallest_shares,
    together,
)
from oracles.building import built
from oracles.cut_checks import TOLERANCE, counted_macs
from oracles.random_networks import RandomNetwork, build, random_blueprint
from oracles.shrinking import SMALL_CASES, SmallCase, small_case
from oracles.untouched import Snapshot

MEASURES = ("flops", "params", "units")
every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


class Branches(nn.Module):
    """Hidden layers side by side that read so many inputs each: their costs add up and do not interact."""

    def __init__(self, *branches: tuple[int, int]) -> None:
        super().__init__()
        self.reads = [reads for reads, _ in branches]
        self.up = nn.ModuleList(nn.Linear(reads, width) for reads, width in branches)
        self.down = nn.ModuleList(nn.Linear(width, 1) for _, width in branches)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            down(torch.relu(up(x[:, :reads])))
            for reads, up, down in zip(self.reads, self.up, self.down, strict=True)
        ]
        return torch.stack(parts).sum(0)


@cache
def branches(*own: tuple[int, int]) -> Structure:
    structure = trace(built(lambda: Branches(*own)), torch.zeros(2, 9, dtype=torch.float64))
    assert [group.size for group in structure.groups] == [width for _, width in own]
    return structure


@cache
def traced(id: str) -> tuple[nn.Module, Tensor, Structure]:
    case = small_case(id)
    model, x = case.model(), case.inputs()
    return model, x, trace(model, x)


def scored(structure: Structure, *values: list[float]) -> UnitScores:
    """Scores in the order of the groups."""
    names = [group.name for group in structure.groups]
    return UnitScores(
        {n: torch.tensor(v, dtype=torch.float64) for n, v in zip(names, values, strict=True)},
        "made up",
    )


def random_scores(structure: Structure, seed: int, kind: str = "signed") -> UnitScores:
    generator = torch.Generator().manual_seed(seed)

    def of(size: int) -> Tensor:
        if kind == "many ties":
            return torch.randint(-1, 2, (size,), generator=generator).double()
        if kind == "all equal":
            return torch.zeros(size, dtype=torch.float64)
        found = torch.randn(size, generator=generator, dtype=torch.float64)
        return found if kind == "signed" else found.exp()

    return UnitScores({g.name: of(g.size) for g in structure.groups}, "made up")


def removed(structure: Structure, plan: Plan) -> dict[str, list[int]]:
    return {
        name: sorted(set(range(structure[name].size)) - set(kept.tolist()))
        for name, kept in plan.kept.items()
    }


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = model(x.clone())
    found = tuple(found.values()) if isinstance(found, dict) else found
    return list(found) if isinstance(found, tuple) else [found]


# ------------------------------------------------------------------------------------------- the best, by trying all

positive = st.integers(1, 6).map(float)


def shares(least: float, most: float) -> st.SearchStrategy[float]:
    """As people write them: three decimals."""
    return st.integers(round(1000 * least), round(1000 * most)).map(lambda n: n / 1000)


@given(
    st.lists(positive, min_size=12, max_size=12),
    shares(0.1, 1.0),
    st.sampled_from(MEASURES),
    st.sampled_from(("unit", "cost")),
)
@settings(max_examples=25)
def test_one_group_loses_the_least_there_is_to_lose(
    values: list[float], share: float, what: str, per: str
) -> None:
    structure = branches((4, 12))
    units, budget = scored(structure, values), Budget(**{what: share})
    best = best_subset(structure, units.values, budget)
    if best == math.inf:
        with pytest.raises(BudgetError, match="cannot be met"):
            make_plan(structure, units, budget, Selection(per=per))
        return
    plan = make_plan(structure, units, budget, Selection(per=per))
    assert removed_score(structure, units.values, plan) == best


@given(
    st.lists(positive, min_size=12, max_size=12),
    shares(0.3, 1.0),
    st.sampled_from(MEASURES),
    st.sampled_from(("unit", "cost")),
)
@settings(max_examples=40)
def test_groups_of_equal_cost_lose_the_least_there_is_to_lose(
    values: list[float], share: float, what: str, per: str
) -> None:
    structure = branches((5, 5), (5, 4), (5, 3))
    units, budget = scored(structure, values[:5], values[5:9], values[9:]), Budget(**{what: share})
    plan = make_plan(structure, units, budget, Selection(widths="global", per=per))
    best = best_subset(structure, units.values, budget)
    assert removed_score(structure, units.values, plan) == best


@given(
    st.lists(positive, min_size=12, max_size=12),
    shares(0.35, 1.0),
    st.sampled_from(MEASURES),
)
@settings(max_examples=30)
def test_score_per_cost_loses_at_most_one_move_more_than_the_best(
    values: list[float], share: float, what: str
) -> None:
    """A knapsack: taking the cheapest ratio first errs by the last unit taken, at most."""
    structure = branches((9, 4), (3, 5), (1, 3))
    units, budget = scored(structure, values[:4], values[4:9], values[9:]), Budget(**{what: share})
    plan = make_plan(structure, units, budget, Selection(widths="global", per="cost"))
    lost = removed_score(structure, units.values, plan)
    best = best_subset(structure, units.values, budget)
    gone = [
        values_of(units, name, unit)
        for name, own in removed(structure, plan).items()
        for unit in own
    ]
    assert best <= lost <= best + max(gone, default=0.0) + 1e-9


def values_of(units: UnitScores, name: str, unit: int) -> float:
    return float(units.values[name][unit])


def taken_in_turn(structure: Structure, units: UnitScores, what: str, share: float) -> float:
    """What is lost if the lowest unit of all goes, and the next, until the budget is met."""
    counts = {group.name: group.size for group in structure.groups}
    ranked = sorted((float(v), name) for name, own in units.values.items() for v in own)
    lost = 0.0
    for value, name in ranked:
        if shares_of(structure, counts)[what] <= share:
            break
        if counts[name] > 1:
            counts[name] -= 1
            lost += value
    return lost


@given(st.integers(0, 99), shares(0.2, 1.0), st.sampled_from(MEASURES))
@settings(max_examples=40)
def test_the_lowest_go_and_none_in_vain(seed: int, share: float, what: str) -> None:
    """Ranked together as they are: no more is lost than one by one, and no unit could come back."""
    _, _, structure = traced("mlp")
    units, budget = random_scores(structure, seed, "positive"), Budget(**{what: share})
    plan = make_plan(structure, units, budget, Selection(widths="global", per="unit"))
    lost = removed_score(structure, units.values, plan)
    assert lost <= taken_in_turn(structure, units, what, share) + 1e-12
    counts = {name: kept for name, (kept, _) in plan.counts().items()}
    for name, kept in counts.items():
        assert shares_of(structure, counts | {name: kept + 1})[what] > share, name


@given(shares(0.15, 0.95), st.sampled_from(MEASURES), st.sampled_from(("unit", "cost")))
@settings(max_examples=30)
def test_a_budget_is_refused_if_and_only_if_no_choice_meets_it(
    share: float, what: str, per: str
) -> None:
    _, _, structure = traced("mlp")
    selection = Selection(per=per, floor=2, cap=0.6, round_to=2)
    units = random_scores(structure, 0)
    best = min(
        shares_of(structure, c, selection)[what] for c in all_choices(structure, (), selection)
    )
    assert best == smallest_shares(structure, (), selection)[what]
    if best <= share:
        assert_promises(
            structure,
            units,
            Budget(**{what: share}),
            selection,
            make_plan(structure, units, Budget(**{what: share}), selection),
        )
    else:
        with pytest.raises(BudgetError, match="cannot be met") as caught:
            make_plan(structure, units, Budget(**{what: share}), selection)
        assert caught.value.reachable == pytest.approx({what: best}, rel=1e-12)


# ------------------------------------------------------------------------------------------ promises, on anything

budgets = st.dictionaries(st.sampled_from(MEASURES), shares(0.1, 1.0), min_size=1, max_size=3).map(
    lambda own: Budget(**own)
)
selections = st.builds(
    Selection,
    widths=st.sampled_from(("global", "uniform")),
    per=st.sampled_from(("unit", "cost")),
    kinds=st.sampled_from(
        (None, None, None, ("hidden",), ("channel", "stream"), ("head_dim", "qk_dim", "v_dim"))
    ),
    names=st.sampled_from((("*",), ("*",), ("!*a",), ("*.0.*",), ("*", "!table"))),
    round_to=st.sampled_from((1, 1, 1, 2, 3)),
    floor=st.sampled_from((1, 1, 1, 2, 4)),
    cap=st.sampled_from((1.0, 1.0, 0.7, 0.34)),
)
score_kinds = st.sampled_from(("signed", "positive", "many ties", "all equal"))


@cache
def random_network(seed: int) -> tuple[RandomNetwork, Structure]:
    network = build(random_blueprint(seed, longest=3))
    return network, trace(network.model, network.inputs(network.batch, 0))


def without(units: UnitScores, structure: Structure, number: int) -> UnitScores:
    """One group's scores missing; with 0, none."""
    if not number or len(structure.groups) < 2:
        return units
    name = structure.groups[number % len(structure.groups)].name
    values = {other: own for other, own in units.values.items() if other != name}
    return UnitScores(values, "made up", missing=(name,))


def planned(
    structure: Structure, units: UnitScores, budget: Budget, selection: Selection
) -> Plan | None:
    """The plan, checked; or None where enumeration agrees that there is none."""
    asked = {what: getattr(budget, what) for what in MEASURES if getattr(budget, what) is not None}
    least = smallest_shares(structure, units.missing, selection)
    unreachable = {what: share for what, share in asked.items() if least[what] > share}
    if unreachable:
        with pytest.raises(BudgetError, match="cannot be met") as caught:
            make_plan(structure, units, budget, selection)
        for what in unreachable:
            assert caught.value.reachable[what] == pytest.approx(least[what], rel=1e-12)
        return None
    plan = make_plan(structure, units, budget, selection)
    assert_promises(structure, units, budget, selection, plan)
    return plan


def assert_same_widths(
    structure: Structure, units: UnitScores, selection: Selection, plan: Plan
) -> None:
    """One share fits all groups that no limit holds, to the next width allowed."""
    least = smallest_choice(structure, units.missing, selection)
    counts = plan.counts()
    low, high = 0.0, 1.0
    for own in together(structure, free_groups(structure, units.missing, selection)):
        for group in own:
            kept = counts.get(group.name, (group.size, 0))[0]
            if kept == least[group.name]:
                continue
            step = max(structure.step(group.name)[group.name], selection.round_to)
            low, high = max(low, (kept - step) / group.size), min(high, (kept + step) / group.size)
    assert low <= high + 1e-12, f"no one share gives {counts}"


def recounted(network: RandomNetwork, structure: Structure, plan: Plan, small: nn.Module) -> None:
    """Parameters by their numbers; multiply-accumulates by a fresh trace, and by torch where it sees all."""
    x = network.inputs(network.batch, 0)
    assert sum(p.numel() for p in small.parameters()) == structure.params(plan)
    ones = any(group.size == 1 for group in structure.after(plan).groups)
    if network.counted and not (network.einsum and ones):
        assert counted_macs(small, x) == structure.macs(plan)
    if plan.delivery == "module":
        assert trace(small, x).macs() == structure.macs(plan)


@given(st.integers(0, 149), budgets, selections, score_kinds, st.integers(0, 99), st.integers(0, 3))
@settings(max_examples=100)
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_promises_on_random_networks(
    seed: int, budget: Budget, selection: Selection, kind: str, numbers: int, left_out: int
) -> None:
    network, structure = random_network(seed)
    units = without(random_scores(structure, numbers, kind), structure, left_out)
    assume(chooses(structure, selection))
    plan = planned(structure, units, budget, selection)
    if plan is None:
        return
    if selection.widths == "uniform":
        assert_same_widths(structure, units, selection, plan)
    for line in spending(structure, plan, budget, selection):
        asked = getattr(budget, line.what)
        assert line.asked == (1.0 if asked is None else asked)
        assert line.got == line.left / line.dense
        assert line.got <= line.asked
    small = cut(network.model, plan)
    recounted(network, structure, plan, small)
    if all(structure[name].exact for name in plan.kept):
        assert_zeroed(network.model, plan, small, network.inputs(network.batch, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"kinds": ("head",)}, {"names": ("!*head_dim",)}, {"kinds": ("stream", "head")}],
    ids=str,
)
def test_spending_counts_the_units_that_the_budget_counts(options: dict[str, Any]) -> None:
    _, _, structure = traced("fused")
    budget, selection = Budget(units=0.7), Selection(**options)
    try:
        plan = make_plan(structure, random_scores(structure, 1), budget, selection)
    except BudgetError as error:
        assert error.reachable["units"] > 0.7  # noqa: PT017 - a refusal is an answer as well
        return
    lines = spending(structure, plan, budget, selection)
    (line,) = (line for line in lines if line.what == "units")
    assert line.got <= line.asked


def chooses(structure: Structure, selection: Selection) -> bool:
    try:
        structure.choose(kinds=selection.kinds, names=selection.names)
    except ValueError:
        return False
    return True


def assert_zeroed(model: nn.Module, plan: Plan, small: nn.Module, x: Tensor) -> None:
    """The cut network is the one whose units are zeroed, to rounding."""
    twin = outputs(zero(model, plan), x)
    for got, expected in zip(outputs(small, x), twin, strict=True):
        scale = max(float(expected.abs().max()), 1e-6)
        torch.testing.assert_close(got, expected, rtol=0, atol=100 * TOLERANCE * scale)


@given(st.integers(0, 149), st.integers(0, 99), shares(0.6, 1.0), shares(0.6, 1.0), selections)
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_plans_compose(
    seed: int, numbers: int, first: float, second: float, selection: Selection
) -> None:
    network, structure = random_network(seed)
    assume(chooses(structure, selection))
    plan = planned(structure, random_scores(structure, numbers), Budget(units=first), selection)
    assume(plan is not None)
    after = structure.after(plan)
    later = planned(after, random_scores(after, numbers + 1), Budget(params=second), selection)
    assume(later is not None)
    both = plan.then(later)
    x = network.inputs(network.batch, 1)
    small = cut(network.model, both)
    for once, twice in zip(
        outputs(small, x), outputs(cut(cut(network.model, plan), later), x), strict=True
    ):
        assert torch.equal(once, twice)
    assert structure.macs(both) == after.macs(later)
    if all(structure[name].exact for name in both.kept):
        assert_zeroed(network.model, both, small, x)


@every_case
@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_promises_on_networks_of_every_kind(case: SmallCase, widths: str) -> None:
    model, x, structure = traced(case.id)
    before = Snapshot(model)
    for share in (0.4, 0.7, 0.95):
        for what in MEASURES:
            selection = Selection(widths=widths)
            units = random_scores(structure, 1)
            plan = planned(structure, units, Budget(**{what: share}), selection)
            if plan is None or not plan.kept:
                continue
            assert plan.delivery == case.delivery
            small = cut(model, plan)
            assert sum(p.numel() for p in small.parameters()) == structure.params(plan)
            if case.id not in ("recurrent", "experts"):  # cells and einsum are not counted by torch
                assert counted_macs(small, x) == structure.macs(plan)
            if plan.delivery == "module":
                assert trace(small, x).macs() == structure.macs(plan)
            assert_zeroed(model, plan, small, x)
    before.assert_unchanged()


@every_case
def test_inexact_groups_are_touched_only_when_asked_for(case: SmallCase) -> None:
    _, _, structure = traced(case.id)
    inexact = [group for group in structure.groups if not group.exact]
    units = random_scores(structure, 2)
    for group in structure.groups:
        units.values[group.name] += 0.0 if group.exact else -100.0  # by their scores they would go
    plan = make_plan(structure, units, Budget(units=0.95), Selection())
    assert not {group.name for group in inexact} & plan.kept.keys()
    for group in inexact:
        asked = Selection(kinds=(group.kind,), names=(group.name,))
        plan = make_plan(structure, units, Budget(units=0.95), asked)
        assert set(plan.kept) == {group.name}


# ------------------------------------------------------------------------------------------------ fine enough units


@cache
def wide() -> Structure:
    layers = [nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 9)]
    return trace(nn.Sequential(*layers), torch.zeros(2, 24))


@pytest.mark.parametrize("widths", ["global", "uniform"])
@pytest.mark.parametrize("per", ["unit", "cost"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.93])
def test_fine_units_meet_a_budget_within_a_hundredth(widths: str, per: str, share: float) -> None:
    structure, selection = wide(), Selection(widths=widths, per=per)
    units = random_scores(structure, 3, "positive")
    least = 0.99 if widths == "global" else 0.98  # a unit of each of the equal layers at a time
    for shares in (
        {"flops": share},
        {"params": share},
        {"units": share},
        {"flops": share, "params": share, "units": share},
    ):
        plan = make_plan(structure, units, Budget(**shares), selection)
        got = assert_promises(structure, units, Budget(**shares), selection, plan)
        closest = max(got[what] / asked for what, asked in shares.items())
        assert least <= closest <= 1


@pytest.mark.parametrize("num", range(2, 15))
def test_exactly_as_many_units_go_as_asked_however_many_are_equal(num: int) -> None:
    _, _, structure = traced("mlp")
    units = random_scores(structure, 0, "all equal")
    plan = make_plan(structure, units, Budget(units=num / 14), Selection(widths="global"))
    gone = removed(structure, plan)
    assert sum(len(own) for own in gone.values()) == 14 - num
    assert all(own == list(range(len(own))) for own in gone.values())  # of equals the first


@pytest.mark.parametrize("num", range(1, 13))
def test_equal_scores_go_by_index(num: int) -> None:
    structure = branches((4, 12))
    values = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, -0.0, 0.0]
    plan = make_plan(structure, scored(structure, values), Budget(units=num / 12))
    zeros = [unit for unit, value in enumerate(values) if value == 0]
    others = [unit for unit, value in enumerate(values) if value]
    expected = sorted([*zeros, *others][: 12 - num])
    assert removed(structure, plan) == ({} if num == 12 else {"up.0": expected})


def test_the_same_question_has_the_same_answer() -> None:
    _, _, structure = traced("residual")
    units = random_scores(structure, 0, "many ties")
    plans = [make_plan(structure, units, Budget(flops=0.5)).to_json() for _ in range(3)]
    assert len(set(plans)) == 1


def test_a_smaller_budget_removes_more_of_the_same() -> None:
    structure = wide()
    units = random_scores(structure, 5, "positive")
    selection = Selection(widths="global", per="unit")
    earlier: dict[str, set[int]] = {}
    for share in (1.0, 0.9, 0.6, 0.3, 0.1):
        gone = removed(structure, make_plan(structure, units, Budget(flops=share), selection))
        assert all(own <= set(gone.get(name, ())) for name, own in earlier.items())
        earlier = {name: set(own) for name, own in gone.items()}


# ----------------------------------------------------------------------------------- every option, told from its other


def test_widths_are_ranked_together_or_kept_alike() -> None:
    structure = branches((5, 6), (5, 6))
    units = scored(structure, [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16])
    found = {
        widths: removed(
            structure, make_plan(structure, units, Budget(units=0.67), Selection(widths=widths))
        )
        for widths in ("global", "uniform")
    }
    assert found == {
        "global": {"up.0": [0, 1, 2, 3]},
        "uniform": {"up.0": [0, 1], "up.1": [0, 1]},
    }


def test_equal_widths_keep_equal_shares_of_unequal_groups() -> None:
    structure = branches((5, 4), (2, 8), (9, 12))
    units = random_scores(structure, 0)
    plan = make_plan(structure, units, Budget(units=0.5), Selection(widths="uniform"))
    assert plan.counts() == {"up.0": (2, 4), "up.1": (4, 8), "up.2": (6, 12)}


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
@pytest.mark.parametrize("what", MEASURES)
def test_equal_widths_stay_equal_whatever_units_cost(share: float, what: str) -> None:
    structure = branches((5, 6), (1, 6))
    units = random_scores(structure, 0)
    plan = make_plan(structure, units, Budget(**{what: share}), Selection(widths="uniform"))
    first, second = (plan.counts().get(name, (6, 6))[0] for name in ("up.0", "up.1"))
    assert abs(first - second) <= 1


@cache
def unequal() -> Structure:
    """A convolution over many positions (MACs), then a wide linear layer (parameters)."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.ReLU(),
        nn.AvgPool2d(16),
        nn.Flatten(),
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 64),
    )
    return trace(model, torch.zeros(1, 1, 16, 16))


@pytest.mark.parametrize(
    ("scores", "per", "shares", "expected"),
    [
        ((2.0, 1.0), "unit", {"flops": 0.96}, "4"),
        ((2.0, 1.0), "cost", {"flops": 0.96}, "0"),
        ((1.0, 2.0), "unit", {"params": 0.985}, "0"),
        ((1.0, 2.0), "cost", {"params": 0.985}, "4"),
        ((2.0, 1.0), "cost", {"units": 0.95}, "4"),
        ((1.0, 2.0), "cost", {"units": 0.95}, "0"),
    ],
)
def test_scores_are_per_unit_or_per_what_the_budget_counts(
    scores: tuple[float, float], per: str, shares: dict[str, float], expected: str
) -> None:
    """A channel costs 264 MACs and 10 parameters, a hidden unit 68 MACs and 69 parameters."""
    structure = unequal()
    assert [structure.unit_cost(g.name) for g in structure.groups] == [(264, 10), (68, 69)]
    units = scored(structure, [scores[0]] * 4, [scores[1]] * 8)
    selection = Selection(widths="global", per=per)
    plan = make_plan(structure, units, Budget(**shares), selection)
    assert {name: len(own) for name, own in removed(structure, plan).items()} == {expected: 1}


def test_kinds_choose() -> None:
    _, _, structure = traced("encoder")
    units = random_scores(structure, 0)
    for kind in ("head", "head_dim", "hidden"):
        plan = make_plan(structure, units, Budget(params=0.95), Selection(kinds=(kind,)))
        assert {structure[name].kind for name in plan.kept} == {kind}


def test_names_choose_and_protect() -> None:
    _, _, structure = traced("mlp")
    units = scored(structure, [0.0] * 8, [9.0] * 6)
    budget = Budget(units=0.8)
    assert set(make_plan(structure, units, budget, Selection(per="unit")).kept) == {"0"}
    for names in (("!0",), ("2",), ("*", "!0*")):
        assert set(make_plan(structure, units, budget, Selection(names=names)).kept) == {"2"}


def test_missing_groups_and_those_tied_to_them_stay_whole() -> None:
    _, _, structure = traced("separate")
    every = random_scores(structure, 0)
    gone = "parts.0.q:qk_dim"
    units = UnitScores(
        {name: own for name, own in every.values.items() if name != gone}, "x", missing=(gone,)
    )
    plan = make_plan(structure, units, Budget(params=0.9))
    assert set(plan.kept) == {"parts.0.q:head"}


@pytest.mark.parametrize("share", [0.25, 0.5, 0.6, 0.875, 1.0])
def test_shares_are_kept_before_the_budget_is_spent(share: float) -> None:
    _, _, structure = traced("mlp")
    units = scored(structure, list(range(8)), [float(-unit) for unit in range(6)])
    selection = Selection(shares={"0": share})
    plan = make_plan(structure, units, Budget(units=0.7), selection)
    counts = {"0": (8, 8), "2": (6, 6)} | plan.counts()
    assert abs(counts["0"][0] - 8 * share) <= 0.5
    assert sum(kept for kept, _ in counts.values()) == min(9, counts["0"][0] + 6)
    assert_promises(structure, units, Budget(units=0.7), selection, plan)


def test_shares_hold_even_where_the_budget_asks_for_nothing() -> None:
    _, _, structure = traced("mlp")
    units = random_scores(structure, 0)
    plan = make_plan(structure, units, Budget(flops=1.0), Selection(shares={"2": 0.5}))
    assert plan.counts() == {"2": (3, 6)}


def test_shares_that_the_rest_cannot_make_up_for_are_refused() -> None:
    structure = branches((5, 6), (5, 6))
    units = scored(structure, [0.0] * 6, [9.0] * 6)
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        make_plan(structure, units, Budget(units=0.5), Selection(shares={"up.0": 1.0}))
    assert caught.value.reachable == pytest.approx({"units": 7 / 12})


@pytest.mark.parametrize("round_to", [1, 2, 3, 5])
def test_widths_become_multiples_or_stay_whole(round_to: int) -> None:
    structure = branches((5, 12), (5, 11), (5, 4))
    selection = Selection(round_to=round_to)
    for seed in range(8):
        units = random_scores(structure, seed)
        plan = planned(structure, units, Budget(units=0.6), selection)
        assert plan is not None
        assert all(kept % round_to == 0 for kept, _ in plan.counts().values())


def test_heads_are_never_rounded() -> None:
    """Multiples of four would leave both of two heads."""
    _, _, structure = traced("encoder")
    units, selection = random_scores(structure, 0), Selection(kinds=("head",), round_to=4)
    plan = make_plan(structure, units, Budget(units=0.5), selection)
    assert set(plan.counts().values()) == {(1, 2)}
    assert len(plan.kept) == 2


@pytest.mark.parametrize("floor", [1, 3, 5])
def test_no_group_falls_below_the_floor(floor: int) -> None:
    structure = branches((5, 12), (5, 4))
    units = scored(structure, [-1.0] * 12, list(range(4)))
    plan = make_plan(structure, units, Budget(units=0.6), Selection(floor=floor))
    assert plan.counts()["up.0"] == (max(floor, 5), 12)
    assert plan.counts().get("up.1", (4, 4))[0] >= min(floor, 4)


@pytest.mark.parametrize(("cap", "left"), [(1.0, 1), (0.5, 6), (0.3, 9), (0.25, 9), (0.05, 12)])
def test_no_group_loses_more_than_the_cap(cap: float, left: int) -> None:
    structure = branches((5, 12))
    units = scored(structure, [0.0] * 12)
    selection = Selection(cap=cap)
    budget = Budget(units=left / 12)
    assert make_plan(structure, units, budget, selection).counts() == (
        {"up.0": (left, 12)} if left < 12 else {}
    )
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        make_plan(structure, units, Budget(units=left / 12 - 0.01), selection)
    assert caught.value.reachable == pytest.approx({"units": left / 12})


def test_a_cap_of_a_tenth_of_ten_is_one() -> None:
    """0.3 · 10 is 3, also where floating point says 2.9999…"""
    structure = branches((5, 10))
    for tenths in range(1, 10):
        selection = Selection(cap=tenths / 10)
        least = 10 - tenths
        plan = make_plan(
            structure, scored(structure, [0.0] * 10), Budget(units=least / 10), selection
        )
        assert plan.counts() == {"up.0": (least, 10)}


def test_tied_groups_keep_equally_many() -> None:
    _, _, structure = traced("separate")
    assert [tie.members for tie in structure.ties] == [
        (("parts.0.q:qk_dim", 1), ("parts.0.v:v_dim", 1))
    ]
    for seed in range(6):
        units = random_scores(structure, seed)
        plan = make_plan(structure, units, Budget(params=0.85))
        counts = plan.counts()
        assert counts.get("parts.0.q:qk_dim") == counts.get("parts.0.v:v_dim")
        assert plan.delivery == "module"


# --------------------------------------------------------------------------------------------- nothing to do, and again


@pytest.mark.parametrize("what", MEASURES)
@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_all_may_stay(what: str, widths: str) -> None:
    model, x, structure = traced("residual")
    selection = Selection(widths=widths)
    units = random_scores(structure, 0)
    plan = make_plan(structure, units, Budget(**{what: 1.0}), selection)
    assert plan.kept == {}
    assert plan.counts() == {}
    whole = cut(model, plan)
    assert whole is not model
    assert torch.equal(whole(x), model(x))
    assert (structure.macs(plan), structure.params(plan)) == (structure.macs(), structure.params())
    assert {line.got for line in spending(structure, plan, Budget(**{what: 1.0}))} == {1.0}
    assert plan.fingerprint_after == structure.fingerprint
    assert Plan.from_json(plan.to_json()).kept == {}
    later = make_plan(structure.after(plan), units, Budget(**{what: 0.7}), selection)
    both = plan.then(later)
    assert both.counts() == later.counts()
    assert torch.equal(cut(model, both)(x), cut(model, later)(x))
    again = make_plan(
        structure.after(later), random_scores(structure.after(later), 1), Budget(flops=1)
    )
    assert torch.equal(cut(model, later.then(again))(x), cut(model, later)(x))


@every_case
def test_three_steps_are_one_cut(case: SmallCase) -> None:
    model, x, dense = traced(case.id)
    structure, total, small = dense, None, model
    for step in range(3):
        aggregation = Aggregation(absolute="entry")
        units = unit_scores(magnitude(small), structure, aggregation)
        try:
            plan = make_plan(structure, units, Budget(units=0.8))
        except BudgetError:
            break
        small = cut(small, plan)
        structure = structure.after(plan)
        total = plan if total is None else total.then(plan)
        assert torch.equal(cut(model, total)(x), small(x)), step
        assert sum(p.numel() for p in small.parameters()) == structure.params()
        lines = {line.what: line for line in spending(dense, total, Budget(units=1.0, flops=1.0))}
        assert (lines["flops"].left, lines["flops"].dense) == (structure.macs(), dense.macs())
        left, whole = (sum(g.size for g in own.choose()) for own in (structure, dense))
        assert (lines["units"].left, lines["units"].dense) == (left, whole)


def test_what_is_given_stays_as_it_was() -> None:
    model, _, structure = traced("gqa")
    before = Snapshot(model)
    units = random_scores(structure, 0)
    values = {name: own.clone() for name, own in units.values.items()}
    groups, fingerprint = structure.groups, structure.fingerprint
    sizes = [group.size for group in groups]
    for budget in (Budget(flops=0.7), Budget(params=0.8, units=0.9), Budget(flops=1.0)):
        for widths in ("global", "uniform"):
            make_plan(structure, units, budget, Selection(widths=widths))
    with pytest.raises(BudgetError, match="cannot be met"):
        make_plan(structure, units, Budget(flops=0.01))
    assert units.values.keys() == values.keys()
    assert all(torch.equal(own, values[name]) for name, own in units.values.items())
    assert (structure.groups, structure.fingerprint) == (groups, fingerprint)
    assert [group.size for group in structure.groups] == sizes
    before.assert_unchanged()


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_scores_that_are_no_numbers_are_refused(bad: float, widths: str) -> None:
    _, _, structure = traced("residual")
    units = random_scores(structure, 0)
    units.values["blocks.1.conv1"][2] = bad
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.conv1"):
        make_plan(structure, units, Budget(flops=0.9), Selection(widths=widths))


def test_scores_of_another_network_are_refused() -> None:
    _, _, structure = traced("residual")
    with pytest.raises(PlanMismatchError, match=r"\w"):
        make_plan(structure, random_scores(traced("mlp")[2], 0), Budget(flops=0.5))
    plan = structure.plan({"stem.0": range(4)})
    with pytest.raises(PlanMismatchError, match=r"stem\.0"):
        make_plan(structure.after(plan), random_scores(structure, 0), Budget(flops=0.5))
    with pytest.raises(PlanMismatchError, match=r"stem\.0"):
        make_plan(structure, random_scores(structure.after(plan), 0), Budget(flops=0.5))
    more = random_scores(structure, 0)
    more.values["layer9"] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(PlanMismatchError, match="layer9"):
        make_plan(structure, more, Budget(flops=0.5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "1"),
        ({"cap": 0.25}, "cap"),
        ({"floor": 5}, "floor"),
        ({"names": ("!0",)}, "0"),
        ({"kinds": ("hidden",), "cap": 0.5, "floor": 3}, "cap"),
        ({"round_to": 5}, "round_to"),
        ({"shares": {"0": 0.9}}, "shares"),
    ],
    ids=str,
)
@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_an_unreachable_budget_is_told_with_what_stands_in_the_way(
    widths: str, options: dict[str, Any], told: str
) -> None:
    """What it says can be reached can be reached, and no less."""
    _, _, structure = traced("mlp")
    units, selection = random_scores(structure, 0), Selection(widths=widths, **options)
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        make_plan(structure, units, Budget(flops=0.05), selection)
    assert told in str(caught.value)
    reachable = caught.value.reachable
    assert set(reachable) == {"flops"}
    assert f"{reachable['flops']:.1%}"[:-3] in str(caught.value)
    plan = make_plan(structure, units, Budget(flops=reachable["flops"]), selection)
    assert structure.macs(plan) / structure.macs() == reachable["flops"]
    if not selection.shares:
        assert reachable == pytest.approx(
            {"flops": smallest_shares(structure, (), selection)["flops"]}, rel=1e-12
        )


def test_an_unreachable_budget_is_told_where_only_what_was_asked_for_is_chosen() -> None:
    """The stream is inexact: without `kinds` nothing would be chosen, and that is no answer."""
    _, _, structure = traced("glu")
    selection = Selection(kinds=("stream",), names=("embed",), cap=0.5)
    units = random_scores(structure, 0)
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        make_plan(structure, units, Budget(units=0.2), selection)
    assert caught.value.reachable == pytest.approx({"units": 0.5})


def test_a_refusal_repeats_what_was_asked() -> None:
    structure = branches((5, 12))
    with pytest.raises(BudgetError, match=r"units=0\.07\b"):
        make_plan(structure, scored(structure, [0.0] * 12), Budget(units=0.07))


def test_of_several_shares_the_unreachable_one_is_told() -> None:
    _, _, structure = traced("mlp")
    units = random_scores(structure, 0)
    with pytest.raises(BudgetError, match="params") as caught:
        make_plan(structure, units, Budget(flops=0.9, params=0.01))
    least = smallest_shares(structure, (), Selection())
    assert caught.value.reachable["params"] == pytest.approx(least["params"])


def test_a_structure_without_a_choice_says_so() -> None:
    """All groups missing: nothing can go, and a budget below 1 cannot be met."""
    _, _, structure = traced("mlp")
    units = UnitScores({}, "made up", missing=("0", "2"))
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        make_plan(structure, units, Budget(flops=0.9))
    assert caught.value.reachable == {"flops": 1.0}
    assert make_plan(structure, units, Budget(flops=1.0)).kept == {}


def test_the_oracle_can_fail() -> None:
    """A plan over budget, one beyond a limit, one that is not of the lowest, and one that takes too much."""
    structure = branches((4, 12))
    units = scored(structure, list(range(12)))
    wrong = [
        (range(1, 12), Budget(units=0.5), Selection(), "over budget"),
        (range(8, 12), Budget(units=0.5), Selection(cap=0.5), "keeps 4 of 12"),
        (range(8, 12), Budget(units=0.5), Selection(floor=6), "keeps 4 of 12"),
        (range(6), Budget(units=0.5), Selection(), "not the lowest"),
        (range(8, 12), Budget(units=0.5), Selection(), "too much"),
        (
            range(6, 12),
            Budget(units=0.5),
            Selection(kinds=("hidden",), names=("!up.0",)),
            "No group",
        ),
    ]
    for kept, budget, selection, match in wrong:
        with pytest.raises((AssertionError, ValueError), match=match):
            assert_promises(structure, units, budget, selection, structure.plan({"up.0": kept}))
    good = structure.plan({"up.0": range(6, 12)})
    assert_promises(structure, units, Budget(units=0.5), Selection(), good)
    assert lowest(torch.tensor([1.0, 0.0, 1.0, 0.0]), 3) == [0, 1, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": {"nowhere": 0.5}}, "fits no group"),
        ({"shares": {"stem*": 0.5}, "names": ("!stem*",)}, "kinds and names leave alone"),
    ],
    ids=["unknown", "protected"],
)
def test_shares_that_could_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    _, _, structure = traced("residual")
    with pytest.raises(ConfigError, match=message):
        make_plan(structure, random_scores(structure, 0), Budget(flops=0.5), Selection(**options))
