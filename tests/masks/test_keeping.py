"""Masks that are kept: whatever trains, copies, saves, loads or scores the network, what is gone is exactly zero.

The oracle is a plain copy whose weights were zeroed once, and whose gradients are multiplied by the masks by hand
before every step. It must be matched bit for bit.
"""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from apoptosis.criteria import oba, taylor
from apoptosis.errors import ConfigError, PlanMismatchError
from apoptosis.masks import (
    MaskPlan,
    identity_masks,
    mask,
    mask_,
    mask_optimizer_,
    masks_of,
    release_,
    zeros_of,
)
from apoptosis.structure import cut, trace
from oracles.mask_choice import kept_of, plan_of, random_plan
from oracles.small_networks import Convolutions
from oracles.untouched import Snapshot

STEPS = 4
exactly = {"rtol": 0, "atol": 0}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(50, 3)
    )


def matrices() -> nn.Sequential:
    """Weights of two dimensions alone: what Muon takes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def batch(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    shape = (5, 6) if isinstance(model[0], nn.Linear) else (5, 2, 6, 6)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (5,), generator=generator)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x, y = batch(model, seed, dtype)
    return F.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: Optimizer, seed: int, masks: MaskPlan | None = None) -> None:
    """One step; with masks given, gradients are multiplied by them by hand."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        for name in masks.masks if masks is not None else ():
            model.get_parameter(name).grad *= masks.kept(name)
        return loss

    optimizer.step(closure)


def zeroed(model: nn.Module, masks: MaskPlan) -> nn.Module:
    """A plain copy with the same zeros and nothing that keeps them."""
    found = copy.deepcopy(model)
    zero_(found, masks)
    return found


def zero_(model: nn.Module, masks: MaskPlan) -> None:
    with torch.no_grad():
        for name in masks.masks:
            model.get_parameter(name).mul_(masks.kept(name))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in model.named_parameters()}


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    assert set(dict(found.named_parameters())) == set(dict(expected.named_parameters()))
    for name, own in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), own, **exactly, msg=name)


def assert_zero(model: nn.Module, masks: MaskPlan) -> None:
    for name in masks.masks:
        gone = model.get_parameter(name).detach()[~masks.kept(name)]
        assert torch.equal(gone, torch.zeros_like(gone)), f"{name} came back"
    assert masks.holds(model)


def assert_moved(model: nn.Module, before: dict[str, Tensor], masks: MaskPlan) -> None:
    for name in masks.masks:
        kept = masks.kept(name)
        moved = (model.get_parameter(name).detach() != before[name])[kept]
        assert moved.float().mean() > 0.5, f"{name} does not learn"


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def assert_keeps(model: nn.Module, masks: MaskPlan) -> None:
    """Trains as the hand-masked copy does."""
    reference = zeroed(released(model), masks)
    before = weights(model)
    for own, given in ((model, None), (reference, masks)):
        optimizer = sgd(own, momentum=0.9, weight_decay=0.01)
        for seed in range(3):
            step(own, optimizer, seed, given)
    assert_zero(model, masks)
    assert_moved(model, before, masks)
    assert_same_weights(model, reference)


def released(model: nn.Module) -> nn.Module:
    found = copy.deepcopy(model)
    if masks_of(found) is not None:
        release_(found)
    return found


# ------------------------------------------------------------------------------------------------ optimisers


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    never_zero: tuple[str, ...] = ()
    """State that starts, by the rule of the optimiser, above zero for a weight without gradients."""


