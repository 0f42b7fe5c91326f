"""Take the moves that cost least score until every budget is met, then give back what the last of them overshot.

The order of moves is given by a figure per move. With `widths="uniform"` it is the share of the group that is gone
after the move, of the units one began with, and bundles of one size move as one; else the score per unit, or per cost
saved. What a move saves depends on the sizes of the other groups: a channel that two layers share saves less when the
other layer has shrunk. Savings are therefore taken anew while moves are taken, each time a fraction of what is still
too much has gone. Where several budgets are not met yet, the saving is the sum of those in each, as shares of what is
still too much there.

At the end no bundle can take its last move back without breaking the budget: what is left unspent is less than the
smallest of those moves.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from apoptosis.planning.budget import Costing
from apoptosis.planning.bundles import Bundle
from apoptosis.planning.selection import Selection

__all__ = ["Levels", "Moves"]

Levels = NDArray[np.int64]
"""(bundles,): how far each bundle has gone."""

AT_ONCE = 1 / 8
"""Share of the excess that is saved between two looks at the prices."""


class Moves:
    """All moves of some bundles, what they cost, and which of them a budget takes."""

    def __init__(
        self,
        bundles: list[Bundle],
        costing: Costing,
        selection: Selection,
        sizes: NDArray[np.int64],
    ) -> None:
        """`sizes` are those of every chosen group, at the places that bundles know."""
        self.bundles = bundles
        self._costing = costing
        self._selection = selection
        self._sizes = sizes

    @cached_property
    def last(self) -> Levels:
        """As far as every bundle may go."""
        return np.array([bundle.last for bundle in self.bundles], dtype=np.int64)

    def counts(self, levels: Levels) -> NDArray[np.int64]:
        """Units left of every chosen group."""
        owner, place, start, gone = self._members
        counts = self._sizes.copy()
        counts[place] -= gone[start + levels[owner]]
        return counts

    def costs(self, levels: Levels) -> dict[str, int]:
        """In every measure of the budget."""
        return self._costing.costs(self.counts(levels))

    def excess(self, levels: Levels) -> float:
        """How far the worst measure is above what is allowed; met at 0 and below."""
        return self._costing.excess(self.counts(levels))

    def spend(self, levels: Levels) -> Levels:
        """Where the budget is met, from `levels` on; the last levels must meet it."""
        first = levels
        priced = self._selection.widths == "global" and self._selection.per != "unit"
        while (excess := self.excess(levels)) > 0:
            order = self._ordered(levels)
            target = excess * (1 - AT_ONCE) if priced else 0.0
            levels = _after(levels, order[: self._fewest(levels, order, target)])
        return self._given_back(first, levels)

    def prices(self, levels: Levels) -> list[float]:
        """What each unit of each bundle's next move saves; 1 where scores are not divided by it."""
        counts = self.counts(levels)
        too_much = self._costing.still_too_much(counts)
        return [
            self._saved_per_unit(bundle, int(level), counts, too_much)
            if level < bundle.last
            else 1.0
            for bundle, level in zip(self.bundles, levels, strict=True)
        ]

    def figure(self, bundle: Bundle, level: int, score: float, price: float) -> float:
        """What decides when the move from a level on is taken, for a score of one's own."""
        if self._selection.widths == "uniform":
            return float(_shares_gone(bundle, level, level + 1)[0])
        num_units = int((bundle.gone[level + 1] - bundle.gone[level]).sum())
        return score / (price * num_units) if price > 0 else np.inf

    @cached_property
    def _members(self) -> tuple[NDArray[np.int64], ...]:
        """Of every member of every bundle: the bundle, its place, and where its losses begin in the last array."""
        owner: list[int] = []
        place: list[int] = []
        columns: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        for number, bundle in enumerate(self.bundles):
            for member, where in enumerate(bundle.places):
                owner.append(number)
                place.append(int(where))
                columns.append(bundle.gone[:, member])
        ends = np.cumsum([len(column) for column in columns])
        return (
            np.array(owner, dtype=np.int64),
            np.array(place, dtype=np.int64),
            ends[:-1],
            np.concatenate(columns),
        )

    def _ordered(self, levels: Levels) -> NDArray[np.int64]:
        """The bundle of every move that is left, from the lowest figure to the highest."""
        owners: list[NDArray[np.int64]] = []
        figures: list[NDArray[np.float64]] = []
        scores: list[NDArray[np.float64]] = []
        counts = self.counts(levels)
        too_much = self._costing.still_too_much(counts)
        for number, (bundle, level) in enumerate(zip(self.bundles, levels, strict=True)):
            own = self._figures(bundle, int(level), bundle.last, counts, too_much)
            owners.append(np.full(len(own), number))
            # A bundle's moves can only be taken in their order, whatever rounding does to their figures.
            figures.append(np.maximum.accumulate(own))
            scores.append(np.diff(bundle.score[level:]))
        owner = np.concatenate(owners)
        figure, score = np.concatenate(figures), np.concatenate(scores)
        ties_by_score = self._selection.widths == "uniform"
        return owner[np.lexsort((score, figure) if ties_by_score else (figure,))]

    def _figures(
        self,
        bundle: Bundle,
        start: int,
        stop: int,
        counts: NDArray[np.int64],
        too_much: Mapping[str, int],
    ) -> NDArray[np.float64]:
        """(stop − start,): what decides when each move is taken; the lower, the sooner."""
        if self._selection.widths == "uniform":
            return _shares_gone(bundle, start, stop)
        score = np.diff(bundle.score[start : stop + 1])
        num_units = np.diff(bundle.gone[start : stop + 1], axis=0).sum(axis=1)
        if not len(score):
            return score
        saved = self._saved_per_unit(bundle, start, counts, too_much)
        return score / (saved * num_units) if saved > 0 else np.full(len(score), np.inf)

    def _saved_per_unit(
        self,
        bundle: Bundle,
        level: int,
        counts: NDArray[np.int64],
        too_much: Mapping[str, int],
    ) -> float:
        """What each unit of the move from a level on saves; 1 where scores are not divided by it."""
        if self._selection.per == "unit":
            return 1.0
        before, after = counts.copy(), counts.copy()
        before[bundle.places] = bundle.sizes - bundle.gone[level]
        after[bundle.places] = bundle.sizes - bundle.gone[level + 1]
        places = tuple(bundle.places.tolist())
        num_units = (bundle.gone[level + 1] - bundle.gone[level]).sum()
        return self._costing.saved(before, after, places, too_much) / num_units

    def _fewest(self, levels: Levels, order: NDArray[np.int64], target: float) -> int:
        """How many of the moves bring the excess down to the target; costs fall with every move."""
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            too_much = self.excess(_after(levels, order[:middle])) > target
            low, high = (middle + 1, high) if too_much else (low, middle)
        return low

    def _given_back(self, first: Levels, levels: Levels) -> Levels:
        """Take moves back, dearest first, while the budget allows."""
        levels, changed = levels.copy(), True
        while changed:
            changed = False
            for number in self._dearest(first, levels):
                levels[number] -= 1
                if self.excess(levels) <= 0:
                    changed = True
                else:
                    levels[number] += 1
        return levels

    def _dearest(self, first: Levels, levels: Levels) -> list[int]:
        """Bundles whose last move may be taken back, the dearest first.

        Where widths are to be uniform, those that have lost the largest share: others would be left too wide.
        """
        counts = self.counts(levels)
        too_much = self._costing.still_too_much(counts)
        moved: list[tuple[float, float, int]] = []
        for number in np.flatnonzero(levels > first):
            bundle, level = self.bundles[number], int(levels[number])
            figure = float(self._figures(bundle, level - 1, level, counts, too_much)[0])
            score = float(bundle.score[level] - bundle.score[level - 1])
            moved.append((-figure, -score, int(number)))
        moved.sort()
        if self._selection.widths == "uniform":
            moved = [move for move in moved if move[0] <= moved[0][0] + 1e-12]
        return [number for _, _, number in moved]


def _shares_gone(bundle: Bundle, start: int, stop: int) -> NDArray[np.float64]:
    """(stop − start,): the share of the units one began with that is gone after each move."""
    gone = bundle.whole - bundle.sizes + bundle.gone[start + 1 : stop + 1]
    return (gone / bundle.whole).mean(axis=1)


def _after(levels: Levels, moves: NDArray[np.int64]) -> Levels:
    return levels + np.bincount(moves, minlength=len(levels))
