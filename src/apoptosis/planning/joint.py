"""Joint selection: units go one after the other, each at what it costs after those that went before it.

With scores s and interactions I, removing a set S costs Σ_{u∈S} s_u + Σ_{u<v∈S} I_uv: of two units that do the same
work the first is cheap and the second is not. What u costs when S has gone is its *marginal*

    m_u(S) = s_u + Σ_{v∈S} I_uv.

The greedy way takes the move with the least marginal (per unit, per cost saved, or where least of the group is gone: as
`moves` does), adds the rows of its units to the marginals of the others, and goes on until the budget is met. A move of
several units (ties, rounding) takes them one by one too. What comes out is an order, as scores: the number of the move
in which each unit goes. The planner ranks these as any others, so all that it promises holds, and what it gives back is
what went last. Prices are taken anew as in `moves`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from apoptosis.criteria import UnitScores
from apoptosis.planning.bundles import Bundle
from apoptosis.planning.moves import AT_ONCE, Levels, Moves

__all__ = ["in_joint_order"]


def in_joint_order(units: UnitScores, moves: Moves, levels: Levels) -> UnitScores:
    """The same units with their places in the joint order for scores.

    Args:
        units: scores with interactions.
        moves: what may move, made of the same scores; the last levels must meet the budget.
        levels: where bundles are to begin; what has to go until there goes first.
    """
    path = _Path(_Marginals(units), moves)
    for number, level in enumerate(levels):
        for _ in range(level):
            path.take(number)
    while (excess := moves.excess(path.levels)) > 0:
        prices = moves.prices(path.levels)
        while moves.excess(path.levels) > excess * (1 - AT_ONCE):
            path.take(path.cheapest(prices))
    return replace(units, values=path.places(), interactions={})


@dataclass(frozen=True)
class _Move:
    """Units that go next of a bundle, and what they cost together."""

    cost: float
    units: tuple[tuple[str, int], ...]


class _Marginals:
    """What each unit costs now; infinite once it has gone."""

    def __init__(self, units: UnitScores) -> None:
        alone = [(name,) for name in units.values if not any(name in g for g in units.interactions)]
        self.of: dict[str, NDArray[np.float64]] = {}
        self.partners: dict[str, tuple[str, ...]] = {}
        """Groups whose marginals change when one of this group goes."""
        self._rows: dict[str, tuple[NDArray[np.float64], NDArray[np.float64], int]] = {}
        for names in (*units.interactions, *alone):
            together = np.concatenate([units.values[name].numpy() for name in names])
            start = 0
            for name in names:
                stop = start + len(units.values[name])
                self.of[name] = together[start:stop]  # views: one addition reaches all partners
                if names in units.interactions:
                    matrix = units.interactions[names].numpy()
                    self._rows[name] = (together, matrix, start)
                self.partners[name] = names
                start = stop

    def between(self, name: str, unit: int, other: str) -> NDArray[np.float64]:
        """What a unit's going adds to the units of another group, or of its own."""
        if name not in self._rows or other not in self.partners[name]:
            return np.zeros(len(self.of[other]))
        _, matrix, start = self._rows[name]
        first = self._rows[other][2]
        return matrix[start + unit, first : first + len(self.of[other])]

    def remove(self, name: str, unit: int) -> None:
        """Let it go, and tell its partners."""
        if name in self._rows:
            together, matrix, start = self._rows[name]
            together += matrix[start + unit]
        self.of[name][unit] = np.inf


class _Path:
    """Moves taken so far, and the cheapest next."""

    def __init__(self, marginals: _Marginals, moves: Moves) -> None:
        self._marginals = marginals
        self._moves = moves
        self.levels = np.zeros(len(moves.bundles), dtype=np.int64)
        self._next: dict[int, _Move] = {}
        self._taken: list[_Move] = []

    def cheapest(self, prices: list[float]) -> int:
        """The bundle whose next move has the least figure."""
        best = (np.inf, np.inf, -1)
        for number, (bundle, level) in enumerate(
            zip(self._moves.bundles, self.levels, strict=True)
        ):
            if level < bundle.last:
                cost = self._move(number).cost
                figure = self._moves.figure(bundle, int(level), cost, prices[number])
                best = min(best, (figure, cost, number))
        return best[2]

    def take(self, number: int) -> None:
        """The next move of a bundle."""
        move = self._move(number)
        touched: set[str] = set()
        for name, unit in move.units:
            self._marginals.remove(name, unit)
            touched.update(self._marginals.partners[name])
        self.levels[number] += 1
        self._taken.append(move)
        self._next = {
            other: kept
            for other, kept in self._next.items()
            if touched.isdisjoint(self._moves.bundles[other].names)
        }

    def places(self) -> dict[str, torch.Tensor]:
        """When each unit goes; those that stay come after, from the lowest marginal to the highest."""
        found = {name: np.zeros(len(own)) for name, own in self._marginals.of.items()}
        staying = [
            (float(cost), name, unit)
            for name, own in self._marginals.of.items()
            for unit, cost in enumerate(own)
            if np.isfinite(cost)
        ]
        for place, (_, name, unit) in enumerate(sorted(staying, key=lambda one: one[0])):
            found[name][unit] = len(self._taken) + place
        for place, move in enumerate(self._taken):
            for name, unit in move.units:
                found[name][unit] = place
        return {name: torch.from_numpy(own) for name, own in found.items()}

    def _move(self, number: int) -> _Move:
        if number not in self._next:
            level = int(self.levels[number])
            self._next[number] = self._found(self._moves.bundles[number], level)
        return self._next[number]

    def _found(self, bundle: Bundle, level: int) -> _Move:
        """The units that go in the move from a level on, one after the other."""
        numbers = bundle.gone[level + 1] - bundle.gone[level]
        now = {name: self._marginals.of[name] for name in bundle.names}
        if numbers.sum() > 1:
            now = {name: own.copy() for name, own in now.items()}
        cost, picked = 0.0, list[tuple[str, int]]()
        for name, num in zip(bundle.names, numbers, strict=True):
            for _ in range(num):
                unit = int(np.argmin(now[name]))
                cost += float(now[name][unit])
                picked.append((name, unit))
                if numbers.sum() > 1:
                    for other in now.keys() & set(self._marginals.partners[name]):
                        now[other] += self._marginals.between(name, unit, other)
                    now[name][unit] = np.inf
        return _Move(cost, tuple(picked))
