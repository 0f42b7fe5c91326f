"""What `prune` and `sparsify` note after every step, and how they take it up again.

No weight changes while units or weights are chosen: who stays says all, and the network is made of the dense one again.
Only norms that were measured on the way have numbers of their own.

What a caller of `prune` leaves unsaid is settled when the run begins, and another version may settle it otherwise. So
its notes also have what was settled: criterion, steps, repair and the rest. The settings of a journal are no place for
that, they are the caller's and known before. A run that goes on takes from its note what is not said again, and is
refused where something else is said: half of one removal sequence and half of another is what nobody asked for.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.checkpoint import Journal, Note, read_step, step_as_json
from apoptosis.criteria import CRITERIA, Criterion
from apoptosis.errors import CheckpointError
from apoptosis.masks import MaskPlan
from apoptosis.records import StepRecord
from apoptosis.repair import REPAIRS, Repair, repair_name
from apoptosis.structure import Plan, Structure, network_digest
from apoptosis.workflow.removal_order import RemovalOrder
from apoptosis.workflow.step_choice import Spared

__all__ = [
    "NETWORK",
    "Told",
    "check_as_begun",
    "choices_of",
    "note_aligned",
    "note_masks",
    "note_units",
    "noted_aligned",
    "noted_masks",
    "noted_units",
    "told_as_begun",
    "with_network",
]

NAME, ALIGNED = "step", "aligned"
MASKS, BUFFERS = "masks", "buffer."
SPARED, PLAN = "spared", "plan"
CHOICES, INSISTED = "choices", "repair_was_asked_for"
NETWORK = "network"
"""A digest of the weights and buffers that a run began with: kept units say nothing of another network."""
EARLIER: Mapping[str, Any] = MappingProxyType({"align": False})
"""What runs did whose notes are older than a choice."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What `prune` was told of what it would choose itself; None where nothing was said."""

    criterion: Criterion | str | None
    steps: int | None
    align: bool | None
    repair: tuple[Repair | str, ...] | None
    insists: bool
    """On the repair: one that nobody asked for may be left out."""


def told_as_begun(told: Told, journal: Journal | None) -> Told:
    """With what the notes of a run say where nothing was said; as it is where there are none.

    Raises:
        CheckpointError: the notes do not say, or name what only the caller has.
    """
    note = _first_note(journal)
    if journal is None or note is None:
        return told
    begun = note.facts.get(CHOICES)
    if begun is None:
        if told.criterion is not None and told.steps is not None and not told.align:
            return replace(told, **EARLIER)
        if told.align:
            raise CheckpointError(
                f"The notes in {journal.folder} are of an older version, which aligned no heads. Leave out align, or "
                "begin again in a new folder."
            )
        raise CheckpointError(
            f"The notes in {journal.folder} are of an older version and do not say by which criterion, and in how many "
            "steps, their run was to go; defaults have changed. Begin again in a new folder; or, if you know both, say "
            "criterion=… and steps=… as they were."
        )
    begun = {**EARLIER, **begun}
    found = replace(
        told,
        steps=begun["steps"] if told.steps is None else told.steps,
        align=begun["align"] if told.align is None else told.align,
    )
    if told.criterion is None:
        named = CRITERIA.get(begun["criterion"])
        found = replace(found, criterion=_found(named, journal, "criterion", begun["criterion"]))
    if told.repair is None:
        known = _repairs_by_name()
        mends = [_found(known.get(own), journal, "repair", own) for own in begun["repair"]]
        found = replace(found, repair=tuple(mends), insists=begun[INSISTED])
    return found


def _found(own: Any, journal: Journal, what: str, name: str) -> Any:
    if own is None:
        raise CheckpointError(
            f"The notes in {journal.folder} are of a run with the {what} {name!r}, which no table has. Give it again: "
            f"{what}=…; or begin again in a new folder."
        )
    return own


def choices_of(
    settings: Mapping[str, Any], how: Criterion, repairs: Iterable[Repair], *, insists: bool
) -> dict[str, Any]:
    """What notes have of a run: its settings, where criteria and repairs of the caller's own do not pass for ours."""
    known = _repairs_by_name()
    return {
        **settings,
        "criterion": _marked(how.name, how, CRITERIA),
        "repair": [_marked(repair_name(own), own, known) for own in repairs],
        INSISTED: insists,
    }


def _repairs_by_name() -> dict[str, Repair]:
    return {repair_name(own): own for own in REPAIRS.values()}


def _marked(name: str, own: object, table: Mapping[str, object]) -> str:
    """The name, marked where a table has something else by it."""
    return name if table.get(name, own) == own else f"{name} (your own)"


