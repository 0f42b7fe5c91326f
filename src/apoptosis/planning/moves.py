"""Take the moves that cost least score until every budget is met, then give back what the last of them overshot.

The order of moves is given by a figure per move. With `widths="uniform"` it is the share of the group that is gone
after the move, of the units one began with; else the score per unit, or per cost saved. What a move saves depends on
the sizes of the other groups: a channel that two layers share saves less when the other layer has shrunk. Savings are
therefore taken anew while moves are taken, each time a fraction of what is still too much has gone. Where several
budgets are not met yet, the saving is the sum of those in each, as shares of what is still too much there.

At the end no bundle can take its last move back without breaking the budget: what is left unspent is less than the
smallest of those moves.
"""

import numpy as np
from numpy.typing import NDArray

from apoptosis.planning.budget import Costing
from apoptosis.planning.bundles import Bundle
from apoptosis.planning.selection import Selection

__all__ = ["counts_at", "spend"]

AT_ONCE = 1 / 8
"""Share of the excess that is saved between two looks at the prices."""


def counts_at(
    bundles: list[Bundle], levels: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Units left of every chosen group."""
    counts = sizes.copy()
    for bundle, level in zip(bundles, levels, strict=True):
        counts[bundle.places] -= bundle.gone[level]
    return counts


def spend(
    bundles: list[Bundle],
    costing: Costing,
    selection: Selection,
    levels: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The level of every bundle at which the budget is met, from `levels` on; the last levels must meet it."""
    first = levels
    priced = selection.widths == "global" and selection.per != "unit"
    while (excess := costing.excess(counts_at(bundles, levels, sizes))) > 0:
        order = _ordered_moves(bundles, levels, costing, selection, sizes)
        target = excess * (1 - AT_ONCE) if priced else 0.0
        num = _fewest_moves(bundles, levels, order, costing, sizes, target)
        levels = _after(levels, order[:num])
    return _given_back(bundles, first, levels, costing, selection, sizes)


def _ordered_moves(
    bundles: list[Bundle],
    levels: NDArray[np.int64],
    costing: Costing,
    selection: Selection,
    sizes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The bundle of every move that is left, from the lowest figure to the highest."""
    owners: list[NDArray[np.int64]] = []
    figures: list[NDArray[np.float64]] = []
    scores: list[NDArray[np.float64]] = []
    counts = counts_at(bundles, levels, sizes)
    for number, (bundle, level) in enumerate(zip(bundles, levels, strict=True)):
        own = _figures(bundle, int(level), bundle.last, counts, costing, selection)
        owners.append(np.full(len(own), number))
        # A bundle's moves can only be taken in their order, whatever rounding does to their figures.
        figures.append(np.maximum.accumulate(own))
        scores.append(np.diff(bundle.score[level:]))
    owner = np.concatenate(owners)
    figure, score = np.concatenate(figures), np.concatenate(scores)
    ties_by_score = selection.widths == "uniform"
    return owner[np.lexsort((score, figure) if ties_by_score else (figure,))]


def _figures(
    bundle: Bundle,
    start: int,
    stop: int,
    counts: NDArray[np.int64],
    costing: Costing,
    selection: Selection,
) -> NDArray[np.float64]:
    """(stop − start,): what decides when each move is taken; the lower, the sooner."""
    if selection.widths == "uniform":
        gone = bundle.whole - bundle.sizes + bundle.gone[start + 1 : stop + 1]
        return (gone / bundle.whole).mean(axis=1)
    score = np.diff(bundle.score[start : stop + 1])
    num_units = np.diff(bundle.gone[start : stop + 1], axis=0).sum(axis=1)
    if selection.per == "unit" or not len(score):
        return score / num_units
    fewer = counts.copy()
    fewer[bundle.places] -= bundle.gone[start + 1] - bundle.gone[start]
    saved = costing.saved(counts, fewer) / num_units[0]
    return score / (saved * num_units) if saved > 0 else np.full(len(score), np.inf)


def _fewest_moves(
    bundles: list[Bundle],
    levels: NDArray[np.int64],
    order: NDArray[np.int64],
    costing: Costing,
    sizes: NDArray[np.int64],
    target: float,
) -> int:
    """How many of the moves bring the excess down to the target; costs fall with every move."""
    low, high = 1, len(order)
    while low < high:
        middle = (low + high) // 2
        counts = counts_at(bundles, _after(levels, order[:middle]), sizes)
        low, high = (middle + 1, high) if costing.excess(counts) > target else (low, middle)
    return low


def _after(levels: NDArray[np.int64], moves: NDArray[np.int64]) -> NDArray[np.int64]:
    return levels + np.bincount(moves, minlength=len(levels))


def _given_back(
    bundles: list[Bundle],
    first: NDArray[np.int64],
    levels: NDArray[np.int64],
    costing: Costing,
    selection: Selection,
    sizes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Take moves back, dearest first, while the budget allows."""
    levels, changed = levels.copy(), True
    while changed:
        changed = False
        for number in _dearest(bundles, first, levels, costing, selection, sizes):
            levels[number] -= 1
            if costing.excess(counts_at(bundles, levels, sizes)) <= 0:
                changed = True
            else:
                levels[number] += 1
    return levels


def _dearest(
    bundles: list[Bundle],
    first: NDArray[np.int64],
    levels: NDArray[np.int64],
    costing: Costing,
    selection: Selection,
    sizes: NDArray[np.int64],
) -> list[int]:
    """Bundles whose last move may be taken back, the dearest first.

    Where widths are to be uniform, those that have lost the largest share: others would be left too wide.
    """
    counts = counts_at(bundles, levels, sizes)
    moved: list[tuple[float, float, int]] = []
    for number in np.flatnonzero(levels > first):
        bundle, level = bundles[number], int(levels[number])
        figure = float(_figures(bundle, level - 1, level, counts, costing, selection)[0])
        score = float(bundle.score[level] - bundle.score[level - 1])
        moved.append((-figure, -score, int(number)))
    moved.sort()
    if selection.widths == "uniform":
        moved = [move for move in moved if move[0] <= moved[0][0] + 1e-12]
    return [number for _, _, number in moved]
