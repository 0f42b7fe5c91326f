"""The second zoo in a table, and whether it reaches its bars."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import zoo_second_checks as checks

__all__ = ["bars", "line", "markdown"]

Record = dict[str, Any]
PACKAGES = ("torch", "torchvision", "timm", "transformers", "ultralytics", "diffusers")
PACKAGES += (
    "segmentation-models-pytorch",
    "monai",
    "torch-geometric",
    "peft",
    "x-transformers",
    "open_clip_torch",
)
EXPLANATION = (
    "What is checked, and how, is said at the top of `benchmarks/zoo_second_checks.py`; packages are in"
    " `benchmarks/zoo_second.txt`. A cell holds both plans where they differ; `—`: the dense network cannot do it"
    " either, or nothing can be compared. *s* is the processor time of the default pruning."
)
HEADS = (
    "network",
    "family",
    "parameters",
    "plans",
    "as",
    *checks.PLAN_CHECKS,
    *checks.PRUNINGS,
    "s",
)


def line(record: Record) -> str:
    """The checks of one network in a line: what is not well is named."""
    bad = [
        f"{name} {_word(text)}"
        for name, text in record["checks"].items()
        if _word(text) not in ("", "n/a")
    ]
    return f"{record['status']} {', '.join(bad)}".strip()


def _word(text: str) -> str:
    """`WRONG`, `raw`, `refused`, `hang`, `n/a`, or nothing."""
    return text.partition(":")[0]


def bars(records: list[Record]) -> list[str]:
    """What was asked of the zoo, and what it gives."""
    there = [r for r in records if r["status"] not in ("skipped", "not measured")]

    def share(text: str, name: str, good: Callable[[Record], bool], bar: float) -> str:
        asked = [r for r in there if name in r["checks"]]
        reached = sum(map(good, asked))
        return f"{text}: {reached} of {len(asked)}, {reached / max(1, len(asked)):.1%} (asked {bar:.0%})"

    def any_of(word: str) -> int:
        return sum(word in map(_word, r["checks"].values()) for r in there)

    def well(name: str) -> Callable[[Record], bool]:
        return lambda record: record["checks"][name] == ""

    skipped = sum(r["status"] == "skipped" for r in records)
    missing = len(records) - len(there) - skipped
    return [
        f"networks: {len(there)}, and {skipped} skipped"
        + (f", {missing} not measured" if missing else ""),
        f"silently wrong: {any_of('WRONG')} (asked 0)",
        f"raw errors: {any_of('raw')} (asked 0)",
        f"hanging: {any_of('hang')}",
        share("equal in every check of both plans", "equal 1", _equal, 0.95),
        share("usable after magnitude", "magnitude", well("magnitude"), 0.95),
        share("usable after the default, in 90 s", "default", well("default"), 0.9),
    ]


def _equal(record: Record) -> bool:
    words = [
        _word(record["checks"].get(f"{name} {i}", "hang"))
        for name in checks.PLAN_CHECKS
        for i in (1, 2)
    ]
    return "" in words and set(words) <= {"", "n/a"}


def markdown(records: list[Record], command: str) -> str:
    """The table, the bars and what is to be said of single networks."""
    commits = ", ".join(sorted({r["commit"] for r in records if "commit" in r}))
    found = [f"{name} {_version(name)}" for name in PACKAGES]
    missing = [r["id"] for r in records if r["status"] == "not measured"]
    rows = [_cells(r) for r in records if r["status"] != "not measured"]
    return (
        "\n".join(
            [
                *("# The second zoo: random plans elsewhere than traced, and two prunings", ""),
                "; ".join(
                    [
                        f"command {command}",
                        f"commit {commits}",
                        f"python {platform.python_version()}",
                        *found,
                    ]
                ),
                *("", *(f"- {text}" for text in bars(records)), ""),
                EXPLANATION + " An empty cell was not measured.",
                *(["", f"Not measured at all: {', '.join(missing)}."] if missing else []),
                *("", "| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)),
                *("| " + " | ".join(row) + " |" for row in rows),
                *("", "## Notes", ""),
                *(f"- {r['id']}: {text}" for r in records for text in _notes(r)),
            ]
        )
        + "\n"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _cells(record: Record) -> tuple[str, ...]:
    said = record["checks"]
    plans = [record[f"plan {i}"] for i in (1, 2) if f"plan {i}" in record]

    def mark(*names: str) -> str:
        marks = [{"": "yes", "n/a": "—"}.get(w := _word(said[n]), w) for n in names if n in said]
        return " / ".join(dict.fromkeys(marks))

    return (
        *(record["id"], record.get("family", ""), f"{record.get('params', 0):,}"),
        " / ".join(f"{plan['share']:.0%}" for plan in plans),
        " / ".join(dict.fromkeys(plan["delivery"] for plan in plans)),
        *(mark(f"{name} 1", f"{name} 2") for name in checks.PLAN_CHECKS),
        *(mark(name) for name in checks.PRUNINGS),
        f"{record['default_s']:.0f}" if "default_s" in record else "",
    )


def _notes(record: Record) -> list[str]:
    """What is not well, each text once."""
    by_text: dict[str, list[str]] = {}
    if "skipped" in record:
        by_text[record["skipped"]] = ["skipped"]
    for name, text in record["checks"].items():
        if _word(text) not in ("", "n/a"):
            by_text.setdefault(text, []).append(name)
    return [
        f"{', '.join(names)}: {' '.join(text.split())[:400]}" for text, names in by_text.items()
    ]
