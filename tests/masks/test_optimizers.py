"""Every optimiser of torch leaves removed weights, their momentum and their moments at zero."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apoptosis.errors import ConfigError
from apoptosis.masks import (
    MaskPlan,
    mask,
    mask_,
    mask_optimizer_,
    release_,
)
from oracles.mask_choice import random_plan
from oracles.masked_training import (
    STEPS,
    assert_moved,
    assert_same_weights,
    assert_zero,
    exactly,
    matrices,
    network,
    released,
    sgd,
    step,
    weights,
    zero_,
    zeroed,
)


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
