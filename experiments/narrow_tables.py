"""Pages and plots of the narrow experiments, from their measured lines; nothing is measured here.

    python experiments/narrow_tables.py

Reads results/narrow_{choose,report,ranking}.csv and narrow_peers.json (as far as it goes), writes
narrow_criteria.{md,png} and narrow_ranking.{md,png} beside them. Every number in the prose is computed from the lines.
"""

import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from narrow_choices import REPORTED
from narrow_lines import Row, read_lines
from PIL import Image

RESULTS = Path(__file__).parent / "results"
KEPT = (0.7, 0.5)
NORMALISERS = ("none", "max", "minmax", "l2", "mean")
DEFAULT = "oba, entries per MAC, 20 steps"
FIGURES = (("loss", 1, 2), ("accuracy", 100, 1), ("bn_loss", 1, 2), ("bn_accuracy", 100, 1))
"""Column, factor, digits."""
AVERAGED = ("oba", "oba-hessian", "oba-ggn", "taylor", "obd-hessian", "obd-ggn", "obd-fisher")
"""Criteria that options are averaged over: `oba-functional` gives what `oba` gives, and two read no data."""
SPELLED = {"p": "producers", "a": "carriers", "c": "consumers"}
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
T_95 = 4.303 / math.sqrt(3)
"""Mean differences of three draws below so many s.d. are within noise (two-sided t at 95 %, two degrees of freedom)."""

CHOSEN_AT = "13:48–13:58 UTC on 2026-11-16, while HEAD went from 23d925c to a353ba8"
REPORTED_AT = "14:12–14:22 UTC on 2026-11-16, while HEAD went from 7301ad3 to e3830f5"
DEVICE = "NVIDIA H200, float32, torch 2.11"
DRAWN = (
    "Three draws (0, 1, 2: rows of the permutation of seed 0) of 2,000 training images; chance has "
)


def main() -> None:
    ways = Ways(read_lines(RESULTS / "narrow_report.csv"))
    peers = Peers(json.loads((RESULTS / "narrow_peers.json").read_text()))
    grid = Grid(read_lines(RESULTS / "narrow_choose.csv"))
    (RESULTS / "narrow_criteria.md").write_text("\n".join(criteria_page(ways, peers, grid)) + "\n")
    plot_criteria(ways, peers, RESULTS / "narrow_criteria.png")
    ranks = Ranks(read_lines(RESULTS / "narrow_ranking.csv"))
    (RESULTS / "narrow_ranking.md").write_text("\n".join(ranking_page(ranks)) + "\n")
    plot_ranking(ranks, RESULTS / "narrow_ranking.png")


# ---------------------------------------------------------------------------------------------------------------------
# Lines, arranged


class Ways:
    """Reported ways: three draws at each budget; best first by accuracy on the half that choices are made on."""

    def __init__(self, rows: list[Row]) -> None:
        self.held: dict[tuple[str, float], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row["draw"]):
            self.held[row["label"], row["kept"]].append(row)
        assert {len(own) for own in self.held.values()} == {3}, "a draw is missing"
        labels = sorted({row["label"] for row in rows})  # ties in one order
        self.labels = sorted(labels, key=self.choice, reverse=True)
        self.missing = [c.label for c in REPORTED if c.label not in self.labels]

    def values(self, label: str, kept: float, what: str) -> list[float]:
        return [row[what] for row in self.held[label, kept]]

    def choice(self, label: str) -> float:
        return 100 * mean(mean(self.values(label, kept, "choose_bn_accuracy")) for kept in KEPT)

    def both(self, label: str) -> list[float]:
        """Reported accuracy of each draw, mean of both budgets, in %."""
        found = [self.values(label, kept, "report_bn_accuracy") for kept in KEPT]
        return [50 * (a + b) for a, b in zip(*found, strict=True)]

    def at(self, label: str, kept: float) -> str:
        return spread([100 * v for v in self.values(label, kept, "report_bn_accuracy")], 1)

    def gap(self, label: str, other: str) -> tuple[float, float]:
        """Mean and s.d. over draws of what one way keeps more than another, in points."""
        gaps = [a - b for a, b in zip(self.both(label), self.both(other), strict=True)]
        return mean(gaps), stdev(gaps)

    def told(self, label: str, other: str) -> str:
        found, sd = self.gap(label, other)
        noise = " (within noise)" if abs(found) < T_95 * sd else ""
        return f"{signed(found)} ± {sd:.1f}{noise}"


