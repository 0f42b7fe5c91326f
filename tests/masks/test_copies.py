"""Masks go with copies, pickles, state dicts, conversions and cuts."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from apoptosis.masks import (
    mask,
    mask_,
    masks_of,
    release_,
)
from apoptosis.structure import cut, trace
from oracles.mask_choice import random_plan
from oracles.masked_training import (
    assert_keeps,
    assert_same_weights,
    assert_zero,
    exactly,
    loss_of,
    network,
    pickled,
    sgd,
    step,
    weights,
    zeroed,
)
from oracles.untouched import Snapshot


def test_a_copy_keeps_its_masks_and_goes_its_own_way() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    twin = copy.deepcopy(model)
    before = weights(model)
    assert masks_of(twin).same_as(masks)
    assert_keeps(twin, masks)
    for name, own in before.items():
        torch.testing.assert_close(model.get_parameter(name), own, **exactly)
    assert_keeps(model, masks)
    assert_keeps(copy.deepcopy(copy.deepcopy(model)), masks)


@pytest.mark.parametrize("which", ["copy", "original"])
def test_releasing_one_does_not_release_the_other(which: str) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    twin = copy.deepcopy(model)
    free, kept = (twin, model) if which == "copy" else (model, twin)
    release_(free)
    assert masks_of(free) is None
    assert masks_of(kept).same_as(masks)
    step(free, sgd(free), 0)
    assert not masks.holds(free)
    assert_keeps(kept, masks)


def test_other_masks_for_a_copy_leave_the_original_its_own() -> None:
    dense = network()
    first, second = random_plan(dense, 1), random_plan(dense, 2)
    model = mask(dense, first)
    twin = copy.deepcopy(model)
    mask_(twin, second)
    assert masks_of(model).same_as(first)
    assert_keeps(twin, second)
    assert_keeps(model, first)


def test_a_copy_after_training_is_a_copy() -> None:
    model = mask(network(), random_plan(network(), 1))
    step(model, sgd(model), 0)
    model.zero_grad()
    twin = copy.deepcopy(model)
    for seed in range(2):
        step(model, sgd(model), seed)
        step(twin, sgd(twin), seed)
    assert_same_weights(twin, model)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [saved_and_loaded, pickled, copy.deepcopy])
def test_masks_survive(through: Callable[[nn.Module], nn.Module]) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = through(mask(dense, masks))
    assert masks_of(model).same_as(masks)
    assert_keeps(model, masks)
    again = through(through(model))
    assert_keeps(again, masks)
    release_(again)
    step(again, sgd(again), 0)
    assert not masks.holds(again)


@pytest.mark.parametrize("through", [saved_and_loaded, pickled, copy.deepcopy])
def test_masks_survive_while_frozen(through: Callable[[nn.Module], nn.Module]) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks).requires_grad_(False)
    found = through(model)
    assert not any(own.requires_grad for own in found.parameters())
    assert_keeps(found.requires_grad_(True), masks)
    assert_keeps(model.requires_grad_(True), masks)


def test_a_copy_that_shares_the_weights_adds_nothing_to_them() -> None:
    """As tools make them that only want to change modules: parameters are in the memo of the copy."""
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    snapshot = Snapshot(model)
    copy.deepcopy(model, {id(own): own for own in model.parameters()})
    snapshot.assert_unchanged()
    release_(model)
    step(model, sgd(model), 0)
    assert not masks.holds(model)


def test_an_average_of_models_keeps_the_zeros() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for seed in range(3):
        step(model, optimizer, seed)
        average.update_parameters(model)
    assert_zero(average.module, masks)


def test_the_state_dict_is_that_of_the_dense_model() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    assert list(model.state_dict()) == list(dense.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in dense.named_parameters()
    ]
    plain = network()
    plain.load_state_dict(model.state_dict())
    assert_same_weights(plain, zeroed(dense, masks))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_loaded_weights_are_masked(assign: bool, strict: bool) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    other = {name: torch.randn_like(own) for name, own in dense.state_dict().items()}
    given = {name: own.clone() for name, own in other.items()}
    found = model.load_state_dict(given, strict=strict, assign=assign)
    assert found.missing_keys == found.unexpected_keys == []
    assert_zero(model, masks)
    for name, own in model.named_parameters():
        expected = other[name] * masks.kept(name) if name in masks.masks else other[name]
        torch.testing.assert_close(own.detach(), expected, **exactly)
    assert masks_of(model).same_as(masks)
    assert_keeps(model, masks)


def test_a_masked_model_inside_another_is_copied_and_loaded_with_its_masks() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    whole = nn.Sequential(mask(dense, masks), nn.Linear(3, 3))
    state = {name: torch.randn_like(own) for name, own in whole.state_dict().items()}
    whole.load_state_dict(state)
    assert_zero(whole[0], masks)
    twin = copy.deepcopy(whole)
    assert masks_of(twin[0]).same_as(masks)
    assert_keeps(twin[0], masks)
    assert_keeps(pickled(whole)[0], masks)
    assert_keeps(whole[0], masks)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_into_a_part_are_masked(assign: bool) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    given = {name: torch.randn_like(own) for name, own in dense[4].state_dict().items()}
    model[4].load_state_dict(given, assign=assign)
    assert_zero(model, masks)
    assert_keeps(model, masks)


def test_loading_what_does_not_fit_changes_no_masks() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.bias": torch.zeros(4)})
    assert_zero(model, masks)
    assert_keeps(model, masks)


def test_masks_survive_another_format() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    model = model.to(torch.float64)
    assert model[0].weight.dtype == torch.float64
    assert masks_of(model).same_as(masks)
    assert_keeps(model, masks)
    assert_keeps(copy.deepcopy(model).float(), masks)


def test_masks_of_a_replaced_parameter_are_not_said_to_be_kept() -> None:
    dense = network()
    model = mask(dense, random_plan(dense, 1))
    model[0].weight = nn.Parameter(torch.ones(model[0].weight.shape))
    assert "0.weight" not in masks_of(model).masks


def test_masks_survive_sixteen_bits() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks).to(torch.bfloat16)
    optimizer = sgd(model, momentum=0.9)
    for seed in range(3):
        step(model, optimizer, seed)
    assert_zero(model, masks)
    assert masks_of(model).same_as(masks)


def test_masks_survive_autocast() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    optimizer = sgd(model, momentum=0.9)
    for seed in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
    assert_zero(model, masks)


def test_after_a_cut_what_is_zero_stays_zero() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    masks = random_plan(dense, 1)
    plan = trace(dense, torch.zeros(1, 6)).plan({"0": [0, 2, 5]})
    small = cut(mask(dense, masks), plan)
    kept = masks_of(small)
    assert kept.same_as(masks.cut(plan))
    optimizer = torch.optim.AdamW(small.parameters(), 0.1)
    for _ in range(3):
        small(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    assert kept.holds(small)
