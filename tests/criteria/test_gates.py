"""The criterion `gates` is −w g + ½ diag G of every group of a traced network, with G for the interactions."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

from apoptosis.criteria import CRITERIA, UnitScores, gates, spearman, taylor_units, unit_truth
from apoptosis.criteria.gates import find_gates, fullest_form
from apoptosis.curvature import GateOptions
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.structure import cut, trace
from apoptosis.task import Task
from oracles.building import built, rows
from oracles.gated import Gated, brute_force
from oracles.shrinking import small_case

MODULE = import_module("apoptosis.criteria.gates")  # the name in the room is the function's


def by_hand(size: int, places: tuple[str, ...], dim: int) -> Gated:
    return Gated.plain("", places, dim, size)


def entries(size: int, *offsets: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(u + o for o in offsets) for u in range(size))


HEADS = tuple(tuple(range(4 * u, 4 * u + 4)) for u in range(2))
NETWORKS = {
    "mlp": {"0": by_hand(8, ("2",), 1), "2": by_hand(6, ("4",), 1)},
    "residual": {
        "stem.0": by_hand(6, ("blocks.0.conv1", "blocks.1.conv1", "head"), 1),
        "blocks.0.conv1": by_hand(5, ("blocks.0.conv2",), 1),
        "blocks.1.conv1": by_hand(5, ("blocks.1.conv2",), 1),
    },
    "fused": {
        "parts.0.qkv:head": Gated("", ("parts.0.proj",), 2, HEADS),
        "parts.0.qkv:head_dim": Gated("", ("parts.0.qkv output",), 2, entries(4, 0, 4, 16, 20)),
    },
    "separate": {
        "parts.0.v:v_dim": Gated("", ("parts.0.o",), 2, entries(4, 0, 4)),
        "parts.0.q:qk_dim": Gated("", ("parts.0.q output",), 2, entries(4, 0, 4)),
        "embed": by_hand(8, ("parts.0.q", "parts.0.k", "parts.0.v", "head"), -1),
    },
    "glu": {"parts.0.both": by_hand(6, ("parts.0.down",), 2)},
    "tied": {"words": by_hand(6, ("inner", "head"), 2), "inner": by_hand(9, ("back",), 2)},
}
"""Groups by network, where they are read, written down here and not found by tracing."""


def built_case(id: str, num: int = 5):
    case = small_case(id)
    model, x = case.model(), case.inputs(num)
    if case.words:
        return model, x, Task.language_model(), trace(model, x)
    labels = torch.randint(3, (num,), generator=torch.Generator().manual_seed(9))
    return model, (x, labels), Task.classification(), trace(model, x)


def part(units: UnitScores, names: list[str]) -> torch.Tensor:
    """The interactions of some groups, in this order."""
    ((groups, matrix),) = units.interactions.items()
    starts, total = {}, 0
    for name in groups:
        starts[name], total = total, total + len(units.values[name])
    at = torch.cat([starts[name] + torch.arange(len(units.values[name])) for name in names])
    return matrix[at][:, at]


@pytest.mark.parametrize("id", NETWORKS)
@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_scores_and_interactions_are_those_of_factors_on_all_that_is_read(id, weight):
    model, batch, task, structure = built_case(id)
    units = gates(model, structure, [batch], task, weight=weight)
    gradient, matrix = brute_force(model, batch, task, list(NETWORKS[id].values()))
    names = list(NETWORKS[id])
    want = -weight * gradient + matrix.diagonal() / 2
    found = torch.cat([units.values[name] for name in names])
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10 * float(want.abs().max()))
    scale = float(matrix.abs().max())
    torch.testing.assert_close(part(units, names), matrix, rtol=0, atol=1e-10 * scale)
    assert (units.criterion, units.options["weight"]) == ("gates", weight)


def test_gates_of_a_product_counted_twice_would_be_caught(monkeypatch):
    """Queries and keys both carry a unit's factor: without the half, G would be four times as large."""
    model, batch, task, structure = built_case("separate")
    right = gates(model, structure, [batch], task).values["parts.0.q:qk_dim"]
    monkeypatch.setattr(
        MODULE,
        "find_gates",
        lambda model, group: [replace(gate, factor=1.0) for gate in find_gates(model, group)],
    )
    wrong = gates(model, structure, [batch], task).values["parts.0.q:qk_dim"]
    torch.testing.assert_close(wrong, 4 * right, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("id", ["residual", "separate", "gqa", "glu", "encoder", "depthwise"])
def test_gates_stand_where_those_of_taylor_stand(id):
    """The gradient part alone, and the groups that are missing."""
    case = small_case(id)
    model, x = case.model(), case.inputs(4)
    structure = trace(model, x)
    with torch.no_grad():
        out = model(x)
    labels = torch.zeros(out.shape[:-1], dtype=torch.int64)
    task = replace(Task.classification(), outputs=lambda raw: raw.movedim(-1, 1))
    first = taylor_units(model, structure, [(x, labels)], task)
    second, full = (gates(model, structure, [(x, labels)], task, weight=w) for w in (0.0, 1.0))
    assert second.missing == full.missing == first.missing
    assert second.loss == pytest.approx(first.loss, rel=1e-12)
    for name, own in first.values.items():
        slope = second.values[name] - full.values[name]
        torch.testing.assert_close(slope.abs(), own, rtol=1e-8, atol=1e-14)


def test_a_cut_network_is_scored_by_the_structure_that_was_derived():
    model, batch, task, structure = built_case("residual")
    plan = structure.plan({"stem.0": [0, 2, 3, 5], "blocks.0.conv1": [1, 4]})
    small = cut(model, plan)
    found = gates(small, structure.after(plan), [batch], task)
    want = gates(small, trace(small, batch[0]), [batch], task)
    for name, own in want.values.items():
        torch.testing.assert_close(found.values[name], own, rtol=1e-10, atol=1e-16)


def test_labels_are_needed_for_the_gradient_alone():
    model, (x, y), task, structure = built_case("residual")
    labelled = gates(model, structure, [(x, y)], task)
    plain = gates(model, structure, [x], task)
    assert plain.loss is None
    for name, own in labelled.values.items():
        torch.testing.assert_close(plain.values[name], own, rtol=1e-12, atol=1e-16)
    with pytest.raises(DataError, match=r"weight=0\.5 was asked for, and some batches have no"):
        gates(model, structure, [x], task, weight=0.5)


def test_with_its_gradient_it_ranks_units_by_their_true_loss_change():
    """On the data it saw; without, another ranking, and here a worse one."""
    model, batch, task, structure = built_case("residual", 20)
    truth = unit_truth(model, structure, [batch], task)
    full, half = (gates(model, structure, [batch], task, weight=w) for w in (1.0, 0.0))
    first = taylor_units(model, structure, [batch], task)

    def correlation(units: UnitScores) -> float:
        return spearman(
            torch.cat([units.values[name] for name in truth]), torch.cat(list(truth.values()))
        )

    assert correlation(full) > 0.9
    assert correlation(full) > max(correlation(half), correlation(first)) + 0.05


def test_the_form_is_the_fullest_that_memory_allows(monkeypatch):
    model, batch, task, structure = built_case("residual")
    standing = [gate for group in structure.groups for gate in find_gates(model, group)]
    sizes = {"dense": 16**2 * 8, "block": (36 + 25 + 25) * 8, "diagonal": 8}
    for form, num_bytes in sizes.items():
        monkeypatch.setattr(MODULE, "LARGEST_BYTES", num_bytes)
        assert fullest_form(standing) == form
        units = gates(model, structure, [batch], task)
        assert units.options["form"] == form
        assert len(units.interactions) == {"dense": 1, "block": 3, "diagonal": 0}[form]


def test_a_seed_gives_other_draws_and_nothing_else():
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 40)))
    batch, structure = rows(16, classes=40), trace(model, rows()[0])
    criterion = CRITERIA["gates"]
    first, again, other = (
        criterion.seeded(seed).units(model, structure, [batch]).values["0"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    own = GateOptions(form="block", draws=3)
    assert gates(model, structure, [batch], seed=5, options=own).options["seed"] == 5


def test_normalised_scores_carry_no_interactions():
    model, batch, task, structure = built_case("residual")
    criterion = CRITERIA["gates"]
    assert criterion.units(model, structure, [batch], task, "signed").interactions
    assert not criterion.units(model, structure, [batch], task, "paper").interactions


def test_networks_without_a_place_for_gates_and_impossible_weights_are_refused():
    case = small_case("recurrent")
    model, x = case.model(), case.inputs()
    with pytest.raises(ModelError, match=r"no place for a gate.*such as `oba`"):
        gates(model, trace(model, x), [x])
    with pytest.raises(ConfigError, match=r"weight=1\.5 was asked for"):
        gates(model, trace(model, x), [x], weight=1.5)


@pytest.mark.parametrize(
    ("interactions", "why"),
    [
        ({("a", "c"): torch.zeros(2, 2)}, "name the group 'c', which has no scores"),
        ({("a",): torch.zeros(2, 2), ("b", "a"): torch.zeros(5, 5)}, "hold the group 'a' twice"),
        ({("a",): torch.zeros(3, 3)}, r"have shape \(3, 3\); these groups have 2 units"),
        ({("a",): torch.tensor([[0.0, 1.0], [0.0, 0.0]])}, "are not symmetric"),
    ],
)
def test_interactions_that_do_not_fit_the_scores_are_refused(interactions, why):
    values = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ConfigError, match=why):
        UnitScores(values, "mine", interactions=interactions)
