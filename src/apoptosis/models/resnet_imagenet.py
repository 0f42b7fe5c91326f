"""ResNet-50 for ImageNet: four stages of 3, 4, 6 and 3 bottleneck blocks (He et al., 2016).

    image ─ conv1 7×7 ─ max 3×3 ─ layer1 (256, 56×56) ─ … ─ layer4 (2048, 7×7) ─ mean over pixels ─ fc ─ logits

A bottleneck is a 1×1, a 3×3 and another 1×1 convolution, the last four times as wide. Which of the first two halves the
image differs between published weights, and nothing in their names or shapes tells: the paper has it on the 1×1,
torchvision ("v1.5") on the 3×3. Parameters are named as in torchvision.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.models.weights import he_normal_, seeded

__all__ = ["Bottleneck", "ResNet50", "StrideOn", "resnet50"]

StrideOn = Literal["3x3", "1x1"]

_EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with norms, added to the input or to a 1×1 convolution of it."""

    def __init__(
        self, inputs: int, width: int, *, stride: int = 1, stride_on: StrideOn = "3x3"
    ) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        first, second = (stride, 1) if stride_on == "1x1" else (1, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, second, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = (
            None
            if inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(n, inputs, h, w)` to `(n, 4 · width, h/stride, w/stride)`."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """The network of the module docstring; `width` is that of the first stage's 3×3 convolutions."""

    def __init__(
        self, *, num_classes: int = 1000, stride_on: StrideOn = "3x3", width: int = 64
    ) -> None:
        super().__init__()
        if stride_on not in ("3x3", "1x1"):
            raise ConfigError(
                f"The stride was asked for on {stride_on!r}; it can be on '3x3' or '1x1'."
            )

        def stage(number: int, num_blocks: int) -> nn.Sequential:
            own = width * 2**number
            before, stride = (_EXPANSION * own // 2, 2) if number else (width, 1)
            first = Bottleneck(before, own, stride=stride, stride_on=stride_on)
            rest = (Bottleneck(_EXPANSION * own, own) for _ in range(num_blocks - 1))
            return nn.Sequential(first, *rest)

        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(0, 3)
        self.layer2 = stage(1, 4)
        self.layer3 = stage(2, 6)
        self.layer4 = stage(3, 3)
        self.fc = nn.Linear(_EXPANSION * 8 * width, num_classes)
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, 224, 224)`; other sizes work as well."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def resnet50(
    *, num_classes: int = 1000, stride_on: StrideOn = "3x3", width: int = 64, seed: int = 0
) -> ResNet50:
    """A new ResNet-50; `seed` alone sets its weights.

    Args:
        num_classes: of the last layer.
        stride_on: the convolution that halves the image, `"3x3"` for torchvision's weights, `"1x1"` for the paper's.
        width: of the first stage's 3×3 convolutions; the others follow.
        seed: draws the weights.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in resnet50().parameters())
    25557032
    """
    with seeded(seed):
        return ResNet50(num_classes=num_classes, stride_on=stride_on, width=width)
