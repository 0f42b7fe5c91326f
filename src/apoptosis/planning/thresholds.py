"""The k-th largest of very many numbers, exactly, without joining or sorting them.

Bit patterns of non-negative floating-point numbers, read as integers, have the order of the numbers. So the number
sought is found digit by digit, 16 bits at a time from the top: count how often each digit occurs among the numbers that
agree with the digits found so far, and walk down the counts. Two passes for float32, four for float64, and no more
memory than one chunk takes. Sorting 25 million takes seconds and a gigabyte.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Threshold", "threshold"]

CHUNK = 2**20
_DIGIT = 16
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Threshold:
    """Larger values stay, and so do the first `num_equal` of the equal ones."""

    value: float
    num_equal: int

    def kept(self, values: Tensor, alive: Tensor | None = None) -> tuple[Tensor, "Threshold"]:
        """True where a value stays, and the threshold for the values that come next."""
        stays, equal = values > self.value, values == self.value
        if alive is not None:
            stays &= alive
            equal &= alive
        places = equal.view(-1).nonzero().squeeze(1)[: self.num_equal]
        stays.view(-1)[places] = True
        return stays, Threshold(self.value, self.num_equal - len(places))


def threshold(values: Iterable[Tensor], num_kept: int) -> Threshold:
    """Where to cut so that exactly `num_kept` of all values stay, the largest.

    Args:
        values: non-negative, finite tensors of one type, float32 or float64; iterated once per digit.
        num_kept: from 1 to their number.

    >>> threshold([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])], 3)
    Threshold(value=1.0, num_equal=1)
    """
    values = list(values) if isinstance(values, Iterator) else values
    dtype = next(iter(values)).dtype
    prefix, left = 0, num_kept
    for shift in reversed(range(0, torch.iinfo(_INTEGERS[dtype]).bits, _DIGIT)):
        counts = _digit_counts(values, prefix, shift)
        larger_or_equal = counts.flip(0).cumsum(0).flip(0)
        digit = int((larger_or_equal >= left).nonzero()[-1])
        left -= int(larger_or_equal[digit] - counts[digit])
        prefix = prefix << _DIGIT | digit
    value = torch.tensor(prefix, dtype=_INTEGERS[dtype]).view(dtype)
    return Threshold(float(value), left)


def _digit_counts(values: Iterable[Tensor], prefix: int, shift: int) -> Tensor:
    """How often each digit occurs at `shift` in the numbers that begin with `prefix`."""
    counts = torch.zeros(2**_DIGIT, dtype=torch.int64)
    for chunk in _chunks(values):
        integers = _INTEGERS[chunk.dtype]
        limits = torch.iinfo(integers)
        digits = (chunk.view(integers) & limits.max) >> shift  # without the sign of −0.0
        if shift + _DIGIT < limits.bits:
            digits = digits[digits >> _DIGIT == prefix]
        digits &= 2**_DIGIT - 1
        counts += torch.bincount(digits, minlength=2**_DIGIT).cpu()
    return counts


def _chunks(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces of about one size: large tensors are cut, small ones on one device joined."""
    held: list[Tensor] = []
    for piece in (piece for tensor in values for piece in tensor.reshape(-1).split(CHUNK)):
        fits = sum(map(len, held)) + len(piece) <= CHUNK
        if held and not (fits and piece.device == held[0].device):
            yield torch.cat(held)
            held = []
        held.append(piece)
    if held:
        yield torch.cat(held)
