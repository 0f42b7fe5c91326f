from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from apoptosis import models

SMALL = models.ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=3, num_classes=2)
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": partial(models.mlp, (6, 5, 2)),
    "vgg19_bn": partial(models.vgg19_bn, width=2),
    "resnet20": partial(models.resnet20, width=2),
    "resnet32": partial(models.resnet32, width=2),
    "resnet56": partial(models.resnet56, width=2, shortcut="pad"),
    "resnet50": partial(models.resnet50, width=2, num_classes=3),
    "vit": partial(models.vit, SMALL),
    "vit_tiny16": models.vit_tiny16,
    "cifar_vit": models.cifar_vit,
}


@pytest.mark.parametrize("name", MAKERS)
def test_weights_depend_on_the_seed_alone(name: str):
    before = torch.get_rng_state()
    same, again, other = (MAKERS[name](seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(same[key], again[key]) for key in same)
    drawn = [key for key in same if key.endswith("weight") and same[key].ndim > 1]
    assert drawn
    assert not any(torch.equal(same[key], other[key]) for key in drawn)


@pytest.mark.slow  # draws 87 million numbers three times
def test_weights_of_the_largest_depend_on_the_seed_alone():
    same, again, other = (models.vit_b16(seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_convolutions_start_with_the_spread_that_relus_need():
    conv = models.resnet20().layer3[1].conv1
    assert conv.weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("name", MAKERS)
def test_outputs_of_a_new_network_are_of_a_usable_size(name: str):
    shape = {"mlp": (4, 6), "vit": (4, 3, 8, 8), "vit_tiny16": (1, 3, 224, 224)}
    x = torch.randn(shape.get(name, (4, 3, 32, 32)), generator=torch.Generator().manual_seed(0))
    logits = MAKERS[name]()(x)
    assert logits.isfinite().all()
    assert 1e-3 < logits.std().item() < 30
