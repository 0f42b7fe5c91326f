"""Plans as data: JSON both ways, composition, fingerprints, derived structures."""

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError
from apoptosis.structure.plan import _indices, _ranges
from oracles.shrinking import SMALL_CASES, SmallCase, small_case

every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def traced(case: SmallCase) -> tuple[nn.Module, torch.Tensor, ap.Structure]:
    model, x = case.model(), case.inputs()
    return model, x, ap.trace(model, x)


def same_plan(a: ap.Plan, b: ap.Plan) -> bool:
    return json.loads(a.to_json()) == json.loads(b.to_json())


def bit_for_bit(a: nn.Module, b: nn.Module, x: torch.Tensor) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(a(x), b(x))


# ------------------------------------------------------------------------------------------------------------ JSON


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_hold_any_set_of_indices(units: set[int]) -> None:
    indices = np.array(sorted(units), dtype=np.int64)
    ranges = json.loads(json.dumps(_ranges(indices)))
    assert np.array_equal(_indices(ranges, 301), indices)
    assert sum(last - first + 1 for first, last in ranges) == len(units)


MLP = small_case("mlp")
MLP_MODEL = MLP.model()
MLP_STRUCTURE = ap.trace(MLP_MODEL, MLP.inputs())


@given(
    st.sets(st.integers(0, 7), min_size=1, max_size=7),
    st.sets(st.integers(0, 5), min_size=1, max_size=6),
)
@settings(max_examples=30)
def test_a_plan_survives_json(first: set[int], second: set[int]) -> None:
    plan = MLP_STRUCTURE.plan({"0": first, "2": second})
    read = ap.Plan.from_json(plan.to_json())
    assert same_plan(read, plan)
    assert read.counts() == plan.counts()
    assert MLP_STRUCTURE.macs(read) == MLP_STRUCTURE.macs(plan)
    bit_for_bit(ap.cut(MLP_MODEL, read), ap.cut(MLP_MODEL, plan), MLP.inputs())


def saved_and_loaded(plan: ap.Plan) -> ap.Plan:
    file = io.BytesIO()
    torch.save(plan, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [lambda plan: pickle.loads(pickle.dumps(plan)), copy.deepcopy, saved_and_loaded],
    ids=["pickle", "deepcopy", "torch.save"],
)
@pytest.mark.parametrize("id", ["mlp", "hard coded"])
def test_a_copy_of_a_plan_leaves_the_model_behind(
    id: str, copied: Callable[[ap.Plan], ap.Plan]
) -> None:
    model, x, structure = traced(small_case(id))
    group = structure.groups[0]
    plan = structure.plan({group.name: range(group.size - 1)})
    found = copied(plan)
    assert found.source is None
    assert plan.source is structure
    assert same_plan(found, plan)
    bit_for_bit(ap.cut(model, found, example_inputs=x), ap.cut(model, plan), x)


def test_a_plan_that_cannot_be_pickled_with_its_model_is_pickled_without() -> None:
    model, _, structure = traced(small_case("mlp"))
    plan = structure.plan({"0": [0, 1]})
    model.unpicklable = lambda: None
    assert len(pickle.dumps(plan)) < 4096


@every_case
def test_every_kind_of_plan_survives_json(case: SmallCase) -> None:
    model, x, structure = traced(case)
    for group in structure.groups:
        if group.size == 1:
            continue
        plan = structure.plan({group.name: range(1, group.size)})
        read = ap.Plan.from_json(plan.to_json())
        assert same_plan(read, plan)
        assert repr(read) == repr(plan)
        bit_for_bit(ap.cut(model, read, example_inputs=x), ap.cut(model, plan), x)


FUSED = small_case("fused")
TEXT = (
    ap.trace(FUSED.model(), FUSED.inputs())
    .plan({"parts.0.qkv:head_dim": [0, 2, 3], "parts.0.qkv:head": [1]})
    .to_json()
)


@given(st.integers(0, len(TEXT) - 1))
def test_a_truncated_plan_is_refused(length: int) -> None:
    with pytest.raises(PlanMismatchError, match="is no plan"):
        ap.Plan.from_json(TEXT[:length])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "3",
        "[]",
        '"plan"',
        "{}",
        '{"format": 1}',
        '{"weight_map": {"a": "b"}}',
        "not json",
    ],
)
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(PlanMismatchError, match="is no plan.*Plan.to_json"):
        ap.Plan.from_json(text)


@pytest.mark.parametrize("given_", [None, 3, ["a"], {"format": 1}], ids=str)
def test_what_is_no_text_is_refused(given_: Any) -> None:
    with pytest.raises(PlanMismatchError, match="is no plan"):
        ap.Plan.from_json(given_)


