"""Batches cut from tensors that fit into memory.

A loop over `Batches` can be started any number of times. Without a seed every pass is the same. With one, each pass has
an order of its own that depends on the seed and the number of the pass alone, so two runs that start from new `Batches`
see the same data in the same order, whatever else has drawn random numbers. Passes are counted as they are started,
whether they are finished or not; `start_at` sets the count, for runs that go on where another stopped.

The first tensor may be images. An augmentation changes them batch by batch, with random numbers that depend on the
seed, the pass and the batch alone; a normalisation comes last, so that images can lie on a device as bytes.

>>> batches = Batches(torch.arange(5), torch.arange(5) % 2, size=2)
>>> [labels.tolist() for _, labels in batches]
[[0, 1], [0, 1], [0]]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.passes import Passes, generator_at
from apoptosis.errors import ConfigError, DataError

__all__ = ["Batches", "Normalisation", "check_can_be_random"]


@dataclass(frozen=True)
class Normalisation:
    """Images as the network wants them: float32, `(x − mean)/std` with one mean and std per channel.

    Bytes count from 0 to 1: they are divided by 255 first. Without mean and std nothing else happens.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def apply(self, images: Tensor) -> Tensor:
        """Images `(n, c, h, w)`, bytes or floats, as float32."""
        scale = 1.0 if images.is_floating_point() else 255.0
        if self.mean is None or self.std is None:
            return images if images.dtype == torch.float32 else images.float() / scale
        # Sent without waiting for what the device has still to do: there is a batch at work there.
        mean, std = (
            (scale * torch.tensor(values)).view(-1, 1, 1).to(images.device, non_blocking=True)
            for values in (self.mean, self.std)
        )
        # The bytes' float copy is ours to change; a float32 image is the caller's.
        changed = images.float()
        return (changed - mean).div_(std) if changed is images else changed.sub_(mean).div_(std)


class Batches:
    """Tuples of tensors, `size` rows at a time; see the module docstring for the order.

    Args:
        *tensors: of one length; images first where there are any.
        size: rows of a batch; the last may have fewer.
        shuffle_seed: draws the orders; rows stay in order without it.
        device: where all tensors are put.
        augmentation: changes the first tensor of every batch at random.
        normalisation: of the first tensor of every batch.

    Raises:
        ConfigError: no batch can have that size, or there is an augmentation and no seed.
        DataError: the tensors have different lengths, or none.
    """

    def __init__(
        self,
        *tensors: Tensor,
        size: int,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
        augmentation: Augmentation | None = None,
        normalisation: Normalisation | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"A batch needs at least one row; size={size} was asked for.")
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"Batches are cut from tensors of one common length above zero; found {sorted(lengths)}. "
                "Give inputs and labels of the same samples."
            )
        check_can_be_random(augmentation, Augmentation, shuffle_seed)
        self.tensors = tuple(tensor.to(device) for tensor in tensors)
        self.size = size
        self._augmentation, self._normalisation = augmentation, normalisation
        self._passes = Passes(self.num_samples, shuffle_seed)

    @property
    def num_samples(self) -> int:
        """Rows in one pass."""
        return len(self.tensors[0])

    def __len__(self) -> int:
        return -(-self.num_samples // self.size)

    def start_at(self, number: int) -> None:
        """Let the next pass be that one, counted from 0, whatever was read before; later ones count on."""
        self._passes.start_at(number)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        number, order = self._passes.next()
        if order is not None:
            order = order.to(self.tensors[0].device)
        for batch, start in enumerate(range(0, self.num_samples, self.size)):
            rows = slice(start, start + self.size)
            taken = rows if order is None else order[rows]
            first, *others = (tensor[taken] for tensor in self.tensors)
            yield self._finished(first, number, batch), *others

    def _finished(self, images: Tensor, number: int, batch: int) -> Tensor:
        seed = self._passes.shuffle_seed
        if self._augmentation is not None and seed is not None:
            images = self._augmentation.apply(images, generator_at(seed, number, batch))
        return images if self._normalisation is None else self._normalisation.apply(images)


def check_can_be_random(augmentation: object, kind: type, shuffle_seed: int | None) -> None:
    """Refuse an augmentation that is for other images, or that has no seed to draw from.

    Raises:
        ConfigError: it is one of these.
    """
    if augmentation is None:
        return
    if not isinstance(augmentation, kind):
        raise ConfigError(
            f"These images are augmented by {kind.__name__}; {type(augmentation).__name__} was given. Give "
            f"{kind.__name__}(), or none."
        )
    if shuffle_seed is None:
        raise ConfigError(
            "An augmentation draws random numbers from the seed of the order, and there is none. Give shuffle_seed, "
            "or no augmentation."
        )
