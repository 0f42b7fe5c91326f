"""Masks that are kept: whatever trains, copies, saves, loads or scores the network, what is gone is exactly zero.

The oracle is a plain copy whose weights were zeroed once, and whose gradients are multiplied by the masks by hand
before every step. It must be matched bit for bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.criteria import oba, taylor
from apoptosis.errors import PlanMismatchError
from apoptosis.masks import (
    identity_masks,
    mask,
    mask_,
    masks_of,
    release_,
    zeros_of,
)
from apoptosis.structure import cut, trace
from oracles.mask_choice import kept_of, plan_of, random_plan
from oracles.masked_training import (
    assert_keeps,
    assert_same_weights,
    assert_zero,
    batch,
    exactly,
    loss_of,
    matrices,
    network,
    pickled,
    sgd,
    step,
    zeroed,
)
from oracles.small_networks import Convolutions
from oracles.untouched import Snapshot

# ------------------------------------------------------------------------------------------------ gradients


def test_gradients_are_masked_as_they_arrive() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    for name, own in reference.named_parameters():
        expected = own.grad * masks.kept(name) if name in masks.masks else own.grad
        torch.testing.assert_close(model.get_parameter(name).grad, expected, **exactly)


def test_gradients_add_up_over_batches() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    for name in masks.masks:
        expected = reference.get_parameter(name).grad * masks.kept(name)
        torch.testing.assert_close(model.get_parameter(name).grad, expected, **exactly)


def test_clipping_sees_the_gradients_that_are_used() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    for name in masks.masks:
        reference.get_parameter(name).grad *= masks.kept(name)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(found, expected, **exactly)
    for name, own in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, own.grad, **exactly)


def test_an_infinite_gradient_of_a_removed_weight_is_none() -> None:
    dense = matrices()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    weight, kept = model.get_parameter("0.weight"), masks.kept("0.weight")
    factor = torch.ones(kept.shape).masked_fill(~kept, torch.inf)
    (weight * factor).nansum().backward()
    assert torch.equal(weight.grad, kept.float())


def test_gradients_of_what_is_not_masked_are_whole() -> None:
    dense = network()
    masks = random_plan(dense, 1, names=("4.weight",))
    model, reference = mask(dense, masks), zeroed(dense, masks)
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    for name, own in reference.named_parameters():
        if name != "4.weight":
            torch.testing.assert_close(model.get_parameter(name).grad, own.grad, **exactly)


def test_the_outputs_are_those_of_the_zeroed_network() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    x, _ = batch(dense, 0)
    torch.testing.assert_close(mask(dense, masks)(x), zeroed(dense, masks)(x), **exactly)


# ------------------------------------------------------------------------------------------------ the given model


@pytest.mark.parametrize("training", [True, False])
def test_masking_a_copy_leaves_the_model_as_it_was(training: bool) -> None:
    dense = network().train(training)
    dense[4].bias.requires_grad_(False)
    loss_of(dense, 0).backward()
    masks = random_plan(dense, 1)
    snapshot = Snapshot(dense)
    model = mask(dense, masks)
    snapshot.assert_unchanged()
    assert type(model) is type(dense)
    assert model.training is training
    assert not model[4].bias.requires_grad
    assert masks_of(dense) is None
    for name, own in dense.named_parameters():
        assert model.get_parameter(name) is not own
    for seed in range(2):
        step(model, sgd(model), seed)
    snapshot.assert_unchanged()


def test_masking_in_place_keeps_the_parameters_that_an_optimiser_holds() -> None:
    model = network()
    before = dict(model.named_parameters())
    masks = random_plan(model, 1)
    mask_(model, masks)
    assert all(model.get_parameter(name) is own for name, own in before.items())
    assert_keeps(model, masks)


def test_masking_draws_no_random_numbers_and_keeps_buffers() -> None:
    torch.manual_seed(0)
    dense = Convolutions()
    dense(torch.randn(4, 3, 8, 8))
    masks = random_plan(dense, 1)
    state = torch.get_rng_state()
    model = mask(dense, masks)
    assert torch.equal(torch.get_rng_state(), state)
    for name, own in dense.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), own, **exactly)


def test_what_a_model_keeps_can_be_asked() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    assert masks_of(dense) is None
    found = masks_of(mask(dense, masks))
    assert found is not None
    assert found.same_as(masks)


def test_masks_of_another_model_change_nothing() -> None:
    model, masks = network(), identity_masks(matrices())
    snapshot = Snapshot(model)
    with pytest.raises(PlanMismatchError, match=r"(?i)another|mask"):
        mask_(model, masks)
    snapshot.assert_unchanged()
    assert masks_of(model) is None


# ------------------------------------------------------------------------------------------------ again, and no more


def test_later_masks_take_the_place_of_earlier_ones() -> None:
    model = network()
    first, second = random_plan(model, 1), random_plan(model, 2)
    mask_(model, first)
    mask_(model, second)
    assert masks_of(model).same_as(second)
    assert_zero(model, second)
    assert_zero(model, first)
    step(model, sgd(model), 0)
    assert_zero(model, second)
    assert not first.holds(model), "what the first masks alone removed may come back"
    assert_keeps(model, second)


def test_later_masks_of_fewer_tensors_free_the_others() -> None:
    model = network()
    mask_(model, random_plan(model, 1))
    second = random_plan(model, 2, names=("4.weight",))
    mask_(model, second)
    assert masks_of(model).same_as(second)
    step(model, sgd(model), 0)
    assert (model.get_parameter("0.weight") != 0).all()
    assert_zero(model, second)


def test_the_same_masks_twice_are_those_masks() -> None:
    model = network()
    masks = random_plan(model, 1)
    mask_(model, masks)
    mask_(model, masks)
    assert_keeps(model, masks)
    release_(model)
    step(model, sgd(model), 0)
    assert not masks.holds(model)


def test_masking_a_masked_model_leaves_it_its_masks() -> None:
    dense = network()
    first, second = random_plan(dense, 1), random_plan(dense, 2)
    model = mask(dense, first)
    snapshot = Snapshot(model)
    later = mask(model, second)
    snapshot.assert_unchanged()
    assert masks_of(later).same_as(second)
    assert_keeps(model, first)
    assert_keeps(later, second)


def test_a_released_model_is_as_any_other() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    release_(model)
    assert masks_of(model) is None
    assert_zero(model, masks)
    for own in (model, reference):
        optimizer = sgd(own, momentum=0.9)
        for seed in range(3):
            step(own, optimizer, seed)
    assert_same_weights(model, reference)
    assert not masks.holds(model)
    model.load_state_dict(dense.state_dict())
    assert_same_weights(model, dense)
    assert masks_of(copy.deepcopy(model)) is None


def test_nothing_of_masks_is_left_on_a_released_model() -> None:
    dense = network()
    before = hooks_and_attributes(dense)
    masks = random_plan(dense, 1)
    mask_(dense, masks)
    release_(dense)
    assert hooks_and_attributes(dense) == before


def hooks_and_attributes(model: nn.Module) -> dict[str, Any]:
    return {
        name: (
            type(module),
            sorted(vars(module)),
            {k: len(v) for k, v in vars(module).items() if "hooks" in k and v is not None},
        )
        for name, module in model.named_modules()
    } | {
        name: (type(own), len(own._backward_hooks or ()), own._post_accumulate_grad_hooks or None)
        for name, own in model.named_parameters()
    }


def test_releasing_a_model_without_masks_is_harmless() -> None:
    model = network()
    snapshot = Snapshot(model)
    release_(model)
    snapshot.assert_unchanged()


def test_a_layer_that_is_all_gone_stays_all_gone() -> None:
    dense = network()
    masks = plan_of(dense, {"4.weight": torch.zeros(3, 50, dtype=torch.bool)})
    model = mask(dense, masks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
    assert_zero(model, masks)


# ------------------------------------------------------------------------------------------------ tied weights


class Tied(nn.Module):
    """One weight in two layers, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.again = self.head

    def __getitem__(self, place: int) -> nn.Module:
        return self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_weights_are_masked_once_and_everywhere() -> None:
    torch.manual_seed(0)
    dense = Tied()
    masks = random_plan(dense, 1)
    assert masks.masks["a.weight"].names == ("a.weight", "b.weight")
    assert set(masks.masks["head.weight"].names) == {"head.weight", "again.weight"}
    assert list(masks.masks) == ["a.weight", "head.weight"]
    model = mask(dense, masks)
    assert model.a.weight is model.b.weight
    assert_keeps(model, masks)
    twin = copy.deepcopy(model)
    assert twin.a.weight is twin.b.weight
    assert twin.a.weight is not model.a.weight
    assert_keeps(twin, masks)
    assert_keeps(pickled(model), masks)
    model.load_state_dict(dense.state_dict())
    assert_zero(model, masks)
    assert_keeps(model, masks)