class Peers:
    """Torch-Pruning's rows by setting; best first by reported accuracy, for there are no figures on the other half."""

    def __init__(self, book: dict[str, Any]) -> None:
        self.meta, self.dense = book["meta"], book["dense"]
        self.held: dict[tuple[Any, ...], dict[tuple[float, bool], list[Row]]] = {}
        for key, row in book["rows"].items():
            *setting, share, _draw, mended = json.loads(key)
            own = self.held.setdefault(tuple(setting), defaultdict(list))
            own[share, mended].append(row)
        self.settings = sorted(self.held, key=self.both, reverse=True)

    def values(self, setting: tuple[Any, ...], kept: float, what: str) -> list[float]:
        """Accuracies as shares, as in our own lines."""
        rows = self.held[setting][kept, what.startswith("bn_")]
        name = what.removeprefix("bn_")
        return [row[name] / (100 if name == "accuracy" else 1) for row in rows]

    def both(self, setting: tuple[Any, ...]) -> float:
        found = [self.values(setting, kept, "bn_accuracy") for kept in KEPT]
        return 100 * mean(mean(own) if own else 0.0 for own in found)

    def draws(self, setting: tuple[Any, ...]) -> int:
        return min(len(self.values(setting, kept, "bn_accuracy")) for kept in KEPT)

    @staticmethod
    def name(setting: tuple[Any, ...]) -> str:
        importance, normaliser, widths, steps, groups = setting
        where = "block channels" if groups == "internal" else "all groups"
        uniform = ", uniform widths" if widths == "uniform" else ""
        many = f", {steps} steps" if steps > 1 else ""
        return f"{importance}, normaliser {normaliser or 'none'}{uniform}, {where}{many}"


class Grid:
    """Accuracy with batch norms measured anew of every way in one step: mean of both budgets, in %."""

    OPTIONS = ("absolute", "over_slices", "roles", "parameters", "normalise", "widths", "per")

    def __init__(self, rows: list[Row]) -> None:
        self.size = len(rows)
        self.held: dict[str, dict[tuple[str, ...], dict[float, Row]]] = defaultdict(dict)
        for row in rows:
            way = tuple(row[option] for option in self.OPTIONS)
            self.held[row["criterion"]].setdefault(way, {})[row["kept"]] = row

    def accuracy(self, criterion: str, way: tuple[str, ...]) -> float:
        return 100 * mean(row["bn_accuracy"] for row in self.held[criterion][way].values())

    def best(self, criterion: str, count: int) -> list[tuple[tuple[str, ...], int]]:
        """The best ways, those that cut the same network once: the simplest to say, and how many there are."""
        same: dict[tuple[float, ...], list[tuple[str, ...]]] = defaultdict(list)
        for way, rows in self.held[criterion].items():
            same[tuple(rows[kept][f] for kept in KEPT for f in ("bn_loss", "loss", "macs"))].append(
                way
            )
        groups = sorted(same.values(), key=lambda g: self.accuracy(criterion, g[0]), reverse=True)
        return [(group[-1], len(group)) for group in groups[:count]]

    def average(self, **asked: str) -> tuple[float, int]:
        """Mean over the averaged criteria and all ways that fit."""
        asked = {"over_slices": "sum", "parameters": "all", "widths": "global", **asked}
        found = [
            self.accuracy(criterion, way)
            for criterion in AVERAGED
            for way in self.held[criterion]
            if asked.items() <= dict(zip(self.OPTIONS, way, strict=True)).items()
        ]
        return mean(found), len(found)


class Ranks:
    """Rank correlations, over draws."""

    COLUMNS = ("per_layer", *(f"all_{n}" for n in NORMALISERS))

    def __init__(self, rows: list[Row]) -> None:
        self.held: dict[tuple[str, str], dict[tuple[str, ...], list[Row]]] = defaultdict(dict)
        for row in rows:
            way = (row["absolute"], row["over_slices"], row["roles"])
            self.held[row["truth"], row["criterion"]].setdefault(way, []).append(row)
        first = next(iter(self.held))[0]
        self.criteria = [c for t, c in self.held if t == first]

    def values(self, truth: str, criterion: str, form: tuple[str, ...], column: str) -> list[float]:
        """Criteria of units themselves have one form."""
        own = self.held[truth, criterion]
        return [row[column] for row in own.get(form) or own["", "", ""]]

    def best(self, truth: str, criterion: str, column: str) -> tuple[str, ...]:
        own = self.held[truth, criterion]
        return max(own, key=lambda form: mean(row[column] for row in own[form]))


# ---------------------------------------------------------------------------------------------------------------------
# The page about criteria


def criteria_page(ways: Ways, peers: Peers, grid: Grid) -> Iterator[str]:
    dense = peers.dense
    yield "# What criteria keep of the public narrow ResNet32, CIFAR-10, without any training"
    yield ""
    yield "```"
    yield from Path(__file__).with_name("runs").joinpath("narrow.sh").read_text().splitlines()
    yield "```"
    yield ""
    yield (
        f"{DEVICE}. The grid (`choose`, {grid.size:,} networks): draw 0, one step, {CHOSEN_AT}. The reported ways "
        f"(`report`, {3 * len(KEPT) * len(ways.labels)} networks): {REPORTED_AT}. {DRAWN}another seed in every "
        "draw of the report, seed 0 in the grid. Scores and batch norms see the draw alone. Choices are made on "
        "test images 0–4,999, figures are those on 5,000–9,999. No training, no augmentation."
    )
    if ways.missing:
        yield ""
        yield f"Not measured with the others, on the GPU: {'; '.join(dict.fromkeys(ways.missing))}. LOG.md has some."
    yield ""
    yield "## Dense"
    yield ""
    yield (
        f"{dense['macs'] / 1e6:.2f} MMACs, loss {dense['loss']:.3f}, accuracy {dense['accuracy']:.2f} % on images "
        "5,000–9,999."
    )
    yield from _reported(ways)
    yield from _peers(peers)
    yield ""
    yield "![accuracy of every way](narrow_criteria.png)"
    yield from _grid(grid, ways)
    yield "## What the figures say"
    yield ""
    for sentence in _reading(ways, peers, grid):
        yield f"- {sentence}"


