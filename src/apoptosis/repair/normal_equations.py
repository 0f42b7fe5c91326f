"""Least squares that forget the data: sums of products are enough, one chunk after the other.

With inputs x and what is missing from the outputs r = y − (W x + b), the change D of the weights that makes

    Σ ‖r − D x‖² + λ ‖D‖²,        λ = ridge · mean of the diagonal of A = Σ x xᵀ

least solves D (A + λ I) = B with B = Σ r xᵀ. The penalty draws towards the weights that are there, so a layer that
misses nothing stays as it is, and an input that is always zero changes no weight. All sums are in float64; there is one
system for each group of channels. Cost: n² numbers twice, and n³/3 multiplications to solve.

How much penalty the data ask for, the data tell: sums of two halves of the samples are kept apart, and what is found on
either is held against the other (`best_ridge`). Where equations are few, as for the head of a network on some hundred
images, the least penalty would fit these images alone; and positions may be many and say much the same, as tokens of
one image do. Where rows of weights have masks, each has a system of its own, m of them in the place of one: some of the
rows tell the penalty for all.
"""

import torch
from torch import Tensor

from apoptosis.curvature.grams import Gram

__all__ = ["NormalEquations"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, float("inf"))
"""From hardly any penalty to leaving the layer as it is."""

MOST_ROWS = 32
"""Of a masked layer, to tell one penalty of six: each takes ten solutions for that. With 576 inputs, 64 outputs and
half of the weights masked the choice takes 0.3 s of one thread, and to solve for all rows, four times over, 0.2 s."""


class NormalEquations:
    """The sums of one layer. `count` are the positions.

    `generator` draws places of convolutions that have more than are needed (`linear_maps.pairs`).
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.count = 0
        self._halves = (_Sums(), _Sums())
        self._is_gram_there = False

    def add(self, inputs: Tensor, missing: Tensor, half: int) -> None:
        """Positions of one half: what went in, (g, n, positions), and what is missing, (g, m, positions)."""
        self._halves[half].add(inputs, missing, with_gram=not self._is_gram_there)
        if not self._is_gram_there:
            self.count += inputs.shape[2]

    def begin_again(self, *, alike: bool) -> None:
        """Forget what was missing: inputs come again, and miss something else.

        Where they come `alike`, the same in the same order, A is there already. With others it would belong to other
        equations than B, and D A = B might have no solution worth the name.
        """
        self.generator.manual_seed(0)
        if not alike:
            self.count, self._halves = 0, (_Sums(), _Sums())
            return
        self._is_gram_there = True
        for own in self._sums():
            own.cross, own.squares = torch.zeros_like(own.cross), 0.0

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or infinity has passed."""
        return all(bool(t.isfinite().all()) for own in self._halves for t in (own.gram, own.cross))

    def best_ridge(self, kept: Tensor | None = None, *, has_bias: bool) -> float:
        """Which of `RIDGES` leaves least of either half, when it is solved on the other with those weights alone."""
        first, second = self._sums()
        if first.is_empty or second.is_empty:
            return RIDGES[0]
        rows = None if kept is None else _spread(kept.shape[0] * kept.shape[1], MOST_ROWS)

        def solved(half: _Sums, ridge: float) -> Tensor:
            return half.solved(ridge, kept, rows, has_bias=has_bias)

        missed = {
            ridge: second.left(solved(first, ridge)) + first.left(solved(second, ridge))
            for ridge in RIDGES
        }
        return min(missed, key=missed.__getitem__)

    def solve(self, ridge: float, kept: Tensor | None = None, *, has_bias: bool) -> Tensor:
        """D, (g, m, n).

        Args:
            ridge: λ in parts of the mean of A's diagonal; infinity leaves everything as it is.
            kept: which weights there are, (g, m, n); the others stay as they are. All unless given.
            has_bias: the last input is the constant 1, on which there is no penalty.
        """
        first, second = self._sums()
        return (first + second).solved(ridge, kept, has_bias=has_bias)

    def left(self, change: Tensor) -> float:
        """Σ ‖r − D x‖²."""
        return sum(own.left(change) for own in self._sums() if not own.is_empty)

    def _sums(self) -> tuple["_Sums", "_Sums"]:
        for own in self._halves:
            own.complete()
        return self._halves


class _Sums:
    """A, (g, n, n), B, (g, m, n), and Σ ‖r‖² of some of the positions; A and B are the number 0 until there are any."""

    def __init__(self) -> None:
        self.gram = self.cross = torch.zeros((), dtype=torch.float64)
        self.squares = 0.0
        self._adding = Gram()

    @property
    def is_empty(self) -> bool:
        return self.cross.ndim == 0

    def add(self, inputs: Tensor, missing: Tensor, *, with_gram: bool) -> None:
        self.cross = (missing @ inputs.mT).add_(self.cross)
        self.squares += float(missing.square().sum())
        if with_gram:
            self._adding.add_(inputs)

    def complete(self) -> None:
        """All inputs have come."""
        if not self._adding.is_empty:
            self.gram = self._adding.taken(1.0)

    def __add__(self, other: "_Sums") -> "_Sums":
        both = _Sums()
        both.gram, both.cross = self.gram + other.gram, self.cross + other.cross
        both.squares = self.squares + other.squares
        return both

    def left(self, change: Tensor) -> float:
        """Σ ‖r − D x‖², from the sums alone."""
        gained = float((change * (2 * self.cross - change @ self.gram)).sum())
        return max(0.0, self.squares - gained)

    def penalised(self, ridge: float, *, has_bias: bool) -> Tensor:
        """A + λ I, without a penalty on the constant."""
        gram = self.gram.clone()
        free = gram.diagonal(dim1=1, dim2=2)[:, : gram.shape[1] - has_bias]
        free += ridge * free.mean(1, keepdim=True)
        return gram

    def solved(
        self,
        ridge: float,
        kept: Tensor | None = None,
        rows: Tensor | None = None,
        *,
        has_bias: bool,
    ) -> Tensor:
        """D; with `kept` in these rows alone, counted through all groups, or in all of them."""
        if ridge == float("inf"):
            return torch.zeros_like(self.cross)
        gram = self.penalised(ridge, has_bias=has_bias)
        if kept is None:
            return _solved(gram, self.cross)
        if has_bias:
            kept = torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], 2)
        return _solved_by_rows(gram, self.cross, kept, rows)


def _solved(gram: Tensor, cross: Tensor) -> Tensor:
    """D with D A = B; the smallest of them where A is singular and there are many."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not failed.any():
        return torch.cholesky_solve(cross.mT, factor).mT
    return cross @ torch.linalg.pinv(gram, hermitian=True)


def _solved_by_rows(gram: Tensor, cross: Tensor, kept: Tensor, rows: Tensor | None) -> Tensor:
    """The same for each row on those inputs that it keeps; zero elsewhere.

    One after the other: brought to one size and solved together, they took longer on a CPU.
    """
    found = torch.zeros_like(cross)
    asked = range(kept.shape[0] * kept.shape[1]) if rows is None else rows.tolist()
    for group, row in (divmod(number, kept.shape[1]) for number in asked):
        own = kept[group, row].nonzero()[:, 0]
        part = _solved(gram[group, own][:, own][None], cross[group, row, own][None, None])
        found[group, row, own] = part[0, 0]
    return found


def _spread(num: int, most: int) -> Tensor:
    """Numbers below `num`, all of them or `most` at even distances."""
    return torch.arange(min(num, most)) * num // min(num, most)
