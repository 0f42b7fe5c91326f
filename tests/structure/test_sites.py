"""Sites say where a run shows a unit: the oracle pokes the unit's parameters and watches which entries move."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from apoptosis.structure import Group, Site, Structure, cut, trace
from oracles.shrinking import SMALL_CASES, SmallCase, small_case

CASES = [
    case
    for case in SMALL_CASES
    if case.delivery == "module" and case.id != "recurrent"  # a step mixes all units of the last
]


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[tuple[str, int, str], Tensor]]:
    """First tensors that go into and come out of every call of a module without children."""
    seen: dict[tuple[str, int, str], Tensor] = {}
    calls: dict[str, int] = {}
    handles = []

    def hook(path: str):
        def after(_module, args, output):
            number = calls[path] = calls.get(path, -1) + 1
            for side, value in (("input", args), ("output", output)):
                while isinstance(value, (tuple, list)):
                    value = value[0]
                seen[path, number, side] = value.detach().clone()

        return after

    for path, module in model.named_modules():
        if next(module.children(), None) is None:
            handles.append(module.register_forward_hook(hook(path)))
    yield seen
    for handle in handles:
        handle.remove()


def shown(model: nn.Module, x: Tensor) -> dict[tuple[str, int, str], Tensor]:
    with watched(model) as seen, torch.no_grad():
        model(x)
    return seen


def moved_along(before: Tensor, after: Tensor, dim: int) -> list[int]:
    moved = (before != after).movedim(dim, 0).flatten(1).any(1)
    return torch.nonzero(moved).flatten().tolist()


def poked(model: nn.Module, group: Group, unit: int, x: Tensor) -> dict:
    """The run with the rows that make one unit changed, and nothing else."""
    tensors = dict(model.named_parameters())
    saved = []
    with torch.no_grad():
        for part in group.slices:
            if part.role == "producer" and part.tensor in tensors:
                tensor = tensors[part.tensor]
                saved.append((tensor, tensor.clone()))
                rows = torch.as_tensor(part.indices[unit])
                tensor.index_copy_(part.dim, rows, tensor.index_select(part.dim, rows) + 0.37)
        try:
            return shown(model, x)
        finally:
            for tensor, old in reversed(saved):
                tensor.copy_(old)


def first_site(group: Group, side: str = "output") -> Site:
    return next(site for site in group.sites if site.side == side)


def assert_first_sites_are_where_units_move(
    structure: Structure, model: nn.Module, x: Tensor
) -> int:
    """The first site of a group comes before anything that mixes its units."""
    before, checked = shown(model, x), 0
    for group in structure.groups:
        if not any(site.side == "output" for site in group.sites):
            continue
        site = first_site(group)
        place = (site.module, site.call, site.side)
        for unit in range(group.size):
            moved = moved_along(before[place], poked(model, group, unit, x)[place], site.dim)
            assert moved == site.indices[unit].tolist(), (group.name, unit)
            checked += 1
    return checked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_poking_a_unit_moves_its_entries_at_its_first_site_and_no_others(case: SmallCase):
    model, x = case.model(), case.inputs(seed=3)
    structure = trace(model, x)
    assert assert_first_sites_are_where_units_move(structure, model, x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sites_after_a_cut_are_those_of_the_cut_network(case: SmallCase):
    model, x = case.model(), case.inputs(seed=3)
    structure = trace(model, x)
    uneven = {g.name: [u for u in range(g.size) if u != 1] for g in structure.groups}
    uneven = {n: k for n, k in uneven.items() if structure[n].smallest <= len(k)}
    while (plan := structure.plan(uneven)).delivery != "module":
        uneven.popitem()
    after, small = structure.after(plan), cut(model, plan)
    assert plan.kept
    assert assert_first_sites_are_where_units_move(after, small, x)
    again = {group.name: group for group in trace(small, x).groups}
    for group in after.groups:
        # Traced anew, a group of one unit is gone, or another that was hidden behind it.
        if group.size > 1 and group.name in again:
            found = {(s.module, s.call, s.side, s.dim): s for s in again[group.name].sites}
            for site in group.sites:
                place = (site.module, site.call, site.side, site.dim)
                assert site.indices.tolist() == found[place].indices.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_entry_of_a_site_belongs_to_one_unit_at_most(case: SmallCase):
    model, x = case.model(), case.inputs()
    seen = shown(model, x)
    for group in trace(model, x).groups:
        for site in group.sites:
            length = seen[site.module, site.call, site.side].shape[site.dim]
            flat = site.indices.flatten().tolist()
            assert len(site.indices) == group.size
            assert len(set(flat)) == len(flat) <= length
            assert set(flat) <= set(range(length))


class Twice(nn.Module):
    """One module called twice, flattened maps, and two groups side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 4, 1)
        self.act = nn.ReLU()
        self.head = nn.Linear((3 + 4) * 4, 3)

    def forward(self, x):
        x = torch.cat([self.act(self.a(x)), self.act(self.b(x))], 1)
        return self.head(x.flatten(1))


def test_calls_are_told_apart_and_flattened_positions_belong_to_their_channel():
    model, x = Twice(), torch.randn(2, 2, 2, 2)
    structure = trace(model, x)
    a, b = structure["a"], structure["b"]
    assert [(s.module, s.call) for s in a.sites if s.module == "act"] == [("act", 0)] * 2
    assert [(s.module, s.call) for s in b.sites if s.module == "act"] == [("act", 1)] * 2
    reads = [next(s for s in group.sites if s.module == "head") for group in (a, b)]
    assert reads[0].indices.tolist() == [list(range(4 * u, 4 * u + 4)) for u in range(3)]
    assert reads[1].indices.tolist() == [list(range(12 + 4 * u, 16 + 4 * u)) for u in range(4)]
    after = structure.after(structure.plan({"a": [0, 2]}))
    read = next(s for s in after["b"].sites if s.module == "head")
    assert read.indices.tolist() == [list(range(8 + 4 * u, 12 + 4 * u)) for u in range(4)]


def test_the_oracle_can_fail():
    case = small_case("mlp")
    model, x = case.model(), case.inputs()
    group = trace(model, x)["0"]
    before, after = shown(model, x), poked(model, group, 1, x)
    place = ("0", 0, "output")
    assert moved_along(before[place], after[place], 1) == [1] != group.sites[0].indices[2].tolist()
