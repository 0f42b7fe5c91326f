"""Named networks, built with random weights drawn from a seed. Knows nothing of data or pruning.

One file per family; `table` lists what can be asked for by name. Whatever a forward pass needs to know of sizes is held
as an attribute of the module that uses it, so that a network with other sizes can still be one of these classes.
"""

from apoptosis.models.digits_cnn import ConvNormAct, DigitsCNN, digits_cnn
from apoptosis.models.mlp import MLP, mlp
from apoptosis.models.resnet_cifar import (
    BasicBlock,
    CifarResNet,
    PadShortcut,
    resnet20,
    resnet32,
    resnet56,
)
from apoptosis.models.resnet_imagenet import Bottleneck, ResNet50, resnet50
from apoptosis.models.table import MODELS, ModelEntry
from apoptosis.models.vgg import VGG19, vgg19_bn
from apoptosis.models.vit import (
    Attention,
    EncoderBlock,
    MLPBlock,
    PatchEmbed,
    ViT,
    ViTOptions,
    cifar_vit,
    vit,
    vit_b16,
    vit_tiny16,
)

__all__ = [
    "MLP",
    "MODELS",
    "VGG19",
    "Attention",
    "BasicBlock",
    "Bottleneck",
    "CifarResNet",
    "ConvNormAct",
    "DigitsCNN",
    "EncoderBlock",
    "MLPBlock",
    "ModelEntry",
    "PadShortcut",
    "PatchEmbed",
    "ResNet50",
    "ViT",
    "ViTOptions",
    "cifar_vit",
    "digits_cnn",
    "mlp",
    "resnet20",
    "resnet32",
    "resnet50",
    "resnet56",
    "vgg19_bn",
    "vit",
    "vit_b16",
    "vit_tiny16",
]