def check_as_begun(journal: Journal | None, choices: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that began with other choices, or with another network.

    Raises:
        CheckpointError: they differ; it says where.
    """
    note = _first_note(journal)
    if journal is None or note is None or CHOICES not in note.facts:
        return
    _check_network(journal, note.facts[CHOICES], choices.get(NETWORK))
    begun, now = (dict(_flat(own)) for own in ({**EARLIER, **note.facts[CHOICES]}, _plain(choices)))
    other = [
        f"{name} {begun.get(name, 'not said')} (now {now.get(name, 'not said')})"
        for name in dict.fromkeys((*begun, *now))
        if begun.get(name) != now.get(name) and name not in (INSISTED, NETWORK)
    ]
    if other:
        raise CheckpointError(
            f"{journal.folder} has notes of a run with other choices: {', '.join(other[:6])}. Go on with the same (a "
            "criterion, steps or repair that is not said is taken from the notes), or begin again in a new folder."
        )


def with_network(
    facts: Mapping[str, Any], model: nn.Module, journal: Journal | None
) -> dict[str, Any]:
    """Facts of a note with what tells the network that its run began with; without, where nobody keeps notes."""
    if journal is None or journal.is_on_the_way:
        return dict(facts)
    return {**facts, NETWORK: network_digest(model)}


def _check_network(journal: Journal, facts: Mapping[str, Any], now: str | None) -> None:
    """Notes of earlier versions do not say, and parts on the way need not."""
    begun = facts.get(NETWORK)
    if begun is not None and now is not None and begun != now:
        raise CheckpointError(
            f"The notes in {journal.folder} are of a run that began with another network: the weights or buffers of "
            f"this one are others (digest {now}, then {begun}). Give the network that it began with, or begin again in "
            "a new folder."
        )


def _first_note(journal: Journal | None) -> Note | None:
    """That of the last step; before there is one, that of aligned heads. Both say what was chosen."""
    return journal and (journal.read(NAME) or journal.read(ALIGNED))


def note_aligned(
    journal: Journal | None,
    turned: Mapping[str, Tensor],
    said: Mapping[str, Any],
    choices: Mapping[str, Any],
) -> None:
    """Tensors of the network whose heads were aligned, and what settings say of them."""
    if journal is not None:
        journal.write(ALIGNED, {"said": said, CHOICES: _plain(choices)}, turned)


def noted_aligned(journal: Journal | None) -> tuple[Mapping[str, Tensor], dict[str, Any]] | None:
    """The same, where it was noted."""
    note = None if journal is None else journal.read(ALIGNED)
    return None if note is None else (note.tensors, dict(note.facts["said"]))


def note_units(  # noqa: PLR0913 - all that a run goes on from
    journal: Journal | None,
    plan: Plan,
    history: Sequence[StepRecord],
    order: RemovalOrder,
    choices: Mapping[str, Any],
    spared: Spared | None,
) -> None:
    """After a step of `prune`, with the choices that led to it."""
    if journal is not None:
        kept = {name: [int(unit) for unit in own] for name, own in plan.kept.items()}
        steps = [step_as_json(step) for step in history]
        facts = {
            "kept": kept,
            PLAN: plan.to_json(),
            "history": steps,
            CHOICES: _plain(choices),
            SPARED: spared.as_data() if spared else None,
        }
        journal.write(NAME, facts, order.as_tensors())


def noted_units(
    journal: Journal | None, dense: Structure, order: RemovalOrder
) -> tuple[Plan, list[StepRecord], Spared | None]:
    """Where a run of `prune` stands: nothing has gone yet where there is no note. `order` is filled."""
    note = None if journal is None else journal.read(NAME)
    if note is None:
        return dense.identity(), [], None
    order.read_(note.tensors)
    spared = note.facts.get(SPARED)
    return (
        _noted_plan(note, dense),
        [read_step(step) for step in note.facts["history"]],
        Spared.from_data(spared) if spared else None,
    )


def _noted_plan(note: Note, dense: Structure) -> Plan:
    """As it was, not only with the units it keeps: one of many steps may be a program where a whole one is none."""
    if PLAN not in note.facts:
        return dense.plan(note.facts["kept"])
    return replace(Plan.from_json(note.facts[PLAN]), source=dense)


def note_masks(
    journal: Journal | None,
    masks: MaskPlan,
    small: nn.Module,
    history: Sequence[StepRecord],
    begun: Mapping[str, Any],
) -> None:
    """After a stage of `sparsify`; `begun` tells the network it began with."""
    if journal is not None:
        tensors = {f"{BUFFERS}{name}": own for name, own in small.named_buffers()}
        tensors[MASKS] = torch.frombuffer(bytearray(masks.to_bytes()), dtype=torch.uint8)
        facts = {**begun, "history": [step_as_json(step) for step in history]}
        journal.write(NAME, facts, tensors)


def noted_masks(
    journal: Journal | None, small: nn.Module, begun: Mapping[str, Any]
) -> tuple[MaskPlan, list[StepRecord]] | None:
    """Where a run of `sparsify` stands; the buffers of `small` are filled. None where there is no note.

    Raises:
        CheckpointError: the run began with another network.
    """
    note = None if journal is None else journal.read(NAME)
    if journal is None or note is None:
        return None
    _check_network(journal, note.facts, begun.get(NETWORK))
    with torch.no_grad():
        for name, buffer in small.named_buffers():
            buffer.copy_(note.tensors[f"{BUFFERS}{name}"])
    masks = MaskPlan.from_bytes(note.tensors[MASKS].numpy().tobytes())
    return masks, [read_step(step) for step in note.facts["history"]]


def _plain(choices: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back; sets in an order that is the same in every process."""
    return json.loads(
        json.dumps(choices, default=lambda own: sorted(own) if isinstance(own, Set) else str(own))
    )


def _flat(choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every choice as a text, those of a selection or a budget by themselves."""
    for name, own in choices.items():
        parts = own if isinstance(own, Mapping) else {}
        yield from ((f"{name}.{part}", json.dumps(value)) for part, value in parts.items())
        if not parts:
            yield name, json.dumps(own)
