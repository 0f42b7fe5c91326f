"""Making tiny models and batches that are the same in every run and degenerate nowhere."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oracles.evaluation import seeded

__all__ = ["Net", "built", "images", "randomise_", "rows", "tokens"]

CLASSES = 3


class Net(nn.Module):
    """A module made of parts and a function: `Net(lambda m, x: m.b(m.a(x)), a=..., b=...)`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        """Keep the function; register parameters and modules by name."""
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function says."""
        return self.function(self, *args, **kwargs)


def built(make: Callable[[], nn.Module], *, seed: int = 1, train: bool = False) -> nn.Module:
    """The model from a fixed seed, in float64, with norms, biases and buffers away from ones and zeros."""
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make().double().train(train)
        randomise_(model)
    return model


def randomise_(model: nn.Module) -> None:
    """Move everything that is initialised to a constant off it; statistics of norms become plausible ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and _constant(parameter):
                centre = parameter.flatten()[0].clamp(-1, 1) if parameter.numel() else 0.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, dtype=torch.float64))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_().mul_(0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def rows(
    num: int = 5, width: int = 4, *, seed: int = 2, classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    """A batch of vectors with labels."""
    return _batch((num, width), seed, classes)


def images(
    num: int = 3, channels: int = 2, size: int = 6, *, seed: int = 3, classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    """A batch of square images with labels."""
    return _batch((num, channels, size, size), seed, classes)


def sequences(
    num: int = 3, length: int = 4, width: int = 6, *, seed: int = 4
) -> tuple[Tensor, Tensor]:
    """A batch of sequences of vectors, one label each."""
    return _batch((num, length, width), seed, CLASSES)


def tokens(
    num: int = 3, length: int = 5, *, words: int = 7, seed: int = 5
) -> tuple[Tensor, Tensor]:
    """A batch of token ids, one label each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words, (num, length), generator=generator)
    return ids, torch.randint(CLASSES, (num,), generator=generator)


def _batch(shape: tuple[int, ...], seed: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (shape[0],), generator=generator)


def _constant(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())
