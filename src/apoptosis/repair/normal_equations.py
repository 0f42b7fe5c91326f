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

Where positions are fewer than half of the inputs, they are kept themselves, and D is found by way of them
(`curvature.dual_ridge`).
"""

import torch
from torch import Tensor

from apoptosis.curvature.dual_ridge import DualRidge
from apoptosis.curvature.grams import Gram, Products

__all__ = ["NormalEquations"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, float("inf"))
"""From hardly any penalty to leaving the layer as it is."""

LEAST = 1e-9
"""With a smaller penalty solutions by way of positions have no digits left."""

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
        self._solver: _Solver | None = None

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
            self._solver, self._is_gram_there = None, False
            self.count, self._halves = 0, (_Sums(), _Sums())
            return
        self._is_gram_there = True
        for own in self._sums():
            own.begin_again()

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or infinity has passed."""
        return all(own.is_finite for own in self._sums())

    def best_ridge(self, kept: Tensor | None = None, *, has_bias: bool) -> float:
        """Which of `RIDGES` leaves least of either half, when it is solved on the other with those weights alone."""
        first, second = self._sums()
        if first.is_empty or second.is_empty:
            return RIDGES[0]
        if kept is None:
            return _least_crossed(first, second, has_bias=has_bias)
        rows = _spread(kept.shape[0] * kept.shape[1], MOST_ROWS)

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
        if kept is not None or ridge == float("inf"):
            return (first + second).solved(ridge, kept, has_bias=has_bias)
        if self._solver is None or self._solver.ridge != ridge:
            self._solver = _Solver(first + second, ridge, has_bias=has_bias)
        return self._solver.solve(first, second)

    def left(self, change: Tensor) -> float:
        """Σ ‖r − D x‖²."""
        return sum(own.left(change) for own in self._sums() if not own.is_empty)

    def _sums(self) -> tuple["_Sums", "_Sums"]:
        for own in self._halves:
            own.complete()
        return self._halves


class _Sums:
    """A, (g, n, n), B, (g, m, n), and Σ ‖r‖² of some of the positions; B is the number 0 until there are any.

    While A is thin, what is missing, (g, m, positions), is there too, in the order of A's columns.
    """

    def __init__(self) -> None:
        self.products: Products | None = None
        self.cross = torch.zeros((), dtype=torch.float64)
        self.squares = 0.0
        self._adding = Gram()
        self._missing: list[Tensor] = []

    @property
    def is_empty(self) -> bool:
        return self.cross.ndim == 0

    @property
    def is_thin(self) -> bool:
        """True if positions are there themselves."""
        return self.products is not None and self.products.is_thin

    @property
    def is_finite(self) -> bool:
        own = () if self.products is None else (self.products.own,)
        return all(bool(t.isfinite().all()) for t in (self.cross, *own))

    @property
    def gram(self) -> Tensor:
        """A; the number 0 until inputs are complete."""
        return self.cross.new_zeros(()) if self.products is None else self.products.matrix

    @property
    def missing(self) -> Tensor:
        """What is missing, where A is thin."""
        if len(self._missing) > 1:
            self._missing = [torch.cat(self._missing, 2)]
        return self._missing[0]

    def add(self, inputs: Tensor, missing: Tensor, *, with_gram: bool) -> None:
        self.cross = (missing @ inputs.mT).add_(self.cross)
        self.squares += float(missing.square().sum())
        if with_gram:
            self._adding.add_(inputs)
        if self._adding.is_thin or self.is_thin:
            self._missing.append(missing)
        else:
            self._missing = []

    def complete(self) -> None:
        """All inputs have come."""
        if not self._adding.is_empty:
            self.products = self._adding.products(1.0)

    def begin_again(self) -> None:
        """Forget what was missing."""
        self.cross, self.squares, self._missing = torch.zeros_like(self.cross), 0.0, []

    def __add__(self, other: "_Sums") -> "_Sums":
        both, own = _Sums(), [half for half in (self, other) if half.products is not None]
        products = [half.products for half in own if half.products is not None]
        both.products = products[0] if len(own) == 1 else products[0] + products[1]
        both.cross, both.squares = self.cross + other.cross, self.squares + other.squares
        if both.is_thin:
            both._missing = [half.missing for half in own]
        return both

    def left(self, change: Tensor) -> float:
        """Σ ‖r − D x‖², from the sums alone."""
        if self.products is not None and self.is_thin:
            return float((self.missing - change @ self.products.own).square().sum())
        gained = float((change * (2 * self.cross - change @ self.gram)).sum())
        return max(0.0, self.squares - gained)

    def penalty(self, ridge: float, *, has_bias: bool) -> Tensor:
        """λ of each group, (g,)."""
        assert self.products is not None, "inputs are complete"
        diagonal = self.products.diagonal
        return ridge * diagonal[:, : diagonal.shape[1] - has_bias].mean(1)

    def penalised(self, ridge: float, *, has_bias: bool) -> Tensor:
        """A + λ I, without a penalty on the constant."""
        gram = self.gram.clone()
        free = gram.diagonal(dim1=1, dim2=2)[:, : gram.shape[1] - has_bias]
        free += self.penalty(ridge, has_bias=has_bias)[:, None]
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
        if kept is None:
            return _Solver(self, ridge, has_bias=has_bias).solve(self)
        if has_bias:
            kept = torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], 2)
        gram = self.penalised(ridge, has_bias=has_bias)
        return _solved_by_rows(gram, self.cross, kept, rows)


