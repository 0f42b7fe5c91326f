"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32×32 pixels, in colour.

They are read from what people have on their disks:

    cifar10.npz               arrays x_train, y_train, x_test, y_test; images as bytes, channels last
    cifar-10-batches-py/      what the authors hand out, unpacked; or the folder that holds it
    cifar-10-python.tar.gz    the same, as it was downloaded; nothing is unpacked to disk

and likewise for cifar100, cifar-100-python. Nothing in a file is ever run (safe_pickles.py).

Validation images are drawn from the training images by a seed, never from the test images; training images stand in
drawn order too, so that the first n are a random sample. Images are normalised by the published mean and deviation of
all 50,000 training images, whatever the seed: a network is judged on the numbers it was trained with, in any split.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.cifar_files import LAYOUTS, check_is_file, read_npz, read_python
from apoptosis.data.splits import DataSet, Split, check_labels
from apoptosis.errors import ConfigError, DataError

__all__ = ["Kind", "cifar10", "cifar100", "load_cifar"]

Kind = Literal["cifar10", "cifar100"]


@dataclass(frozen=True)
class _Constants:
    num_classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


CONSTANTS: dict[Kind, _Constants] = {
    "cifar10": _Constants(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Constants(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def cifar10(path: Path | str, *, seed: int = 0, num_validation: int = 5000) -> DataSet[Split]:
    """CIFAR-10 from a file or folder; see the module docstring for which.

    Args:
        path: where it lies.
        seed: draws which training images are set aside for validation.
        num_validation: how many; 0 for none.

    Raises:
        ConfigError: as many as there are training images were set aside.
        DataError: there is no such file, or it is damaged or another one; the message says which and where to get it.
    """
    return load_cifar("cifar10", path, seed=seed, num_validation=num_validation)


def cifar100(path: Path | str, *, seed: int = 0, num_validation: int = 5000) -> DataSet[Split]:
    """CIFAR-100 with its hundred fine classes; all else as `cifar10`."""
    return load_cifar("cifar100", path, seed=seed, num_validation=num_validation)


def load_cifar(
    kind: Kind, path: Path | str, *, seed: int = 0, num_validation: int | None = None
) -> DataSet[Split]:
    """Either of the two; a tenth of the training images is set aside where no number is given.

    Raises:
        ConfigError: as many as there are training images were set aside.
        DataError: there is no such file, or it is damaged or another one.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{kind} was asked for at {path}, and nothing is there. {LAYOUTS[kind].remedy}"
        )
    if not path.is_dir():
        check_is_file(path)
    is_npz = path.is_file() and (path.suffix == ".npz" or zipfile.is_zipfile(path))
    arrays = read_npz(path) if is_npz else read_python(path, LAYOUTS[kind])
    (images, labels), test = (
        _checked(kind, path, part, arrays[f"x_{part}"], arrays[f"y_{part}"])
        for part in ("train", "test")
    )
    num = len(labels) // 10 if num_validation is None else num_validation
    if not 0 <= num < len(labels):
        raise ConfigError(
            f"{num} validation images were asked for, and {path} has {len(labels)} training images in all. Ask for a "
            "number that leaves some to train on."
        )
    constants = CONSTANTS[kind]

    def split(images: Tensor, labels: Tensor) -> Split:
        return Split(images, labels, constants.mean, constants.std)

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    validation, train = order[:num], order[num:]
    return DataSet(
        name=kind,
        train=split(images[train].contiguous(), labels[train]),
        validation=split(images[validation].contiguous(), labels[validation]) if num else None,
        test=split(test[0].contiguous(), test[1]),
        num_classes=constants.num_classes,
        augmentation=Augmentation(pad=4, flip=True),
    )


def _checked(
    kind: Kind, path: Path, part: str, images: NDArray[Any], labels: NDArray[Any]
) -> tuple[Tensor, Tensor]:
    """Images `(n, 3, 32, 32)`, a view of what was read, and labels `(n,)`."""
    what = f"{path}, {part}"
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise DataError(
            f"{what}: images are bytes of shape (n, 32, 32, 3); found {images.dtype} of shape {images.shape}. "
            "Write them with channels last, from 0 to 255."
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as keras writes them
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels):
        raise DataError(
            f"{what}: {len(images)} images need as many whole numbers as labels, and at least one; found "
            f"{labels.dtype} of shape {labels.shape}."
        )
    classes = torch.from_numpy(labels.astype(np.int64))
    check_labels(classes, CONSTANTS[kind].num_classes, what)
    # A copy where the memory is a file's own and must not be written to.
    images = images if images.flags.writeable else images.copy()
    return torch.from_numpy(images).permute(0, 3, 1, 2), classes
