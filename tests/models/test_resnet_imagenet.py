import pytest
import torch
from torch import nn
from torch.testing import assert_close

from apoptosis.errors import ConfigError
from apoptosis.models import resnet50
from apoptosis.structure import trace
from oracles.library import define_torchvision_ops
from oracles.public_files import public_weights


def torchvision_resnet50(*, stride_on: str) -> nn.Module:
    define_torchvision_ops()
    from torchvision.models import resnet50 as theirs

    model = theirs(weights=None)
    for block in model.modules():
        if hasattr(block, "conv3") and stride_on == "1x1":
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return model


@pytest.mark.parametrize("stride_on", ["3x3", "1x1"])
def test_logits_are_those_of_torchvision(stride_on):
    theirs = torchvision_resnet50(stride_on=stride_on).double().eval()
    with torch.device("meta"):
        ours = resnet50(stride_on=stride_on).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=True)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)


def test_a_stride_on_the_first_convolution_costs_less():
    """3.86 G MACs of the paper's network against 4.09 G."""
    with torch.device("meta"):
        x = torch.zeros(1, 3, 224, 224)
        costs = {on: trace(resnet50(stride_on=on), x).macs() for on in ("1x1", "3x3")}
    assert costs == {"1x1": 3857973248, "3x3": 4089184256}


def test_an_unknown_place_of_the_stride_is_refused():
    with pytest.raises(ConfigError, match="'3x3' or '1x1'"):
        resnet50(stride_on="5x5")  # type: ignore[arg-type]


def test_public_weights_load():
    with torch.device("meta"):
        model = resnet50(stride_on="1x1")
    model.load_state_dict(public_weights("imagenet_resnet50_v1"), strict=True, assign=True)
