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

Where positions are few (`Products.is_thin`) fits are found by way of them (`curvature.dual_ridge`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from apoptosis.curvature import DualRidge, Products

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
    constant = torch.arange(num, device=columns.device)[num - has_bias :]
    kept = torch.cat([others.sort().values, constant])
    sizes = [float(own[columns].mean()) for own in energies]
    if all(half.is_thin for half in halves):
        thin = [
            _Columns.of(half.own, kept, told, size, has_bias=has_bias)
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
    """The same by the columns themselves, those that stay and those that are told, (1, …, positions) each."""

    kept: Tensor
    told: Tensor
    size: float
    has_bias: bool

    @classmethod
    def of(
        cls, columns: Tensor, kept: Tensor, told: Tensor, size: float, *, has_bias: bool
    ) -> "_Columns":
        return cls(columns[:, kept], columns[:, told], size, has_bias)

    def __add__(self, other: "_Columns") -> "_Columns":
        kept, told = (
            torch.cat(both, 2) for both in ((self.kept, other.kept), (self.told, other.told))
        )
        return _Columns(kept, told, self.size + other.size, self.has_bias)

    @property
    def energies(self) -> Tensor:
        """Of those that are told."""
        return self.told[0].square().sum(1)

    def missed(self, seen: "_Columns", ridges: Sequence[float]) -> Iterator[Tensor]:
        """Of each column that is told, on what was `seen`."""
        fits = DualRidge(self.kept, has_bias=self.has_bias)
        penalties = (self.kept.new_tensor([max(own, LEAST) * self.size]) for own in ridges)
        for left in fits.missed(self.told, seen.kept, seen.told, penalties):
            yield left[0]


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
