"""The page of what is lost without training, from its measured lines; nothing is measured here.

    python experiments/untrained_tables.py

Reads results/untrained*.csv and untrained.json (device, torch, commit, commands), writes untrained.md. Lines of
ImageNet have a page of their own.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from narrow_lines import Row, read_lines

RESULTS = Path(__file__).parent / "results"
REPAIRS = {
    "none": "as cut",
    "batch_norm": "norms measured anew",
    "consumers": "readers of what went refitted",
    "refit": "every layer refitted",
    "refit+blocks": "every layer refitted, then every block",
}
DISTILLED = "refit+blocks+distil:"
"""Ahead of steps × images."""
Bars = dict[str, dict[float, float]]
UNTRAINED: Bars = {
    "*floor*": {0.3: 90.7, 0.5: 87.0, 0.6: 83.2, 0.7: 78.3},
    "*aim*": {0.3: 91.2, 0.5: 88.5, 0.6: 85.5, 0.7: 81.5},
}
TRAINED: Bars = {
    "*floor*": {0.3: 91.7, 0.5: 90.5, 0.6: 88.9, 0.7: 86.4},
    "*aim*": {0.3: 92.2, 0.5: 91.2, 0.6: 90.0, 0.7: 88.0},
}
"""Floors are what the best throw-away code reached, on all test images, from 2,000 to 5,000 calibration images, and
with half a minute of distilling on a GPU."""
DEVICES = {"cpu": "CPU", "cuda": "H200"}
CUTS = {
    "channels": "shares of the 560 channels inside blocks removed, at least 2 left in each",
    "macs": "shares of the MACs removed, from all that may go: residual streams too, but for those under a LayerNorm",
}
NETWORKS = {
    "narrow": "The public narrow ResNet32",
    "wide": "The wide ResNet32",
    "small_vit": "A small ViT",
}


def page(rows: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    yield "# What is lost without labels and without training? Networks of CIFAR-10"
    yield ""
    yield "```"
    yield from about["commands"]
    yield "```"
    yield ""
    images = sorted({int(row["images"]) for row in rows})
    yield (
        f"{about['device']}. Scores and repairs see {' or '.join(f'{n:,}' for n in images)} training images without "
        "labels. Accuracy in % on test images 5,000–9,999 (standard error about 0.5 points); mean ± s.d. over draws "
        "where there are several, n in brackets. A way is criterion:steps; + refits between them. Rows in the order of "
        f"test images 0–4,999. {about['note']}"
    )
    for of, network in product(CUTS, NETWORKS):
        here = [
            row
            for row in rows
            if (row.get("of", "channels"), row.get("network", "narrow")) == (of, network)
        ]
        if here:
            yield ""
            yield f"## {NETWORKS[network]}: {CUTS[of]}"
            yield ""
            yield f"Dense: {about['dense'][network]:.2f} %."
        asked = (of, network) == ("channels", "narrow")
        for repair in _repairs(here):
            own = [row for row in here if row["repair"] == repair]
            told = _told(repair)
            bars = TRAINED if repair.startswith(DISTILLED) else UNTRAINED
            yield from _table(
                own, f"{told[0].upper()}{told[1:]}", bars if asked and "refit" in repair else {}
            )


def _repairs(rows: Sequence[Row]) -> Iterator[str]:
    """In the order of the table, then by steps of distilling."""
    there = {row["repair"] for row in rows}
    yield from (repair for repair in REPAIRS if repair in there)
    yield from sorted(there - set(REPAIRS), key=_steps)


def _told(repair: str) -> str:
    if repair in REPAIRS:
        return REPAIRS[repair]
    steps, images = _steps(repair)
    return f"the same, then {steps:,} steps of {images} images towards the dense network"


def _steps(repair: str) -> tuple[int, int]:
    steps, _, images = repair.removeprefix(DISTILLED).partition("x")
    return int(steps), int(images)


def _table(rows: Sequence[Row], title: str, bars: Bars) -> Iterator[str]:
    removed = sorted({row["removed"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows))
    yield ""
    yield f"### {title}"
    yield ""
    yield _line(["way", *(f"{share:g} removed" for share in removed), "choosing", "repair"])
    yield _line(["---", *["---:"] * (len(removed) + 2)])
    for way in sorted(ways, key=lambda way: -_worth(rows, way)):
        own = [row for row in rows if row["way"] == way]
        cells = [_cell([r for r in own if r["removed"] == share]) for share in removed]
        times = [_times(own, name) for name in ("choosing_s", "repair_s")]
        yield _line([way, *cells, *times])
    for label, wanted in bars.items():
        told = [f"{wanted[share]:.1f}" if share in wanted else "–" for share in removed]
        yield _line([label, *told, "", ""])


def _times(rows: Sequence[Row], name: str) -> str:
    """Means, of each kind of device by itself."""
    devices = sorted({row.get("device", "cpu") for row in rows})
    means = {
        device: mean(row[name] for row in rows if row.get("device", "cpu") == device)
        for device in devices
    }
    return ", ".join(f"{DEVICES[device]} {seconds:.0f} s" for device, seconds in means.items())


def _worth(rows: Sequence[Row], way: str) -> float:
    """By the images that choices are made on; shares that it lacks count as the mean of the others."""
    gains: list[float] = []
    for share in {row["removed"] for row in rows}:
        there = [row["choose"] for row in rows if row["removed"] == share]
        own = [r["choose"] for r in rows if r["removed"] == share and r["way"] == way]
        gains.append(mean(own) - mean(there) if own else 0.0)
    return mean(gains)


def _cell(rows: Sequence[Row]) -> str:
    values = [100 * row["report"] for row in rows]
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f} ({len(values)})" if values[1:] else "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_page(folder: Path) -> None:
    paths = sorted(set(folder.glob("untrained*.csv")) - set(folder.glob("untrained_imagenet*")))
    rows = [row for path in paths for row in read_lines(path)]
    about = json.loads((folder / "untrained.json").read_text())
    (folder / "untrained.md").write_text("\n".join(page(rows, about)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    write_page(parser.parse_args().results)


if __name__ == "__main__":
    main()
