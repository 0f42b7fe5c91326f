"""The network that a run of `prune` starts from: the one given, or the same with its heads aligned.

Heads are aligned once in a run. What came of it is noted: a run that goes on takes the same numbers up again, whatever
order its data come in by then, and reads no data for it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.alignment import align_heads
from apoptosis.checkpoint import Journal, Note, digest_of
from apoptosis.errors import CheckpointError
from apoptosis.structure import Group, Structure, copy_with, model_tensors
from apoptosis.task import Batch, Task
from apoptosis.workflow.arguments import failures_explained

__all__ = ["aligned_once"]

NAME, GIVEN = "aligned", "given"


def aligned_once(  # noqa: PLR0913 - what alignment takes, and where its result is noted
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task,
    *,
    groups: Iterable[Group],
    journal: Journal | None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The turned network (or the given one, where nothing can be turned), and what settings say of it.

    Raises:
        CheckpointError: the journal is of a run that aligned another network.
    """
    note = None if journal is None else journal.read(NAME)
    if journal is not None and note is not None:
        return _as_noted(model, note, journal), _said(note.facts)
    with failures_explained("Aligning heads"):
        found = align_heads(model, structure, batches, task, groups=groups)
    said = {"aligned": list(found.energies), "not_aligned": found.left_alone}
    if journal is not None and found.energies:
        before, after = model_tensors(model), model_tensors(found.model)
        turned = {name: own for name, own in after.items() if not _same(own, before[name])}
        facts = {**said, GIVEN: digest_of({name: before[name] for name in turned})}
        journal.write(NAME, facts, turned)
    return found.model, said


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _said(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: own for name, own in facts.items() if name != GIVEN}


def _as_noted(model: nn.Module, note: Note, journal: Journal) -> nn.Module:
    held = model_tensors(model)
    given = {name: held[name] for name in note.tensors if name in held}
    if len(given) < len(note.tensors) or digest_of(given) != note.facts[GIVEN]:
        raise CheckpointError(
            f"The notes in {journal.folder} are of a run that aligned the heads of another network. Give the network "
            "that it began with, or begin again in a new folder."
        )
    turned = copy_with(model, {})
    held = model_tensors(turned)
    with torch.no_grad():
        for name, own in note.tensors.items():
            held[name].copy_(own)
    return turned
