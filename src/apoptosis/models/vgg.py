"""VGG-19 with batch norm for 32×32 images: sixteen 3×3 convolutions and one linear layer (Simonyan & Zisserman, 2015).

    image ─ 2 × w ─ 2 × 2w ─ 4 × 4w ─ 4 × 8w ─ 4 × 8w ─ mean over pixels ─ classifier ─ logits

Between stages a maximum over 2×2 pixels, so that the last one sees 2×2. This is the form of pruning papers: the norms
make biases of convolutions idle, and one linear layer stands for the three of the original.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from apoptosis.models.weights import he_normal_, seeded

__all__ = ["VGG19", "vgg19_bn"]

_STAGES = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))
"""Convolutions of each stage, and their channels in units of the width."""


class VGG19(nn.Module):
    """The network of the module docstring."""

    def __init__(self, *, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(*_layers(width))
        self.classifier = nn.Linear(_STAGES[-1][1] * width, num_classes)
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, 32, 32)`."""
        return self.classifier(self.features(images).mean((2, 3)))


def _layers(width: int) -> Iterator[nn.Module]:
    inputs = 3
    for stage, (num_convs, factor) in enumerate(_STAGES):
        if stage:
            yield nn.MaxPool2d(2)
        for _ in range(num_convs):
            outputs = factor * width
            yield nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            yield nn.BatchNorm2d(outputs)
            yield nn.ReLU()
            inputs = outputs


def vgg19_bn(*, num_classes: int = 10, width: int = 64, seed: int = 0) -> VGG19:
    """A new network with `width` channels in its first stage; `seed` alone sets its weights.

    >>> sum(p.numel() for p in vgg19_bn().parameters())
    20035018
    """
    with seeded(seed):
        return VGG19(num_classes=num_classes, width=width)
