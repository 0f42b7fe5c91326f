"""`align_heads`: turn every attention head into its principal axes, so that few of its dimensions carry nearly all.

A trained head has no reason to prefer the coordinates it came in: what its queries and keys agree on, and what its
values hand on, is spread over all dimensions. The same network in the coordinates of `bases` has the dimensions in the
order of what they carry, the least ones last, and those can go at little cost. Nothing else changes: the new network
computes what the old one did, to rounding, and any criterion, budget and repair can follow.

Moments are of what passes: queries and keys at the outputs of the modules that make them, mixed values at the input of
the module that reads them. That reader's side is the second moment of its columns, all of its outputs counting alike.

Which entries may be turned together is guessed from shapes (`bonds`) and decided on a twin with random weights
(`trials`). What is returned is turned and never run: data pass a copy that is thrown away. So there is room needed for
the network twice more, in float64 the second time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.alignment.bases import principal_turn
from apoptosis.alignment.bonds import DIMENSIONS, Bond, NoBondError, Slot, Way, possible_bonds
from apoptosis.alignment.moments import Moments, moments_of
from apoptosis.alignment.trials import Trial
from apoptosis.alignment.turning import rows_of, turn_
from apoptosis.errors import ConfigError, DataError, ModelError, PlanMismatchError
from apoptosis.masks import masks_of
from apoptosis.progress import track
from apoptosis.structure import Group, Structure, copy_with, mark_turned_, model_tensors
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["Aligned", "align_heads"]


@dataclass(frozen=True, eq=False)
class Aligned:
    """The network in new coordinates.

    Attributes:
        model: computes what the given one does. Plans for it are for it alone (`Plan.basis`).
        energies: by name of each group that was turned, (units,): the share of E (a' b')² that each dimension carries,
            summed over heads, falling. Where queries share a key it falls for all of them together.
        left_alone: by name of each other group of dimensions, why not.
    """

    model: nn.Module
    energies: dict[str, Tensor]
    left_alone: dict[str, str]


@one_at_a_time
def align_heads(
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    groups: Iterable[Group] | None = None,
) -> Aligned:
    """The same network with the dimensions of its attention heads in the order of what they carry.

    Args:
        model: the one that `structure` describes; nothing of it changes.
        structure: its groups; those of heads tell which entries belong to one head.
        batches: data, labelled or not, read once; not at all where there is nothing to turn. All positions count,
            those of padding too.
        task: what a batch is; classification unless said.
        groups: those to turn; all unless given.

    Returns:
        A copy, or the model itself where nothing was turned.

    Raises:
        ConfigError: an argument is of another kind than is meant.
        DataError: there are no samples.
        ModelError: the model is on the meta device.
        NonFiniteError: NaN or infinity passes a head.
        PlanMismatchError: structure or groups are of another network.

    >>> from apoptosis.models import ViTOptions, vit
    >>> from apoptosis.structure import trace
    >>> images = torch.randn(8, 3, 8, 8)
    >>> net = vit(ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=2, num_classes=3))
    >>> found = align_heads(net, trace(net, images[:1]), [images])
    >>> sorted(found.energies), found.left_alone
    (['blocks.0.attn.qkv:qk_dim', 'blocks.0.attn.qkv:v_dim'], {})
    """
    _check_kinds(model, structure, batches, task)
    task = task or Task.classification()
    chosen = _dimensions(model, structure, groups)
    with torch.inference_mode(mode=False), torch.no_grad():
        ways, left_alone = _possible(model, structure, chosen)
        if not ways:
            return Aligned(model, {}, left_alone)
        slots = dict.fromkeys(s for own in ways.values() for way in own for s in _watched(way))
        moments, example = moments_of(copy_with(model, {}), slots, batches, task)
        right = _right_ways(Trial(model, task, example), ways, moments, left_alone)
        if not right:
            return Aligned(model, {}, left_alone)
        turned = copy_with(model, {})
        held = model_tensors(turned)
        energies = {name: _turned_(held, way, moments) for name, way in right.items()}
        before = model_tensors(model)
        mark_turned_(turned, (n for n, own in held.items() if not torch.equal(own, before[n])))
    return Aligned(turned, energies, left_alone)


def _possible(
    model: nn.Module, structure: Structure, groups: Iterable[Group]
) -> tuple[dict[str, list[Way]], dict[str, str]]:
    """By name of each group, the ways in which it may be bound, or why there are none."""
    ways: dict[str, list[Way]] = {}
    left_alone: dict[str, str] = {}
    for group in groups:
        try:
            _check_can_turn(model, group)
            ways[group.name] = list(possible_bonds(structure, group))
        except NoBondError as why:
            left_alone[group.name] = str(why)
    return ways, left_alone


def _check_can_turn(model: nn.Module, group: Group) -> None:
    """Refuse what turning would break.

    Raises:
        NoBondError: it says why.
    """
    held, masked = model_tensors(model), masks_of(model)
    masks = set() if masked is None else set(masked.masks)
    for own in group.slices:
        tensor = held[own.tensor]
        if own.tensor in masks:
            raise NoBondError(
                f"{own.tensor} is masked, and mixing its entries would fill the zeros"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise NoBondError(
                f"{own.tensor} has numbers of {tensor.dtype}, which would be rounded again; convert to float32 first"
            )


def _right_ways(
    trial: Trial, ways: Mapping[str, list[Way]], moments: Moments, left_alone: dict[str, str]
) -> dict[str, Way]:
    """By name of each group that can be turned, how; `left_alone` is told of the others."""
    right: dict[str, Way] = {}
    first = {
        name: own[0]
        for name, own in ways.items()
        if own and all(slot in moments for way in own for slot in _watched(way))
    }
    together = trial.right_together(first) if len(first) > 1 else frozenset[str]()
    for name, own in track(ways.items(), "trying turns of heads"):
        if name in together:
            right[name] = own[0]
            continue
        try:
            if not all(slot in moments for way in own for slot in _watched(way)):
                raise NoBondError("its layers do not run on these data")
            right[name] = trial.first_right(own)
        except NoBondError as why:
            left_alone[name] = str(why)
    return right


def _turned_(held: Mapping[str, Tensor], way: Way, moments: Moments) -> Tensor:
    """Turn all bonds of a group in place; the mean of their energies."""
    shares: list[Tensor] = []
    for bond in way:
        left, right = _sides(held, bond, moments)
        assert len(left) == len(right), "both sides of a bond have the same heads"
        turns, energies = zip(*map(principal_turn, left, right), strict=True)
        turn_(held, bond, torch.stack(turns))
        own = torch.stack(energies).sum(0).cpu()
        shares.append(own / own.sum().clamp_min(torch.finfo(own.dtype).tiny))
    return torch.stack(shares).mean(0)


def _sides(held: Mapping[str, Tensor], bond: Bond, moments: Moments) -> tuple[Tensor, Tensor]:
    """C_a and C_b of every head, (heads, units, units) each."""
    passing = torch.stack([moments.of(own) for own in bond.right]).sum(0)
    if bond.right[0].side == "output":
        return moments.of(bond.left), passing
    columns = [rows_of(held, own, *own.places[0]) for own in bond.right]
    return passing, torch.stack([own @ own.mT for own in columns]).sum(0)


def _watched(way: Way) -> Iterator[Slot]:
    """Slots whose activations count."""
    for bond in way:
        if bond.right[0].side == "output":
            yield bond.left
        yield from bond.right


def _check_kinds(model: Any, structure: Any, batches: Any, task: Any) -> None:
    """Refuse arguments of another kind than is meant, of which Python would say something else.

    Raises:
        ConfigError: for a model, structure or task.
        DataError: for batches.
        ModelError: for a model without numbers.
    """
    meant = {"model": (model, nn.Module), "structure": (structure, Structure)}
    meant |= {} if task is None else {"task": (task, Task)}
    for name, (given, kind) in meant.items():
        if not isinstance(given, kind):
            raise ConfigError(
                f"The {name} of align_heads is a {type(given).__name__} and should be a {kind.__name__}: "
                "align_heads(model, trace(model, example), batches, task)."
            )
    if any(own.is_meta for own in model.parameters()):
        raise ModelError(
            "The model is on the meta device and has no numbers to align. Give it real weights first."
        )
    if isinstance(batches, Tensor | Mapping | str):
        what = f"one tensor of shape {tuple(batches.shape)}" if isinstance(batches, Tensor) else ""
        raise DataError(
            f"The batches of align_heads are {what or f'a {type(batches).__name__}'}. Give a list of batches or a "
            "loader; a single batch is a list of one."
        )
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise DataError(
            f"The batches of align_heads are a {type(batches).__name__}; pass a list or a loader, anything that gives "
            "batches."
        )


def _dimensions(model: nn.Module, structure: Structure, groups: Any) -> list[Group]:
    """The groups of dimensions to turn, all of them of this network.

    Raises:
        ConfigError: what was given are no groups.
        PlanMismatchError: they, or the structure, are of another network.
    """
    if isinstance(groups, str) or not (groups is None or isinstance(groups, Iterable)):
        raise ConfigError(
            f"The groups to align are a {type(groups).__name__}; give a list of groups, such as "
            "structure.choose(kinds=['v_dim'])."
        )
    chosen: list[Group] = []
    for group in structure.groups if groups is None else groups:
        if not isinstance(group, Group):
            raise ConfigError(
                f"A group to align is {group!r}, a {type(group).__name__}; the group of a name is structure[name]."
            )
        own = structure[group.name]
        if own.size != group.size:
            raise PlanMismatchError(
                f"The group {group.name!r} to align has {group.size} units, that of the structure {own.size}. Take "
                "structure[name] of the structure that is passed."
            )
        if own.kind in DIMENSIONS:
            _check_is_of(model, structure, own)
            chosen.append(own)
    return chosen


def _check_is_of(model: nn.Module, structure: Structure, group: Group) -> None:
    held = model_tensors(model)
    for name, *_ in group.places:
        found = tuple(held[name].shape) if name in held else None
        wanted = structure.shapes.get(name, found)  # buffers that are not saved have none
        if found is None or found != wanted:
            there = "does not have it" if found is None else f"has it in shape {found}"
            raise PlanMismatchError(
                f"The structure knows a tensor {name!r} of shape {wanted}; this {type(model).__name__} {there}. The "
                "structure is of another network: trace this one."
            )
