"""Linear layers with ReLUs between, for vectors or for images read pixel by pixel.

The sizes of LeNet-300-100 (LeCun et al., 1998) are the default: what much of the early work on pruning was tried on.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.models.weights import seeded

__all__ = ["MLP", "mlp"]


class MLP(nn.Module):
    """`sizes` are those of the input, of every hidden layer, and of the output."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ConfigError(
                f"An MLP was asked for with sizes {tuple(sizes)}; it needs those of its input and its output at least."
            )
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, outputs)` of `(n, inputs)`, or of anything that has as many numbers per sample."""
        x = x.flatten(1)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


def mlp(sizes: Sequence[int] = (784, 300, 100, 10), *, seed: int = 0) -> MLP:
    """A new network with layers of those sizes, input and output included; `seed` alone sets its weights.

    >>> sum(p.numel() for p in mlp().parameters())
    266610
    """
    with seeded(seed):
        return MLP(sizes)
