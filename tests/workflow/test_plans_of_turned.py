"""A plan made after heads were turned is carried out on the turned network, and refused elsewhere in words."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from apoptosis.alignment import align_heads
from apoptosis.checkpoint import load, load_outcome, save
from apoptosis.errors import PlanMismatchError
from apoptosis.models import ViTOptions, vit
from apoptosis.planning import Budget
from apoptosis.repair import Refit
from apoptosis.structure import Plan, cut, cut_optimizer, trace, verify, zero
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import Material, Pruning, iterative, prune

OPTIONS = ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    return vit(OPTIONS).eval()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 3, 8, 8, generator=generator)
    return [(images, torch.arange(24) % 3)]


@pytest.fixture(scope="module")
def outcome(dense, data):
    return prune(dense, data, Budget(flops=0.7), criterion="magnitude", steps=2, align=True)


def turned_by_hand(dense, data):
    found = align_heads(dense, trace(dense, data[0][0][:1]), data).model
    structure = trace(found, data[0][0][:1])
    name = next(group.name for group in structure.groups if group.kind == "v_dim")
    return found, structure.plan({name: range(structure[name].size - 2)})


def refused(work) -> None:
    with pytest.raises(PlanMismatchError, match=r"(?s)heads were turned.*`outcome\.dense`"):
        work()


def test_the_network_that_was_given_is_refused(dense, data, outcome):
    plan = outcome.plan
    assert plan.basis is not None
    optimizer = torch.optim.SGD(dense.parameters(), 0.1)
    refused(lambda: cut(dense, plan))
    refused(lambda: zero(dense, plan))
    refused(lambda: cut_optimizer(optimizer, dense, outcome.model, plan))
    refused(lambda: cut(dense, Plan.from_json(plan.to_json())))
    refused(lambda: cut(copy.deepcopy(dense).double(), plan))
    refused(lambda: Refit()(dense, outcome.model, plan, data, None))


def test_the_network_it_is_for_is_cut_to_what_came_out(data, outcome):
    for plan in (outcome.plan, Plan.from_json(outcome.plan.to_json()), copy.copy(outcome.plan)):
        for network in (outcome.dense, copy.deepcopy(outcome.dense)):
            again = cut(network, plan)
            for name, own in again.state_dict().items():
                assert torch.equal(own, outcome.model.state_dict()[name]), name
    images = data[0][0]
    assert_close(
        cut(copy.deepcopy(outcome.dense).double(), outcome.plan)(images.double()).float(),
        outcome.model(images),
    )


def test_turned_by_hand_and_planned_by_hand_it_is_the_same(dense, data):
    turned, plan = turned_by_hand(dense, data)
    cut(turned, plan)
    refused(lambda: cut(dense, plan))
    whole = trace(turned, data[0][0][:1])
    refused(lambda: cut(dense, whole.identity()))
    assert verify(whole).failed == {}


def test_turned_twice_the_last_counts(dense, data):
    turned, _ = turned_by_hand(dense, data)
    other = [(images * torch.tensor([1.0, 0.2, 3.0]).view(3, 1, 1), y) for images, y in data]
    outcome = prune(turned, other, Budget(flops=0.7), criterion="magnitude", steps=2, align=True)
    cut(outcome.dense, outcome.plan)
    refused(lambda: cut(turned, outcome.plan))


def test_pruned_after_it_was_turned_by_hand_it_is_for_that_network(dense, data):
    turned, _ = turned_by_hand(dense, data)
    outcome = prune(turned, data, Budget(flops=0.7), criterion="magnitude", steps=3, align=False)
    assert outcome.plan.delivery == "module"
    cut(turned, outcome.plan)
    refused(lambda: cut(dense, outcome.plan))


def test_one_that_was_trained_on_since_is_refused_until_that_is_said(data, outcome):
    trained = copy.deepcopy(outcome.dense)
    fit_(trained, data, options=FitOptions(epochs=1))
    refused(lambda: cut(trained, outcome.plan))
    cut(trained, replace(outcome.plan, basis=None))


def test_a_plan_where_nothing_was_turned_is_for_any_weights(dense, data):
    outcome = prune(dense, data, Budget(flops=0.7), criterion="magnitude", steps=2)
    assert outcome.plan.basis is None
    torch.manual_seed(5)
    cut(vit(OPTIONS), outcome.plan)


def test_rounds_with_training_in_between_are_one_plan_of_no_single_network(dense, data):
    outcomes = iterative(
        dense,
        [Budget(flops=0.8), Budget(flops=0.6)],
        Material(scoring=data, training=data),
        pruning=Pruning(criterion="magnitude", steps=1, align=True),
        fit=FitOptions(epochs=1, learning_rate=0.01),
    )
    refused(lambda: cut(dense, outcomes[1].plan))
    cut(outcomes[0].dense, outcomes[0].plan)
    refused(lambda: cut(outcomes[0].dense, outcomes[1].plan))


@pytest.mark.parametrize("trained", [False, True])
def test_checkpoints_of_it_are_loaded_into_any_network_of_its_shapes(
    dense, data, outcome, trained, tmp_path
):
    if trained:
        outcome = replace(outcome, model=copy.deepcopy(outcome.model))
        fit_(outcome.model, data, options=FitOptions(epochs=1))
    save(tmp_path / "net", outcome)
    torch.manual_seed(7)
    small = load(tmp_path / "net", vit(OPTIONS))
    assert_close(small(data[0][0]), outcome.model.eval()(data[0][0]))
    again = load_outcome(tmp_path / "net", vit(OPTIONS))
    assert again.plan.basis == outcome.plan.basis
    refused(lambda: cut(dense, again.plan))


def test_plans_of_earlier_versions_are_read(outcome):
    text = outcome.plan.to_json().replace('"basis":', '"earlier":')
    assert Plan.from_json(text).basis is None