def _reported(ways: Ways) -> Iterator[str]:
    yield ""
    yield "## Chosen ways, three draws"
    yield ""
    yield (
        "Mean ± s.d. over draws on images 5,000–9,999; MACs (%) as got, mean over draws. BN: batch norms "
        "measured anew on the draw. *Choice*: accuracy (%) with BN on images 0–4,999, mean of both budgets, "
        "which rows are sorted by. In bold: the default. Entries: Σ|s| over the entries of producers and "
        "consumers, no normaliser; per MAC: divided by what the unit saves. The paper's way: |Σ s| per layer, "
        "mean over producers and consumers, divided by the group's largest, per unit. Block channels: streams "
        "are left alone."
    )
    yield ""
    yield from head(["way", "choice", *_columns()])
    for label in ways.labels:
        bold = "**" if label == DEFAULT else ""
        cells = [f"{bold}{label}{bold}", f"{bold}{ways.choice(label):.1f}{bold}"]
        for kept in KEPT:
            cells.append(f"{100 * mean(ways.values(label, kept, 'macs')):.1f}")
            for what, factor, digits in FIGURES:
                values = [factor * v for v in ways.values(label, kept, f"report_{what}")]
                cells.append(f"{bold}{spread(values, digits)}{bold}")
        yield line(cells)


def _peers(peers: Peers) -> Iterator[str]:
    yield ""
    yield "## Torch-Pruning at the same MACs"
    yield ""
    yield (
        f"`{peers.meta['command']}`, {peers.meta['device']}, {peers.meta['versions']}, commits "
        f"{', '.join(peers.meta.get('commits') or [peers.meta.get('commit', '?')])}; the same draws, images and "
        "repair of batch norms. n: draws measured so far; magnitudes alone have no draw before the repair. There "
        "are no figures on images 0–4,999; rows are sorted by the mean accuracy with BN of both budgets on "
        "5,000–9,999, which favours the first of them a little. With all groups its stream is misaligned on this "
        "network ([narrow_peers.md](narrow_peers.md)), so that only rows of block channels are a comparison of "
        "criteria."
    )
    yield ""
    yield from head(["way", "n", *_columns()])
    for setting in peers.settings:
        cells = [peers.name(setting), str(peers.draws(setting))]
        for kept in KEPT:
            macs = [row["share"] for row in peers.held[setting][kept, True]]
            cells.append(f"{100 * mean(macs):.1f}" if macs else "–")
            for what, factor, digits in FIGURES:
                values = [factor * v for v in peers.values(setting, kept, what)]
                cells.append(spread(values, digits))
        yield line(cells)


def _columns() -> list[str]:
    names = ("MACs", "loss", "accuracy", "loss, BN", "accuracy, BN")
    return [f"{100 * kept:.0f} %: {name}" for kept in KEPT for name in names]


def _grid(grid: Grid, ways: Ways) -> Iterator[str]:
    yield ""
    yield "## The grid: every aggregation and selection"
    yield ""
    yield (
        "One step, draw 0 (n = 1), accuracy (%) with BN on images 0–4,999. The best three of each criterion; "
        "*same*: ways that cut the same network, of which one is named."
    )
    yield ""
    yield from head(
        ["criterion", "absolute", "roles", "normaliser", "ranked", "70 %", "50 %", "mean", "same"]
    )
    for criterion in sorted(
        grid.held, key=lambda c: -grid.accuracy(c, grid.best(c, 1)[0][0]), reverse=False
    ):
        for way, same in grid.best(criterion, 3):
            told = dict(zip(grid.OPTIONS, way, strict=True))
            rows = grid.held[criterion][way]
            yield line(
                [
                    criterion,
                    told["absolute"] or "–",
                    spelled(told["roles"]) or "–",
                    told["normalise"] + (", mean of slices" * (told["over_slices"] == "mean")),
                    _ranked(told["widths"], told["per"]),
                    *(f"{100 * rows[kept]['bn_accuracy']:.1f}" for kept in KEPT),
                    f"{grid.accuracy(criterion, way):.1f}",
                    str(same),
                ]
            )
    yield ""
    yield (
        f"What each option is worth: mean over {len(AVERAGED)} criteria ({', '.join(AVERAGED)}) of the mean of "
        "both budgets. *All others*: over every value of the other options; *as the default*: entries of "
        "producers and consumers, no normaliser, per MAC, but for the option itself; *as the paper*: |Σ| per "
        "layer, producers and consumers, max, per unit."
    )
    yield ""
    yield from head(["option", "value", "all others", "as the default", "as the paper"])
    for option, values in OPTION_VALUES.items():
        for value in values:
            yield line(
                [
                    option,
                    spelled(value) if option == "roles" else value,
                    *(
                        f"{grid.average(**{**form, option: value})[0]:.1f}"
                        for form in ({}, AS_DEFAULT, AS_PAPER)
                    ),
                ]
            )
    for widths, per in (("global", "unit"), ("global", "cost"), ("uniform", "unit")):
        asked = {"widths": widths, "per": per, "normalise": "none"}
        both = [grid.average(**{**form, **asked})[0] for form in ({}, AS_DEFAULT)]
        yield line(
            [
                "ranking, without normaliser",
                _ranked(widths, per),
                *(f"{v:.1f}" for v in both),
                "–",
            ]
        )
    for over in ("sum", "mean"):
        asked = {"over_slices": over, "normalise": "none"}
        both = [grid.average(**{**form, **asked})[0] for form in ({}, AS_DEFAULT)]
        yield line(
            ["over slices, without normaliser", over, *(f"{v:.1f}" for v in both), "–"],
        )
    yield ""
    yield (
        "Normaliser and price do not add up, which averages hide: mean over all other options, and with entries "
        "of producers and consumers."
    )
    yield ""
    yield from head(
        ["normaliser", "per unit", "per MAC", "entries, per unit", "entries, per MAC"],
    )
    for n in NORMALISERS:
        cells = [
            f"{grid.average(**form, normalise=n, per=per)[0]:.1f}"
            for form in ({}, ENTRIES)
            for per in ("unit", "cost")
        ]
        yield line([n, *cells])
    yield ""
    yield _same_in_both(grid, ways)
    yield ""


