"""Measured lines of the narrow experiments, as text that stays small: one line per network, columns named on the first.

Floats keep four significant digits: accuracies of 5,000 images are exact at that, all others far within their spread.
Roles are letters: p producers, a carriers, c consumers.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from apoptosis.criteria import Aggregation

__all__ = ["Row", "gathered", "read_lines", "write_lines"]

Row = dict[str, Any]
LETTERS = {"producer": "p", "carrier": "a", "consumer": "c"}
OPTIONS = ("absolute", "over_slices", "roles", "parameters")


def gathered(how: Aggregation | None, normalise: str = "none") -> Row:
    """Columns of an aggregation; criteria of units themselves have only a normaliser."""
    assert {f.name for f in fields(Aggregation)} == {*OPTIONS, "normalise"}, "a column is missing"
    if how is None:
        return {**dict.fromkeys(OPTIONS, ""), "normalise": normalise}
    found = {option: getattr(how, option) for option in OPTIONS}
    return {
        **found,
        "roles": "".join(LETTERS[role] for role in how.roles),
        "normalise": how.normalise,
    }


def write_lines(path: Path, jobs: Iterable[Sequence[Row]], count: int) -> None:
    """Write the rows of jobs as these end; all rows have the same keys."""
    with path.open("w", newline="") as out:
        writer: csv.DictWriter[str] | None = None
        for done, rows in enumerate(jobs, 1):
            if rows and writer is None:
                writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
                writer.writeheader()
            if writer is not None:
                writer.writerows({k: _short(v) for k, v in row.items()} for row in rows)
            out.flush()
            print(f"{done} of {count} jobs", flush=True)


def read_lines(path: Path) -> list[Row]:
    with path.open(newline="") as lines:
        return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(lines)]


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
