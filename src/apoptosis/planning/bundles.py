"""Bundles: groups tied in number shrink together, in the moves that floors, caps and rounding allow.

A bundle has *levels*. Level 0 is the network as it is; at level ℓ every member has lost its `gone[ℓ]` lowest-scored
units. A *move* goes from one level to the next, costs the scores of the units that go, and saves what they save.
Within a group units go from the lowest score to the highest, equal ones by index, so levels are nested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from apoptosis.criteria import UnitScores
from apoptosis.errors import ConfigError
from apoptosis.planning.selection import Selection
from apoptosis.structure import Group, Structure

__all__ = ["Bundle", "alike", "find_bundles", "order_of"]


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tied groups and their levels.

    Attributes:
        names: the members.
        places: where they stand among all counts.
        gone: (levels, members), units lost at each level.
        score: (levels,), the sum of the scores of all units lost.
        sizes: (members,), units now.
        whole: (members,), units of the network one began with.
    """

    names: tuple[str, ...]
    places: NDArray[np.int64]
    gone: NDArray[np.int64]
    score: NDArray[np.float64]
    sizes: NDArray[np.int64]
    whole: NDArray[np.int64]

    @property
    def last(self) -> int:
        """The lowest level that may be reached."""
        return len(self.score) - 1

    def until(self, level: int) -> "Bundle":
        """The same, going no further than a level."""
        return replace(self, gone=self.gone[: level + 1], score=self.score[: level + 1])

    def level_of(self, fixed: Mapping[str, int]) -> int | None:
        """The level nearest to the numbers asked of its members, if any are.

        Raises:
            ConfigError: ties, floors or rounding allow nothing near it.
        """
        wanted = [(i, fixed[name]) for i, name in enumerate(self.names) if name in fixed]
        if not wanted:
            return None
        left = self.sizes - self.gone
        level = int(np.argmin(sum(np.abs(left[:, i] - keep) for i, keep in wanted)))
        coarseness = int(np.diff(self.gone, axis=0).max())
        for i, keep in wanted:
            if abs(left[level, i] - keep) > coarseness:
                raise ConfigError(
                    f"shares asks for {keep} of {self.whole[i]} units of {self.names[i]!r}; the nearest that ties, "
                    f"floors, caps and rounding allow is {left[level, i]}. In one bundle: {', '.join(self.names)}."
                )
        return level


def find_bundles(
    structure: Structure,
    units: UnitScores,
    selection: Selection,
    chosen: Sequence[Group],
    fewest: Mapping[str, int],
    whole: Mapping[str, int],
) -> list[Bundle]:
    """Every bundle that can shrink, in the order of the groups.

    Args:
        structure: groups and ties.
        units: scores; groups without any stay whole, and what is tied to them.
        selection: rounding.
        chosen: groups that may shrink; `places` of bundles are places in this list.
        fewest: how many units must stay, by group.
        whole: how many there were in the network one began with, by group.
    """
    place = {group.name: i for i, group in enumerate(chosen)}
    found: list[Bundle] = []
    done: set[str] = set()
    for group in chosen:
        if group.name in done:
            continue
        step = structure.step(group.name)
        done |= step.keys()
        if not all(name in place and name in units.values for name in step):
            continue
        members = [structure[name] for name in step]
        sizes = np.array([member.size for member in members], dtype=np.int64)
        gone = _levels(members, np.array(list(step.values())), selection, fewest)
        if len(gone) > 1:
            score = np.zeros(len(gone))
            for i, member in enumerate(members):
                score += _cumulative(units, member.name)[gone[:, i]]
            places = np.array([place[name] for name in step], dtype=np.int64)
            at_first = np.array([whole[name] for name in step], dtype=np.int64)
            found.append(Bundle(tuple(step), places, gone, score, sizes, at_first))
    return found


def alike(bundles: Sequence[Bundle]) -> list[Bundle]:
    """One bundle for all that have the same sizes and levels: they keep equally many units."""
    families: dict[tuple[bytes, ...], list[Bundle]] = {}
    for bundle in bundles:
        key = (bundle.whole.tobytes(), bundle.sizes.tobytes(), bundle.gone.tobytes())
        families.setdefault(key, []).append(bundle)
    return [_joined(own) for own in families.values()]


def _joined(bundles: Sequence[Bundle]) -> Bundle:
    if len(bundles) == 1:
        return bundles[0]
    return Bundle(
        tuple(name for bundle in bundles for name in bundle.names),
        np.concatenate([bundle.places for bundle in bundles]),
        np.concatenate([bundle.gone for bundle in bundles], axis=1),
        np.sum([bundle.score for bundle in bundles], axis=0),
        np.concatenate([bundle.sizes for bundle in bundles]),
        np.concatenate([bundle.whole for bundle in bundles]),
    )


def order_of(units: UnitScores, name: str) -> NDArray[np.int64]:
    """Units from the one that goes first to the one that goes last."""
    return np.argsort(units.values[name].numpy(), kind="stable")


def _cumulative(units: UnitScores, name: str) -> NDArray[np.float64]:
    ordered = units.values[name].numpy()[order_of(units, name)]
    return np.concatenate([[0.0], np.cumsum(ordered)])


def _levels(
    members: list[Group],
    step: NDArray[np.int64],
    selection: Selection,
    fewest: Mapping[str, int],
) -> NDArray[np.int64]:
    most = min(
        (member.size - fewest[member.name]) // int(own)
        for member, own in zip(members, step, strict=True)
    )
    gone = np.arange(max(most, 0) + 1)[:, None] * step
    left = np.array([member.size for member in members]) - gone
    fits = (left % np.array([selection.multiple(member) for member in members]) == 0).all(axis=1)
    fits[0] = True
    return gone[fits]