def _same_in_both(grid: Grid, ways: Ways) -> str:
    """Draw 0 in one step is in the grid and in the report: what the code has changed between them."""
    changed: dict[str, list[float]] = defaultdict(list)
    for (label, kept), rows in ways.held.items():
        row = rows[0]
        way = tuple(row[option] for option in grid.OPTIONS)
        if row["steps"] == 1 and "block" not in label and way in grid.held[row["criterion"]]:
            old = grid.held[row["criterion"]][way][kept]["bn_accuracy"]
            changed[row["widths"]].append(100 * (row["choose_bn_accuracy"] - old))
    assert not any(changed["global"]), "the grid is of other code than the report"
    low, high = min(changed["uniform"]), max(changed["uniform"])
    return (
        f"Draw 0 in one step is in the grid and among the reported ways. {len(changed['global'])} networks of "
        f"global rankings have the same accuracy in both; the {len(changed['uniform'])} of uniform widths are "
        f"{signed(low)} to {signed(high)} points better in the report, for 6023cbe changed what uniform widths "
        "are. The grid's rows of uniform widths are of the code before it."
    )


ENTRIES = {"absolute": "entry", "roles": "pc"}
AS_DEFAULT = {**ENTRIES, "normalise": "none", "per": "cost"}
AS_PAPER = {"absolute": "slice", "roles": "pc", "normalise": "max", "per": "unit"}
OPTION_VALUES = {
    "absolute": ("unit", "slice", "entry"),
    "roles": (
        "pac",
        "pc",
        "c",
        "pa",
    ),
    "normalise": NORMALISERS,
    "per": ("unit", "cost"),
}


def _ranked(widths: str, per: str) -> str:
    return "uniform widths" if widths == "uniform" else {"unit": "per unit", "cost": "per MAC"}[per]