class _Solver:
    """D for whatever is missing at the same inputs: what takes long is done once."""

    def __init__(self, sums: _Sums, ridge: float, *, has_bias: bool) -> None:
        self.ridge = ridge
        self._penalty = sums.penalty(ridge, has_bias=has_bias)
        self._dual: DualRidge | None = None
        self._factor: Tensor | None = None
        is_thin = sums.is_thin and ridge >= LEAST and bool((self._penalty > 0).all())
        if sums.products is not None and is_thin:
            self._dual = DualRidge(sums.products.own, has_bias=has_bias)
            return
        gram = sums.penalised(ridge, has_bias=has_bias)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed.any():
            self._inverse = torch.linalg.pinv(gram, hermitian=True)
        else:
            self._factor = factor

    def solve(self, *parts: _Sums) -> Tensor:
        """D with D A = B; the smallest of them where A is singular and there are many."""
        own = [part for part in parts if not part.is_empty]
        if self._dual is not None:
            missing = torch.cat([part.missing for part in own], 2)
            return self._dual.weights(missing, self._penalty)
        cross = sum((part.cross for part in own[1:]), own[0].cross)
        if self._factor is not None:
            return torch.cholesky_solve(cross.mT, self._factor).mT
        return cross @ self._inverse


def _least_crossed(first: _Sums, second: _Sums, *, has_bias: bool) -> float:
    """Which of `RIDGES` leaves least of either half, when it is solved on the other.

    Where solutions are dear, by a walk from the middle: what is left falls and rises once.
    """
    finite = [ridge for ridge in RIDGES if ridge != float("inf")]
    missed = {float("inf"): first.squares + second.squares}
    one, other = first.products, second.products
    if one is not None and other is not None and one.is_thin and other.is_thin:
        for own, there in ((first, second), (second, first)):
            assert own.products is not None, "it is thin"
            assert there.products is not None, "it is thin"
            penalties = [own.penalty(ridge, has_bias=has_bias) for ridge in finite]
            if not all(bool((penalty > 0).all()) for penalty in penalties):
                return RIDGES[0]
            found = DualRidge(own.products.own, has_bias=has_bias).missed(
                own.missing, there.products.own, there.missing, penalties
            )
            for ridge, left in zip(finite, found, strict=True):
                missed[ridge] = missed.get(ridge, 0.0) + float(left.sum())
        return min(RIDGES, key=missed.__getitem__)

    def of(place: int) -> float:
        ridge = RIDGES[place]
        if ridge not in missed:
            ours, theirs = (own.solved(ridge, has_bias=has_bias) for own in (first, second))
            missed[ridge] = second.left(ours) + first.left(theirs)
        return missed[ridge]

    place = len(finite) // 2
    while place > 0 and of(place - 1) <= of(place):
        place -= 1
    while place + 1 < len(RIDGES) and of(place + 1) < of(place):
        place += 1
    return RIDGES[place]


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