# ------------------------------------------------------------------------------------------------ other rooms


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (4,), generator=generator)


@pytest.mark.parametrize("criterion", [oba, taylor], ids=["oba", "taylor"])
@pytest.mark.parametrize("training", [True, False])
def test_a_masked_model_scores_as_a_plain_one_with_the_same_zeros(
    criterion: Callable[..., Any], training: bool
) -> None:
    torch.manual_seed(0)
    dense = Convolutions().train(training)
    masks = random_plan(dense, 1)
    model, plain = mask(dense, masks), zeroed(dense, masks)
    snapshot = Snapshot(model)
    batches = [images(0), images(1)]
    found, expected = criterion(model, batches), criterion(plain, batches)
    snapshot.assert_unchanged()
    assert found.loss == expected.loss
    assert found.fallbacks == expected.fallbacks
    assert found.values.keys() == expected.values.keys()
    for name, own in expected.values.items():
        torch.testing.assert_close(found.values[name], own, **exactly)
    assert masks_of(model).same_as(masks)


def test_a_gradient_asked_for_by_the_criteria_is_that_of_the_plain_model() -> None:
    """θ ⊙ (Hθ + g) with the first order on: a masked gradient would not show, a masked Hθ would."""
    torch.manual_seed(0)
    dense = Convolutions().eval()
    masks = random_plan(dense, 1)
    model, plain = mask(dense, masks), zeroed(dense, masks)
    found = oba(model, [images(0)], kind="hessian", first_order=1.0)
    expected = oba(plain, [images(0)], kind="hessian", first_order=1.0)
    for name, own in expected.values.items():
        torch.testing.assert_close(found.values[name], own, **exactly)


