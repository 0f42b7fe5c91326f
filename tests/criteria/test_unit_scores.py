"""What a unit is worth: sums over the entries that it owns, against masks and plain loops."""

import dataclasses
import math
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.criteria import (
    AGGREGATIONS,
    Aggregation,
    Scores,
    UnitScores,
    magnitude,
    taylor,
    unit_scores,
)
from apoptosis.errors import ApoptosisError, ConfigError, PlanMismatchError
from apoptosis.structure import Structure, cut, trace
from oracles.building import CLASSES, built, images
from oracles.random_networks import build, random_blueprint
from oracles.shrinking import SMALL_CASES, SmallCase
from oracles.unit_sums import ROLES, normalised, removed_entries, unit_sums

ABSOLUTE = ("none", "unit", "slice", "entry")
OVER_SLICES = ("sum", "mean")
PARAMETERS = ("all", "weights")
NORMALISE = ("none", "max", "minmax", "l2", "mean")
SUBSETS = tuple(own for num in (1, 2, 3) for own in combinations(ROLES, num))
PLAIN: dict[str, Any] = {
    "absolute": "none",
    "over_slices": "sum",
    "roles": ROLES,
    "parameters": "all",
    "normalise": "none",
}


class Squared(nn.Module):
    """All products of two hidden units: each unit is twice in what reads them, and (u, u) is one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h[:, :, None] * h[:, None, :]).flatten(1))


class SquareStream(nn.Module):
    """A stream that a square weight reads and writes: row u and column u share the entry (u, u)."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.mix = nn.Linear(2, 3), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        return self.head(x + F.gelu(self.mix(x)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    )


CASES = [
    *SMALL_CASES,
    SmallCase("convolutional", convolutional, (2, 8, 8)),
    SmallCase("squared", Squared, (3,)),
    SmallCase("square stream", SquareStream, (2,)),
]
every_case = pytest.mark.parametrize("id", [case.id for case in CASES])


@cache
def traced(id: str) -> tuple[nn.Module, Structure]:
    case = next(case for case in CASES if case.id == id)
    model = case.model()
    return model, trace(model, case.inputs())


def whole_numbers(model: nn.Module, seed: int = 0) -> Scores:
    """Small signed integers: their sums are exact, cancel, and are often equal."""
    generator = torch.Generator().manual_seed(seed)
    return Scores(
        {
            name: torch.randint(-4, 5, p.shape, generator=generator).double()
            for name, p in model.named_parameters()
        },
        "made up",
    )


