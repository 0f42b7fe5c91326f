"""Plots of the sparse experiments: accuracy against the share removed, a panel for what becomes of batch norms."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from narrow_tables import _save
from sparse_ways import (
    COLUMNS,
    LARGE_POLICIES,
    POLICIES,
    REMOVED,
    Large,
    Narrow,
    Way,
    large_ways,
    paper_form,
    staged,
)

COLORS = {
    "magnitude": "#222222",
    "taylor": "#d55e00",
    "obd-fisher": "#cc79a7",
    "oba": "#0072b2",
    "oba-hessian": "#009e73",
    "oba-ggn": "#e69f00",
}
MARKERS = dict(zip(COLORS, "os^DvP", strict=True))


def plot_narrow(narrow: Narrow, path: Path) -> None:
    figure, panels = _panels(3, "Narrow ResNet20, CIFAR-10: single weights removed, no training")
    for axes, (policy, title) in zip(panels, POLICIES.items(), strict=True):
        for criterion in COLUMNS.values():
            form = paper_form(criterion)
            ways = staged(criterion, form, policy)
            full = [way for way in ways if all(narrow.values(way, r) for r in REMOVED)]
            shown = max(full or ways, key=lambda way: way.stages)
            _curve(axes, criterion, shown, lambda r, way=shown: narrow.values(way, r), REMOVED)
        _panel(axes, title, narrow.accuracy)
    panels[0].set_ylabel("accuracy (%), images 5,000–9,999; dotted: dense")
    _save(figure, path)


def plot_large(large: Large, path: Path) -> None:
    figure, panels = _panels(2, "ResNet50, ImageNet: single weights removed, no training")
    for axes, policy in zip(panels, LARGE_POLICIES, strict=True):
        for way in large_ways(policy):
            if way.stages == 5:
                continue
            look = {"linestyle": "-" if way.stages == 20 or way.ranks_stay else "--"}
            color = "magnitude" if way.criterion == "magnitude" else "oba"
            if way.form != paper_form(way.criterion):
                color = {"magnitude": "obd-fisher", "oba": "taylor"}[way.criterion]
            _curve(axes, color, way, lambda r, w=way: large.values(w, r), large.removed, **look)
        _panel(axes, POLICIES[policy], large.dense)
    panels[0].set_ylabel("accuracy (%), 2,000 images; dotted: dense")
    _save(figure, path)


def _panels(count: int, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.8 * count, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure, figure.subplots(1, count, sharey=True)


def _curve(
    axes: Any,
    look: str,
    way: Way,
    values: Callable[[float], dict[int, float]],
    shares: Any,
    **more: Any,
) -> None:
    held = {share: list(own.values()) for share in shares if (own := values(share))}
    if held:
        num = sorted({len(own) for own in held.values()})
        draws = f"n {num[0]}" if len(num) == 1 else f"n {num[0]}–{num[-1]}"
        axes.errorbar(
            list(held),
            [mean(own) for own in held.values()],
            [stdev(own) if len(own) > 1 else 0.0 for own in held.values()] if num[-1] > 1 else None,
            color=COLORS[look],
            marker=MARKERS[look],
            markersize=4,
            linewidth=1.4,
            label=f"{way.name} ({draws})",
            **more,
        )


def _panel(axes: Any, title: str, dense: float) -> None:
    axes.axhline(dense, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_title(title, size=10, loc="left")
    axes.set_xlabel("share of weights removed")
    axes.set_ylim(0, 100)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            frameon=False, fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14)
        )