def test_another_format_is_named() -> None:
    data = json.loads(TEXT) | {"format": 2}
    with pytest.raises(PlanMismatchError, match="format 2; this version reads format 1"):
        ap.Plan.from_json(json.dumps(data))


HEAD = "parts.0.qkv:head"
BROKEN: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a unit too large": (("groups", HEAD, "kept"), [[2, 2]]),
    "a negative unit": (("groups", HEAD, "kept"), [[-1, 0]]),
    "unsorted units": (("groups", HEAD, "kept"), [[1, 1], [0, 0]]),
    "a unit twice": (("groups", HEAD, "kept"), [[0, 1], [1, 1]]),
    "a range the wrong way": (("groups", HEAD, "kept"), [[1, 0]]),
    "no units": (("groups", HEAD, "kept"), []),
    "a huge range": (("groups", HEAD, "kept"), [[0, 10**15]]),
    "units as text": (("groups", HEAD, "kept"), "01"),
    "fractions": (("groups", HEAD, "kept"), [[0.5, 1.5]]),
    "booleans": (("groups", HEAD, "kept"), [[False, True]]),
    "size as text": (("groups", HEAD, "size"), "many"),
    "a negative size": (("groups", HEAD, "size"), -2),
    "groups as a list": (("groups",), []),
    "a huge entry": (("tensors", 0, "kept", "0"), [[0, 10**15]]),
    "an unsorted entry": (("tensors", 0, "kept", "0"), [[3, 4], [0, 0]]),
    "a dimension too many": (("tensors", 0, "kept"), {"7": [[0, 0]]}),
    "a negative dimension": (("tensors", 0, "kept"), {"-1": [[0, 0]]}),
    "a shape as text": (("tensors", 0, "shape"), "wide"),
    "names as text": (("tensors", 0, "names"), "parts.0.qkv.weight"),
    "no names": (("tensors", 0, "names"), []),
    "names as numbers": (("tensors", 0, "names"), [3]),
    "an attribute without a module": (("attributes", 0), {"name": "num_heads"}),
    "an attribute's value as text": (("attributes", 0, "new"), "three"),
    "a factor as text": (("scalings", 0, "factor"), "big"),
    "a factor that is not finite": (("scalings", 0, "factor"), float("nan")),
    "an unknown delivery": (("delivery",), "drone"),
    "no fingerprint": (("fingerprint",), None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused(name: str) -> None:
    path, value = BROKEN[name]
    data = json.loads(TEXT)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanMismatchError, match="is no plan"):
        ap.Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("key", [k for k in json.loads(TEXT) if k != "format"])
def test_a_plan_with_a_part_missing_is_refused(key: str) -> None:
    data = json.loads(TEXT)
    del data[key]
    with pytest.raises(PlanMismatchError, match=f"is no plan.*{key}"):
        ap.Plan.from_json(json.dumps(data))


def test_a_read_plan_changes_no_attribute_that_is_not_a_size() -> None:
    """A plan from elsewhere must not be able to set what it likes."""
    model, _, structure = traced(FUSED)
    data = json.loads(structure.plan({HEAD: [1]}).to_json())
    data["attributes"] = [
        {"module": "parts.0", "name": "forward", "place": None, "old": 1, "new": 2}
    ]
    plan = ap.Plan.from_json(json.dumps(data))
    with pytest.raises(PlanMismatchError, match="size 'forward' of module 'parts.0'"):
        ap.cut(model, plan)
    data["attributes"] = [{"module": "nowhere", "name": "size", "place": None, "old": 1, "new": 2}]
    with pytest.raises(PlanMismatchError, match="nowhere"):
        ap.cut(model, ap.Plan.from_json(json.dumps(data)))


# ----------------------------------------------------------------------------------------------------- composition


@every_case
def test_two_cuts_are_one_bit_for_bit(case: SmallCase) -> None:
    model, x, structure = traced(case)
    first_kept = {g.name: range(g.size - 1) for g in structure.groups if g.size > 2}
    first = structure.plan(first_kept)
    after = structure.after(first)
    second = after.plan({g.name: range(1, g.size) for g in after.groups if g.size > 1})
    both = first.then(second)
    one, two = ap.cut(model, both), ap.cut(ap.cut(model, first), second)
    assert_same_up_to_rounding_of_scales(one, two, x, both)
    assert both.fingerprint == structure.fingerprint
    assert both.fingerprint_after == second.fingerprint_after
    assert structure.macs(both) == after.macs(second)
    assert structure.params(both) == sum(p.numel() for p in one.parameters())
    read = ap.Plan.from_json(both.to_json())
    bit_for_bit(ap.cut(model, read, example_inputs=x), one, x)


