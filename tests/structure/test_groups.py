"""Groups against brute force: units are poked, and what moves is compared with what the group says."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError
from oracles.building import Net, built
from oracles.shrinking import SMALL_CASES, SmallCase, small_case

every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


@every_case
def test_the_units_of_a_slice_are_apart_and_equally_large(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    for group in structure.groups:
        for part in group.slices:
            own = part.indices
            assert own.shape[0] == group.size
            assert len(np.unique(own)) == own.size, "no entry belongs to two units"
            assert own.min() >= 0
            assert own.max() < structure.shapes[part.tensor][part.dim]
            assert (np.diff(own, axis=1) > 0).all()


@every_case
def test_removing_a_unit_removes_its_slices_and_nothing_else(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    for group in structure.groups:
        unit = group.size // 2
        if group.size == 1:
            continue
        plan = structure.plan({group.name: [u for u in range(group.size) if u != unit]})
        gone = {
            (name, dim): sorted({*range(cut.shape[dim])} - {*kept.tolist()})
            for cut in plan.tensors
            for name in cut.names[:1]
            for dim, kept in cut.kept.items()
        }
        assert gone == {(s.tensor, s.dim): s.indices[unit].tolist() for s in group.slices}


@every_case
def test_zeroing_a_unit_everywhere_is_noticed_by_exactly_its_consumers(case: SmallCase) -> None:
    """Poke what makes a unit: entries of no other unit of the same group move before they are consumed."""
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    for group in structure.groups:
        sites = [
            s for s in group.sites if s.side == "output" and _makes(structure, group, s.module)
        ]
        for site in sites[:1]:
            before = seen(model, x, site)
            after = seen(poked(model, group, site.module, unit=0), x, site)
            moved = (before != after).movedim(site.dim, 0).flatten(1).any(1)
            weight = next(s for s in group.slices if s.tensor.startswith(f"{site.module}."))
            expected = torch.zeros(before.shape[site.dim], dtype=torch.bool)
            expected[torch.as_tensor(weight.indices[0])] = True
            assert torch.equal(moved, expected), f"{group.name} at {site}"


def _makes(structure: ap.Structure, group: ap.structure.Group, module: str) -> bool:
    """A linear layer or convolution whose rows are the units, and whose columns are not."""
    own = [(s.tensor, s.dim, s.role) for s in group.slices if s.tensor.rpartition(".")[0] == module]
    dims = {dim for tensor, dim, _ in own if tensor.endswith(".weight")}
    return (f"{module}.weight", 0, "producer") in own and dims == {0}


def poked(model: nn.Module, group: ap.structure.Group, module: str, *, unit: int) -> nn.Module:
    """A copy with the unit's rows of one module changed."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for part in group.slices:
        if part.tensor.rpartition(".")[0] == module and part.dim == 0:
            state[part.tensor][torch.as_tensor(part.indices[unit])] += 1.0
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other


