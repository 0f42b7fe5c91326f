"""Least squares with a penalty by way of positions: where these are fewer than inputs, their matrix is the smaller one.

With inputs X, (n, positions), and what is wanted, Y, (m, positions), the weights of least ‖Y − W X‖² + λ ‖W‖² are

    W = Y Xᵀ (X Xᵀ + λ I)⁻¹ = Y (Xᵀ X + λ I)⁻¹ Xᵀ,

the second by a system of as many unknowns as there are positions. An input that is the constant has no penalty: what it
tells of the others and of Y is taken off both, and the rest is fitted without it. Each position may count several
times: then all of its numbers, the constant among them, are by so much larger.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["DualRidge"]


class DualRidge:
    """Fits of whatever is wanted to the same inputs, (g, n, positions); with `has_bias` the last is the constant."""

    def __init__(self, columns: Tensor, *, has_bias: bool) -> None:
        self._has_bias = has_bias
        self._num = columns.shape[1] - has_bias
        self._constant = columns[:, self._num :]
        self._size = self._constant.square().sum(2, keepdim=True)
        self._mean = self._level(columns[:, : self._num])
        self._free = self._centred(columns[:, : self._num], self._mean)
        self._among: Tensor | None = None

    def weights(self, wanted: Tensor, penalty: Tensor) -> Tensor:
        """W, (g, m, n), for what is wanted, (g, m, positions), and λ above zero, (g,)."""
        level = self._level(wanted)
        free = self._fit(self._centred(wanted, level), penalty).mT @ self._free.mT
        return torch.cat([free, level - free @ self._mean], 2) if self._has_bias else free

    def missed(
        self, wanted: Tensor, columns: Tensor, there: Tensor, penalties: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Of other positions, with inputs `columns` and `there` wanted, what each fit leaves: (g, m) for each λ."""
        level = self._level(wanted)
        wanted = self._centred(wanted, level)
        constant = columns[:, self._num :]
        others = columns[:, : self._num]
        if self._has_bias:
            others, there = others - self._mean * constant, there - level * constant
        cross = self._free.mT @ others
        for penalty in penalties:
            yield (there - self._fit(wanted, penalty).mT @ cross).square().sum(2)

    def _fit(self, wanted: Tensor, penalty: Tensor) -> Tensor:
        """(Xᵀ X + λ I)⁻¹ Yᵀ."""
        if self._among is None:
            self._among = self._free.mT @ self._free
        own = self._among.clone()
        own.diagonal(dim1=1, dim2=2).add_(penalty[:, None])
        return torch.cholesky_solve(wanted.mT, torch.linalg.cholesky(own))

    def _level(self, rows: Tensor) -> Tensor:
        """How much of the constant there is in each, (g, rows, 1)."""
        return rows @ self._constant.mT / self._size if self._has_bias else rows[:, :, :0]

    def _centred(self, rows: Tensor, level: Tensor) -> Tensor:
        return rows - level * self._constant if self._has_bias else rows