def _reading(ways: Ways, peers: Peers, grid: Grid) -> Iterator[str]:
    assert ways.labels[0] == DEFAULT, "the default is no longer the best on the half of choices"
    second = ways.labels[1]
    dense = peers.dense["accuracy"]
    yield (
        f"**{DEFAULT}** is first on the half that choices are made on ({ways.choice(DEFAULT):.1f} %, next "
        f"{ways.choice(second):.1f} %: {second}). On the other half it keeps {ways.at(DEFAULT, 0.7)} % at 70 % of "
        f"the MACs and {ways.at(DEFAULT, 0.5)} % at 50 %, of {dense:.1f} %."
    )
    near = [label for label in ways.labels[1:] if _within_noise(ways, DEFAULT, label)]
    yield (
        "Differences from here on are points of accuracy with BN on images 5,000–9,999, mean of both budgets, "
        f"paired over three draws, ± s.d.; within noise means below {T_95:.1f} s.d. (t-test, 95 %, not corrected "
        "for many comparisons). The default against its neighbours: "
        + "; ".join(f"{label} {ways.told(DEFAULT, label)}" for label in ways.labels[1:6])
        + f". Three draws cannot tell it from {len(near)} of the {len(ways.labels) - 1} other ways."
    )
    steps = [1, 5, 10, 20, 50]
    named = ["oba, entries per MAC"] + [f"oba, entries per MAC, {s} steps" for s in steps[1:]]
    shown = ", ".join(
        f"{s}: {spread(ways.both(label), 1)}" for s, label in zip(steps, named, strict=True)
    )
    gain = "; ".join(
        f"{name} {ways.told(f'{name}, entries per MAC, 20 steps', f'{name}, entries per MAC')}"
        for name in ("taylor", "oba-hessian", "oba-ggn", "obd-fisher", "magnitude")
    )
    yield (
        f"Steps, for oba by entries per MAC: {shown}. Twenty against one are worth "
        f"{ways.told(DEFAULT, named[0])}; the order among 5, 10, 20 and 50 is not monotone (20 against 10: "
        f"{ways.told(DEFAULT, named[2])}; against 50: {ways.told(DEFAULT, named[4])}), so that the place of 20 "
        f"among them may be luck in part. Twenty against one for others: {gain}; taylor-activation, per unit, "
        f"{ways.told('taylor-activation, 20 steps', 'taylor-activation')}."
    )
    one_step = [
        label for label in ways.labels if label.endswith("entries per MAC") and "steps" not in label
    ]
    top = one_step[0]
    assert {label.split(",")[0] for label in one_step[:2]} == {"obd-ggn", "obd-hessian"}, (
        "the page about ranks says so"
    )
    yield (
        f"In one step, by entries per MAC, {top} is first on the half of choices; on the other half it is "
        f"{ways.told(top, 'oba, entries per MAC')} above oba, {ways.told(top, 'taylor, entries per MAC')} above "
        f"taylor and {ways.told(top, 'magnitude, entries per MAC')} above magnitude. A run takes "
        f"{_seconds(ways, top):.0f} s, with oba {_seconds(ways, 'oba, entries per MAC'):.0f} s (several at a time "
        "on one device)."
    )
    yield (
        f"The paper's combination by name: the default keeps {ways.told(DEFAULT, PAPERS_20)} points more than "
        f"*{PAPERS_20}*, and in one step entries per MAC keep {ways.told('oba, entries per MAC', PAPERS)} more "
        f"than *{PAPERS}*. For magnitude it is the other way round: "
        f"{ways.told('magnitude, entries per MAC', MAGNITUDE)} ({ways.at('magnitude, entries per MAC', 0.7)} "
        f"against {ways.at(MAGNITUDE, 0.7)} % at 70 %, {ways.at('magnitude, entries per MAC', 0.5)} against "
        f"{ways.at(MAGNITUDE, 0.5)} % at 50 %)."
    )
    priced = [grid.average(**ENTRIES, normalise="none", per=per)[0] for per in ("cost", "unit")]
    scaled = [grid.average(**ENTRIES, normalise="max", per=per)[0] for per in ("cost", "unit")]
    everywhere = [grid.average(per=per)[0] for per in ("cost", "unit")]
    yield (
        "Price and normaliser (grid, n = 1 draw): without a normaliser a price per MAC is worth "
        f"{signed(priced[0] - priced[1])} points for entries of producers and consumers; after division by the "
        f"largest it is worth {signed(scaled[0] - scaled[1])}, and over all combinations "
        f"{signed(everywhere[0] - everywhere[1])}. A likely reason, not tested: normalised scores are no longer "
        f"in units of the loss. Option by option, averages over all others would choose {_on_average(grid)}: the "
        "argument for the default is its combination, not the sum of its parts."
    )
    assert priced[0] > priced[1], "a price is worth nothing"
    assert scaled[0] < scaled[1], "normalised scores can be priced"
    firsts = [c for c in AVERAGED if _default_place(grid, c) == 1]
    places = ", ".join(f"{c} {_default_place(grid, c)}" for c in AVERAGED if c not in firsts)
    yield (
        f"The default's aggregation and ranking are the best of the grid for {len(firsts)} of {len(AVERAGED)} "
        f"criteria ({', '.join(firsts)}); its place for the others: {places}; for magnitude "
        f"{_default_place(grid, 'magnitude')}. Places count different networks."
    )
    yield (
        "Streams: leaving them alone changes little. Oba in 20 steps with streams against block channels "
        f"{ways.told(DEFAULT, 'oba, entries per MAC, block channels, 20 steps')}, in one step "
        f"{ways.told('oba, entries per MAC', 'oba, entries per MAC, block channels')}; taylor in 20 steps "
        f"{ways.told('taylor, entries per MAC, 20 steps', 'taylor, entries per MAC, block channels, 20 steps')}. "
        "Magnitude and chance, priced per MAC, never cut a stream. Uniform widths lose: oba in one step, entries "
        f"per MAC against uniform, {ways.told('oba, entries per MAC', 'oba, uniform widths')}."
    )
    for name in ("magnitude", "random"):
        both = [ways.both(f"{name}, entries per MAC{part}") for part in ("", ", block channels")]
        assert both[0] == both[1], f"{name} cuts streams"
    yield _against_peers(ways, peers)
    yield (
        "What three draws and one network cannot show: both halves judge the same pruned networks, so that the "
        "split guards against luck with test images, not against luck with draws, and the first of "
        f"{len(ways.labels)} rows is flattered by both halves alike. `oba-functional` equals `oba` in every "
        "reported figure."
    )
    assert all(
        ways.values("oba, entries per MAC", kept, "report_loss")
        == ways.values("oba-functional, entries per MAC", kept, "report_loss")
        for kept in KEPT
    )