@every_case
def test_the_text_of_a_plan_does_not_tell_in_how_many_steps_it_was_made(case: SmallCase) -> None:
    _, _, structure = traced(case)
    groups = [group.name for group in structure.groups if group.size > 1]
    steps = structure.identity()
    for name in reversed(groups):
        here = structure.after(steps)
        steps = steps.then(here.plan({name: range(1, here[name].size)}))
    whole = structure.plan({name: range(1, structure[name].size) for name in groups})
    if steps.scalings == whole.scalings:
        assert json.loads(steps.to_json())["tensors"] == json.loads(whole.to_json())["tensors"]


def assert_same_up_to_rounding_of_scales(
    one: nn.Module, two: nn.Module, x: torch.Tensor, plan: ap.Plan
) -> None:
    if not plan.scalings:
        bit_for_bit(one, two, x)
        return
    torch.testing.assert_close(one(x), two(x), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("id", ["fused", "encoder"])
def test_composed_cuts_of_attention_equal_the_twin(id: str) -> None:
    case = small_case(id)
    model, x, structure = traced(case)
    name = next(g.name for g in structure.groups if g.kind == "head_dim")
    first = structure.plan({name: [0, 1, 3]})
    second = structure.after(first).plan({name: [0, 2]})
    both = first.then(second)
    assert both.kept[name].tolist() == [0, 3]
    small = ap.cut(model, both)
    torch.testing.assert_close(small(x), ap.zero(model, both)(x), rtol=1e-12, atol=1e-13)
    at_once = ap.cut(model, structure.plan({name: [0, 3]}))
    torch.testing.assert_close(small(x), at_once(x), rtol=1e-12, atol=1e-13)


def test_plans_that_do_not_follow_each_other_are_refused() -> None:
    first = MLP_STRUCTURE.plan({"0": [0, 1, 2]})
    with pytest.raises(PlanMismatchError, match="another network than the first one leads to"):
        first.then(first)
    elsewhere = MLP_STRUCTURE.after(MLP_STRUCTURE.plan({"0": [0, 1]})).plan({"0": [1]})
    with pytest.raises(PlanMismatchError, match="structure.after"):
        first.then(elsewhere)


@given(st.data())
@settings(max_examples=20)
def test_composition_is_associative(data: st.DataObject) -> None:
    def some(size: int) -> st.SearchStrategy[list[int]]:
        return st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1).map(sorted)

    structure, plans = MLP_STRUCTURE, []
    for size in (8, 4, 2):
        if structure["0"].size < 2:
            break
        kept = data.draw(some(min(size, structure["0"].size)))
        plans.append(structure.plan({"0": kept}))
        structure = structure.after(plans[-1])
    if len(plans) == 3:
        a, b, c = plans
        assert same_plan(a.then(b).then(c), a.then(b.then(c)))


# ---------------------------------------------------------------------------------------------- derived structures


@every_case
def test_a_derived_structure_is_the_one_a_new_trace_finds(case: SmallCase) -> None:
    model, x, structure = traced(case)
    bound = {name for tie in structure.ties for name, _ in tie.members}
    if (
        case.id == "encoder"
    ):  # torch's attention, once cut, has widths of its own for keys and values
        bound |= {g.name for g in structure.groups if "linear1" not in g.name}
    plan = structure.plan(
        {g.name: range(1, g.size) for g in structure.groups if g.size > 2 and g.name not in bound}
    )
    derived, again = structure.after(plan), ap.trace(ap.cut(model, plan), x)
    assert derived.fingerprint == again.fingerprint == plan.fingerprint_after
    assert derived.shapes == again.shapes
    assert derived.macs() == again.macs() == structure.macs(plan)
    assert derived.params() == again.params() == structure.params(plan)
    facts = [[(g.size, g.exact) for g in s.groups] for s in (derived, again)]
    assert facts[0] == facts[1]
    if case.delivery == "module":
        names = [[(g.name, g.kind) for g in s.groups] for s in (derived, again)]
        assert names[0] == names[1]
    for one, other in zip(derived.groups, again.groups, strict=True):
        for a, b in zip(one.slices, other.slices, strict=True):
            assert (a.tensor, a.dim) == (b.tensor, b.dim)
            assert np.array_equal(a.indices, b.indices)


def test_fingerprints_tell_names_and_shapes_and_nothing_else() -> None:
    other = MLP.model()
    with torch.no_grad():
        other[0].weight.add_(1)
    assert ap.trace(other, MLP.inputs(5)).fingerprint == MLP_STRUCTURE.fingerprint
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    assert ap.trace(wider, torch.zeros(2, 4)).fingerprint != MLP_STRUCTURE.fingerprint


def test_a_plan_tells_its_size_in_one_line() -> None:
    plan = MLP_STRUCTURE.plan({"0": [0, 1, 2]})
    assert repr(plan) == "Plan(1 groups, 9 of 14 units, as module)"
    assert plan.counts() == {"0": (3, 8)}
