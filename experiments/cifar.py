"""CIFAR-10 for the experiments on public narrow networks: draws of training images, two halves of the test set.

The public networks saw all training images. Scores are taken on draws of 2,000 of them; choices are made on test images
0–4,999 (`choose`), figures reported on 5,000–9,999 (`report`). One small file holds what is needed:

    python experiments/cifar.py data/cifar10.npz data/carry/draws.npz
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from apoptosis.data import Batches
from apoptosis.models import CifarResNet, resnet20, resnet32, resnet56

__all__ = ["DRAWS", "DRAW_SIZE", "Cifar", "load_cifar", "public_network"]

DRAWS = (0, 1, 2)
DRAW_SIZE = 2000
Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]
STATISTICS: dict[str, Statistics] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and deviation of each channel that a network saw images with: the public ones ImageNet's, ours their own."""


@dataclass(frozen=True)
class Cifar:
    """Normalised images `(n, 3, 32, 32)` and labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def draw(self, number: int, size: int = 500) -> Batches:
        """The scoring images of one draw."""
        rows = slice(DRAW_SIZE * number, DRAW_SIZE * (number + 1))
        return Batches(self.train[0][rows], self.train[1][rows], size=size)

    def choose(self, size: int = 1000) -> Batches:
        """Test images 0–4,999, for choices."""
        return Batches(self.test[0][:5000], self.test[1][:5000], size=size)

    def report(self, size: int = 1000) -> Batches:
        """Test images 5,000–9,999, for figures."""
        return Batches(self.test[0][5000:], self.test[1][5000:], size=size)


def load_cifar(
    path: Path | str = "data/carry/draws.npz", device: str = "cpu", statistics: str = "imagenet"
) -> Cifar:
    held = np.load(path)

    def part(name: str) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(held[f"x_{name}"]).to(device).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in STATISTICS[statistics])
        return (pixels - mean) / std, torch.from_numpy(held[f"y_{name}"]).to(device).long()

    return Cifar(part("train"), part("test"))


def public_network(depth: int, folder: Path | str, device: str = "cpu") -> CifarResNet:
    """A public narrow network in eval mode."""
    make = {20: resnet20, 32: resnet32, 56: resnet56}[depth]
    model = make(width=16, shortcut="pad")
    model.load_state_dict(load_file(Path(folder) / f"cifar10_resnet{depth}.safetensors"))
    return model.to(device).eval()


def _write_draws(source: str, target: str) -> None:
    held = np.load(source)
    rows = np.random.default_rng(0).permutation(50_000)[: DRAW_SIZE * len(DRAWS)]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        target,
        x_train=held["x_train"][rows],
        y_train=held["y_train"][rows],
        x_test=held["x_test"],
        y_test=held["y_test"],
    )


if __name__ == "__main__":
    _write_draws(*sys.argv[1:3])
