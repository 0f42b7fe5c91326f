"""A convolutional network for 8×8 grey images: four convolutions, one shortcut, about 17 thousand weights.

    image ─ stem ─┬─ side ─(+)─ down ─ top ─ mean over pixels ─ head ─ logits
                  └────────┘

Every stage is convolution, batch norm, ReLU. The shortcut and the norms' biases give paths of different length through
the network: without them first- and second-order scores would order weights alike (Euler's identity), and a demo would
have nothing to show.
"""

from torch import Tensor, nn

from apoptosis.models.weights import seeded

__all__ = ["ConvNormAct", "DigitsCNN", "digits_cnn"]


class ConvNormAct(nn.Module):
    """A 3×3 convolution, its batch norm and a ReLU: `(n, inputs, h, w)` to `(n, outputs, h/stride, w/stride)`."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Run the three in order."""
        return self.act(self.norm(self.conv(x)))


class DigitsCNN(nn.Module):
    """The network of the module docstring."""

    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvNormAct(1, width)
        self.side = ConvNormAct(width, width)
        self.down = ConvNormAct(width, 2 * width, stride=2)
        self.top = ConvNormAct(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 1, 8, 8)`."""
        x = self.stem(images)
        x = x + self.side(x)
        x = self.top(self.down(x))
        return self.head(x.mean((2, 3)))


def digits_cnn(*, width: int = 16, num_classes: int = 10, seed: int = 0) -> DigitsCNN:
    """A new network whose weights depend on `seed` alone; the global random state is left as it was.

    >>> sum(p.numel() for p in digits_cnn().parameters())
    16794
    """
    with seeded(seed):
        return DigitsCNN(width, num_classes)
