"""Small networks trained under masks, and beside them copies whose gradients are masked by hand."""

import copy
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from apoptosis.masks import (
    MaskPlan,
    masks_of,
    release_,
)

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


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))
