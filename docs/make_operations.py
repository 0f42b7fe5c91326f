"""Writes docs/operations.md from the table of tangent rules: `python docs/make_operations.py`."""

from collections import defaultdict
from pathlib import Path

from apoptosis.curvature import RULES

PAGE = Path(__file__).with_name("operations.md")

INTRODUCTION = """\
# Operations with a rule of their own

Made by `python docs/make_operations.py` from the table of rules; a test holds the two together.

x' is the tangent of x, d/dt x(θ + tδ). Every rule gives the value and the tangent of one operation, and which part of
its second derivative may flow back; [method.md](method.md) says what `connectivity` keeps of it. Each rule is tested on
samples of its own against finite differences, and against the slow path in all four kinds.

Names are torch's. Methods, operators, in-place forms and `out=` lead to the same entry: `x @ y`, `x.matmul(y)` and
`torch.matmul(x, y)` are one operation. Functions and modules that are written in Python, such as `F.interpolate` or
`nn.MultiheadAttention`, need no entry: what they call is seen instead. Recurrent layers are taken apart into steps.

Everything else takes the generic path. It is as exact, but runs the operation again in the backward, and the result
counts it in `fallbacks`.
"""

FAMILIES = {
    "layer": "A weight times an input. `connectivity` keeps the product; it is the paper's series term.",
    "product": "Two things that may both depend on θ. `connectivity` keeps the product, and freezes divisions and "
    "squares.",
    "linear": "Linear in all that can move. There is no second derivative to keep or to freeze.",
    "pointwise": "Entry by entry. Frozen in `connectivity`.",
    "norm": "`connectivity` keeps the product with γ and freezes the normalisation n.",
    "attention": "`connectivity` keeps q·k and S·v and freezes the softmax.",
    "select": "Picks entries by their values. Which one is picked does not change under a small move.",
    "composite": "Several steps that count as one. Frozen in `connectivity`.",
}


def page() -> str:
    """The whole page: one section per family, operations with the same mathematics in one row."""
    families: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rule in RULES.values():
        families[rule.family][rule.mathematics.rstrip(".")].append(rule.name)
    missing = families.keys() - FAMILIES.keys()
    assert not missing, f"describe {missing} here"
    sections = [_section(family, families[family]) for family in FAMILIES]
    return "\n".join([INTRODUCTION, *sections])


def _section(family: str, rows: dict[str, list[str]]) -> str:
    lines = [f"## {family}", "", FAMILIES[family], "", "| operation | mathematics |", "|---|---|"]
    for mathematics, names in sorted(rows.items(), key=lambda row: min(row[1])):
        operations = ", ".join(
            f"`{name}`" for name in sorted(names, key=lambda name: (name.lower(), name))
        )
        lines.append(f"| {operations} | {mathematics.replace('|', '∣')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
