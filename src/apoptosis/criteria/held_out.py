"""How far a layer's inputs can stand in for each other on samples that nobody fitted.

Whether a unit can be spared depends on how well the others tell what it says: x_q ≈ W x_K, by least squares. Of few
samples, or of many tokens that say much the same, such a fit explains most of what it has seen and little of what it
has not. (Of the hidden units of a small language model, 4,096 tokens for 1,408 of them, three tenths are left on these
tokens and nine tenths on others; experiments/LOG.md.) Prices made of it are then far too low.

With a quarter of the channels taken away, and what is left of each of their columns on the mean in parts of its own
energy (one column of great energy says nothing of the others),

    inside  = what is left on the samples that were fitted, with the penalty that prices have,
    outside = what is left of one half of the samples after a fit to the other, with the penalty that leaves least,
    κ       = (outside − inside) / (1 − inside), within 0 … 1:

nothing where the fit holds, 1 where it explains nothing of others.

Where positions are few (`Products.is_thin`) fits are found by way of their products with each other: with X_K of what
is kept and x_q of what is told, both without what the constant says of them, x_q (X_Kᵀ X_K + λ)⁻¹ X_Kᵀ is W.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from apoptosis.curvature import Products

__all__ = ["optimism"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Penalties of fits to half of the samples, as `Refit` has them to choose from."""
LEAST = 1e-9
"""Inputs that are copies of each other have no fit without any penalty."""
PART = 4
"""One channel in so many is told from the others."""
MOST_TARGETS = 128
"""Columns that are told: more change the mean by little, and each costs a solution."""


def optimism(
    halves: tuple[Products, Products], columns: Tensor, *, ridge: float, has_bias: bool
) -> float:
    """κ; 0 where there are too few channels to tell by, 1 where there is one half alone.

    Channels that are always zero are passed over: κ is the same as where they have been cut.

    Time: eleven Cholesky factors of three quarters of the inputs, or of the positions where these are fewer.

    Args:
        halves: of two halves of the samples, of one group of n inputs each, in units of all of them.
        columns: (channels, k), where each channel is among the inputs.
        ridge: of the fit to all samples, in parts of the mean of what is not zero.
        has_bias: the last input is the constant 1, on which there is no penalty.
    """
    energies = torch.stack([half.diagonal[0] for half in halves])
    num = energies.shape[1]
    shows = [bool(own[: num - has_bias].any()) for own in energies]
    if any(shows) and not all(shows):
        return 1.0
    columns = columns[energies.sum(0)[columns].any(1)]
    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    order = order.to(columns.device)
    gone, others = (columns[own].flatten() for own in order.tensor_split([len(order) // PART]))
    told = gone[(energies[:, gone] > 0).all(0)][:MOST_TARGETS]
    if not len(told):
        return 0.0
    kept = others.sort().values
    sizes = [float(own[columns].mean()) for own in energies]
    if all(half.is_thin for half in halves):
        thin = [
            _Columns.of(half.own[0], kept, told, size, has_bias=has_bias)
            for half, size in zip(halves, sizes, strict=True)
        ]
        return _kappa(thin[0], thin[1], ridge)
    seen = [
        _Seen.of(half.matrix[0], kept, told, size, has_bias=has_bias)
        for half, size in zip(halves, sizes, strict=True)
    ]
    return _kappa(seen[0], seen[1], ridge)


@dataclass(frozen=True, eq=False)
class _Seen:
    """Second moments of the columns that stay, theirs with those that are told, and those' energies.

    `size` is the mean of all energies, `has_bias` whether the last that stays is the constant.
    """

    among: Tensor
    cross: Tensor
    energies: Tensor
    size: float
    has_bias: bool

    @classmethod
    def of(
        cls, moment: Tensor, kept: Tensor, told: Tensor, size: float, *, has_bias: bool
    ) -> "_Seen":
        constant = torch.arange(len(moment), device=kept.device)[len(moment) - has_bias :]
        kept = torch.cat([kept, constant])
        rows = moment[kept]
        return cls(rows[:, kept], rows[:, told], moment[told, told], size, has_bias)

    def __add__(self, other: "_Seen") -> "_Seen":
        sums = (self.among + other.among, self.cross + other.cross, self.energies + other.energies)
        return _Seen(*sums, self.size + other.size, self.has_bias)

    def missed(self, seen: "_Seen", ridges: Sequence[float]) -> Iterator[Tensor]:
        """Of each column that is told, on what was `seen`: W = (A_KK + λ a I)⁻¹ A_Kq, where a is `size`."""
        for ridge in ridges:
            among = self.among.clone()
            among.diagonal()[: len(among) - self.has_bias].add_(max(ridge, LEAST) * self.size)
            fit = torch.cholesky_solve(self.cross, torch.linalg.cholesky(among))
            yield seen.energies - (fit * (2 * seen.cross - seen.among @ fit)).sum(0)


@dataclass(frozen=True, eq=False)
class _Columns:
    """The same by the columns themselves: those that stay, those that are told, and the constant, (…, positions)."""

    kept: Tensor
    told: Tensor
    constant: Tensor
    size: float

    @classmethod
    def of(
        cls, columns: Tensor, kept: Tensor, told: Tensor, size: float, *, has_bias: bool
    ) -> "_Columns":
        constant = columns[-1] if has_bias else torch.zeros_like(columns[-1])
        return cls(columns[kept], columns[told], constant, size)

    def __add__(self, other: "_Columns") -> "_Columns":
        return _Columns(
            torch.cat([self.kept, other.kept], 1),
            torch.cat([self.told, other.told], 1),
            torch.cat([self.constant, other.constant]),
            self.size + other.size,
        )

    @property
    def energies(self) -> Tensor:
        """Of those that are told."""
        return self.told.square().sum(1)

    def missed(self, seen: "_Columns", ridges: Sequence[float]) -> Iterator[Tensor]:
        """Of each column that is told, on what was `seen`."""
        size = self.constant.square().sum().clamp_min(torch.finfo(self.constant.dtype).tiny)
        mean, level = (own @ self.constant / size for own in (self.kept, self.told))
        kept, told = (
            own - torch.outer(at, self.constant)
            for own, at in ((self.kept, mean), (self.told, level))
        )
        others = kept.T @ (seen.kept - torch.outer(mean, seen.constant))
        wanted = seen.told - torch.outer(level, seen.constant)
        among = kept.T @ kept
        for ridge in ridges:
            own = among.clone()
            own.diagonal().add_(max(ridge, LEAST) * self.size)
            fit = torch.cholesky_solve(told.T, torch.linalg.cholesky(own))
            yield (wanted - fit.T @ others).square().sum(1)


_Half = TypeVar("_Half", _Seen, _Columns)


def _kappa(first: _Half, second: _Half, ridge: float) -> float:
    crossed = zip(_left(first, second, RIDGES), _left(second, first, RIDGES), strict=True)
    outside = min(map(sum, crossed)) / 2
    whole = first + second
    (inside,) = _left(whole, whole, (ridge,))
    return min(1.0, max(0.0, (outside - inside) / (1 - inside))) if inside < 1 else 0.0


def _left(fitted: _Half, seen: _Half, ridges: Sequence[float]) -> list[float]:
    """In parts of each column's energy, the mean, for each ridge; a fit that is worse than none counts as none."""
    return [float((own / seen.energies).clamp(0, 1).mean()) for own in fitted.missed(seen, ridges)]
