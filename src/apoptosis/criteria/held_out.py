"""With which penalty what a layer reads is told from the rest of it, on samples that nobody fitted.

Whether a unit can be spared depends on how well the others stand in for it: x_q ≈ W x_K, fitted by least squares. Of
few samples, or of many tokens that say much the same, such a fit explains nearly everything it has seen and little of
what it has not (the hidden units of a language model, 4,096 tokens for 1,408 of them: a quarter is left on these
tokens, all of it on others; experiments/LOG.md), and prices made of it would be far too low. With a penalty λ that
holds on the other half of the samples they are not.

    missed(λ) = Σ_q t_q E_B (x_q − W_q x_K)²,      W_q = (A_KK + λ a I)⁻¹ A_Kq,      and the same with A and B exchanged

A and B are the second moments of two halves of the samples, a the mean of A's diagonal, q a quarter of the channels,
t_q what an error there costs.
"""

import torch
from torch import Tensor

__all__ = ["RIDGES", "missed_by_ridge"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PART = 4
"""One channel in so many is told from the others."""
MOST_TARGETS = 128
"""Columns that are told: more change the sum by little, and each costs a solution."""


def missed_by_ridge(
    halves: tuple[Tensor, Tensor], weights: Tensor, columns: Tensor, *, has_bias: bool
) -> Tensor:
    """What is missed with each of `RIDGES`, (5,); zeros where there is nothing to tell by.

    Args:
        halves: A and B, (n, n).
        weights: T, (m, n): an error e of the inputs costs ‖T e‖².
        columns: (channels, k), where each channel is among the inputs.
        has_bias: the last input is the constant 1, on which there is no penalty.
    """
    found = torch.zeros(len(RIDGES), dtype=torch.float64)
    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    gone = columns[order[: len(columns) // PART].to(columns.device)].flatten()
    if not len(gone) or not all(bool(half.diagonal().any()) for half in halves):
        return found
    others = torch.ones(len(halves[0]), dtype=torch.bool, device=gone.device)
    others[gone] = False
    kept, told = others.nonzero().flatten(), gone[:MOST_TARGETS]
    costs = weights[:, told].square().sum(0)
    for a, b in (halves, halves[::-1]):
        for number, ridge in enumerate(RIDGES):
            fit = _solved(a, kept, told, ridge, has_bias=has_bias)
            left = b[told, told] - (fit * (2 * b[kept][:, told] - b[kept][:, kept] @ fit)).sum(0)
            found[number] += float(costs @ left)
    return found


def _solved(moment: Tensor, kept: Tensor, told: Tensor, ridge: float, *, has_bias: bool) -> Tensor:
    """(A_KK + λ a I)⁻¹ A_Kq."""
    among = moment[kept][:, kept]
    penalty = ridge * float(moment.diagonal()[: len(moment) - has_bias].mean())
    free = among.diagonal()[: len(kept) - has_bias]
    free += max(penalty, torch.finfo(torch.float64).tiny)
    return torch.cholesky_solve(moment[kept][:, told], torch.linalg.cholesky(among))
