"""Least squares that forget the data: sums of products are enough, one chunk after the other.

With inputs x and what is missing from the outputs r = y − (W x + b), the change D of the weights that makes

    Σ ‖r − D x‖² + λ ‖D‖²,        λ = ridge · mean of the diagonal of A = Σ x xᵀ

least solves D (A + λ I) = B with B = Σ r xᵀ. The penalty draws towards the weights that are there, so a layer that
misses nothing stays as it is, and an input that is always zero changes no weight. All sums are in float64; there is one
system for each group of channels. Cost: n² numbers, and n³/3 multiplications to solve.
"""

import torch
from torch import Tensor

__all__ = ["NormalEquations"]


class NormalEquations:
    """The sums of one layer: A, B, and Σ ‖r‖² as `squares`; `count` are the positions.

    `generator` draws places of convolutions that have more than are needed (`linear_maps.pairs`).
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.count = 0
        self.squares = 0.0
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self._is_gram_whole = False

    def add(self, inputs: Tensor, missing: Tensor) -> None:
        """Positions: what went in, (g, n, positions), and what is missing, (g, m, positions)."""
        cross = missing @ inputs.mT
        self._cross = cross if self._cross is None else self._cross.add_(cross)
        self.squares += float(missing.square().sum())
        if not self._is_gram_whole:
            gram = inputs @ inputs.mT
            self._gram = gram if self._gram is None else self._gram.add_(gram)
            self.count += inputs.shape[2]

    def begin_again(self) -> None:
        """Forget what was missing: the same inputs come again, at the same places, and miss something else."""
        self.generator.manual_seed(0)
        self.squares, self._cross, self._is_gram_whole = 0.0, None, True

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or infinity has passed."""
        return all(bool(sums.isfinite().all()) for sums in self._sums())

    def solve(self, ridge: float, kept: Tensor | None = None, *, has_bias: bool) -> Tensor:
        """D, (g, m, n).

        Args:
            ridge: λ in parts of the mean of A's diagonal.
            kept: which weights there are, (g, m, n); the others stay as they are. All unless given.
            has_bias: the last input is the constant 1, on which there is no penalty.
        """
        gram, cross = self._sums()
        gram = gram.clone()
        free = gram.diagonal(dim1=1, dim2=2)[:, : gram.shape[1] - has_bias]
        free += ridge * free.mean(1, keepdim=True)
        if kept is None:
            return _solved(gram, cross)
        if has_bias:
            kept = torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], 2)
        found = torch.zeros_like(cross)
        for group, row in torch.cartesian_prod(*(torch.arange(n) for n in kept.shape[:2])).tolist():
            own = kept[group, row].nonzero()[:, 0]
            part = _solved(gram[group, own][:, own][None], cross[group, row, own][None, None])
            found[group, row, own] = part[0, 0]
        return found

    def left(self, change: Tensor) -> float:
        """Σ ‖r − D x‖², from the sums alone."""
        gram, cross = self._sums()
        gained = float((change * (2 * cross - change @ gram)).sum())
        return max(0.0, self.squares - gained)

    def _sums(self) -> tuple[Tensor, Tensor]:
        assert self._gram is not None, "asked only where something was added"
        assert self._cross is not None, "asked only where something was added"
        return self._gram, self._cross


def _solved(gram: Tensor, cross: Tensor) -> Tensor:
    """D with D A = B; the smallest of them where A is singular and there are many."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not failed.any():
        return torch.cholesky_solve(cross.mT, factor).mT
    return cross @ torch.linalg.pinv(gram, hermitian=True)
