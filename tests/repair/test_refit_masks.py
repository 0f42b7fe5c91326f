"""Masked layers: rows are fitted on the weights that they have, and masks stay."""

import pytest
import torch
from torch import nn

from apoptosis.masks import Mask, MaskPlan, identity_masks, mask, masks_of
from apoptosis.repair import Refit
from apoptosis.repair.normal_equations import RIDGES
from oracles.building import built
from oracles.masked_networks import random_masks
from oracles.refitted import CLOSE, error, halved, normal, unlabelled
from oracles.shrinking import small_case

pytestmark = pytest.mark.usefixtures("way")
"""Every claim holds on both ways through the networks."""


def test_masked_weights_stay_zero_and_the_others_are_least_squares():
    model, x = small_case("mlp").model(), normal(60, 4)
    masks = random_masks(model, 0.5)
    small = mask(model, masks)
    found = Refit(ridge=0.0, rounds=0)(model, small, masks, unlabelled(x))
    kept = masks_of(found)
    assert kept is not None
    for name, own in masks.masks.items():
        assert torch.equal(kept.masks[name].kept(), own.kept())
        assert not found.get_parameter(name)[~own.kept()].any()
    own = masks.masks["0.weight"].kept()
    with torch.no_grad():
        for row in range(8):
            rows = torch.cat([x[:, own[row]], torch.ones(60, 1).double()], 1)
            want = torch.linalg.lstsq(rows, model[0](x)[:, row, None]).solution[:, 0]
            torch.testing.assert_close(found[0].weight[row, own[row]], want[:-1], **CLOSE)
    assert error(found, model, x) < error(small, model, x)


def test_the_penalty_of_a_masked_layer_is_chosen_with_its_mask():
    """Two weights of each row are left, far fewer than samples; all thirty would learn these by heart."""
    model = built(lambda: nn.Linear(30, 5))
    x = normal(40, 4, seed=1) @ normal(4, 30, seed=2) + normal(40, 30)
    kept = torch.zeros(5, 30, dtype=torch.bool)
    kept[torch.arange(5), torch.arange(5)] = kept[torch.arange(5), torch.arange(5) + 9] = True
    plan = MaskPlan({"weight": Mask.of(["weight"], kept)}, identity_masks(model).fingerprint)
    small = mask(model, plan)
    found = Refit()(model, small, plan, unlabelled(x))

    def missed(ridge: float) -> float:
        total = 0.0
        with torch.no_grad():
            lacks = model(x) - small(x)
        for half in (0, 1):
            a, b = slice(half, None, 2), slice(1 - half, None, 2)
            size = (ridge * x[a].square().sum() / 30).sqrt()
            for row in range(5):
                read = torch.cat([x[:, kept[row]], x.new_ones(40, 1)], 1)
                penalty = size * torch.eye(2, 3).double()
                design = torch.cat([read[a], penalty])
                wanted = torch.cat([lacks[a, row], lacks.new_zeros(2)])
                change = torch.linalg.lstsq(design, wanted[:, None]).solution[:, 0]
                total += float((lacks[b, row] - read[b] @ change).square().sum())
        return total

    best = min(RIDGES[:-1], key=missed)
    want = Refit(ridge=best)(model, small, plan, unlabelled(x))
    torch.testing.assert_close(found.weight, want.weight, rtol=0, atol=0)
    assert found.weight.ne(small.weight).any()


def test_a_masked_network_that_was_cut_keeps_its_masks():
    model, x = small_case("residual").model(), small_case("residual").inputs(40)
    masked = mask(model, random_masks(model, 0.7))
    plan, small = halved(masked, x)
    found = Refit()(masked, small, plan, unlabelled(x))
    before, after = masks_of(small), masks_of(found)
    assert before is not None
    assert after is not None
    for name, own in before.masks.items():
        assert torch.equal(after.masks[name].kept(), own.kept()), name
        assert not found.get_parameter(name)[~own.kept()].any()
    assert error(found, masked, x) < error(small, masked, x)


def test_masks_of_a_model_that_is_a_layer_are_found():
    model = built(lambda: nn.Linear(4, 3))
    plan = MaskPlan(
        {"weight": Mask.of(["weight"], torch.eye(3, 4) > 0)}, identity_masks(model).fingerprint
    )
    found = Refit()(model, mask(model, plan), plan, unlabelled(normal(20, 4)))
    assert int((found.weight != 0).sum()) == 3
