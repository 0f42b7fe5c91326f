"""The best coordinates of a sum over dimensions, where one may choose them.

What two sides share is z = Σ_i a_i b_i (queries and keys; or mixed values and the columns of the layer that reads
them). For any invertible M it is the same with a' = M a and b' = M⁻ᵀ b. Taking dimensions away leaves least behind,

    E (z − z_kept)² = tr(C_a Q C_b Qᵀ) → min,      C_a = E a aᵀ,  C_b = E b bᵀ  (a and b independent),

in the coordinates of the singular value decomposition C_a^½ C_b^½ = U s Vᵀ:

    M = s^½ Uᵀ C_a^{-½},      E a'_i² = E b'_i² = s_i,      E (a'_i b'_i)² = s_i².

Both sides carry the same energy, and dimensions come in the order of what they are worth.
"""

import torch
from torch import Tensor

__all__ = ["principal_turn"]

SMALLEST = 1e-8
"""Of the largest, below which an eigenvalue counts as this much: the inverse of nothing is infinite."""


def principal_turn(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """M and s² from C_a and C_b, each (d, d) in float64. Where one side is zero nothing is turned.

    >>> turn, energies = principal_turn(torch.diag(torch.tensor([1.0, 4.0]).double()), torch.eye(2).double())
    >>> energies
    tensor([4., 1.], dtype=torch.float64)
    """
    if not (bool(left.any()) and bool(right.any())):
        return torch.eye(len(left)).to(left), left.new_zeros(len(left))
    (root, inverse), (other, _) = _roots(left), _roots(right)
    bases, strengths, _ = torch.linalg.svd(root @ other)
    return strengths.sqrt()[:, None] * bases.T @ inverse, strengths.square()


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """C^½ and C^{-½}."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    values = values.clamp_min(SMALLEST * float(values[-1])).sqrt()
    return vectors * values @ vectors.T, vectors / values @ vectors.T
