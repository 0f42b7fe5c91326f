"""What units cost together beyond the sum of their scores, and what makes such matrices fit scores."""

from collections.abc import Mapping

import torch
from torch import Tensor

from apoptosis.errors import ConfigError

__all__ = ["checked_interactions"]

SYMMETRY = 1e-6
"""How far a matrix may be from symmetric, relative to its largest entry: rounding of sums in float32."""


def checked_interactions(
    interactions: Mapping[tuple[str, ...], Tensor], values: Mapping[str, Tensor]
) -> dict[tuple[str, ...], Tensor]:
    """Interactions in float64 on the CPU.

    Raises:
        ConfigError: they do not fit the scores `values`: other groups, sizes, or no symmetry.
    """
    names = [name for groups in interactions for name in groups]
    if unknown := [name for name in names if name not in values]:
        raise ConfigError(f"Interactions name the group {unknown[0]!r}, which has no scores.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Interactions hold the group {twice[0]!r} twice; put groups that act on each other into one matrix."
        )
    return {groups: _checked(groups, own, values) for groups, own in interactions.items()}


def _checked(groups: tuple[str, ...], matrix: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    size = sum(len(values[name]) for name in groups)
    found = torch.as_tensor(matrix).detach().to("cpu", torch.float64)
    if tuple(found.shape) != (size, size):
        raise ConfigError(
            f"Interactions of {', '.join(groups)} have shape {tuple(found.shape)}; these groups have {size} units."
        )
    if not _symmetric(found):
        raise ConfigError(
            f"Interactions of {', '.join(groups)} are not symmetric: what u adds to v, v adds to u."
        )
    return found


def _symmetric(matrix: Tensor) -> bool:
    """Row by row in parts: a copy of the whole may be a gigabyte."""
    if not matrix.numel():
        return True
    largest = max(float(part.abs().max()) for part in matrix.split(1024))
    gaps = (
        float((part - matrix[:, start : start + len(part)].T).abs().max())
        for start, part in zip(range(0, len(matrix), 1024), matrix.split(1024), strict=True)
    )
    return not any(gap > SYMMETRY * largest for gap in gaps)
