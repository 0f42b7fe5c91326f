"""Bonds: entries of two sides of a network that are multiplied with each other, summed, and used nowhere else.

The dimensions of an attention head are summed over twice: those of queries and keys where scores are made, those of
values where the next layer reads the mixture. Such a sum is the same in any coordinates (`bases`), head by head. Groups
of units say which entries of which tensors are dimension u (`Slice.indices`), groups of heads to which head an entry
belongs; what belongs to one head in one module is a `Slot`.

What is found here is a guess by shapes: where queries, keys and values share one group of dimensions, nothing says
which is which, and an operation may act on single dimensions. `aligning` tries every guess on the network itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from apoptosis.structure import Group, Indices, Slice, Structure

__all__ = ["Bond", "NoBondError", "Slot", "possible_bonds"]

KINDS = ("qk_dim", "v_dim", "head_dim")
HEADS = ("head", "kv_head")


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


def possible_bonds(structure: Structure, group: Group) -> Iterator[tuple[Bond, ...]]:
    """Ways in which the dimensions of a group may be bound, the likeliest first; each way binds all of them.

    Raises:
        NoBondError: there is none; it says why.
    """
    if group.kind not in KINDS:
        raise NoBondError("its units are no dimensions of attention heads")
    acting = [own.tensor for own in group.slices if own.role == "carrier"]
    if acting:
        raise NoBondError(f"{acting[0]} acts on single dimensions")
    made, read = (_slots(structure, group, role) for role in ("producer", "consumer"))
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


def _slots(structure: Structure, group: Group, role: str) -> list[Slot]:
    """All that make, or all that read, in the order of the tensors and of the entries within a head."""
    by_module: dict[str, list[Slice]] = {}
    for own in group.slices:
        if own.role == role:
            by_module.setdefault(own.tensor.rpartition(".")[0], []).append(own)
    return [
        slot
        for path, slices in by_module.items()
        for slot in _of_module(structure, group, path, slices)
    ]


def _of_module(
    structure: Structure, group: Group, path: str, slices: Sequence[Slice]
) -> Iterator[Slot]:
    side = "output" if slices[0].role == "producer" else "input"
    indices = slices[0].indices
    if not all(np.array_equal(own.indices, indices) for own in slices):
        raise NoBondError(f"tensors of {path} hold its units in different places")
    shown = [s for s in group.sites if s.module == path and s.side == side]
    if not any(np.array_equal(site.indices, indices) for site in shown):
        raise NoBondError(f"no module shows the {side} of {path}")
    places = tuple((own.tensor, own.dim) for own in slices)
    for entries in _by_head(indices, _owners(structure, slices[0], int(indices.max()) + 1)):
        yield Slot(path, side, shown[0].dim, places, entries)


def _owners(structure: Structure, own: Slice, length: int) -> Indices:
    """The head of each entry; one head for all where the network has no groups of them."""
    owners = np.zeros(length, dtype=np.int64)
    for group in structure.groups:
        for other in group.slices if group.kind in HEADS else ():
            if (other.tensor, other.dim) == (own.tensor, own.dim):
                for head, entries in enumerate(other.indices):
                    owners[entries[entries < length]] = head
    return owners


def _by_head(indices: Indices, owners: Indices) -> Iterator[Indices]:
    """(heads, units) for the first entry that a unit has in each head, then for the second, and so on."""
    columns = owners[indices]  # (units, entries)
    heads, counts = np.unique(columns[0], return_counts=True)
    if not (columns == columns[:1]).all() or len(set(counts.tolist())) > 1:
        raise NoBondError("its units do not lie alike in all heads")
    places = [np.flatnonzero(columns[0] == head) for head in heads]
    for number in range(counts[0]):
        yield np.stack([indices[:, own[number]] for own in places])
