"""The page of what public ImageNet networks lose without training, from its measured lines; nothing is measured here.

    python experiments/untrained_imagenet_tables.py

Reads results/untrained_imagenet*.csv and the JSON file beside each (a `note` may be added there by hand), writes
untrained_imagenet.md. Differences are taken image by image from the bits of the lines: of several draws the mean for
each image, so that standard errors are of the images that judge, whatever the number of draws.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from narrow_lines import Row, read_lines
from torch import Tensor
from untrained_imagenet import bits

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"resnet50": "ResNet50", "vit_tiny": "ViT-tiny"}
REPAIRS = {
    "none": "as cut",
    "batch_norm": "norms measured anew",
    "refit": "every layer refitted",
    "refit+blocks": "every layer refitted, then every block",
}
KINDS = {"all": "all groups", "channel": "channels alone, no streams"}
AIMS = {("resnet50", 0.42): -3.5}
REFERENCE = "obs:1"


def page(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# What do public ImageNet networks lose without training?"
    yield ""
    yield "```"
    yield from (run["command"] for run in runs)
    yield "```"
    yield ""
    told = sorted(
        {f"{run['device']}, torch {run['torch']}, commit {run['commit']}" for run in runs}
    )
    notes = " ".join(run["note"] for run in runs if "note" in run)
    yield (
        f"{'; '.join(told)}. Shares of the MACs are gone, by exact count. Scores and repairs see draws of "
        "the 1,000 calibrating images, figures are on other images: points of accuracy against the dense network, ± "
        "one standard error of the paired differences; of several draws the mean, with their number and standard "
        "deviation in brackets. The same images say which way is best, so that is seen with hindsight. A way is "
        "criterion:steps; + refits between them. Seconds are means over a row, memory is the most that the process "
        f"had until then. {notes}".rstrip()
    )
    for network, title in NETWORKS.items():
        own = [row for row in rows if row["network"] == network]
        for judge, images in sorted({(r["judge"], r["images"]) for r in own if r["images"]}):
            here = [r for r in own if r["judge"] == judge and r["images"] in (images, 0)]
            yield from _network(here, title, images)


def _network(rows: Sequence[Row], title: str, images: float) -> Iterator[str]:
    """Those of one network from so many calibrating images; the dense one is among them."""
    dense = next(row for row in rows if row["way"] == "dense")
    small = [row for row in rows if row["way"] != "dense"]
    yield ""
    yield f"## {title}, {images:,.0f} calibrating images"
    yield ""
    yield f"Dense: {100 * dense['accuracy']:.2f} % of {dense['judge']:,.0f} images."
    places = dict.fromkeys((row["kinds"], row["widths"]) for row in small)
    for (kinds, widths), repair in product(places, REPAIRS):
        own = [
            r for r in small if (r["kinds"], r["widths"], r["repair"]) == (kinds, widths, repair)
        ]
        made = [row for row in own if not row["failure"]]
        if made:
            yield ""
            told = KINDS.get(kinds, kinds)
            yield f"### {told[0].upper()}{told[1:]}, {widths} widths, {REPAIRS[repair]}"
            yield ""
            yield from _table(made, bits(dense), repair)
        for failure in sorted({row["failure"] for row in own if row["failure"]}):
            ways = sorted({row["way"] for row in own if row["failure"] == failure})
            yield ""
            yield f"{', '.join(ways)}, {REPAIRS[repair]}, refused: {failure}"


def _table(rows: Sequence[Row], dense: Tensor, repair: str) -> Iterator[str]:
    removed = sorted({row["removed"] for row in rows})
    missing = any(row["missing"] for row in rows)
    columns = [f"{share:.0%} gone" for share in removed]
    compared = [f"{REFERENCE} less it, {removed[-1]:.0%}"] if _of(rows, REFERENCE) else []
    yield _line(
        ["way", *columns, *compared, "choosing", "repair", "memory", *["groups left out"] * missing]
    )
    yield _line(["---", *["---:"] * (len(columns) + len(compared) + 3 + missing)])
    ways = dict.fromkeys(row["way"] for row in rows)
    for way in sorted(ways, key=lambda way: -_worth(rows, way)):
        own = _of(rows, way)
        cells = [_cell([r for r in own if r["removed"] == share], dense) for share in removed]
        if compared:
            cells.append(_against(own, _of(rows, REFERENCE), removed[-1]))
        seconds = [
            f"{mean(row[name] for row in own):,.0f} s" for name in ("choosing_s", "repair_s")
        ]
        memory = f"{max(row['peak_mib'] for row in own) / 1024:.1f} GiB"
        left_out = [f"{max(row['missing'] for row in own):.0f}"] * missing
        yield _line([way, *cells, *seconds, memory, *left_out])
    aims = [AIMS.get((rows[0]["network"], share)) for share in removed]
    if repair == "refit" and any(aims):
        told = ["" if aim is None else f"{aim:+.1f}" for aim in aims]
        yield _line(["*aim*", *told, *[""] * (len(compared) + 3 + missing)])


def _of(rows: Sequence[Row], way: str) -> list[Row]:
    return [row for row in rows if row["way"] == way]


def _worth(rows: Sequence[Row], way: str) -> float:
    """Shares that it lacks count as the mean of the others."""
    gains: list[float] = []
    for share in {row["removed"] for row in rows}:
        there = [row for row in rows if row["removed"] == share]
        own = [row["difference"] for row in _of(there, way)]
        gains.append(mean(own) - mean(row["difference"] for row in there) if own else 0.0)
    return mean(gains)


def _cell(rows: Sequence[Row], dense: Tensor) -> str:
    if not rows:
        return "–"
    found = _paired(_share_right(rows), dense.double())
    each = [row["difference"] for row in rows]
    return found + (f" ({len(each)}, s.d. {stdev(each):.1f})" if each[1:] else "")


def _against(rows: Sequence[Row], others: Sequence[Row], share: float) -> str:
    own, theirs = ([r for r in some if r["removed"] == share] for some in (rows, others))
    if not own or not theirs or own[0]["way"] == theirs[0]["way"]:
        return ""
    return _paired(_share_right(theirs), _share_right(own))


def _share_right(rows: Sequence[Row]) -> Tensor:
    """In how many of the draws each image is right, (images,)."""
    return torch.stack([bits(row).double() for row in rows]).mean(0)


def _paired(right: Tensor, other: Tensor) -> str:
    """Mean difference in points, ± one standard error."""
    change = 100 * (right - other)
    return f"{float(change.mean()):+.1f} ± {float(change.std()) / math.sqrt(len(change)):.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_page(folder: Path) -> None:
    paths = sorted(folder.glob("untrained_imagenet*.csv"))
    rows = [row for path in paths for row in read_lines(path)]
    runs = [json.loads(path.with_suffix(".json").read_text()) for path in paths]
    (folder / "untrained_imagenet.md").write_text("\n".join(page(rows, runs)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    write_page(parser.parse_args().results)


if __name__ == "__main__":
    main()
