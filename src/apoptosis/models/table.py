"""The table of networks: what the command line, the documentation and the tests know them by."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from apoptosis.models.digits_cnn import digits_cnn
from apoptosis.models.mlp import mlp
from apoptosis.models.resnet_cifar import resnet20, resnet32, resnet56
from apoptosis.models.resnet_imagenet import resnet50
from apoptosis.models.vgg import vgg19_bn
from apoptosis.models.vit import cifar_vit, vit_b16, vit_tiny16

__all__ = ["MODELS", "ModelEntry"]


@dataclass(frozen=True)
class ModelEntry:
    """A network with its options settled, and the shape of one input to run it on, a batch of one."""

    name: str
    summary: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


_CIFAR, _IMAGENET = (1, 3, 32, 32), (1, 3, 224, 224)

_narrow20 = partial(resnet20, width=16, shortcut="pad")
_narrow32 = partial(resnet32, width=16, shortcut="pad")
_narrow56 = partial(resnet56, width=16, shortcut="pad")

_ENTRIES = (
    ModelEntry("digits_cnn", "four convolutions, for 8×8 digits", digits_cnn, (1, 1, 8, 8)),
    ModelEntry("mlp", "LeNet-300-100, for 28×28 digits", mlp, (1, 1, 28, 28)),
    ModelEntry("vgg19_bn", "VGG-19 with batch norm, for CIFAR", vgg19_bn, _CIFAR),
    ModelEntry("resnet20", "ResNet-20 of width 64, for CIFAR", resnet20, _CIFAR),
    ModelEntry("resnet32", "ResNet-32 of width 64, for CIFAR", resnet32, _CIFAR),
    ModelEntry("resnet56", "ResNet-56 of width 64, for CIFAR", resnet56, _CIFAR),
    ModelEntry("resnet20_narrow", "ResNet-20 of He et al., for CIFAR", _narrow20, _CIFAR),
    ModelEntry("resnet32_narrow", "ResNet-32 of He et al., for CIFAR", _narrow32, _CIFAR),
    ModelEntry("resnet56_narrow", "ResNet-56 of He et al., for CIFAR", _narrow56, _CIFAR),
    ModelEntry("resnet50", "ResNet-50 as in torchvision, for ImageNet", resnet50, _IMAGENET),
    ModelEntry("cifar_vit", "a small vision transformer, for CIFAR", cifar_vit, _CIFAR),
    ModelEntry("vit_tiny16", "ViT-tiny/16, for ImageNet", vit_tiny16, _IMAGENET),
    ModelEntry("vit_b16", "ViT-B/16, for ImageNet", vit_b16, _IMAGENET),
)

MODELS = MappingProxyType({entry.name: entry for entry in _ENTRIES})