PAPERS, PAPERS_20 = "oba, the paper's way", "oba, the paper's way, 20 steps"
MAGNITUDE = "magnitude, the paper's way"


def _within_noise(ways: Ways, label: str, other: str) -> bool:
    found, sd = ways.gap(label, other)
    return abs(found) < T_95 * sd


def _seconds(ways: Ways, label: str) -> float:
    return mean(s for kept in KEPT for s in ways.values(label, kept, "seconds"))


def _on_average(grid: Grid) -> str:
    """The best value of each option, mean over all values of the others."""
    best = {
        option: max(values, key=lambda value: grid.average(**{option: value})[0])
        for option, values in OPTION_VALUES.items()
    }
    return ", ".join(
        f"{option} *{spelled(value) if option == 'roles' else value}*"
        for option, value in best.items()
    )


def _default_place(grid: Grid, criterion: str) -> int:
    """Place of the default's way among the different networks of a criterion."""
    asked = {**AS_DEFAULT, "over_slices": "sum", "parameters": "all", "widths": "global"}
    own = grid.accuracy(criterion, tuple(asked[option] for option in grid.OPTIONS))
    better = grid.best(criterion, 10**6)
    return 1 + sum(grid.accuracy(criterion, way) > own + 1e-9 for way, _ in better)


