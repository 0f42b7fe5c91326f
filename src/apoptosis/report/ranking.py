"""The record of a ranking check, and its picture: one row per criterion, one dot per group, a bar at the mean."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from apoptosis.report.style import COLORS, GRID, MARKERS, new_figure, save

__all__ = ["Agreement", "RankingReport", "plot_ranking"]


@dataclass(frozen=True)
class Agreement:
    """One criterion's Spearman correlation with the true loss change, per group, and the seconds scoring took."""

    criterion: str
    groups: Mapping[str, float]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean over groups."""
        return sum(self.groups.values()) / len(self.groups)


@dataclass(frozen=True)
class RankingReport:
    """Agreements of all criteria on one trained network, and what is needed to measure them again."""

    agreements: tuple[Agreement, ...]
    channels: Mapping[str, int]
    facts: Mapping[str, Any]

    def best_first(self) -> list[Agreement]:
        """From the highest mean to the lowest; an undefined one comes last."""
        return sorted(
            self.agreements,
            key=lambda row: -math.inf if math.isnan(row.mean) else row.mean,
            reverse=True,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; an undefined correlation is null."""
        return {
            **self.facts,
            "channels": dict(self.channels),
            "criteria": [
                {
                    "criterion": agreement.criterion,
                    "spearman": {k: _number(v) for k, v in agreement.groups.items()},
                    "mean": _number(agreement.mean),
                    "seconds": round(agreement.seconds, 4),
                }
                for agreement in self.best_first()
            ],
        }


def plot_ranking(report: RankingReport, path: Path) -> Path:
    """Draw the report as a PNG."""
    rows = report.best_first()[::-1]
    figure = new_figure(8, 1.6 + 0.42 * len(rows))
    axes = figure.add_subplot()
    axes.barh(range(len(rows)), [row.mean for row in rows], height=0.62, color="#dbe4ee", zorder=1)
    for (group, channels), (color, marker) in zip(report.channels.items(), _looks(), strict=False):
        axes.scatter(
            [row.groups[group] for row in rows],
            range(len(rows)),
            s=46,
            color=color,
            marker=marker,
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
            label=f"{group} ({channels})",
        )
    for height, row in enumerate(rows):
        label = "undefined" if math.isnan(row.mean) else f"{row.mean:+.2f}"
        axes.annotate(label, (1.02, height), xycoords=("axes fraction", "data"), va="center")
    axes.set_yticks(range(len(rows)), [row.criterion for row in rows])
    axes.axvline(0, color="#444444", linewidth=0.8, zorder=2)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(min(-0.3, _lowest(report) - 0.05), 1.03)
    axes.grid(axis="x", color=GRID, linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.annotate("mean", (1.02, 1.01), xycoords="axes fraction", weight="bold")
    axes.set_xlabel(
        "Spearman correlation with the true loss change of removing a channel (1 = same order)"
    )
    axes.set_title("How well does each criterion rank channels?", loc="left", weight="bold")
    figure.legend(title="group (channels)", loc="outside lower center", ncols=6, frameon=False)
    return save(figure, path)


def _lowest(report: RankingReport) -> float:
    values = [v for a in report.agreements for v in a.groups.values() if not math.isnan(v)]
    return min(values, default=0.0)


def _looks() -> Iterator[tuple[str, str]]:
    return zip(cycle(COLORS), cycle(MARKERS), strict=True)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
