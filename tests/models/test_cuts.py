"""Every group of every family, cut: equal to its zeroed twin, delivered as the same class, at the cost foretold."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from apoptosis.models import ViTOptions, digits_cnn, mlp, resnet20, resnet50, vgg19_bn, vit
from apoptosis.structure import trace, verify
from oracles.cut_checks import check

SMALL_VIT = ViTOptions(image_size=8, patch_size=4, width=12, depth=2, num_heads=3, num_classes=5)


def short_resnet50() -> nn.Module:
    """One block in each of the first stages and two in the last: there are no other kinds of block."""
    model = resnet50(width=4, num_classes=3)
    for stage, length in ("layer1", 1), ("layer2", 1), ("layer3", 1), ("layer4", 2):
        setattr(model, stage, getattr(model, stage)[:length])
    return model


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_groups: int


CASES = [
    Case("digits_cnn", partial(digits_cnn, width=4), (1, 8, 8), 3),
    Case("mlp", partial(mlp, (12, 6, 5, 3)), (3, 2, 2), 2),
    Case("vgg19_bn", partial(vgg19_bn, width=2), (3, 16, 16), 16),
    Case("resnet conv", partial(resnet20, width=4), (3, 8, 8), 12),
    Case("resnet50", short_resnet50, (3, 32, 32), 15),
    Case("resnet pad", partial(resnet20, width=4, shortcut="pad"), (3, 8, 8), 14),
    Case("vit", partial(vit, SMALL_VIT), (3, 8, 8), 9),
]


@dataclass(frozen=True)
class Seed:
    seed: int = 0


class Subject:
    """What `cut_checks` asks of a network, in float64 and with norms that do something."""

    blueprint, batch, counted, einsum = Seed(), 2, True, False

    def __init__(self, case: Case) -> None:
        self.shape = case.shape
        self.model = case.make().double().eval()
        generator = torch.Generator().manual_seed(0)
        for norm in self.model.modules():
            if isinstance(norm, (nn.BatchNorm2d, nn.LayerNorm)):
                nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
                # Above zero, or most units of so narrow a network are dead and no cut of them shows.
                nn.init.uniform_(norm.bias, 0.2, 1.0, generator=generator)
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.running_mean, std=0.1, generator=generator)

    def inputs(self, batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, *self.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_cut_equals_its_twin_and_comes_as_the_same_class(case: Case):
    report = check(Subject(case), alone=1, joint=2)
    assert report.findings == []
    assert report.groups == case.num_groups
    assert report.tallies["module"] == report.tallies["plans"] >= case.num_groups
    assert report.tallies["cuts that change the output"] >= 0.9 * report.exact


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.id in ("resnet pad", "vit")], ids=lambda case: case.id
)
def test_verify_finds_nothing(case: Case):
    structure = trace(case.make(), torch.zeros(1, *case.shape))
    assert verify(structure).failed == {}


@pytest.mark.slow
def test_verify_finds_nothing_in_all_of_resnet50():
    structure = trace(resnet50(width=4, num_classes=3), torch.zeros(1, 3, 32, 32))
    assert len(structure.groups) == 37
    assert verify(structure).failed == {}