def seen(model: nn.Module, x: Tensor, site: ap.structure.Site) -> Tensor:
    """What goes in or out of a module at one of its calls."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        value = args[0] if site.side == "input" else output
        found.append((value[0] if isinstance(value, tuple) else value).detach().clone())

    handle = model.get_submodule(site.module).register_forward_hook(note)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        handle.remove()
    return found[site.call]


@every_case
def test_sites_show_as_many_units_as_the_group_has(case: SmallCase) -> None:
    """Cut one unit: every site shrinks by the entries of that unit, along that dimension alone."""
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    if case.delivery == "program":
        return  # a program has no modules to look at
    bound = {name for tie in structure.ties for name, _ in tie.members}
    for group in structure.groups:
        if group.size == 1 or group.name in bound:
            continue
        small = ap.cut(model, structure.plan({group.name: [*range(group.size - 1)]}))
        for site in group.sites:
            before, after = seen(model, x, site).shape, seen(small, x, site).shape
            changed = [d for d in range(len(before)) if before[d] != after[d]]
            assert changed == [site.dim], f"{group.name} at {site}"
            assert (before[site.dim] - after[site.dim]) * group.size == before[site.dim]


@pytest.mark.parametrize("id", ["mlp", "residual", "tied", "hard coded"])
def test_a_zeroed_unit_is_zero_where_it_was_made(id: str) -> None:
    case = small_case(id)
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    for group in structure.groups:
        twin = ap.zero(model, structure.plan({group.name: [*range(1, group.size)]}))
        for site in group.sites:
            if site.side == "output" and _makes(structure, group, site.module):
                weight = next(s for s in group.slices if s.tensor == f"{site.module}.weight")
                value = seen(twin, x, site).movedim(site.dim, 0)
                assert not value[torch.as_tensor(weight.indices[0])].any(), f"{group.name} {site}"


@every_case
def test_each_dimension_of_a_tensor_is_a_slice_once_per_group(case: SmallCase) -> None:
    structure = ap.trace(case.model(), case.inputs())
    for group in structure.groups:
        places = [(s.tensor, s.dim) for s in group.slices]
        assert len(places) == len(set(places))
        assert any(s.role == "producer" for s in group.slices)
    assert len({g.name for g in structure.groups}) == len(structure.groups)


def roles(case: SmallCase, name: str) -> dict[tuple[str, int], str]:
    structure = ap.trace(case.model(), case.inputs())
    return {(s.tensor, s.dim): s.role for s in structure[name].slices}


def test_roles_say_who_makes_carries_and_reads() -> None:
    assert roles(small_case("residual"), "blocks.0.conv1") == {
        ("blocks.0.conv1.weight", 0): "producer",
        ("blocks.0.bn1.weight", 0): "carrier",
        ("blocks.0.bn1.bias", 0): "carrier",
        ("blocks.0.bn1.running_mean", 0): "carrier",
        ("blocks.0.bn1.running_var", 0): "carrier",
        ("blocks.0.conv2.weight", 1): "consumer",
    }
    assert roles(small_case("gqa"), "parts.0.v:v_dim") == {
        ("parts.0.v.weight", 0): "producer",
        ("parts.0.v.bias", 0): "producer",
        ("parts.0.o.weight", 1): "consumer",
    }
    assert roles(small_case("experts"), "parts.0.up") == {
        ("parts.0.up", 1): "producer",
        ("parts.0.down", 2): "consumer",
    }


def test_a_layer_from_a_stream_to_itself_makes_along_rows_and_reads_along_columns() -> None:
    found = roles(small_case("fused"), "embed")
    assert found["parts.1.weight", 0] == "producer"
    assert found["parts.1.weight", 1] == "consumer"


INDICES = {
    # (3, heads, width) = (3, 2, 4) rows: unit u of the width owns row u of every head of every projection.
    ("fused", "parts.0.qkv:head_dim", "parts.0.qkv.weight", 0): [
        [p * 8 + h * 4 + u for p in range(3) for h in range(2)] for u in range(4)
    ],
    ("fused", "parts.0.qkv:head", "parts.0.qkv.weight", 0): [
        [p * 8 + h * 4 + u for p in range(3) for u in range(4)] for h in range(2)
    ],
    ("fused", "parts.0.qkv:head", "parts.0.proj.weight", 1): [
        [h * 4 + u for u in range(4)] for h in range(2)
    ],
    # Four query heads on two key heads, width two: key head k serves query heads 2k and 2k + 1.
    ("gqa", "parts.0.q:kv_head", "parts.0.q.weight", 0): [
        [4 * k + i for i in range(4)] for k in range(2)
    ],
    ("gqa", "parts.0.q:kv_head", "parts.0.k.weight", 0): [[2 * k, 2 * k + 1] for k in range(2)],
    ("gqa", "parts.0.q:query_head", "parts.0.q.weight", 0): [
        [4 * k + 2 * r + i for k in range(2) for i in range(2)] for r in range(2)
    ],
    ("glu", "parts.0.both", "parts.0.both.weight", 0): [[u, 6 + u] for u in range(6)],
    ("recurrent", "cell.weight_ih_l0", "cell.weight_ih_l0", 0): [
        [gate * 6 + u for gate in range(4)] for u in range(6)
    ],
    ("hard coded", "a", "a.weight", 0): [[4 * a + b for b in range(4)] for a in range(3)],
    ("hard coded", "a#2", "b.weight", 1): [[3 * b + a for a in range(3)] for b in range(4)],
}


@pytest.mark.parametrize("place", INDICES, ids=lambda place: " ".join(map(str, place[:3])))
def test_indices_are_those_of_the_reshapes(place: tuple[str, str, str, int]) -> None:
    id, name, tensor, dim = place
    case = small_case(id)
    group = ap.trace(case.model(), case.inputs())[name]
    found = next(s for s in group.slices if (s.tensor, s.dim) == (tensor, dim))
    assert found.indices.tolist() == INDICES[place]


@pytest.mark.parametrize("id", ["separate", "gqa"])
def test_one_attribute_for_two_sizes_ties_their_numbers(id: str) -> None:
    case = small_case(id)
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    (tie,) = structure.ties
    assert dict(tie.members) == {"parts.0.q:qk_dim": 1, "parts.0.v:v_dim": 1}
    assert tie.because == "one attribute holds both sizes: parts.0.head_dim"
    size = structure["parts.0.q:qk_dim"].size
    alone = structure.plan({"parts.0.q:qk_dim": range(size - 1)})
    both = structure.plan({name: range(1, size) for name, _ in tie.members})
    assert (alone.delivery, both.delivery) == ("program", "module")
    for plan in (alone, both):
        torch.testing.assert_close(
            ap.cut(model, plan)(x), ap.zero(model, plan)(x), rtol=1e-12, atol=1e-13
        )


def test_halves_that_a_chunk_makes_are_tied() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        first, second = net.a(x).chunk(2, -1)
        return net.b(torch.relu(first)) + net.c(torch.tanh(second))

    model = built(lambda: Net(forward, a=nn.Linear(4, 12), b=nn.Linear(6, 3), c=nn.Linear(6, 3)))
    x = torch.randn(2, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    assert [g.size for g in structure.groups] == [6, 6]
    (tie,) = structure.ties
    names = [name for name, _ in tie.members]
    assert {g.name for g in structure.groups} == set(names)
    assert "test_groups.py" in tie.because
    even = structure.plan({names[0]: [0, 1], names[1]: [3, 5]})
    uneven = structure.plan({names[0]: [0, 1, 2, 3], names[1]: [3, 5]})
    assert (even.delivery, uneven.delivery) == ("module", "program")
    for plan in (even, uneven):
        torch.testing.assert_close(
            ap.cut(model, plan)(x), ap.zero(model, plan)(x), rtol=1e-12, atol=1e-13
        )


def test_squeeze_without_a_dimension_keeps_two_units_at_least() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x[:, None]).squeeze())

    model = built(lambda: Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)))
    x = torch.randn(2, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    assert [(g.name, g.smallest) for g in structure.groups] == [("a", 2)]
    with pytest.raises(PlanMismatchError, match="keep 1 of 5 units; at least 2 must stay.*squeeze"):
        structure.plan({"a": [3]})
    plan = structure.plan({"a": [1, 3]})
    torch.testing.assert_close(
        ap.cut(model, plan)(x), ap.zero(model, plan)(x), rtol=1e-12, atol=1e-13
    )


def test_pinned_dimensions_name_operation_and_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(torch.sort(y, -1).values)

    structure = ap.trace(Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)), torch.randn(2, 4))
    pins = {(p.tensor, p.dim): p for p in structure.pinned}
    line = forward.__code__.co_firstlineno + 2
    assert structure.groups == ()
    assert pins["a.weight", 0].op.startswith("sort")
    assert f"test_groups.py:{line} in forward" in pins["a.weight", 0].line
    assert pins["a.weight", 1].reason == "it is an input of the model"
    assert pins["b.weight", 0].reason == "it is an output of the model"
