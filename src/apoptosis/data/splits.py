"""A data set and its parts.

A part gives batches of normalised float32 images and their labels, again and again. `Split` holds its images in memory,
as bytes where they come as bytes: CIFAR-10 takes 184 MB, on a GPU too, and a batch is normalised there when it is read.
`ImageFiles` (image_files.py) is a part whose images are decoded when they are asked for. Who takes a `Part` takes both.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.batches import Batches, Normalisation
from apoptosis.errors import DataError

__all__ = ["DataSet", "Part", "Split", "check_labels"]


class Part(Protocol):
    """One part of a data set."""

    @property
    def labels(self) -> Tensor:
        """Classes of all images, `(n,)`, int64."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what batches hold."""
        ...

    def __len__(self) -> int: ...

    def first(self, num: int | None) -> "Part":
        """Its first images as a part, all where num is None."""
        ...

    def batches(
        self,
        size: int,
        *,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
        augmentation: Any = None,
    ) -> Any:
        """Batches `(images, labels)` that can be read again and again and have `start_at`, as `Batches` do."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """Images `(n, c, h, w)`, bytes or floats, and their labels `(n,)`, int64.

    Args:
        images: bytes count from 0 to 1 once they are read; floats stay what they are.
        labels: class of each image.
        mean: of each channel, taken off when a batch is read; nothing unless given.
        std: of each channel, divided by; given together with the mean.

    Raises:
        DataError: shapes or types are others, or do not fit each other.

    >>> split = Split(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(3), (0.5,), (0.25,))
    >>> [(images.max().item(), labels.tolist()) for images, labels in split.batches(2)]
    [(2.0, [0, 1]), (2.0, [2])]
    """

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise DataError(
                f"Images come as bytes or floats of shape (n, c, h, w); found {images.dtype} of shape "
                f"{tuple(images.shape)}. Say images.permute(0, 3, 1, 2) where channels come last."
            )
        if labels.dtype != torch.int64 or labels.shape != (len(images),):
            raise DataError(
                f"Labels come as one int64 per image, here of shape ({len(images)},); found {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        _check_channels(images.shape[1], self.mean, self.std)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def first(self, num: int | None) -> "Split":
        """The part's first images, all where num is None; nothing is copied."""
        return replace(self, images=self.images[:num], labels=self.labels[:num])

    def batches(
        self,
        size: int,
        *,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
        augmentation: Augmentation | None = None,
    ) -> Batches:
        """`(images, labels)` batches, normalised; see `Batches`."""
        return Batches(
            self.images,
            self.labels,
            size=size,
            shuffle_seed=shuffle_seed,
            device=device,
            augmentation=augmentation,
            normalisation=Normalisation(self.mean, self.std),
        )


P = TypeVar("P", bound=Part, covariant=True)


@dataclass(frozen=True, eq=False)
class DataSet(Generic[P]):
    """Parts with no image in common; only the first is always there.

    Args:
        name: as a person says it.
        train: to learn from, and to score on.
        validation: to choose by.
        test: for the final figure.
        num_classes: labels are 0 … num_classes − 1.
        augmentation: what training images usually get; None for nothing. It happens only where it is handed on.

    Raises:
        DataError: a label is out of range, or images of the parts have different shapes.
    """

    name: str
    train: P
    validation: P | None
    test: P | None
    num_classes: int
    augmentation: Any = None

    def __post_init__(self) -> None:
        for purpose, part in self.parts().items():
            check_labels(part.labels, self.num_classes, f"{self.name}, {purpose}")
            if part.image_shape != self.train.image_shape:
                raise DataError(
                    f"Images of {self.name} are of shape {self.train.image_shape} in training, and of shape "
                    f"{part.image_shape} in {purpose}. Give all parts one shape."
                )

    def parts(self) -> dict[str, P]:
        """Those that there are, by name."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Of a batch with one image."""
        return (1, *self.train.image_shape)


def check_labels(labels: Tensor, num_classes: int, what: str) -> None:
    """Refuse labels that are no class.

    Raises:
        DataError: one is out of range; the message has the first such.
    """
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"{what}: labels of {num_classes} classes are 0 … {num_classes - 1}; image {place} has label "
            f"{int(labels[place])}, and {len(wrong)} of {len(labels)} are out of range. Number classes from 0, or say "
            "how many there are."
        )


def _check_channels(
    channels: int, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> None:
    if mean is None and std is None:
        return
    if mean is None or std is None or not len(mean) == len(std) == channels or min(std) <= 0:
        raise DataError(
            f"Mean and std come together, one number for each of {channels} channels, std above 0; found mean={mean}, "
            f"std={std}."
        )
