"""What `prune` and `sparsify` note after every step, and how they take it up again.

No weight changes while units or weights are chosen: who stays says all, and the network is made of the dense one again.
Only norms that were measured on the way have numbers of their own.
"""

from collections.abc import Sequence

import torch
from torch import nn

from apoptosis.checkpoint import Journal, read_step, step_as_json
from apoptosis.masks import MaskPlan
from apoptosis.records import StepRecord
from apoptosis.structure import Plan, Structure
from apoptosis.workflow.removal_order import RemovalOrder

__all__ = ["note_masks", "note_units", "noted_masks", "noted_units"]

NAME = "step"
MASKS, BUFFERS = "masks", "buffer."


def note_units(
    journal: Journal | None, plan: Plan, history: Sequence[StepRecord], order: RemovalOrder
) -> None:
    """After a step of `prune`."""
    if journal is not None:
        kept = {name: [int(unit) for unit in own] for name, own in plan.kept.items()}
        steps = [step_as_json(step) for step in history]
        journal.write(NAME, {"kept": kept, "history": steps}, order.as_tensors())


def noted_units(
    journal: Journal | None, dense: Structure, order: RemovalOrder
) -> tuple[Plan, list[StepRecord]]:
    """Where a run of `prune` stands: nothing has gone yet where there is no note. `order` is filled."""
    note = None if journal is None else journal.read(NAME)
    if note is None:
        return dense.identity(), []
    order.read_(note.tensors)
    return dense.plan(note.facts["kept"]), [read_step(step) for step in note.facts["history"]]


def note_masks(
    journal: Journal | None, masks: MaskPlan, small: nn.Module, history: Sequence[StepRecord]
) -> None:
    """After a stage of `sparsify`."""
    if journal is not None:
        tensors = {f"{BUFFERS}{name}": own for name, own in small.named_buffers()}
        tensors[MASKS] = torch.frombuffer(bytearray(masks.to_bytes()), dtype=torch.uint8)
        journal.write(NAME, {"history": [step_as_json(step) for step in history]}, tensors)


def noted_masks(
    journal: Journal | None, small: nn.Module
) -> tuple[MaskPlan, list[StepRecord]] | None:
    """Where a run of `sparsify` stands; the buffers of `small` are filled. None where there is no note."""
    note = None if journal is None else journal.read(NAME)
    if note is None:
        return None
    with torch.no_grad():
        for name, buffer in small.named_buffers():
            buffer.copy_(note.tensors[f"{BUFFERS}{name}"])
    masks = MaskPlan.from_bytes(note.tensors[MASKS].numpy().tobytes())
    return masks, [read_step(step) for step in note.facts["history"]]
