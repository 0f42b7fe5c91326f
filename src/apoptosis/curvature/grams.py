"""Σ X Xᵀ over many X, in place and half of it: the sum is symmetric, so blocks below the diagonal are left for the end.

Against `total + x @ x.mT` this takes half to two thirds of the time where n is 512 or more, and no second matrix
of that size. In float64 throughout: products in float32 take a third to a half off that, but are wrong by up to 6e-7
of the diagonal's mean, which no longer is small beside a ridge that somebody chose smaller.

Where positions are fewer than half of n, as for wide convolutions on small maps, X itself is smaller than the sum, and
whatever is asked of the sum costs less by way of Xᵀ X. So X is kept until it is no longer smaller.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gram", "Products"]

BLOCK = 256
"""Rows at a time: fewer make products slow, more leave less out."""


THIN = 2
"""Times fewer positions than numbers of one: so many are kept as they are."""


@dataclass(frozen=True, eq=False)
class Products:
    """A sum of products X Xᵀ, for each group: (g, n, n), or X itself, (g, n, positions), where it is thin."""

    own: Tensor
    is_thin: bool = False

    @property
    def matrix(self) -> Tensor:
        """(g, n, n)."""
        return _product(self.own) if self.is_thin else self.own

    @property
    def diagonal(self) -> Tensor:
        """(g, n)."""
        return self.own.square().sum(2) if self.is_thin else _diagonal(self.own)

    def of_group(self, number: int, device: torch.device) -> "Products":
        """That of one group, (1, n, ...), on a device."""
        return Products(self.own[number : number + 1].to(device), self.is_thin)

    def cpu(self) -> "Products":
        """The same on the CPU."""
        return Products(self.own.cpu(), self.is_thin)

    def __add__(self, other: "Products") -> "Products":
        if self.is_thin and other.is_thin:
            return Products(torch.cat([self.own, other.own], 2), is_thin=True)
        return Products(self.matrix + other.matrix)


class Gram:
    """A sum so far. Of nothing it has no size yet."""

    def __init__(self, *, keeps: bool = True) -> None:
        """`keeps`: X, as long as it is thin."""
        self._upper: Tensor | None = None
        self._kept: list[Tensor] | None = [] if keeps else None

    def add_(self, columns: Tensor, factor: float = 1.0) -> None:
        """X, (g, n, positions), counted `factor` times."""
        columns = columns.double()
        if self._kept is not None:
            self._kept.append(columns * factor**0.5)
            if THIN * sum(own.shape[2] for own in self._kept) > columns.shape[1]:
                self._sum_up()
            return
        self._add_(columns, factor)

    def _sum_up(self) -> None:
        """Keep products from now on."""
        kept, self._kept = self._kept or [], None
        if kept:
            self._add_(torch.cat(kept, 2), 1.0)

    def _add_(self, columns: Tensor, factor: float) -> None:
        groups, n = columns.shape[:2]
        if self._upper is None:
            self._upper = columns.new_zeros(groups, n, n)
        for i in range(0, n, BLOCK):
            rows = columns[:, i : i + BLOCK]
            self._upper[:, i : i + BLOCK, i:].baddbmm_(rows, columns[:, i:].mT, alpha=factor)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._upper is None and not self._kept

    @property
    def is_thin(self) -> bool:
        """True if X is kept so far."""
        return bool(self._kept)

    @property
    def is_finite(self) -> bool:
        """Whether all of it is: by its diagonal, which no other entry exceeds and where every bad value shows."""
        if self._kept:
            return all(bool(own.isfinite().all()) for own in self._kept)
        return self._upper is None or bool(_diagonal(self._upper).isfinite().all())

    def products(self, factor: float) -> Products:
        """The sum times `factor`. This one is empty afterwards."""
        if self._kept:
            columns, self._kept = torch.cat(self._kept, 2), []
            return Products(columns.mul_(factor**0.5), is_thin=True)
        return Products(self.taken(factor))

    def taken(self, factor: float) -> Tensor:
        """The sum times `factor`, (g, n, n), symmetric to the last digit. This one is empty afterwards."""
        if self._kept:
            self._sum_up()
            self._kept = None
        assert self._upper is not None, "nothing was added"
        total, self._upper = self._upper.mul_(factor), None
        for i in range(0, total.shape[1], BLOCK):
            total[:, i + BLOCK :, i : i + BLOCK] = total[:, i : i + BLOCK, i + BLOCK :].mT
            block = total[:, i : i + BLOCK, i : i + BLOCK]
            block.copy_(block.triu() + block.triu(1).mT)
        return total


def _diagonal(matrices: Tensor) -> Tensor:
    return torch.diagonal(matrices, dim1=-2, dim2=-1)


def _product(columns: Tensor) -> Tensor:
    """X Xᵀ of X, (g, n, positions); half of the products, and symmetric to the last digit."""
    total = Gram(keeps=False)
    total.add_(columns)
    return total.taken(1.0)
