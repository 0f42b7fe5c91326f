"""The network that a run of `prune` starts from: the one given, or the same with its heads aligned.

Heads are aligned once in a run. What came of it is noted: a run that goes on takes the same numbers up again, whatever
order its data come in by then. Like the notes of steps these take it that the network is the one the run began with;
what can be seen of that is looked at.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.alignment import align_heads
from apoptosis.checkpoint import Journal
from apoptosis.errors import CheckpointError
from apoptosis.structure import Group, Structure, copy_with, mark_turned_, model_tensors
from apoptosis.task import Batch, Task
from apoptosis.workflow.arguments import failures_explained
from apoptosis.workflow.notes import note_aligned, noted_aligned

__all__ = ["aligned_once"]


def aligned_once(  # noqa: PLR0913 - what alignment takes, and what its note has
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task,
    *,
    groups: Iterable[Group],
    journal: Journal | None,
    choices: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """The turned network (or the given one, where nothing can be turned), and what settings say of it.

    Raises:
        CheckpointError: the journal is of a run that aligned another network.
    """
    if journal is not None and (noted := noted_aligned(journal)) is not None:
        tensors, said = noted
        return _with(model, tensors, journal), said
    with failures_explained("Aligning heads"):
        found = align_heads(model, structure, batches, task, groups=groups)
    said = {"aligned": list(found.energies), "not_aligned": found.left_alone}
    if found.energies:
        before, after = model_tensors(model), model_tensors(found.model)
        turned = {name: own for name, own in after.items() if not torch.equal(own, before[name])}
        note_aligned(journal, turned, said, choices)
    return found.model, said


def _with(model: nn.Module, tensors: Mapping[str, Tensor], journal: Journal) -> nn.Module:
    turned = copy_with(model, {})
    held = model_tensors(turned)
    if any(name not in held or held[name].shape != own.shape for name, own in tensors.items()):
        raise CheckpointError(
            f"The notes in {journal.folder} are of a run that aligned the heads of another network. Give the network "
            "that it began with, or begin again in a new folder."
        )
    with torch.no_grad():
        for name, own in tensors.items():
            held[name].copy_(own)
    mark_turned_(turned, tensors)
    return turned
