from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from apoptosis.errors import ConfigError
from apoptosis.models import PadShortcut, resnet20, resnet32, resnet56
from apoptosis.structure import cut, trace, zero
from oracles.public_files import cifar10_test_images, public_weights

PUBLIC = [(resnet20, "cifar10_resnet20", 0.9173), (resnet32, "cifar10_resnet32", 0.9263)]


@pytest.mark.parametrize(("make", "depth"), [(resnet20, 20), (resnet32, 32), (resnet56, 56)])
def test_the_name_counts_layers_with_weights_on_the_longest_path(make, depth):
    layers = [m for m in make(width=2).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert (
        len([m for m in layers if not (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1))])
        == depth
    )


def test_the_pad_places_every_second_pixel_between_zeros():
    x = torch.randn(2, 4, 6, 6)
    y = PadShortcut(4, 9)(x)
    assert y.shape == (2, 9, 3, 3)
    for c in range(9):
        expected = x[:, c - 2, ::2, ::2] if 2 <= c < 6 else torch.zeros(2, 3, 3)
        assert torch.equal(y[:, c], expected)


def test_a_padded_shortcut_has_no_weights():
    assert not any("shortcut" in name for name in resnet20(width=2, shortcut="pad").state_dict())
    assert sum("shortcut.0.weight" in name for name in resnet20(width=2).state_dict()) == 2


def test_a_block_adds_its_input_to_its_branch():
    model = resnet20(width=4, shortcut="pad").eval()
    x = torch.randn(2, 4, 8, 8)
    block = model.layer2[0]
    nn.init.zeros_(block.bn2.weight)
    assert_close(block(x), F.relu(PadShortcut(4, 8)(x)))


def test_an_unknown_shortcut_is_refused():
    with pytest.raises(ConfigError, match="'conv' and 'pad'"):
        resnet20(shortcut="none")  # type: ignore[arg-type]


def test_padded_streams_lie_inside_each_other():
    """Channel c of stage 1 is channel c + 2 of stage 2 and c + 6 of stage 3; what a stage adds is a group per side."""
    structure = trace(resnet20(width=4, shortcut="pad"), torch.zeros(1, 3, 32, 32))
    streams = {g.name: g.size for g in structure.groups if g.kind == "stream"}
    assert streams == {
        "conv1": 4,
        "layer2.0.conv2": 2,
        "layer2.0.conv2#2": 2,
        "layer3.0.conv2": 4,
        "layer3.0.conv2#2": 4,
    }
    rows = {s.tensor: s.indices[1] for s in structure["conv1"].slices if s.dim == 0}
    assert list(rows["conv1.weight"]) == [1]
    assert list(rows["layer2.0.conv2.weight"]) == [3]
    assert list(rows["layer3.0.conv2.weight"]) == [7]


def test_cutting_one_side_changes_that_side_of_the_pad():
    model = resnet20(width=4, shortcut="pad").eval()
    structure = trace(model, torch.zeros(1, 3, 32, 32))
    plan = structure.plan({"layer2.0.conv2": [1], "layer3.0.conv2#2": [0, 3], "conv1": [0, 2, 3]})
    assert plan.delivery == "module", plan.delivery_because
    small = cut(model, plan)
    assert type(small) is type(model)
    pads = [small.layer2[0].shortcut, small.layer3[0].shortcut]
    assert [(pad.before, pad.after) for pad in pads] == [(1, 2), (4, 2)]
    x = torch.randn(2, 3, 32, 32)
    assert_close(small(x), zero(model, plan)(x))


@pytest.mark.parametrize(("make", "name", "accuracy"), PUBLIC, ids=[name for _, name, _ in PUBLIC])
def test_public_weights_load_and_reach_their_accuracy(make, name, accuracy):
    model = make(width=16, shortcut="pad").eval()
    model.load_state_dict(public_weights(name), strict=True)
    images, labels = cifar10_test_images(500)
    with torch.no_grad():
        reached = (model(images).argmax(1) == labels).double().mean().item()
    deviation = sqrt(accuracy * (1 - accuracy) / len(labels))
    assert abs(reached - accuracy) < 3 * deviation