def _against_peers(ways: Ways, peers: Peers) -> str:
    fair = [s for s in peers.settings if s[4] == "internal" and peers.draws(s) == 3]
    best = max(fair, key=peers.both)
    ours = [
        label
        for label in ways.labels
        if not label.endswith("steps") and mean(ways.both(label)) > peers.both(best)
    ]
    many = [s for s in peers.settings if s[4] == "internal" and s[3] > 1]
    later = "".join(
        f" In {s[3]} steps, {peers.name(s)}: {peers.both(s):.1f} % (n = {peers.draws(s)})."
        for s in many
        if peers.draws(s)
    )

    def at(kept: float) -> str:
        return spread([100 * v for v in peers.values(best, kept, "bn_accuracy")], 1)

    above = [
        mean(100 * v for v in ways.values(DEFAULT, kept, "report_bn_accuracy"))
        - mean(100 * v for v in peers.values(best, kept, "bn_accuracy"))
        for kept in KEPT
    ]
    named = "; ".join(f"{label} {spread(ways.both(label), 1)} %" for label in ours) or "none"
    magnitudes = [m for m in ways.labels if m.startswith("magnitude")]
    return (
        f"Torch-Pruning's best row of three draws is {peers.name(best)}: {at(0.7)} "
        f"% at 70 % and {at(0.5)} % at 50 %, mean {peers.both(best):.1f} %. The default, in 20 steps, differs "
        f"from it by {signed(above[0])} and {signed(above[1])} points (mean {spread(ways.both(DEFAULT), 1)} %). "
        f"In one step ours with a higher mean are: {named}. Oba in one step has "
        f"{spread(ways.both('oba, entries per MAC'), 1)} %, less than that row, and our magnitude (|w|, not w²) "
        f"at best {max(mean(ways.both(m)) for m in magnitudes):.1f} %.{later}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The page about ranks

TRUTHS = {"scoring": "the 2,000 images that scores saw", "test": "test images 5,000–9,999"}
PAPER_FORM = ("slice", "mean", "pc")
DEFAULT_FORM = ("entry", "sum", "pc")
PAPER_TABLE = {
    "OBA": (0.421, 0.379, 0.456, None, 0.402, None),
    "Taylor": (0.409, 0.080, 0.417, None, 0.433, None),
    "OBD": (0.347, 0.342, 0.426, None, 0.186, None),
    "Weight": (0.289, -0.187, 0.092, None, 0.443, None),
}
"""Its Table 1, CIFAR-10, the columns that are also ours; its standardisation has no twin here."""


def ranking_page(ranks: Ranks) -> Iterator[str]:
    yield "# Do scores know what a unit is worth? The public narrow ResNet32, CIFAR-10"
    yield ""
    yield "`python experiments/narrow_ranking.py --device cuda --out experiments/results/narrow_ranking.csv`"
    yield ""
    yield (
        f"{DEVICE}, {CHOSEN_AT}. Spearman correlation with the change of the loss when a unit is zeroed, every "
        "unit of every group: *per layer* (mean over groups), and *over all units* after a normaliser per group. "
        f"{DRAWN}seed 0 in all of them. Mean ± s.d. over draws (n = 3). Tables (c) name the best of 32 "
        "aggregations of each criterion in each column, seen with hindsight on the very figures shown: an upper "
        "end, not a comparison."
    )
    yield ""
    yield (
        "The paper's Table 1 (CIFAR-10, a ResNet32 of its own, units after the first convolution and three blocks):"
    )
    yield ""
    yield from _rank_head("method")
    for name, values in PAPER_TABLE.items():
        yield line([name, *("–" if v is None else f"{v:.2f}" for v in values)])
    for truth, where in TRUTHS.items():
        forms = {
            "(a) the paper's form: |Σ| per layer, mean over producers and consumers": PAPER_FORM,
            "(b) the default form: Σ|·| over entries of producers and consumers": DEFAULT_FORM,
            "(c) best of every form, with hindsight": None,
        }
        for title, form in forms.items():
            yield ""
            yield f"## Truth on {where}, {title}"
            yield ""
            if form is None:
                yield (
                    "After each figure its form: where the abs is (unit, slice, entry, none), roles (p "
                    "producers, a carriers, c consumers), m for a mean over slices."
                )
                yield ""
            yield from _rank_head("criterion")
            for criterion in ranks.criteria:
                yield line([_named(criterion), *_rank_cells(ranks, truth, criterion, form)])
    yield ""
    yield "![rank correlations](narrow_ranking.png)"
    yield ""
    yield "## What the figures say"
    yield ""
    for sentence in _rank_reading(ranks):
        yield f"- {sentence}"


def _rank_head(first: str) -> Iterator[str]:
    yield from head([first, "per layer", *(f"all, {n}" for n in NORMALISERS)])


def _named(criterion: str) -> str:
    return {"magnitude": "magnitude (weight)", "random": "random (chance)"}.get(
        criterion, criterion
    )


def _rank_cells(
    ranks: Ranks, truth: str, criterion: str, form: tuple[str, ...] | None
) -> Iterator[str]:
    for column in ranks.COLUMNS:
        used = form or ranks.best(truth, criterion, column)
        cell = spread(ranks.values(truth, criterion, used, column), 2)
        absolute, over, roles = used
        told = f" ({absolute} {roles}{' m' if over == 'mean' else ''})" if form is None else ""
        yield cell if criterion.startswith("taylor-") else cell + told


def _rank_reading(ranks: Ranks) -> Iterator[str]:
    def at(criterion: str, form: tuple[str, ...], column: str, truth: str) -> str:
        return spread(ranks.values(truth, criterion, form, column), 2)

    def order(form: tuple[str, ...], column: str, truth: str) -> str:
        means = {c: mean(ranks.values(truth, c, form, column)) for c in ranks.criteria}
        first = sorted(means, key=lambda c: means[c], reverse=True)[:3]
        return ", ".join(f"{c} {means[c]:.2f}" for c in first)

    a, b = PAPER_FORM, DEFAULT_FORM
    yield (
        f"OBA in the paper's form has {at('oba', a, 'per_layer', 'scoring')} per layer on the scoring images and "
        f"{at('oba', a, 'per_layer', 'test')} on test images, against 0.42 in the paper; over all units without a "
        f"normaliser {at('oba', a, 'all_none', 'scoring')} and {at('oba', a, 'all_none', 'test')}, against 0.38; "
        f"with max {at('oba', a, 'all_max', 'scoring')} and {at('oba', a, 'all_max', 'test')}, against 0.46. "
        "Another network, other units; every one of these is lower than the paper's."
    )
    yield (
        f"OBA is not first here. Per layer in the paper's form the first are {order(a, 'per_layer', 'scoring')} "
        f"(scoring images) and {order(a, 'per_layer', 'test')} (test images); in the default form "
        f"{order(b, 'per_layer', 'scoring')} and {order(b, 'per_layer', 'test')}."
    )
    summed = ("slice", "sum", "pc")
    yield (
        f"Over all units without a normaliser the default form gives oba {at('oba', b, 'all_none', 'scoring')} "
        f"and {at('oba', b, 'all_none', 'test')}. Most of what it gains on the paper's form is the sum over "
        f"slices in place of a mean: |Σ| per layer, summed, has {at('oba', summed, 'all_none', 'scoring')} and "
        f"{at('oba', summed, 'all_none', 'test')}. The first of all in the default form are "
        f"{order(b, 'all_none', 'scoring')} (scoring images) and {order(b, 'all_none', 'test')} (test images); "
        "obd-ggn and obd-hessian also prune best in one step by the same form, priced per MAC "
        "([narrow_criteria.md](narrow_criteria.md))."
    )
    yield (
        "Over all units chance is no zero, presumably for sums and normalisers give whole groups a level: with "
        f"l2 it has {at('random', b, 'all_l2', 'scoring')} and {at('random', b, 'all_l2', 'test')}, with max "
        f"{at('random', b, 'all_max', 'scoring')} and {at('random', b, 'all_max', 'test')}, without a normaliser "
        f"{at('random', b, 'all_none', 'scoring')} and {at('random', b, 'all_none', 'test')}; per layer "
        f"{at('random', b, 'per_layer', 'scoring')} and {at('random', b, 'per_layer', 'test')}. Columns over all "
        "units are to be read against that row (one seed)."
    )
    yield (
        f"A good rank per layer is not enough: magnitude has {at('magnitude', b, 'per_layer', 'scoring')} and "
        f"{at('magnitude', b, 'per_layer', 'test')}, oba {at('oba', b, 'per_layer', 'scoring')} and "
        f"{at('oba', b, 'per_layer', 'test')}, yet over all units without a normaliser magnitude has "
        f"{at('magnitude', b, 'all_none', 'scoring')} and {at('magnitude', b, 'all_none', 'test')}, and it prunes "
        "worse by the same form. Units are removed one at a time here, and together there."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Plots


def plot_criteria(ways: Ways, peers: Peers, path: Path) -> None:
    groups = {
        "oba": lambda label: label.startswith("oba"),
        "taylor": lambda label: label.startswith("taylor"),
        "obd": lambda label: label.startswith("obd"),
        "magnitude and chance": lambda label: label.startswith(("magnitude", "random")),
    }
    rows: list[tuple[str, Callable[[float], list[float]] | None]] = []
    for title, fits in groups.items():
        rows.append((title, None))
        for label in filter(fits, ways.labels):
            rows.append((label, _of(ways.values, label, "report_bn_accuracy")))
    rows.append(("Torch-Pruning, block channels (n)", None))
    for setting in peers.settings:
        if setting[4] == "internal":
            name = peers.name(setting).replace(", block channels", "")
            rows.append(
                (f"{name} ({peers.draws(setting)})", _of(peers.values, setting, "bn_accuracy"))
            )
    rows.reverse()
    figure, axes = _figure(10, 1.5 + 0.23 * len(rows))
    for height, (label, values) in enumerate(rows):
        if values is None:
            axes.annotate(
                label,
                (-0.01, height),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                weight="bold",
            )
            continue
        weight = "bold" if label == DEFAULT else "normal"
        axes.annotate(
            label,
            (-0.01, height),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            weight=weight,
            size=8.5,
        )
        for kept, color, marker in ((0.5, ORANGE, "s"), (0.7, BLUE, "o")):
            _dot(axes, [100 * v for v in values(kept)], height, color, marker)
    axes.axvline(peers.dense["accuracy"], color="#444444", linewidth=0.8, linestyle=":")
    axes.set_yticks([])
    axes.set_ylim(-0.8, len(rows) - 0.2)
    _finish(
        axes, "accuracy (%) on test images 5,000–9,999, batch norms measured anew; dotted: dense"
    )
    axes.set_title(
        "Narrow ResNet32 at 70 % and 50 % of its MACs, no training", loc="left", weight="bold"
    )
    for kept, color, marker in ((0.7, BLUE, "o"), (0.5, ORANGE, "s")):
        axes.scatter(
            [], [], color=color, marker=marker, label=f"{100 * kept:.0f} % of MACs, mean ± s.d."
        )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    _save(figure, path)


def plot_ranking(ranks: Ranks, path: Path) -> None:
    looks = {
        ("scoring", PAPER_FORM): (BLUE, "o", "paper's form, scoring images"),
        ("test", PAPER_FORM): (ORANGE, "s", "paper's form, test images"),
        ("scoring", DEFAULT_FORM): (GREEN, "D", "default form, scoring images"),
        ("test", DEFAULT_FORM): (PINK, "^", "default form, test images"),
    }
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    names = ranks.criteria[::-1]
    shown = (
        ("per_layer", "per layer", "OBA"),
        ("all_none", "over all units, no normaliser", "OBA"),
    )
    for axes, (column, title, ours) in zip(panels, shown, strict=True):
        for place, ((truth, form), (color, marker, label)) in enumerate(looks.items()):
            for height, criterion in enumerate(names):
                values = ranks.values(truth, criterion, form, column)
                _dot(axes, values, height + 0.27 - 0.18 * place, color, marker)
            axes.scatter(
                [], [], color=color, marker=marker, label=label if axes is panels[0] else None
            )
        paper = PAPER_TABLE[ours][ranks.COLUMNS.index(column)]
        axes.axvline(paper, color="#444444", linewidth=0.8, linestyle=":")
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_yticks(range(len(names)), [_named(name) for name in names])
        axes.set_title(title, loc="left", weight="bold")
        _finish(axes, "Spearman correlation; dotted: the paper's OBA")
    figure.suptitle("Do scores rank units by the true change of the loss?", weight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def _of(
    values: Callable[..., list[float]], which: Any, what: str
) -> Callable[[float], list[float]]:
    return lambda kept: values(which, kept, what)


def _save(figure: Figure, path: Path) -> None:
    """Few colours: a third of the size."""
    held = io.BytesIO()
    figure.savefig(held, dpi=110, format="png")
    Image.open(held).convert("RGB").quantize(64).save(path, optimize=True)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _dot(axes: Any, values: list[float], height: float, color: str, marker: str) -> None:
    if values:
        sd = stdev(values) if len(values) > 1 else 0.0
        axes.plot(
            [mean(values) - sd, mean(values) + sd],
            [height] * 2,
            color=color,
            linewidth=1.6,
            zorder=2,
        )
        axes.scatter(
            mean(values),
            height,
            s=34,
            color=color,
            marker=marker,
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
        )


def _finish(axes: Any, label: str) -> None:
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    sd = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{sd}"


def spelled(roles: str) -> str:
    return ", ".join(SPELLED[letter] for letter in roles)


def signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


def head(names: Iterable[str]) -> Iterator[str]:
    names = list(names)
    yield line(names)
    yield "|" + "---|" * len(names)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
