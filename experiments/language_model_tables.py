"""The page of what a small language model loses without training, from its measured lines; nothing is measured here.

    python experiments/language_model_tables.py

Reads results/language_model*.csv and the .json beside each (command, device, torch, commit), writes language_model.md.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from narrow_lines import Row, read_lines

RESULTS = Path(__file__).parent / "results"
KINDS = {"manual": "Chinese manual pages", "samples": "The dense network's own samples"}
FIGURES = {"loss": "loss per token", "kl": "KL(dense ‖ small) per token"}
REPAIRS = {
    "none": "as cut",
    "refit": "refitted",
    "refit:1e-2": "refitted, ridge 1e-2",
    "refit+blocks": "refitted, blocks as well",
}


def page(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    dense = [row for row in rows if row["way"] == "dense"]
    small = [row for row in rows if row["way"] != "dense"]
    yield "# What does a small language model lose without training? MiniMind2-small"
    yield ""
    yield "```"
    yield from dict.fromkeys(run["command"] for run in runs)
    yield "```"
    yield ""
    used = {name: _listed(str(run[name]) for run in runs) for name in runs[0]}
    agreed, judged = min(row["agreed"] for row in rows), {int(row["judged"]) for row in rows}
    assert len(judged) == 1, f"lines that do not compare: judged on {judged} predictions"
    yield (
        f"{used['device']}, torch {used['torch']}, transformers {used['transformers']}, commit {used['commit']}. A "
        f"Llama of {dense[0]['params'] / 1e6:.1f} M parameters with grouped queries and a tied head, float32. Hidden "
        "units of its MLPs and its heads are cut to the share named, each over all layers, in one step. Scores and "
        "repairs see a draw of text, half manual pages and half samples of the dense network; criteria that draw "
        "numbers draw others each time. No labels but the text itself, no training. Figures are of "
        f"{judged.pop():,} predictions of each kind on other text, the same for all; mean ± s.d. over draws, n in "
        "brackets. The repair is the same for all ways of a column. `:uniform` keeps the same share of every layer's "
        f"hidden units. `generate` ran on every network; a plain run without its cache agrees on {agreed:.0%} of "
        "the tokens, at the least."
    )
    for tokens in sorted({int(row["tokens"]) for row in small}):
        own = [row for row in small if row["tokens"] == tokens]
        yield from ("", f"# Draws of {tokens:,} tokens")
        for kind, figure in product(KINDS, FIGURES):
            yield from _figures(own, dense, kind, figure)
        yield from _costs(own)
        yield from _speech(own, dense)


def _figures(rows: Sequence[Row], dense: Sequence[Row], kind: str, figure: str) -> Iterator[str]:
    name = f"{kind}_{figure}"
    columns = _columns(rows)
    yield from ("", f"## {KINDS[kind]}: {FIGURES[figure]}", "")
    yield _line(["way", *(f"{kept:.0%}, {REPAIRS[repair]}" for kept, repair in columns)])
    yield _line(["---", *["---:"] * len(columns)])
    if figure == "loss":
        yield _line(["*dense*", *[f"{dense[0][name]:.3f}"] * len(columns)])
    for way in _ways(rows):
        yield _line([way, *(_cell([r[name] for r in _at(rows, way, *own)]) for own in columns)])


def _costs(rows: Sequence[Row]) -> Iterator[str]:
    """Plans of all shares are chosen at once."""
    columns = _columns(rows)
    mended = [own for own in columns if own[1] != "none"]
    repairs = [f"{REPAIRS[repair]} at {kept:.0%}" for kept, repair in mended]
    yield from ("", "## What it took", "")
    yield "Seconds, and the most memory of the whole process meanwhile; means over draws. What stays, by share:"
    for kept in dict.fromkeys(kept for kept, _ in columns):
        own = [row for row in rows if row["kept"] == kept]
        left = (_listed(f"{int(row[n]):,}" for row in own) for n in ("hidden", "heads", "params"))
        yield "- {:.0%}: {} hidden units, {} heads, {} parameters".format(kept, *left)
    yield ""
    yield _line(["way", "choosing", *repairs])
    yield _line(["---", *["---:"] * (1 + len(repairs))])
    for way in _ways(rows):
        cells = [_spent([row for row in rows if row["way"] == way], "choosing")]
        cells += [_spent(_at(rows, way, *own), "repair") for own in mended]
        yield _line([way, *cells])


def _speech(rows: Sequence[Row], dense: Sequence[Row]) -> Iterator[str]:
    """Of the first draw."""
    first = min(row["draw"] for row in rows)
    yield from ("", "## What `generate` says", "")
    yield "请介绍一下长城。 (Tell me about the Great Wall.) Greedy, at most 32 tokens, first draw."
    yield ""
    yield _line(["way", "stays", "repair", "answer"])
    yield _line(["---"] * 4)
    for row in (*dense[:1], *(row for row in rows if row["draw"] == first)):
        said = str(row["says"]).replace("|", "\\|")
        yield _line([row["way"], f"{row['kept']:.0%}", REPAIRS[row["repair"]], said])


def _columns(rows: Sequence[Row]) -> list[tuple[float, str]]:
    found = {(row["kept"], row["repair"]) for row in rows}
    return sorted(found, key=lambda own: (-own[0], list(REPAIRS).index(own[1])))


def _ways(rows: Sequence[Row]) -> list[str]:
    """In the order of the lines: sorted by these figures, the best would be chosen with hindsight."""
    return list(dict.fromkeys(row["way"] for row in rows))


def _at(rows: Sequence[Row], way: str, kept: float, repair: str) -> list[Row]:
    return [r for r in rows if (r["way"], r["kept"], r["repair"]) == (way, kept, repair)]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {stdev(values):.3f}" if values[1:] else ""
    return f"{mean(values):.3f}{spread} ({len(values)})"


def _spent(rows: Sequence[Row], what: str) -> str:
    if not rows:
        return "–"
    seconds, megabytes = (mean(row[f"{what}_{unit}"] for row in rows) for unit in ("s", "mb"))
    return f"{seconds:.1f} s, {megabytes / 1024:.1f} GiB"


def _listed(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_page(folder: Path) -> None:
    paths = sorted(folder.glob("language_model*.csv"))
    rows = [row for path in paths for row in read_lines(path)]
    runs = [json.loads(path.with_suffix(".json").read_text()) for path in paths]
    (folder / "language_model.md").write_text("\n".join(page(rows, runs)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    write_page(parser.parse_args().results)


if __name__ == "__main__":
    main()
