"""A random plan to a given share of a network's MACs, and plans that cut one group at a time.

Groups that are tied keep the same share of their units, so ties join groups into bundles; a bundle shrinks in as many
steps as the greatest common divisor of its sizes has units. Costs come from the structure alone: nothing is run.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from apoptosis.structure import Group, Structure

__all__ = ["Bundle", "bundles_of", "kept_units", "random_counts"]

Counts = dict[str, int]


@dataclass(frozen=True)
class Bundle:
    """Groups tied to each other, and the number of steps they can shrink in together."""

    groups: tuple[Group, ...]

    @property
    def steps(self) -> int:
        return math.gcd(*(group.size for group in self.groups))

    @property
    def exact(self) -> bool:
        return all(group.exact for group in self.groups)

    @property
    def fewest(self) -> int:
        """Steps that must stay."""
        return max(math.ceil(g.smallest * self.steps / g.size) for g in self.groups)

    def counts(self, steps: int) -> Counts:
        return {group.name: group.size * steps // self.steps for group in self.groups}


def bundles_of(structure: Structure) -> list[Bundle]:
    """Every bundle that can shrink."""
    leader = {group.name: group.name for group in structure.groups}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for tie in structure.ties:
        first, *others = (name for name, _ in tie.members)
        for other in others:
            leader[find(other)] = find(first)
    members: dict[str, list[Group]] = {}
    for group in structure.groups:
        members.setdefault(find(group.name), []).append(group)
    bundles = [Bundle(tuple(own)) for own in members.values()]
    return [bundle for bundle in bundles if bundle.fewest < bundle.steps]


def random_counts(
    structure: Structure, bundles: list[Bundle], share: float, rng: random.Random
) -> tuple[Counts, float]:
    """Units to keep, at random, such that the network costs `share` of its MACs, or as near as it gets; and its share.

    Each bundle gets a random speed; all shrink together until the share is passed (bisection), then single steps of
    random bundles come as near as they can.
    """
    speeds = [rng.uniform(0.3, 1) for _ in bundles]

    def after(time: float) -> list[int]:
        return [
            max(b.fewest, round(b.steps * (1 - time * speed)))
            for b, speed in zip(bundles, speeds, strict=True)
        ]

    whole = structure.macs()

    def cost(steps: list[int]) -> float:
        return structure.macs(_joined(bundles, steps)) / whole

    early, late = 0.0, 4.0
    for _ in range(25):
        middle = (early + late) / 2
        early, late = (middle, late) if cost(after(middle)) > share else (early, middle)
    best = _refined(bundles, after(late), lambda steps: abs(cost(steps) - share), rng)
    return _joined(bundles, best), cost(best)


def _refined(
    bundles: list[Bundle],
    steps: list[int],
    miss: Callable[[list[int]], float],
    rng: random.Random,
) -> list[int]:
    now = miss(steps)
    for _ in range(300):
        if now < 0.003:
            break
        trial = list(steps)
        for place in rng.sample(range(len(bundles)), rng.randint(1, min(3, len(bundles)))):
            moved = trial[place] + rng.choice((-2, -1, 1, 2))
            trial[place] = min(max(moved, bundles[place].fewest), bundles[place].steps)
        if (distance := miss(trial)) < now:
            steps, now = trial, distance
    return steps


def _joined(bundles: list[Bundle], steps: list[int]) -> Counts:
    found: Counts = {}
    for bundle, own in zip(bundles, steps, strict=True):
        if own < bundle.steps:
            found |= bundle.counts(own)
    return found


def kept_units(structure: Structure, counts: Counts, rng: random.Random) -> dict[str, list[int]]:
    """Which units stay, at random."""
    return {
        name: sorted(rng.sample(range(structure[name].size), count))
        for name, count in counts.items()
    }
