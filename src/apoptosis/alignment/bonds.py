"""Bonds: entries of two sides of a network that are multiplied with each other, summed, and used nowhere else.

The dimensions of an attention head are summed over twice: those of queries and keys where scores are made, those of
values where the next layer reads the mixture. Such a sum is the same in any coordinates (`bases`), head by head. Groups
of units say which entries of which tensors are dimension u (`Slice.indices`), groups of heads to which head an entry
belongs; what belongs to one head in one module is a `Slot`.

Coordinates are chosen once for all that is multiplied with each other, so the heads that count are those which every
side has. Where one key serves several queries (grouped queries, or one key head for all) the queries are several slots.

What is found here is a guess by shapes: where queries, keys and values share one group of dimensions, nothing says
which is which, and an operation may act on single dimensions. `trials` decides which guess is right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from apoptosis.structure import Group, Indices, Slice, Structure

__all__ = ["DIMENSIONS", "Bond", "NoBondError", "Slot", "Way", "possible_bonds"]

DIMENSIONS = ("qk_dim", "v_dim", "head_dim")
HEADS = ("head", "kv_head", "query_head")


class NoBondError(Exception):
    """Why the dimensions of a group are not turned. For this room alone."""


@dataclass(frozen=True, eq=False)
class Slot:
    """One vector per head, as a module makes it (at its output) or reads it (at its input).

    Attributes:
        module: its path.
        side: `output` or `input`.
        dim: the dimension of what passes there that holds the entries.
        places: tensor and dimension of each parameter with the same entries: a weight, and its bias.
        entries: (heads, units).
    """

    module: str
    side: str
    dim: int
    places: tuple[tuple[str, int], ...]
    entries: Indices


@dataclass(frozen=True, eq=False)
class Bond:
    """Left and right are summed over together; several on the right have the left one in common (grouped queries)."""

    left: Slot
    right: tuple[Slot, ...]


Way: TypeAlias = tuple[Bond, ...]
"""How all dimensions of a group may be bound."""


def possible_bonds(structure: Structure, group: Group) -> Iterator[Way]:
    """Ways in which the dimensions of a group, one of `DIMENSIONS`, may be bound, the likeliest first.

    Raises:
        NoBondError: there is none; it says why.
    """
    acting = [own.tensor for own in group.slices if own.role == "carrier"]
    if acting:
        raise NoBondError(f"{acting[0]} acts on single dimensions")
    heads = _heads_of_all(structure, group)
    made, read = (_slots(group, role, heads) for role in ("producer", "consumer"))
    if len({slot.entries.shape for slot in (*made, *read)}) > 1:
        raise NoBondError("what is multiplied with each other does not have the same heads")
    if group.kind == "v_dim" and len(made) == 1 and read:
        yield (Bond(made[0], tuple(read)),)
    elif group.kind == "qk_dim" and not read and len(made) >= 2 and (bond := _scores(made)):
        yield (bond,)
    elif group.kind == "head_dim" and len(made) == 3 and read:
        for values in reversed(made):  # most code has them last
            others = [own for own in made if own is not values]
            yield Bond(values, tuple(read)), Bond(others[0], (others[1],))
    else:
        raise NoBondError(
            f"it is made {len(made)} and read {len(read)} times in each head, a way that is not known"
        )


def _scores(made: Sequence[Slot]) -> Bond | None:
    """Of queries and keys. Of two it does not matter which is which; of more, a module's only one is the key."""
    if len(made) == 2:
        return Bond(made[0], (made[1],))
    by_module = [[own for own in made if own.module == path] for path in {s.module for s in made}]
    by_module.sort(key=len)
    if len(by_module) == 2 and len(by_module[0]) == 1:
        return Bond(by_module[0][0], tuple(by_module[1]))
    return None


def _heads_of_all(structure: Structure, group: Group) -> list[Group]:
    """Groups of heads that say of every entry of a group of dimensions to which head it belongs."""
    return [
        heads
        for heads in structure.groups
        if heads.kind in HEADS and all(_covers(heads, own) for own in group.slices)
    ]


def _covers(heads: Group, own: Slice) -> bool:
    found = _same_place(heads, own)
    return found is not None and bool(np.isin(own.indices, found.indices).all())


def _same_place(heads: Group, own: Slice) -> Slice | None:
    place = (own.tensor, own.dim)
    return next((other for other in heads.slices if (other.tensor, other.dim) == place), None)


def _slots(group: Group, role: str, heads: Sequence[Group]) -> list[Slot]:
    """All that make, or all that read, in the order of the tensors and of the entries within a head."""
    by_module: dict[str, list[Slice]] = {}
    for own in group.slices:
        if own.role == role:
            by_module.setdefault(own.tensor.rpartition(".")[0], []).append(own)
    return [
        slot
        for path, slices in by_module.items()
        for slot in _of_module(group, path, slices, heads)
    ]


def _of_module(
    group: Group, path: str, slices: Sequence[Slice], heads: Sequence[Group]
) -> Iterator[Slot]:
    side = "output" if slices[0].role == "producer" else "input"
    indices = slices[0].indices
    if not all(np.array_equal(own.indices, indices) for own in slices):
        raise NoBondError(f"tensors of {path} hold its units in different places")
    shown = [s for s in group.sites if s.module == path and s.side == side]
    if not any(np.array_equal(site.indices, indices) for site in shown):
        raise NoBondError(f"no module shows the {side} of {path}")
    places = tuple((own.tensor, own.dim) for own in slices)
    for entries in _by_head(indices, _owners(heads, slices[0])):
        yield Slot(path, side, shown[0].dim, places, entries)


def _owners(heads: Sequence[Group], own: Slice) -> Indices:
    """(units, entries): the head of each entry; one for all where no group of heads has every side."""
    owners = np.zeros(own.indices.shape, dtype=np.int64)
    for group in heads:  # several: a key head, and the queries' within it
        found = _same_place(group, own)
        assert found is not None, "a group that covers the slice"
        owner = np.zeros(int(found.indices.max()) + 1, dtype=np.int64)
        for head, entries in enumerate(found.indices):
            owner[entries] = head
        owners = owners * group.size + owner[own.indices]
    return owners


def _by_head(indices: Indices, owners: Indices) -> Iterator[Indices]:
    """(heads, units) for the first entry that a unit has in each head, then for the second, and so on."""
    heads, counts = np.unique(owners[0], return_counts=True)
    if not (owners == owners[:1]).all() or len(set(counts.tolist())) > 1:
        raise NoBondError("its units do not lie alike in all heads")
    places = [np.flatnonzero(owners[0] == head) for head in heads]
    for number in range(counts[0]):
        yield np.stack([indices[:, own[number]] for own in places])
