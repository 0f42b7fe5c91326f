"""The page of the wide ResNet32, from its measured lines; nothing is measured here.

    python experiments/wide_tables.py

Reads results/wide_prune*.csv, wide_dense.csv and wide.json (device, torch, commit, commands), writes wide_resnet32.md.
Every number in the prose is computed from the lines; lines may be missing, and stand in several files of one run each.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from narrow_lines import Row, read_lines

RESULTS = Path(__file__).parent / "results"
PAPER = {0.3: 95.19, 0.06: 93.45}
"""What the paper has for OBA after 150 epochs; another recipe, another counting of MACs."""
ALLOCATIONS = {
    "default": "entries, per MAC",
    "capped": "entries, per MAC, at most 90 % of a group",
    "unit": "entries, per unit",
    "paper": "the paper's: layers by their largest, per unit",
    "paper-capped": "the paper's, at most 90 % of a group",
    "uniform": "every group by the same share, one step",
}


@dataclass(frozen=True)
class Cell:
    """All networks of one way, budget and schedule; accuracies in %."""

    tuned: list[float]
    before: list[float]
    rows: list[Row]

    @property
    def text(self) -> str:
        if not self.tuned:
            return "–"
        spread = f" ± {stdev(self.tuned):.2f}" if len(self.tuned) > 1 else ""
        return f"{mean(self.tuned):.2f}{spread} ({len(self.tuned)})"


class Wide:
    """Lines of one number of epochs."""

    def __init__(self, rows: Sequence[Row], epochs: int) -> None:
        self.rows = [row for row in rows if int(row["epochs"]) == epochs]
        self.epochs = epochs

    @property
    def columns(self) -> list[tuple[float, str]]:
        found = {(row["budget"], row["schedule"]) for row in self.rows}
        return sorted(found, key=lambda own: (-own[0], own[1] != "one-shot"))

    @property
    def ways(self) -> list[tuple[str, str]]:
        """Best first, by validation data: the mean over the columns that it has."""
        found = list(dict.fromkeys((row["criterion"], row["allocation"]) for row in self.rows))
        return sorted(found, key=lambda way: -self._validated(way))

    def cell(self, way: tuple[str, str], column: tuple[float, str]) -> Cell:
        rows = [
            row
            for row in self.rows
            if (row["criterion"], row["allocation"]) == way
            and (row["budget"], row["schedule"]) == column
        ]
        return Cell(
            [100 * row["test"] for row in rows], [100 * row["cut_test"] for row in rows], rows
        )

    def _validated(self, way: tuple[str, str]) -> float:
        """Columns weigh alike; one that a way has not counts as the mean of the others there."""
        gains: list[float] = []
        for column in self.columns:
            own = [row["validation"] for row in self.cell(way, column).rows]
            everybody = [
                row["validation"] for row in self.rows if (row["budget"], row["schedule"]) == column
            ]
            gains.append(mean(own) - mean(everybody) if own else 0.0)
        return mean(gains)


def page(rows: Sequence[Row], dense: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    yield "# The wide ResNet32 on CIFAR-10: 30 % and 6 % of the MACs, then fine-tuned"
    yield ""
    yield "```"
    yield from about["commands"]
    yield "```"
    yield ""
    yield (
        f"{about['device']}, torch {about['torch']}, commit {about['commit']}. Trained on 45,000 images, epochs chosen "
        "on 5,000 others, figures on the 10,000 test images (standard error about 0.25 points for one network). Seeds "
        "draw the split, the weights and all orders; every way starts from the same dense network of its seed. Mean ± "
        "standard deviation over networks (how many). Criteria score 2,560 training images in each of 12 steps, which "
        "an iterative run's rounds share (`obs` and uniform widths: one step), and widths are multiples of 8. "
        f"{about.get('note', '')}"
    )
    yield ""
    yield from _dense_lines(dense)
    for epochs in sorted({int(row["epochs"]) for row in rows}):
        yield from _tables(Wide(rows, epochs))


def _dense_lines(dense: Sequence[Row]) -> Iterator[str]:
    tests = [100 * row["test"] for row in dense]
    spread = f" ± {stdev(tests):.2f}" if len(tests) > 1 else ""
    first = dense[0]
    yield (
        f"Dense: **{mean(tests):.2f}{spread} %** ({len(tests)} seeds), {int(first['epochs'])} epochs in "
        f"{mean(row['seconds'] for row in dense):.0f} s each, one-cycle to {first['learning_rate']:g}, smoothed labels "
        f"{first['label_smoothing']:g}, holes of {int(first['cutout'])} pixels."
    )


def _tables(wide: Wide) -> Iterator[str]:
    told = ", ".join(f"{PAPER[b]:g} % at {b:.0%}" for b in PAPER)
    yield ""
    yield f"## {wide.epochs} epochs of fine-tuning"
    yield ""
    yield (
        f"Accuracy in %, rows by validation data. The paper has {told} of the MACs after 150 epochs of its own recipe. "
        "Rounds of an iterative run share the epochs."
    )
    yield ""
    heads = [f"{budget:.0%} {schedule}" for budget, schedule in wide.columns]
    yield _line(["criterion", "allocation", *heads])
    yield _line(["---", "---", *["---:"] * len(heads)])
    for way in wide.ways:
        criterion, allocation = way
        cells = [wide.cell(way, column).text for column in wide.columns]
        yield _line([criterion, ALLOCATIONS[allocation], *cells])
    yield ""
    yield (
        "The same networks before any training (accuracy in %), the share of the thinnest group that is left, and "
        "seconds:"
    )
    yield ""
    yield _line(
        ["criterion", "allocation", *(f"{head}: cut" for head in heads), "thinnest", "pruning"]
    )
    yield _line(["---", "---", *["---:"] * (len(heads) + 2)])
    for way in wide.ways:
        found = [wide.cell(way, column) for column in wide.columns]
        rows = [row for cell in found for row in cell.rows]
        yield _line(
            [
                way[0],
                ALLOCATIONS[way[1]],
                *(f"{mean(cell.before):.1f}" if cell.before else "–" for cell in found),
                f"{min(row['thinnest'] for row in rows):.1%}",
                f"{mean(row['prune_seconds'] for row in rows):.1f} s",
            ]
        )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_page(folder: Path) -> None:
    rows = [row for path in sorted(folder.glob("wide_prune*.csv")) for row in read_lines(path)]
    dense = read_lines(folder / "wide_dense.csv")
    about = json.loads((folder / "wide.json").read_text())
    (folder / "wide_resnet32.md").write_text("\n".join(page(rows, dense, about)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    write_page(parser.parse_args().results)


if __name__ == "__main__":
    main()
