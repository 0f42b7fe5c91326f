"""Writes docs/axes.md from the table of axis rules: `python docs/make_axes.py`."""

from collections import defaultdict
from pathlib import Path

from apoptosis.structure.analysis import FAMILIES as TABLE
from apoptosis.structure.rules import RULES

PAGE = Path(__file__).with_name("axes.md")

INTRODUCTION = """\
# Operations with an axis rule

Made by `python docs/make_axes.py` from the table of rules; a test holds the two together.

A rule says how the axes of an operation's tensors are related: which are equal, which are products (h·d) or sums
(a + b) of others, which stay whole, and where the result is zero once units are. Every rule is tested on samples of its
own: each axis that it leaves free is cut, and the operation on what is kept must give what is kept of the operation on
zeroed tensors; zeros that it claims must be zeros, multiply-accumulates those that torch counts.

Names are those of ATen operations, as they are before torch takes them apart; overloads are left out. In-place forms
lead to the same entry. An operation that is not here keeps every axis that it touches whole: the network can be cut
everywhere else, and `Structure.pinned` tells where and why.
"""

FAMILIES = {
    "products": "Letters are axes, as in `einsum`. A letter that is not in the result is summed over.",
    "elementwise": "Each entry by itself.",
    "norms": "A statistic over an axis makes cutting it inexact: allowed, and marked as such.",
    "reductions": "Sums, means, orders, pools. What compares the indices of an axis keeps it whole.",
    "shapes": "Entries move about, and none is changed.",
    "indices": "Look-ups by number keep the axis that is looked up in whole.",
    "recurrent": "Several steps of time in one operation.",
}


def page() -> str:
    """The whole page: one section per family, operations with the same rule in one row."""
    families: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rule in RULES.values():
        names = families[rule.family][rule.says.rstrip(".")]
        base = rule.name.partition(".")[0]
        if base not in names:
            names.append(base)
    assert set(TABLE) == FAMILIES.keys(), "describe every family here"
    return "\n".join([INTRODUCTION, *(_section(name, families[name]) for name in FAMILIES)])


def _section(family: str, rows: dict[str, list[str]]) -> str:
    lines = [f"## {family}", "", FAMILIES[family], "", "| operation | axes |", "|---|---|"]
    for says, names in sorted(rows.items(), key=lambda row: min(row[1])):
        operations = ", ".join(
            f"`{name}`" for name in sorted(names, key=lambda name: (name.lower(), name))
        )
        lines.append(f"| {operations} | {says.replace('|', '∣')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
