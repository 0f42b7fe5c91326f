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
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    halves: tuple[Tensor, Tensor], columns: Tensor, *, ridge: float, has_bias: bool
) -> float:
    """κ; 0 where there are too few channels to tell by, 1 where there is one half alone.

    Channels that are always zero are passed over: κ is the same as where they have been cut.

    Time: eleven Cholesky factors of three quarters of the inputs, five times what the inverse of A takes.

    Args:
        halves: the second moments of two halves of the samples, (n, n), in units of all of them.
        columns: (channels, k), where each channel is among the inputs.
        ridge: of the fit to all samples, in parts of the mean of what is not zero.
        has_bias: the last input is the constant 1, on which there is no penalty.
    """
    shows = [bool(half.diagonal()[: len(half) - has_bias].any()) for half in halves]
    if any(shows) and not all(shows):
        return 1.0
    energies = torch.stack([half.diagonal() for half in halves])
    columns = columns[energies.sum(0)[columns].any(1)]
    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    order = order.to(columns.device)
    gone, others = (columns[own].flatten() for own in order.tensor_split([len(order) // PART]))
    told = gone[(energies[:, gone] > 0).all(0)][:MOST_TARGETS]
    if not len(told):
        return 0.0
    constant = torch.arange(len(halves[0]), device=columns.device)[len(halves[0]) - has_bias :]
    kept = torch.cat([others.sort().values, constant])
    first, second = (
        _Seen.of(half, kept, told, float(half.diagonal()[columns].mean()), has_bias=has_bias)
        for half in halves
    )
    outside = min(_left(first, second, own) + _left(second, first, own) for own in RIDGES) / 2
    whole = first + second
    inside = _left(whole, whole, ridge)
    return min(1.0, max(0.0, (outside - inside) / (1 - inside))) if inside < 1 else 0.0


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

    def solved(self, ridge: float) -> Tensor:
        """(A_KK + λ a I)⁻¹ A_Kq, where a is `size`."""
        among = self.among.clone()
        among.diagonal()[: len(among) - self.has_bias].add_(max(ridge, LEAST) * self.size)
        return torch.cholesky_solve(self.cross, torch.linalg.cholesky(among))


def _left(fitted: _Seen, seen: _Seen, ridge: float) -> float:
    """In parts of each column's energy, the mean; a fit that is worse than none counts as none."""
    fit = fitted.solved(ridge)
    missed = seen.energies - (fit * (2 * seen.cross - seen.among @ fit)).sum(0)
    return float((missed / seen.energies).clamp(0, 1).mean())
