"""Data and weights that are not in the repository: where they may lie, and a skip that says what is missing.

Looked for in `data/` and in a folder `shared/data` beside the repository. No claim rests on them alone: they show that
weights from elsewhere load under their own names, and compute what they were trained for.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["cifar10_test_images", "public_weights"]

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "data", ROOT / "data" / "weights", ROOT.parent / "shared" / "data" / "weights")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def public_weights(name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    return load_file(_found(f"{name}.safetensors"))


def cifar10_test_images(number: int) -> tuple[Tensor, Tensor]:
    """The first test images, normalised with ImageNet's mean and deviation, and their labels."""
    with np.load(_found("cifar10.npz")) as arrays:
        images, labels = arrays["x_test"][:number], arrays["y_test"][:number]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    return (x - mean) / std, torch.from_numpy(labels).long()


def _found(name: str) -> Path:
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not there; it is not part of the repository")
