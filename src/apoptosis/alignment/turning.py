"""Carrying out a turn: rows of parameters mixed with each other, head by head."""

from collections.abc import Mapping

import torch
from torch import Tensor

from apoptosis.alignment.bonds import Bond, Slot

__all__ = ["rows_of", "turn_", "turn_slot_"]


def turn_(held: Mapping[str, Tensor], bond: Bond, turn: Tensor) -> None:
    """Left by M (heads, units, units), and all on the right by M⁻ᵀ: sums over both stay what they are."""
    turn_slot_(held, bond.left, turn)
    for slot in bond.right:
        turn_slot_(held, slot, torch.linalg.inv(turn).mT)


def turn_slot_(held: Mapping[str, Tensor], slot: Slot, turn: Tensor) -> None:
    """One side alone; products are in float64, whatever the parameters are."""
    for name, dim in slot.places:
        rows = rows_of(held, slot, name, dim)
        rows = turn.to(rows) @ rows
        lines = held[name].movedim(dim, 0)
        where = torch.from_numpy(slot.entries).flatten().to(lines.device)
        lines[where] = rows.flatten(0, 1).view(-1, *lines.shape[1:]).to(lines)


def rows_of(held: Mapping[str, Tensor], slot: Slot, name: str, dim: int) -> Tensor:
    """What a parameter has for a slot, (heads, units, the rest), in float64."""
    lines = held[name].detach().movedim(dim, 0)
    lines = lines.reshape(len(lines), -1)
    return lines[torch.from_numpy(slot.entries).to(lines.device)].double()
