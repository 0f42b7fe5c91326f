import torch
from torch import nn

from apoptosis.models import vgg19_bn


def test_width_scales_the_published_channels():
    convs = [m for m in vgg19_bn(width=2).modules() if isinstance(m, nn.Conv2d)]
    published = [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    assert [32 * conv.out_channels for conv in convs] == published
    assert all(conv.bias is None for conv in convs)


def test_the_last_stage_sees_two_by_two_pixels():
    model = vgg19_bn(width=2, num_classes=7)
    assert model.features(torch.randn(3, 3, 32, 32)).shape == (3, 16, 2, 2)
    assert model(torch.randn(3, 3, 32, 32)).shape == (3, 7)
