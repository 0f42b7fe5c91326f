"""Passes over a data set: their number, the order of the samples in each, and random numbers that belong to one place.

Order and random numbers are functions of a seed and of the numbers of pass, batch or image, and of nothing else. So a
run that was interrupted goes on with the same data as one that was not, on whatever device.
"""

import numpy as np
import torch
from torch import Tensor

from apoptosis.errors import ConfigError

__all__ = ["Passes", "generator_at"]


class Passes:
    """The order of one pass after the other. Pass n has the n-th permutation of a generator with the seed.

    >>> passes = Passes(5, shuffle_seed=0)
    >>> orders = [passes.next()[1].tolist() for _ in range(3)]
    >>> passes.start_at(1)
    >>> passes.next()[1].tolist() == orders[1]
    True
    """

    def __init__(self, num_samples: int, shuffle_seed: int | None) -> None:
        self.num_samples = num_samples
        self.shuffle_seed = shuffle_seed
        self._next = 0
        self._start()

    def start_at(self, number: int) -> None:
        """Let the next pass be that one, counted from 0; later ones count on.

        Raises:
            ConfigError: the number is negative.
        """
        if number < 0:
            raise ConfigError(f"Passes are counted from 0; pass {number} was asked for.")
        self._next = number

    def next(self) -> tuple[int, Tensor | None]:
        """Number and order of the next pass; no order where nothing is shuffled."""
        number = self._next
        self._next += 1
        if self._generator is None:
            return number, None
        if self._num_drawn > number:
            self._start()
        while self._num_drawn < number:  # 0.3 ms for 50,000 samples: cheaper than a state to keep
            self._draw()
        return number, self._draw()

    def _start(self) -> None:
        # On the CPU, so that the order is the same on every device.
        seed = self.shuffle_seed
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._num_drawn = 0

    def _draw(self) -> Tensor:
        self._num_drawn += 1
        return torch.randperm(self.num_samples, generator=self._generator)


def generator_at(*place: int) -> torch.Generator:
    """A generator of its own for one place, such as (seed, pass, batch); places near each other have unlike numbers.

    >>> first, other = (torch.rand(1, generator=generator_at(0, 0, batch)).item() for batch in (0, 1))
    >>> first == other
    False
    """
    # Two words of 32 bits each: SeedSequence joins words, and large numbers would run into their neighbours.
    words = [word for number in place for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)]
    sequence = np.random.SeedSequence([len(place), *words])
    (state,) = sequence.generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state) >> 1)  # torch takes 63 bits without a sign
