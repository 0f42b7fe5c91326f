"""Accuracy against cost: one line per contestant over the share of MACs that it kept, the dense network as a point.

A dozen colours cannot be told apart, so most lines are grey and a few are coloured; every line has its name at its end,
moved up or down where two would meet. Bars are one standard deviation over seeds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from apoptosis.comparison import Comparison, Judged, Trial
from apoptosis.report.counts import counted
from apoptosis.report.style import COLORS, INK, MARKERS, PALE, QUIET, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_accuracy_against_cost", "spread_apart"]

HEIGHT = 5.2
LABEL_SHARE = 0.052
"""Of the height of a panel: what one name needs."""

Figure = Callable[[Trial], Judged | None]


def plot_accuracy_against_cost(
    comparison: Comparison, path: Path, highlight: Iterable[str] | None = None
) -> Path:
    """Draw the comparison as a PNG: after pruning and, where there was any, after fine-tuning.

    Args:
        comparison: what was measured.
        path: the file.
        highlight: contestants to colour, six at most; the first that was asked for, the best on validation data and
            the baselines unless said.
    """
    colored = _looks(comparison, highlight)
    panels: list[tuple[str, Figure]] = [("After pruning, before any training", lambda t: t.test)]
    if comparison.is_tuned:
        epochs = comparison.facts.get("options", {}).get("fit", {}).get("epochs")
        training = "fine-tuning" if epochs is None else f"{counted(epochs, 'epoch')} of fine-tuning"
        panels.append((f"After {training}", lambda t: t.tuned_test))
    figure = new_figure(6.4 * len(panels), HEIGHT)
    for axes, (title, judged) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _draw(axes, comparison, judged, colored)
        axes.set_title(title, loc="left", weight="bold", color=INK, fontsize=11)
    return save(figure, path)


def spread_apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near these heights, in the same order, at least `gap` apart and within the limits where they fit.

    >>> spread_apart([0.5, 0.5, 0.9], gap=0.2, low=0, high=1)
    [0.4, 0.6000000000000001, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda place: heights[place])

    def within(start: float, num: int) -> tuple[float, int]:
        return min(max(start, low), max(low, high - gap * (num - 1))), num

    blocks: list[tuple[float, int]] = []  # runs of names that touch: the lowest place, and how many
    for place in order:
        blocks.append(within(heights[place], 1))
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * blocks[-2][1]:
            (above, more), (start, num) = blocks.pop(), blocks.pop()
            middle = (start * num + (above - gap * num) * more) / (num + more)
            blocks.append(within(middle, num + more))
    spots = [start + gap * step for start, num in blocks for step in range(num)]
    found = dict(zip(order, spots, strict=True))
    return [found[place] for place in range(len(heights))]


def _looks(
    comparison: Comparison, highlight: Iterable[str] | None
) -> Mapping[str, tuple[str, str]]:
    """Colour and marker of those that stand out."""
    chosen = list(comparison.notable() if highlight is None else highlight)[: len(COLORS)]
    return dict(zip(chosen, zip(COLORS, MARKERS, strict=False), strict=False))


def _draw(
    axes: "Axes",
    comparison: Comparison,
    judged: Figure,
    colored: Mapping[str, tuple[str, str]],
) -> None:
    is_share = comparison.measure == "accuracy"
    scale = 100 if is_share else 1
    ends: dict[str, tuple[float, float]] = {}
    dense = comparison.dense_spread()
    for name in sorted(comparison.contestants, key=lambda name: name in colored):
        points = [
            (_got(comparison, name, budget), comparison.spread(name, budget, judged))
            for budget in comparison.budgets
        ]
        shown = [
            (x, own.mean * scale, (own.deviation or 0) * scale)
            for x, own in points
            if own.mean is not None
        ]
        if not shown:
            continue
        xs, ys, errors = map(list, zip(*shown, strict=True))
        color, marker = colored.get(name, (PALE, ""))
        axes.errorbar(
            xs,
            ys,
            yerr=errors if any(errors) else None,
            color=color,
            marker=marker,
            markersize=6,
            markeredgecolor="white",
            linewidth=2.2 if name in colored else 1.1,
            elinewidth=1.1,
            capsize=2.5 if name in colored else 0,
            zorder=4 if name in colored else 2,
        )
        ends[name] = (xs[-1], ys[-1])
        if name in colored and dense.mean is not None:
            way = [xs[0], 1.0], [ys[0], dense.mean * scale]
            axes.plot(*way, color=color, linewidth=1, linestyle=(0, (1, 2)), zorder=3)
    if dense.mean is not None:
        axes.errorbar(
            [1.0],
            [dense.mean * scale],
            yerr=None if dense.deviation is None else [dense.deviation * scale],
            color=INK,
            marker="*",
            markersize=13,
            capsize=2.5,
            zorder=5,
        )
        axes.annotate(
            "dense", (1, dense.mean * scale), (0, -15), textcoords="offset points", ha="center"
        )
    _scale_axes(axes, comparison, ends)
    _name_lines(axes, ends, colored)


def _scale_axes(
    axes: "Axes", comparison: Comparison, ends: Mapping[str, tuple[float, float]]
) -> None:
    """Shares by halving, the names' column to the left of the smallest."""
    smallest = min((x for x, _ in ends.values()), default=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xlim(smallest * (smallest**0.62), smallest**-0.06)
    axes.set_xticks(
        [*comparison.budgets, 1.0], [f"{share:.0%}" for share in [*comparison.budgets, 1.0]]
    )
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    tidy(axes, "y")
    axes.yaxis.tick_right()
    axes.set_xlabel("share of MACs kept", color=INK)
    what = "test accuracy in %" if comparison.measure == "accuracy" else "test loss"
    num = len(comparison.dense)
    axes.set_ylabel(what + (f" (mean of {num} seeds ± s.d.)" if num > 1 else ""), color=INK)
    axes.yaxis.set_label_position("right")


def _name_lines(
    axes: "Axes",
    ends: Mapping[str, tuple[float, float]],
    colored: Mapping[str, tuple[str, str]],
) -> None:
    low, high = axes.get_ylim()
    height = high - low
    names = list(ends)
    spots = spread_apart(
        [ends[name][1] for name in names],
        LABEL_SHARE * height,
        low + 0.02 * height,
        high - 0.02 * height,
    )
    left = min((x for x, _ in ends.values()), default=0.5)
    column = left * left**0.11
    for name, spot in zip(names, spots, strict=True):
        color = colored[name][0] if name in colored else QUIET
        x, y = ends[name]
        axes.plot([x, column], [y, spot], color=color, linewidth=0.6, alpha=0.6, zorder=1)
        axes.annotate(
            name,
            (column, spot),
            (-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
            color=color,
            weight="bold" if name in colored else "normal",
        )


def _got(comparison: Comparison, name: str, budget: float) -> float:
    return mean(trial.got for trial in comparison.of(name, budget))