def assert_same(found: UnitScores, expected: dict[str, list[float]], structure: Structure) -> None:
    """Names, sizes, numbers; what is missing and what has scores are all there is."""
    assert list(found.values) == [g.name for g in structure.groups if g.name in expected]
    assert sorted(found.missing) == sorted({g.name for g in structure.groups} - expected.keys())
    assert isinstance(found.missing, tuple)
    for name, own in expected.items():
        got = found.values[name]
        assert got.dtype == torch.float64
        assert got.device.type == "cpu"
        assert not got.requires_grad
        torch.testing.assert_close(
            got,
            torch.tensor(own, dtype=torch.float64),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# ------------------------------------------------------------------------------------------------- brute force


@every_case
@pytest.mark.parametrize("absolute", ABSOLUTE)
def test_sums_are_those_of_masks(id: str, absolute: str) -> None:
    model, structure = traced(id)
    scores = whole_numbers(model)
    for over_slices, roles, parameters in product(OVER_SLICES, SUBSETS, PARAMETERS):
        options = {
            "absolute": absolute,
            "over_slices": over_slices,
            "roles": roles,
            "parameters": parameters,
            "normalise": "none",
        }
        expected = unit_sums(scores.values, structure, **options)
        assert_same(unit_scores(scores, structure, Aggregation(**options)), expected, structure)


@every_case
@pytest.mark.parametrize("normalise", NORMALISE)
def test_normalised_sums_are_those_of_masks(id: str, normalise: str) -> None:
    model, structure = traced(id)
    scores = whole_numbers(model, seed=1)
    for absolute in ABSOLUTE:
        options = PLAIN | {"absolute": absolute, "normalise": normalise}
        expected = unit_sums(scores.values, structure, **options)
        assert_same(unit_scores(scores, structure, Aggregation(**options)), expected, structure)


@cache
def random_network(seed: int) -> tuple[nn.Module, Structure]:
    network = build(random_blueprint(seed, longest=3))
    return network.model, trace(network.model, network.inputs(network.batch, 0))


aggregations = st.fixed_dictionaries(
    {
        "absolute": st.sampled_from(ABSOLUTE),
        "over_slices": st.sampled_from(OVER_SLICES),
        "roles": st.sampled_from(SUBSETS),
        "parameters": st.sampled_from(PARAMETERS),
        "normalise": st.sampled_from(NORMALISE),
    }
)


@given(st.integers(0, 299), aggregations, st.integers(0, 99), st.sampled_from((0.0, 0.3, 0.8)))
@settings(max_examples=100)
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_units_of_random_networks(
    seed: int, options: dict[str, Any], numbers: int, left_out: float
) -> None:
    """Any options, any part of the parameters scored."""
    model, structure = random_network(seed)
    generator = torch.Generator().manual_seed(numbers)
    values = {
        name: own
        for name, own in whole_numbers(model, numbers).values.items()
        if torch.rand((), generator=generator) >= left_out
    }
    scores, aggregation = Scores(values, "made up"), Aggregation(**options)
    held = {own.tensor for group in structure.groups for own in group.slices}
    if held and not values.keys() & held:
        with pytest.raises(PlanMismatchError, match="None of the"):
            unit_scores(scores, structure, aggregation)
        return
    expected = unit_sums(values, structure, **options)
    assert_same(unit_scores(scores, structure, aggregation), expected, structure)


@every_case
def test_a_unit_is_worth_what_its_removal_takes_away(id: str) -> None:
    model, structure = traced(id)
    scores = whole_numbers(model, seed=2)
    found = unit_scores(scores, structure, Aggregation(**PLAIN))
    for group in structure.groups:
        for unit in {0, group.size - 1} if group.size > 1 else ():
            gone = removed_entries(structure, group.name, unit)
            taken = sum(
                float(own[gone[name]].sum()) for name, own in scores.values.items() if name in gone
            )
            assert float(found.values[group.name][unit]) == taken, (group.name, unit)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_ones_count_the_parameters_that_a_unit_saves(seed: int) -> None:
    model, structure = random_network(seed)
    ones = Scores({name: torch.ones_like(p) for name, p in model.named_parameters()}, "ones")
    found = unit_scores(ones, structure, Aggregation(**PLAIN))
    for group in structure.groups:
        expected = 0 if group.name in found.missing else structure.unit_cost(group.name)[1]
        if group.name in found.values:
            assert found.values[group.name].tolist() == [expected] * group.size


def test_the_oracle_can_fail() -> None:
    """One that counts the shared entry twice, or forgets a slice, is found out."""
    model, structure = traced("square stream")
    scores = whole_numbers(model)
    twice = {
        name: [
            sum(float(scores.values[s.tensor].select(s.dim, u).sum()) for s in own.slices)
            for u in range(own.size)
        ]
        for name, own in ((group.name, group) for group in structure.groups)
    }
    found = unit_scores(scores, structure, Aggregation(**PLAIN))
    with pytest.raises(AssertionError, match="start"):
        assert_same(found, twice, structure)
    makers = unit_sums(scores.values, structure, roles=("producer",))
    with pytest.raises(AssertionError, match="start"):
        assert_same(found, makers, structure)


# ---------------------------------------------------------------------------------------------------- by hand


def three_units() -> tuple[nn.Module, Structure]:
    """(2 → 3 → 1), weights that a reader can add up."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 4.0], [-1.0, 1.0]]))
        model[0].bias.copy_(torch.tensor([0.5, -1.0, 0.0]))
        model[2].weight.copy_(torch.tensor([[10.0, -20.0, 0.0]]))
    return model, trace(model, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [13.5, 28.0, 2.0]),
        ({"over_slices": "mean"}, [4.5, 28 / 3, 2 / 3]),
        ({"parameters": "weights"}, [13.0, 27.0, 2.0]),
        ({"parameters": "weights", "over_slices": "mean"}, [6.5, 13.5, 1.0]),
        ({"roles": ("producer",)}, [3.5, 8.0, 2.0]),
        ({"roles": ("consumer",)}, [10.0, 20.0, 0.0]),
        ({"normalise": "max"}, [13.5 / 28, 1.0, 2 / 28]),
        ({"normalise": "minmax"}, [11.5 / 26, 1.0, 0.0]),
        ({"normalise": "mean"}, [13.5 / 14.5, 28 / 14.5, 2 / 14.5]),
        ({"normalise": "l2"}, [value / math.sqrt(970.25) for value in (13.5, 28.0, 2.0)]),
    ],
    ids=str,
)
def test_magnitudes_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    model, structure = three_units()
    found = unit_scores(magnitude(model), structure, Aggregation(**PLAIN | options))
    assert found.missing == ()
    torch.testing.assert_close(
        found.values["0"], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"absolute": "none"}, [9.5, -14.0, 0.0]),
        ({"absolute": "unit"}, [9.5, 14.0, 0.0]),
        ({"absolute": "slice"}, [1 + 0.5 + 10, 7 + 1 + 20, 0.0]),
        ({"absolute": "entry"}, [3 + 0.5 + 10, 7 + 1 + 20, 2.0]),
        ({"absolute": "none", "over_slices": "mean"}, [9.5 / 3, -14 / 3, 0.0]),
        ({"absolute": "unit", "over_slices": "mean"}, [9.5 / 3, 14 / 3, 0.0]),
        ({"absolute": "slice", "over_slices": "mean"}, [11.5 / 3, 28 / 3, 0.0]),
        ({"absolute": "unit", "parameters": "weights"}, [9.0, 13.0, 0.0]),
        ({"absolute": "none", "normalise": "max"}, [9.5 / 14, -1.0, 0.0]),
        ({"absolute": "none", "normalise": "minmax"}, [1.0, 0.0, 14 / 23.5]),
        ({"absolute": "none", "normalise": "mean"}, [9.5 * 3 / 23.5, -14 * 3 / 23.5, 0.0]),
    ],
    ids=str,
)
def test_signed_scores_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """The weights themselves as scores: where the absolute value stands makes all the difference."""
    model, structure = three_units()
    scores = Scores({name: p.detach().clone() for name, p in model.named_parameters()}, "weights")
    found = unit_scores(scores, structure, Aggregation(**PLAIN | options))
    torch.testing.assert_close(
        found.values["0"], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_an_entry_shared_by_two_slices_counts_once_in_a_sum_and_in_each_slice() -> None:
    """mix.weight (3, 3) is the stream's along both dimensions."""
    model, structure = traced("square stream")
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["mix.weight"] = torch.tensor([[5.0, 1.0, 0.0], [0.0, -7.0, 0.0], [0.0, 0.0, 0.0]])
    found = {
        absolute: unit_scores(
            Scores(values, "made up"), structure, Aggregation(**PLAIN | {"absolute": absolute})
        )
        for absolute in ABSOLUTE
    }
    name = structure.groups[0].name
    got = {absolute: own.values[name].tolist() for absolute, own in found.items()}
    assert got == {
        "none": [6.0, -6.0, 0.0],
        "unit": [6.0, 6.0, 0.0],
        "slice": [6 + 5, 7 + 6, 0.0],
        "entry": [6 + 5, 7 + 8, 0.0],
    }


def test_an_entry_owned_twice_along_one_dimension_counts_once() -> None:
    """h ⊗ h: b's column (u, u) is unit u's in both factors."""
    model, structure = traced("squared")
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["b.weight"] = torch.eye(4, dtype=torch.float64).flatten().repeat(CLASSES, 1)
    for absolute in ABSOLUTE:
        options = PLAIN | {"absolute": absolute}
        found = unit_scores(Scores(values, "made up"), structure, Aggregation(**options))
        assert found.values["a"].tolist() == [CLASSES] * 4, absolute


# ------------------------------------------------------------------------------------------------ conservation


def conserving(*, bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, bias=bias),
        nn.ReLU(),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(5, 6, 1, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, CLASSES, bias=bias),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_what_makes_a_channel_is_worth_what_reads_it(bias: bool) -> None:
    """Σ θg of a producer's row (with its bias) = Σ θg of the consumer's column, channel by channel."""
    model, batch = built(lambda: conserving(bias=bias)), images(4, 2, 12)
    structure = trace(model, batch[0])
    scores = taylor(model, [batch])
    made, read = (
        unit_scores(scores, structure, Aggregation(**PLAIN | {"roles": (role,)}))
        for role in ("producer", "consumer")
    )
    assert len(structure.groups) == 3
    for group in structure.groups:
        assert made.values[group.name].abs().max() > 1e-6
        torch.testing.assert_close(
            made.values[group.name], read.values[group.name], rtol=1e-9, atol=1e-15
        )
    if bias:  # it is part of the balance
        weights = unit_scores(
            scores,
            structure,
            Aggregation(**PLAIN | {"roles": ("producer",), "parameters": "weights"}),
        )
        gaps = weights.values["0"] - read.values["0"]
        torch.testing.assert_close(-gaps, scores.values["0.bias"].double(), rtol=1e-9, atol=1e-15)


def test_the_gate_of_a_norm_is_what_its_carriers_say() -> None:
    """Σ z ∂L/∂z after BatchNorm = γ ∂L/∂γ + β ∂L/∂β, and what reads the channel is worth the same."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, CLASSES),
        )

    model, (x, y) = built(make), images(5, 2, 6)
    structure = trace(model, x)
    scores = taylor(model, [(x, y)])
    carried, read = (
        unit_scores(scores, structure, Aggregation(**PLAIN | {"roles": (role,)})).values["0"]
        for role in ("carrier", "consumer")
    )
    z = model[1](model[0](x)).detach().requires_grad_()
    F.cross_entropy(model[2:](z), y).backward()
    gate = (z * z.grad).sum((0, 2, 3)).detach()
    assert gate.abs().max() > 1e-6
    torch.testing.assert_close(carried, gate, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(read, gate, rtol=1e-9, atol=1e-15)


# -------------------------------------------------------------------------------------------------- normalisers


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("constant", [0.0, 2.0, -3.0])
def test_a_group_of_equal_scores_is_normalised_without_nan(normalise: str, constant: float) -> None:
    model, structure = three_units()
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["0.bias"] = torch.full((3,), constant)
    options = PLAIN | {"normalise": normalise}
    found = unit_scores(Scores(values, "made up"), structure, Aggregation(**options)).values["0"]
    sign = math.copysign(1.0, constant) if constant else 0.0
    expected = {
        "none": constant,
        "max": sign,
        "minmax": 0.0,
        "l2": sign / math.sqrt(3),
        "mean": sign,
    }
    torch.testing.assert_close(
        found, torch.full((3,), expected[normalise], dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("scale", [1e-200, 1e-320, 1e200])
@pytest.mark.parametrize("normalise", ["max", "minmax", "l2", "mean"])
def test_tiny_and_huge_scores_are_normalised_like_others(normalise: str, scale: float) -> None:
    """Squares of 1e±200 are no numbers any more; a constant added to divisors would flatten the group."""
    model, structure = three_units()
    model = model.double()
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["0.bias"] = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) * scale
    options = PLAIN | {"normalise": normalise}
    found = unit_scores(Scores(values, "made up"), structure, Aggregation(**options)).values["0"]
    expected = torch.tensor(normalised([1.0, 2.0, 4.0], normalise), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-3 if scale == 1e-320 else 1e-12, atol=1e-12)


@given(st.lists(st.integers(-5, 5), min_size=3, max_size=3), st.sampled_from(NORMALISE[1:]))
def test_normalisers_have_their_closed_form(raw: list[int], normalise: str) -> None:
    model, structure = three_units()
    values = {"0.bias": torch.tensor(raw, dtype=torch.float64)}
    options = PLAIN | {"normalise": normalise}
    found = unit_scores(Scores(values, "made up"), structure, Aggregation(**options)).values["0"]
    assert found.isfinite().all()
    if any(raw):
        laws = {
            "max": found.abs().max() == 1,
            "l2": math.isclose(found.norm(), 1, rel_tol=1e-12),
            "mean": math.isclose(found.abs().mean(), 1, rel_tol=1e-12),
            "minmax": len(set(raw)) == 1 or (found.min() == 0 and found.max() == 1),
        }
        assert laws[normalise]
    else:
        assert found.tolist() == [0.0] * 3


# ----------------------------------------------------------------------------------------- precision, what is missing


def test_sums_are_made_in_float64() -> None:
    model, structure = three_units()
    values = {
        "0.weight": torch.tensor([[1e8, 1.0], [1e8, 2.0], [1e8, 3.0]]),
        "2.weight": torch.tensor([[-1e8, -1e8, -1e8]]),
    }
    found = unit_scores(Scores(values, "made up"), structure, Aggregation(**PLAIN))
    assert found.values["0"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_of_any_precision_give_float64(dtype: torch.dtype) -> None:
    model, structure = three_units()
    values = {name: torch.ones(p.shape, dtype=dtype) for name, p in model.named_parameters()}
    found = unit_scores(Scores(values, "made up"), structure, Aggregation(**PLAIN))
    assert found.values["0"].dtype == torch.float64
    assert found.values["0"].tolist() == [4.0] * 3


def test_a_group_without_scores_is_missing_not_zero() -> None:
    model, structure = traced("mlp")
    scores = whole_numbers(model)
    some = {name: own for name, own in scores.values.items() if name == "4.weight"}
    found = unit_scores(Scores(some, "made up"), structure, Aggregation(**PLAIN))
    assert found.missing == ("0",)
    assert set(found.values) == {"2"}
    biases = {"0.bias": scores.values["0.bias"], "2.bias": scores.values["2.bias"]}
    options = PLAIN | {"parameters": "weights"}
    nothing = unit_scores(Scores(biases, "made up"), structure, Aggregation(**options))
    assert sorted(nothing.missing) == ["0", "2"]
    assert nothing.values == {}


def test_a_mean_is_over_the_slices_that_count() -> None:
    """Without the bias' scores there are two slices, not three."""
    model, structure = three_units()
    scores = magnitude(model)
    some = {name: own for name, own in scores.values.items() if name != "0.bias"}
    options = PLAIN | {"over_slices": "mean"}
    found = unit_scores(Scores(some, "magnitude"), structure, Aggregation(**options))
    assert found.values["0"].tolist() == [6.5, 13.5, 1.0]


def test_frozen_parameters_are_left_out() -> None:
    model, structure = three_units()
    model[0].weight.requires_grad_(requires_grad=False)
    found = unit_scores(magnitude(model), structure, Aggregation(**PLAIN))
    assert found.values["0"].tolist() == [10.5, 21.0, 0.0]


def test_a_tied_tensor_counts_once() -> None:
    model, structure = traced("tied")
    found = unit_scores(magnitude(model), structure, Aggregation(**PLAIN))
    by_hand = (
        model.words.weight.abs().sum(0)
        + model.inner.weight.abs().sum(0)
        + model.back.weight.abs().sum(1)
        + model.back.bias.abs()
    )
    torch.testing.assert_close(found.values["words"], by_hand.detach(), rtol=1e-12, atol=0)


def test_a_cut_network_is_scored_by_its_own_structure() -> None:
    """`structure.after(plan)` numbers units anew; so do its scores."""
    for id in ("convolutional", "fused", "gqa", "residual", "tied"):
        model, structure = traced(id)
        kept = {g.name: range(1, g.size) for g in structure.groups if g.exact}
        plan = structure.plan(kept)
        small, after = cut(model, plan), structure.after(plan)
        scores = whole_numbers(small, seed=4)
        expected = unit_sums(scores.values, after)
        assert_same(unit_scores(scores, after, Aggregation(**PLAIN)), expected, after)
        assert {name: len(own) for name, own in expected.items()} == {
            group.name: group.size for group in after.groups
        }


def test_what_is_given_stays_as_it_was() -> None:
    model, structure = traced("residual")
    scores = whole_numbers(model)
    before = {name: own.clone() for name, own in scores.values.items()}
    for name in AGGREGATIONS:
        found = unit_scores(scores, structure, name)
        for own in found.values.values():
            own.fill_(math.nan)  # what comes back shares nothing with what was given
    assert scores.values.keys() == before.keys()
    assert all(torch.equal(own, before[name]) for name, own in scores.values.items())


# ------------------------------------------------------------------------------------------------ names and errors


@every_case
def test_every_named_aggregation_is_what_its_fields_say(id: str) -> None:
    model, structure = traced(id)
    scores = whole_numbers(model, seed=3)
    for name, aggregation in AGGREGATIONS.items():
        options = {
            own.name: getattr(aggregation, own.name) for own in dataclasses.fields(aggregation)
        }
        expected = unit_sums(scores.values, structure, **options)
        assert_same(unit_scores(scores, structure, name), expected, structure)
        assert_same(unit_scores(scores, structure, aggregation), expected, structure)


def test_the_default_is_one_of_the_named() -> None:
    model, structure = traced("residual")
    scores = whole_numbers(model)
    default = unit_scores(scores, structure)
    named = [unit_scores(scores, structure, name) for name in AGGREGATIONS]
    assert any(
        all(torch.equal(own.values[group], default.values[group]) for group in default.values)
        for own in named
    )


def test_no_two_names_mean_the_same() -> None:
    assert len(set(AGGREGATIONS.values())) == len(AGGREGATIONS)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("absolute", "layer", ABSOLUTE),
        ("absolute", None, ABSOLUTE),
        ("absolute", True, ABSOLUTE),
        ("over_slices", "max", OVER_SLICES),
        ("roles", ("maker",), ROLES),
        ("roles", (), ROLES),
        ("roles", "producer", ROLES),
        ("roles", ("producer", "reader"), ROLES),
        ("parameters", "biases", PARAMETERS),
        ("normalise", "softmax", NORMALISE),
        ("normalise", "MAX", NORMALISE),
    ],
)
def test_a_value_nobody_can_mean_is_refused_with_those_one_can(
    field: str, value: Any, allowed: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=field.removesuffix("s")) as caught:
        Aggregation(**PLAIN | {field: value})
    assert [word for word in allowed if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["", "tailor", "Paper!"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    model, structure = three_units()
    with pytest.raises(ConfigError, match=name or "''") as caught:
        unit_scores(magnitude(model), structure, name)
    assert [known for known in AGGREGATIONS if known not in str(caught.value)] == []


def test_options_are_given_by_keyword_and_stay() -> None:
    with pytest.raises(TypeError, match="positional"):
        Aggregation("none")  # type: ignore[misc]
    aggregation = Aggregation(**PLAIN)
    with pytest.raises(dataclasses.FrozenInstanceError, match="absolute"):
        aggregation.absolute = "unit"  # type: ignore[misc]


def test_scores_of_another_shape_are_refused() -> None:
    model, structure = three_units()
    values = dict(magnitude(model).values)
    values["0.weight"] = values["0.weight"][:2]
    with pytest.raises(ApoptosisError, match="0.weight"):
        unit_scores(Scores(values, "magnitude"), structure, Aggregation(**PLAIN))


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        np.array([1.0, 2.0, 3.0]),
        [1.0, 2.0, 3.0],
    ],
    ids=["integers", "bfloat16", "with a graph", "numpy", "list"],
)
def test_numbers_of_any_kind_become_those_that_planning_reads(values):
    found = UnitScores({"a": values}, "mine").values["a"]
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize("values", [torch.zeros(3, dtype=torch.complex64), "abc", [None, None]])
def test_what_is_no_real_number_is_refused(values):
    with pytest.raises(ConfigError, match="one number per unit"):
        UnitScores({"a": values}, "mine")