def test_tracing_a_masked_model_leaves_it_as_it_was() -> None:
    torch.manual_seed(0)
    model = Convolutions().eval()
    mask_(model, random_plan(model, 1))
    x, _ = images(0)
    snapshot = Snapshot(model)
    structure = trace(model, x)
    snapshot.assert_unchanged()
    cut(model, structure.plan({structure.groups[0].name: [0, 1]}))
    snapshot.assert_unchanged()


def test_a_masked_model_that_was_traced_can_be_released() -> None:
    torch.manual_seed(0)
    model = Convolutions().eval()
    masks = random_plan(model, 1)
    mask_(model, masks)
    x, y = images(0)
    trace(model, x)
    release_(model)
    F.cross_entropy(model(x), y).backward()
    sgd(model).step()
    assert not masks.holds(model)


def test_a_masked_model_is_traced_and_cut_as_a_plain_one() -> None:
    torch.manual_seed(0)
    dense = Convolutions().eval()
    masks = random_plan(dense, 1)
    model, plain = mask(dense, masks), zeroed(dense, masks)
    x, _ = images(0)
    found, expected = trace(model, x), trace(plain, x)
    assert masks_of(model).same_as(masks)
    assert [(g.name, g.size, g.kind) for g in found.groups] == [
        (g.name, g.size, g.kind) for g in expected.groups
    ]
    assert (found.macs(), found.params()) == (expected.macs(), expected.params())
    assert found.fingerprint == expected.fingerprint
    kept = {group.name: range(0, group.size, 2) for group in expected.groups}
    small = cut(model, found.plan(kept))
    torch.testing.assert_close(small(x), cut(plain, expected.plan(kept))(x), **exactly)
    assert kept_of(zeros_of(small, ("*",))).keys() == set(masks.masks)
