"""Residual networks for 32×32 images: three stages of basic blocks, 6n + 2 layers (He et al., 2016, section 4.2).

    image ─ conv1 ─ layer1 (w, 32×32) ─ layer2 (2w, 16×16) ─ layer3 (4w, 8×8) ─ mean over pixels ─ linear ─ logits

A block adds two 3×3 convolutions to its input. Where a stage halves the image and doubles the channels, the input has
to follow. Two ways are in use, and published networks differ in them:

- `shortcut="conv"`: a 1×1 convolution and a norm. With w = 64 this is the wide network of pruning papers.
- `shortcut="pad"`, option A: every second pixel, and zeros around the channels. No weights. With w = 16 this is the
  network of He et al., and parameters are named as in the weights that circulate for it.

Option A makes the streams of the stages one inside the other: channel c of stage 1 is channel c + w/2 of stage 2.
Zeros to add are therefore held as two integers: cutting channels that only a later stage has changes these and
nothing else.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.models.weights import he_normal_, seeded

__all__ = [
    "BasicBlock",
    "CifarResNet",
    "PadShortcut",
    "Shortcut",
    "resnet20",
    "resnet32",
    "resnet56",
]

Shortcut = Literal["conv", "pad"]


class PadShortcut(nn.Module):
    """Option A: every second pixel, with `before` and `after` channels of zeros around its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """`(n, inputs, h, w)` to `(n, outputs, h/2, w/2)`."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with norms, added to the input or to what a shortcut makes of it."""

    def __init__(self, inputs: int, outputs: int, *, shortcut: Shortcut) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """`(n, inputs, h, w)` to `(n, outputs, h/stride, w/stride)`."""
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(branch + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, kind: Shortcut) -> nn.Module:
    if inputs == outputs:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(inputs, outputs)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs)
    )


class CifarResNet(nn.Module):
    """The network of the module docstring, with `num_blocks` blocks in each stage."""

    def __init__(
        self, num_blocks: int, *, num_classes: int = 10, width: int = 64, shortcut: Shortcut
    ) -> None:
        super().__init__()
        if shortcut not in ("conv", "pad"):
            raise ConfigError(f"There is no shortcut {shortcut!r}. Known are 'conv' and 'pad'.")

        def stage(inputs: int, outputs: int) -> nn.Sequential:
            widths = [inputs] + [outputs] * num_blocks
            pairs = zip(widths, widths[1:], strict=False)
            return nn.Sequential(*(BasicBlock(a, b, shortcut=shortcut) for a, b in pairs))

        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width)
        self.layer2 = stage(width, 2 * width)
        self.layer3 = stage(2 * width, 4 * width)
        self.linear = nn.Linear(4 * width, num_classes)
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, 32, 32)`."""
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20(
    *, num_classes: int = 10, width: int = 64, shortcut: Shortcut = "conv", seed: int = 0
) -> CifarResNet:
    """A new network of 20 layers, with `width` channels in its first stage; `seed` alone sets its weights.

    >>> sum(p.numel() for p in resnet20(width=16, shortcut="pad").parameters())
    269722
    """
    with seeded(seed):
        return CifarResNet(3, num_classes=num_classes, width=width, shortcut=shortcut)


def resnet32(
    *, num_classes: int = 10, width: int = 64, shortcut: Shortcut = "conv", seed: int = 0
) -> CifarResNet:
    """A new network of 32 layers, with `width` channels in its first stage; `seed` alone sets its weights.

    >>> sum(p.numel() for p in resnet32().parameters())
    7427914
    """
    with seeded(seed):
        return CifarResNet(5, num_classes=num_classes, width=width, shortcut=shortcut)


def resnet56(
    *, num_classes: int = 10, width: int = 64, shortcut: Shortcut = "conv", seed: int = 0
) -> CifarResNet:
    """A new network of 56 layers, with `width` channels in its first stage; `seed` alone sets its weights.

    >>> sum(p.numel() for p in resnet56(width=16, shortcut="pad").parameters())
    853018
    """
    with seeded(seed):
        return CifarResNet(9, num_classes=num_classes, width=width, shortcut=shortcut)
