"""Scores of units by brute force: for each unit a boolean mask per tensor, then plain sums.

A unit's slices are read from `group.slices` one index at a time. Nothing here knows how the library gathers them.
`removed_entries` says the same another way: what a plan that removes the unit alone takes from each tensor.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from apoptosis.structure import Group, Slice, Structure

__all__ = ["counted_slices", "normalised", "removed_entries", "unit_sums"]

ROLES = ("producer", "carrier", "consumer")


def unit_sums(
    scores: Mapping[str, Tensor],
    structure: Structure,
    *,
    absolute: str = "none",
    over_slices: str = "sum",
    roles: tuple[str, ...] = ROLES,
    parameters: str = "all",
    normalise: str = "none",
) -> dict[str, list[float]]:
    """Scores of every group's units; groups none of whose counted entries was scored are left out."""
    found: dict[str, list[float]] = {}
    for group in structure.groups:
        slices = counted_slices(scores, group, roles, parameters)
        if not slices:
            continue
        raw = []
        for unit in range(group.size):
            masks = [_mask(own, unit, scores[own.tensor].shape) for own in slices]
            if absolute in ("none", "unit"):
                total = _counted_once(scores, slices, masks)
                total = abs(total) if absolute == "unit" else total
            else:
                total = 0.0
                for own, mask in zip(slices, masks, strict=True):
                    entries = scores[own.tensor][mask].tolist()
                    if absolute == "entry":
                        total += math.fsum(abs(entry) for entry in entries)
                    else:
                        total += abs(math.fsum(entries))
            raw.append(total / len(slices) if over_slices == "mean" else total)
        found[group.name] = normalised(raw, normalise)
    return found


def counted_slices(
    scores: Mapping[str, Tensor], group: Group, roles: tuple[str, ...], parameters: str
) -> list[Slice]:
    """Those of the roles asked for, in tensors that have scores and are of the kind asked for."""
    found = []
    for own in group.slices:
        if own.role not in roles or own.tensor not in scores:
            continue
        if parameters == "weights" and scores[own.tensor].ndim < 2:
            continue
        found.append(own)
    return found


def normalised(raw: list[float], how: str) -> list[float]:
    """Within a group; where there is nothing to divide by, zeros."""
    if how == "none":
        return raw
    shift = min(raw) if how == "minmax" else 0.0
    sizes = [abs(value) for value in raw]
    scale = {
        "max": max(sizes),
        "minmax": max(raw) - min(raw),
        "l2": math.sqrt(math.fsum(size * size for size in sizes)),
        "mean": math.fsum(sizes) / len(sizes),
    }[how]
    return [0.0 if scale == 0 else (value - shift) / scale for value in raw]


def removed_entries(structure: Structure, group: str, unit: int) -> dict[str, Tensor]:
    """By tensor, under each of its names, true where a plan that removes this unit alone takes an entry away."""
    kept = [other for other in range(structure[group].size) if other != unit]
    found: dict[str, Tensor] = {}
    for cut in structure.plan({group: kept}).tensors:
        stays = torch.ones(cut.shape, dtype=torch.bool)
        for dim, own in cut.kept.items():
            for index in range(cut.shape[dim]):
                if index not in own:
                    stays.select(dim, index).fill_(value=False)
        for name in cut.names:
            found[name] = ~stays
    return found


def _mask(own: Slice, unit: int, shape: torch.Size) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for index in own.indices[unit].tolist():
        mask.select(own.dim, index).fill_(value=True)
    return mask


def _counted_once(scores: Mapping[str, Tensor], slices: list[Slice], masks: list[Tensor]) -> float:
    """The sum over the union of a tensor's masks: an entry that two slices share counts once."""
    union: dict[str, Tensor] = {}
    for own, mask in zip(slices, masks, strict=True):
        union[own.tensor] = union[own.tensor] | mask if own.tensor in union else mask
    return math.fsum(entry for name, mask in union.items() for entry in scores[name][mask].tolist())
