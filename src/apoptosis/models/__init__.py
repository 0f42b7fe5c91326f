"""Named networks, built with random weights drawn from a seed. Knows nothing of data or pruning."""

from apoptosis.models.digits_cnn import ConvNormAct, DigitsCNN, digits_cnn
from apoptosis.models.resnet_cifar import (
    BasicBlock,
    CifarResNet,
    PadShortcut,
    resnet20,
    resnet32,
    resnet56,
)

__all__ = [
    "BasicBlock",
    "CifarResNet",
    "ConvNormAct",
    "DigitsCNN",
    "PadShortcut",
    "digits_cnn",
    "resnet20",
    "resnet32",
    "resnet56",
]