CASES = [
    Case("SGD", torch.optim.SGD, {"lr": 0.1}),
    Case("SGD momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    Case("SGD dampening", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    Case("SGD nesterov", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Case("SGD decay", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    Case("SGD fused", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    Case("SGD foreach", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    Case("Adam", torch.optim.Adam, {"lr": 0.01}),
    Case("Adam decay", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    Case("Adam amsgrad", torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    Case("Adam fused", torch.optim.Adam, {"lr": 0.01, "fused": True}),
    Case("Adam foreach", torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    Case("AdamW", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    Case("AdamW amsgrad", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    Case("RMSprop", torch.optim.RMSprop, {"lr": 0.01}),
    Case("RMSprop centred", torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    Case("Adagrad", torch.optim.Adagrad, {"lr": 0.01, "weight_decay": 0.1}),
    Case("Adadelta", torch.optim.Adadelta, {"lr": 1.0}),
    Case("NAdam", torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    Case("NAdam decoupled", torch.optim.NAdam, {"decoupled_weight_decay": True}),
    Case("RAdam", torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    # max(β·u, |g| + ε): ε where there is no gradient
    Case("Adamax", torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}, ("exp_inf",)),
    Case("ASGD", torch.optim.ASGD, {"lr": 0.1, "t0": 1, "weight_decay": 0.1}),
    # a length of step, which is no movement
    Case("Rprop", torch.optim.Rprop, {"lr": 0.01}, ("step_size",)),
    Case("Adafactor", torch.optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
]
MIXING = [
    Case("Muon", torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    Case("Muon plain", torch.optim.Muon, {"lr": 0.02, "nesterov": False, "momentum": 0.5}),
    Case("LBFGS", torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4}),
    Case("LBFGS searching", torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
]
every_optimiser = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
mixing_optimiser = pytest.mark.parametrize("case", MIXING, ids=lambda case: case.id)


def test_every_optimiser_of_torch_is_tried() -> None:
    """All but SparseAdam, which takes sparse gradients alone."""
    there = {
        own
        for own in vars(torch.optim).values()
        if inspect.isclass(own) and issubclass(own, Optimizer) and own is not Optimizer
    }
    assert there - {torch.optim.SparseAdam} == {case.make for case in (*CASES, *MIXING)}


def assert_state_zero(optimizer: Optimizer, model: nn.Module, masks: MaskPlan, case: Case) -> int:
    """How many entries of the state have the shape of their weight."""
    seen = 0
    for name in masks.masks:
        parameter = model.get_parameter(name)
        for key, own in optimizer.state.get(parameter, {}).items():
            if isinstance(own, Tensor) and own.shape == parameter.shape and own.ndim:
                seen += 1
                gone = own[~masks.kept(name)]
                if key not in case.never_zero:
                    assert torch.equal(gone, torch.zeros_like(gone)), f"{key} of {name} is not zero"
    return seen


@every_optimiser
def test_what_is_gone_stays_gone_under(case: Case) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    before = weights(model)
    optimizer = case.make(model.parameters(), **case.options)
    other = case.make(reference.parameters(), **case.options)
    for seed in range(STEPS):
        step(model, optimizer, seed)
        step(reference, other, seed, masks)
        assert_zero(model, masks)
        assert_state_zero(optimizer, model, masks, case)
    assert_moved(model, before, masks)
    assert_same_weights(model, reference)
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], **exactly)


@every_optimiser
def test_a_kept_model_with_a_masked_optimiser_trains_alike(case: Case) -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    optimizer = case.make(model.parameters(), **case.options)
    mask_optimizer_(optimizer, model)
    other = case.make(reference.parameters(), **case.options)
    for seed in range(STEPS):
        step(model, optimizer, seed)
        step(reference, other, seed, masks)
    assert_zero(model, masks)
    assert_same_weights(model, reference)


@mixing_optimiser
def test_what_is_gone_stays_gone_under_a_mixing_optimiser(case: Case) -> None:
    dense = matrices()
    masks = random_plan(dense, 1)
    model, reference = mask(dense, masks), zeroed(dense, masks)
    before = weights(model)
    optimizer = case.make(model.parameters(), **case.options)
    mask_optimizer_(optimizer, model)
    other = case.make(reference.parameters(), **case.options)
    for seed in range(STEPS):
        step(model, optimizer, seed)
        step(reference, other, seed, masks)
        zero_(reference, masks)
        assert_zero(model, masks)
        assert_state_zero(optimizer, model, masks, case)
    assert_moved(model, before, masks)
    assert_same_weights(model, reference)


def test_muon_mixes_so_that_the_oracle_can_fail() -> None:
    dense = matrices()
    masks = random_plan(dense, 1)
    reference = zeroed(dense, masks)
    step(reference, torch.optim.Muon(reference.parameters(), lr=0.02), 0, masks)
    assert not masks.holds(reference)


@pytest.mark.parametrize("case", [*CASES, *MIXING], ids=lambda case: case.id)
def test_a_trained_optimiser_forgets_what_is_gone(case: Case) -> None:
    """Masked in place after training: its momentum would bring every weight back."""
    model = matrices() if case in MIXING else network()
    optimizer = case.make(model.parameters(), **case.options)
    for seed in range(3):
        step(model, optimizer, seed)
    masks = random_plan(model, 1)
    dense_state = {
        id(parameter): {key: own.clone() for key, own in state.items() if isinstance(own, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    mask_(model, masks)
    mask_optimizer_(optimizer, model)
    assert_zero(model, masks)
    assert_state_zero(optimizer, model, masks, case)
    for name in masks.masks:
        parameter = model.get_parameter(name)
        for key, own in optimizer.state.get(parameter, {}).items():
            if isinstance(own, Tensor) and own.shape == parameter.shape:
                was, kept = dense_state[id(parameter)][key], masks.kept(name)
                torch.testing.assert_close(own[kept], was[kept], **exactly)
    before = weights(model)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        assert_zero(model, masks)
        assert_state_zero(optimizer, model, masks, case)
    assert_moved(model, before, masks)


def test_contaminated_momentum_would_bring_weights_back() -> None:
    """What the test above guards against."""
    model = network()
    optimizer = sgd(model, momentum=0.9)
    step(model, optimizer, 0)
    masks = random_plan(model, 1)
    zero_(model, masks)
    step(model, optimizer, 1, masks)
    assert not masks.holds(model)


def test_masking_an_optimiser_twice_is_harmless() -> None:
    model = network()
    masks = random_plan(model, 1)
    mask_(model, masks)
    reference = zeroed(released(model), masks)
    optimizer, other = sgd(model, momentum=0.9), sgd(reference, momentum=0.9)
    mask_optimizer_(optimizer, model)
    mask_optimizer_(optimizer, model)
    for seed in range(3):
        step(model, optimizer, seed)
        step(reference, other, seed, masks)
    assert_same_weights(model, reference)
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()


def test_a_masked_optimiser_follows_the_masks_of_its_model() -> None:
    dense = matrices()
    first, second = random_plan(dense, 1), random_plan(dense, 2)
    model = mask(dense, first)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    mask_optimizer_(optimizer, model)
    step(model, optimizer, 0)
    mask_(model, second)
    step(model, optimizer, 1)
    assert_zero(model, second)
    assert not first.holds(model)
    release_(model)
    step(model, optimizer, 2)
    assert not second.holds(model)


def test_a_masked_optimiser_takes_other_masks_when_asked_again() -> None:
    """Between two stages: what only the first masks removed learns again."""
    dense = matrices()
    first, second = random_plan(dense, 1), random_plan(dense, 2)
    model = mask(dense, first)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    mask_optimizer_(optimizer, model)
    step(model, optimizer, 0)
    mask_(model, second)
    mask_optimizer_(optimizer, model)
    for seed in range(1, 3):
        step(model, optimizer, seed)
        assert_zero(model, second)
    for name in first.masks:
        back = second.kept(name) & ~first.kept(name)
        assert (model.get_parameter(name)[back] != 0).float().mean() > 0.5


def test_a_dense_state_loaded_into_a_masked_optimiser_brings_nothing_back() -> None:
    dense = network()
    masks = random_plan(dense, 1)
    model = mask(dense, masks)
    trained = sgd(dense, momentum=0.9)
    step(dense, trained, 0)
    optimizer = sgd(model, momentum=0.9)
    mask_optimizer_(optimizer, model)
    optimizer.load_state_dict(trained.state_dict())
    for seed in range(1, 3):
        step(model, optimizer, seed)
        assert_zero(model, masks)
        assert_state_zero(optimizer, model, masks, CASES[0])


def test_several_groups_of_parameters_are_all_masked() -> None:
    model = network()
    masks = random_plan(model, 1)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.5}],
        lr=0.1,
        momentum=0.9,
    )
    step(model, optimizer, 0)
    mask_(model, masks)
    mask_optimizer_(optimizer, model)
    for seed in range(1, 4):
        step(model, optimizer, seed)
    assert_zero(model, masks)


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


# ------------------------------------------------------------------------------------------------ copies and files


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


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


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


# ------------------------------------------------------------------------------------------------ cuts and optimisers


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


def test_an_optimiser_of_another_model_is_refused() -> None:
    dense = network()
    model = mask(dense, random_plan(dense, 1))
    with pytest.raises(ConfigError, match="trains none of the"):
        mask_optimizer_(torch.optim.SGD(dense.parameters(), 0.1), model)
    with pytest.raises(ConfigError, match="which keeps none"):
        mask_optimizer_(torch.optim.SGD(dense.parameters(), 0.1), dense)


def test_an_optimiser_is_told_once() -> None:
    dense = network()
    model = mask(dense, random_plan(dense, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        mask_optimizer_(optimizer, model)
    assert len(optimizer._optimizer_step_post_hooks) == 1
