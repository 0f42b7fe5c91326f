"""The table against figures that others published, and against what its entries promise."""

from dataclasses import dataclass

import pytest
import torch

import apoptosis.models
from apoptosis.models import MODELS
from apoptosis.structure import Structure, trace


@dataclass(frozen=True)
class Published:
    """Millions, as printed: the last digit is half a unit exact."""

    name: str
    params: str
    macs: str = ""


PUBLISHED = [
    Published("mlp", "0.267"),  # LeNet-300-100
    Published("vgg19_bn", "20.04", "398"),
    Published("resnet20", "4.33"),  # wide: EigenDamage
    Published("resnet32", "7.43"),
    Published("resnet20_narrow", "0.27", "40.6"),  # He et al.; MACs: FPGM
    Published("resnet32_narrow", "0.46", "68.9"),
    Published("resnet56_narrow", "0.85", "125"),
    Published("resnet50", "25.557", "4089"),  # torchvision
    Published("vit_tiny16", "5.717"),  # timm
    Published("vit_b16", "86.57", "17564"),  # torchvision
]


def on_meta(name: str) -> Structure:
    with torch.device("meta"):
        return trace(MODELS[name].make(), torch.zeros(MODELS[name].input_shape))


def half_a_unit(printed: str) -> float:
    digits = len(printed.partition(".")[2])
    return 0.5 * 10.0**-digits + 1e-9


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda figure: figure.name)
def test_costs_are_the_published_ones(figure: Published):
    structure = on_meta(figure.name)
    assert structure.params() / 1e6 == pytest.approx(
        float(figure.params), rel=0, abs=half_a_unit(figure.params)
    )
    if figure.macs:
        assert structure.macs() / 1e6 == pytest.approx(
            float(figure.macs), rel=0, abs=half_a_unit(figure.macs)
        )


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_runs_on_its_own_input(name: str):
    entry = MODELS[name]
    assert entry.name == name
    with torch.device("meta"):
        logits = entry.make().eval()(torch.zeros(entry.input_shape))
    assert logits.ndim == 2
    assert len(logits) == 1


@pytest.mark.parametrize("name", MODELS)
def test_every_group_has_a_rule_and_only_layer_norm_makes_one_inexact(name: str):
    structure = on_meta(name)
    assert not structure.without_rule
    assert not structure.unused
    assert not structure.ties
    inexact = [group for group in structure.groups if not group.exact]
    assert all("LayerNorm" in group.inexact_because for group in inexact)
    assert len(inexact) == ("vit" in name)
    assert {pin.reason for pin in structure.pinned} <= {
        "it is an input of the model",
        "it is an output of the model",
    }


def test_the_front_door_is_sorted_and_complete():
    names = apoptosis.models.__all__
    assert names == sorted(names, key=lambda n: (not n.isupper(), n[0].islower(), n))
    assert all(hasattr(apoptosis.models, name) for name in names)
