"""Batches cut from tensors that fit into memory.

A loop over `Batches` can be started any number of times. Without a seed every pass is the same. With one, each pass has
an order of its own that depends on the seed and the number of the pass alone, so two runs that start from new `Batches`
see the same data in the same order, whatever else has drawn random numbers.

>>> batches = Batches(torch.arange(5), torch.arange(5) % 2, size=2)
>>> [labels.tolist() for _, labels in batches]
[[0, 1], [0, 1], [0]]
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from apoptosis.errors import ConfigError, DataError

__all__ = ["Batches"]


class Batches:
    """Tuples of tensors, `size` rows at a time; see the module docstring for the order."""

    def __init__(
        self,
        *tensors: Tensor,
        size: int,
        shuffle_seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"A batch needs at least one row; size={size} was asked for.")
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"Batches are cut from tensors of one common length above zero; found {sorted(lengths)}. "
                "Give inputs and labels of the same samples."
            )
        self.tensors = tuple(tensor.to(device) for tensor in tensors)
        self.size = size
        # On the CPU, so that the order is the same on every device.
        self._generator = (
            None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
        )

    @property
    def num_samples(self) -> int:
        """Rows in one pass."""
        return len(self.tensors[0])

    def __len__(self) -> int:
        return -(-self.num_samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = self._order()
        for start in range(0, self.num_samples, self.size):
            rows = slice(start, start + self.size)
            if order is None:
                yield tuple(tensor[rows] for tensor in self.tensors)
            else:
                yield tuple(tensor[order[rows]] for tensor in self.tensors)

    def _order(self) -> Tensor | None:
        if self._generator is None:
            return None
        order = torch.randperm(self.num_samples, generator=self._generator)
        return order.to(self.tensors[0].device)
