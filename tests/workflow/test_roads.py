"""`one_shot`, `iterative`, `gradual`: each against its parts done by hand, its budgets recounted, bad input."""

import copy

import pytest
import torch
from torch import nn

from apoptosis.data import Batches, digits
from apoptosis.errors import ConfigError
from apoptosis.masks import masks_of
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Selection, Sparsity
from apoptosis.structure import cut, trace
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import (
    Material,
    Pruning,
    Sparsifying,
    gradual,
    iterative,
    one_shot,
    prune,
    sparsify,
)

DATA = digits()
FIT = FitOptions(epochs=2, learning_rate=0.02)
HOW = Pruning(criterion="taylor", steps=2)
EXAMPLE = torch.zeros(1, 1, 8, 8)


def batches(num: int = 128, *, shuffled: bool = True) -> Batches:
    seed = 0 if shuffled else None
    return Batches(DATA.train.images[:num], DATA.train.labels[:num], size=64, shuffle_seed=seed)


def material() -> Material:
    validation = Batches(DATA.validation.images[:64], DATA.validation.labels[:64], size=64)
    return Material(scoring=batches(shuffled=False), training=batches(), validation=validation)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    model = digits_cnn(width=8)
    fit_(model, batches(400), options=FitOptions(epochs=2))
    return model.eval()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert torch.equal(own, expected[name]), name


def test_one_shot_is_prune_then_fit(dense):
    before = copy.deepcopy(dense.state_dict())
    data = material()
    found = one_shot(dense, Budget(flops=0.5), data, pruning=HOW, fit=FIT)
    by_hand = prune(dense, data.scoring, Budget(flops=0.5), criterion="taylor", steps=2)
    fit_(by_hand.model, batches(), options=FIT, validation=data.validation)
    assert_same(found.model, by_hand.model)
    assert found.plan.kept.keys() == by_hand.plan.kept.keys()
    (record,) = found.settings["training"]
    assert len(record["epochs"]) == 2
    assert record["kept"] in (0, 1, 2)
    assert all(torch.equal(own, before[name]) for name, own in dense.state_dict().items())


def test_without_epochs_nothing_is_trained(dense):
    data = Material(scoring=batches(shuffled=False))
    found = one_shot(dense, Budget(flops=0.5), data, pruning=HOW, fit=FitOptions(epochs=0))
    assert "training" not in found.settings
    assert_same(found.model, cut(dense, found.plan))


def test_rounds_go_down_and_each_is_made_of_the_last(dense):
    data = material()
    budgets = [Budget(flops=0.7), Budget(flops=0.4), Budget(flops=0.2)]
    rounds = iterative(dense, budgets, data, pruning=HOW, fit=FIT)
    structure = trace(dense, EXAMPLE)
    for number, (found, budget) in enumerate(zip(rounds, budgets, strict=True), 1):
        assert structure.macs(found.plan) <= budget.flops * structure.macs()
        assert trace(found.model, EXAMPLE).macs() == structure.macs(found.plan)
        assert found.spent[0].asked == budget.flops
        assert found.spent[0].dense == structure.macs()
        assert found.settings["budget"] == {"flops": budget.flops}
        assert len(found.settings["training"]) == number
        assert len(found.history) == 2 * number

    first = one_shot(dense, budgets[0], data, pruning=HOW, fit=FIT)
    assert_same(rounds[0].model, first.model)
    share = 0.4 / first.spent[0].got * (1 - 1e-12)
    second = prune(first.model, data.scoring, Budget(flops=share), criterion="taylor", steps=2)
    fit_(second.model, batches(), options=FIT, validation=data.validation)
    assert_same(rounds[1].model, second.model)
    for name, kept in rounds[2].plan.kept.items():
        before = rounds[1].plan.kept.get(name, range(structure[name].size))
        assert set(map(int, kept)) <= set(map(int, before)), "what has gone stays away"


def test_a_budget_of_several_measures_goes_down_in_all(dense):
    budgets = [Budget(flops=0.7, params=0.8), Budget(flops=0.4, params=0.3)]
    rounds = iterative(dense, budgets, material(), pruning=HOW, fit=FitOptions(epochs=1))
    structure = trace(dense, EXAMPLE)
    for found, budget in zip(rounds, budgets, strict=True):
        assert structure.macs(found.plan) <= budget.flops * structure.macs()
        assert structure.params(found.plan) <= budget.params * structure.params()


def test_gradual_zeroes_trains_and_zeroes_more(dense):
    data = material()
    how = Sparsifying(criterion="taylor", stages=3)
    found = gradual(dense, Sparsity(keep=0.2), data, sparsifying=how, fit=FIT)
    assert [step.step for step in found.history] == [1, 2, 3]
    assert len(found.settings["training"]) == 3
    assert found.settings["stages"] == 3
    masks = masks_of(found.model)
    assert masks is not None
    assert masks.density == pytest.approx(0.2, abs=1e-3)
    assert found.spent[0].got == pytest.approx(0.2, abs=1e-3)

    small = dense
    for stage in (1, 2, 3):
        keep = Sparsity(keep=0.2 ** (stage / 3))
        small = sparsify(small, data.scoring, keep, criterion="taylor", stages=1).model
        fit_(small, batches(), options=FIT, validation=data.validation)
    assert_same(found.model, small)


def test_a_pattern_goes_through_its_own_stages(dense):
    how = Sparsifying(criterion="magnitude", stages=2)
    only = Sparsity(pattern="2:4", names=("!stem.conv.weight",))
    found = gradual(dense, only, material(), sparsifying=how, fit=FIT)
    weight = found.model.get_parameter("head.weight").unflatten(1, (-1, 4))
    assert int(torch.count_nonzero(weight, dim=2).max()) == 2


def test_the_dense_network_teaches_where_that_is_asked(dense):
    data, fit = material(), FitOptions(epochs=1, learning_rate=0.02, distil=0.9)
    found = one_shot(dense, Budget(flops=0.5), data, pruning=HOW, fit=fit)
    alone = prune(dense, data.scoring, Budget(flops=0.5), criterion="taylor", steps=2)
    fit_(alone.model, batches(), options=fit, teacher=dense, validation=data.validation)
    assert_same(found.model, alone.model)


def test_bad_input(dense):
    data = material()
    with pytest.raises(ConfigError, match="no batches to train on"):
        one_shot(dense, Budget(flops=0.5), Material(scoring=data.scoring), pruning=HOW, fit=FIT)
    with pytest.raises(ConfigError, match="No budgets"):
        iterative(dense, [], data)
    with pytest.raises(ConfigError, match="asks for less of the same"):
        iterative(dense, [Budget(flops=0.4), Budget(flops=0.5)], data)
    with pytest.raises(ConfigError, match="asks for less of the same"):
        iterative(dense, [Budget(flops=0.4), Budget(params=0.3)], data)
    shares = Pruning(selection=Selection(shares={"*": 0.5}))
    with pytest.raises(ConfigError, match="Shares of groups"):
        iterative(dense, [Budget(flops=0.5)], data, pruning=shares)
