"""The plan that keeps everything is a plan like any other."""

import json

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError
from apoptosis.structure import Structure
from oracles.random_networks import build, random_blueprint
from oracles.shrinking import SMALL_CASES, SmallCase, small_case
from oracles.untouched import Snapshot

every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def halved(structure: Structure) -> ap.Plan:
    kept = {g.name: range(max(g.smallest, g.size // 2)) for g in structure.groups}
    return structure.plan({n: k for n, k in kept.items() if len(k) < structure[n].size})


def as_data(plan: ap.Plan) -> dict:
    return json.loads(plan.to_json())


def assert_equal_not_same(one: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    assert one is not other
    assert type(one) is type(other)
    mine, theirs = one.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.untyped_storage().data_ptr() != theirs[name].untyped_storage().data_ptr()
        assert tensor.requires_grad == theirs[name].requires_grad
    assert torch.equal(one(x), other(x))


@every_case
def test_cutting_nothing_gives_an_equal_copy_of_its_own(case: SmallCase):
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    before = Snapshot(model)
    plan = structure.identity()
    for made in (ap.cut(model, plan), ap.zero(model, plan)):
        before.assert_unchanged()
        assert_equal_not_same(made, model, x)
    assert (plan.kept, plan.counts(), plan.delivery) == ({}, {}, "module")
    assert plan.fingerprint == plan.fingerprint_after == structure.fingerprint
    assert structure.macs(plan) == structure.macs()
    assert structure.params(plan) == structure.params()


@every_case
def test_it_changes_nothing_before_or_after_another_plan(case: SmallCase):
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    plan = halved(structure)
    after = structure.after(plan)
    small = ap.cut(model, plan)
    first, last = structure.identity().then(plan), plan.then(after.identity())
    assert as_data(first) == as_data(plan)
    both = as_data(last), as_data(plan)
    for data in both:
        del data["delivery_because"]
    assert both[0] == both[1]
    for composed in (first, last, structure.identity().then(first)):
        again = ap.cut(model, composed)
        assert torch.equal(again(x), small(x))
        assert {n: tuple(t.shape) for n, t in again.state_dict().items()} == after.shapes


@every_case
def test_it_survives_json(case: SmallCase):
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    read = ap.Plan.from_json(structure.identity().to_json())
    assert as_data(read) == as_data(structure.identity())
    assert_equal_not_same(ap.cut(model, read), model, x)
    plan = halved(structure)
    assert as_data(read.then(plan)) == as_data(plan)


@every_case
def test_the_structure_after_it_is_the_structure(case: SmallCase):
    structure = ap.trace(case.model(), case.inputs())
    after = structure.after(structure.identity())
    assert [(g.name, g.size) for g in after.groups] == [(g.name, g.size) for g in structure.groups]
    assert (after.shapes, after.macs()) == (structure.shapes, structure.macs())
    assert as_data(halved(after)) == as_data(halved(structure))


def test_that_of_a_program_copies_the_program():
    case = small_case("hard coded")
    model, x = case.model(), case.inputs()
    structure = ap.trace(model, x)
    plan = halved(structure)
    small, after = ap.cut(model, plan), structure.after(plan)
    identity = after.identity()
    assert (plan.delivery, identity.delivery) == ("program", "program")
    assert_equal_not_same(ap.cut(small, identity), small, x)


def test_another_network_is_refused():
    case, other = small_case("mlp"), small_case("tied")
    structure = ap.trace(case.model(), case.inputs())
    stranger = ap.trace(other.model(), other.inputs())
    with pytest.raises(PlanMismatchError, match="made for another network"):
        stranger.after(structure.identity())
    with pytest.raises(PlanMismatchError, match="made for another network"):
        structure.identity().then(halved(stranger))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_random_networks_are_copied(seed):
    network = build(random_blueprint(seed, longest=2))
    x = network.inputs(network.batch, 0)
    copied = ap.cut(network.model, ap.trace(network.model, x).identity())
    assert copied is not network.model
    for name, tensor in network.model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], tensor)
