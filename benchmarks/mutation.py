"""Claim: the tests of a room notice a wrong line. Of random single changes of the code, at least 97 in 100 are caught.

A change is drawn from a seed (`mutation_changes.py`), a room with a chance that goes by its code. It is judged by the
tests of its own room and the examples of its own file, and of these by those that run the changed line
(`mutation_tests.py`): caught if one fails, hangs or crashes. A change that keeps the meaning (a bound on an
optimisation, a branch that gives the same) cannot be caught; a person lists it with the reason in
`mutation_equal.toml`, by its text.

    python benchmarks/mutation.py --count 200 --seed 0 --out runs/mutation0.jsonl           # goes on where it stopped
    python benchmarks/mutation.py --out runs/mutation0.jsonl --again                        # what was missed, once more
    python benchmarks/mutation.py --only structure/replay.py:77 --out runs/line.jsonl       # all changes of one line

The first run finds out which test runs which line (some minutes) and keeps it below `--work`. Exit status 1 if a change
was missed.
"""

import argparse
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation_changes import Change, changes_of
from mutation_tests import (
    ROOT,
    Child,
    TestMap,
    copy_tree,
    import_ahead,
    judge,
    make_map,
    run_all,
    start,
)

ROOMS = (
    "task",
    "training",
    "masks",
    "alignment",
    "planning",
    "criteria",
    "repair",
    "curvature",
    "structure",
)
EQUAL = Path(__file__).with_name("mutation_equal.toml")
NOT_CODE = {"structure/samples.py"}  # builds the samples on which the tests try the rules
KEY = ("file", "where", "old", "new")


def main() -> int:
    asked = arguments()
    texts = {name: text for room in ROOMS for name, text in sources_of(room)}
    out: Path = asked.out
    out.parent.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    drawn = drawn_before(out, texts) or draw(asked, texts)
    if not out.exists():
        append(
            out, {"seed": asked.seed, "commit": commit(), "drawn": [facts(c, texts) for c in drawn]}
        )
    judged = {key_of(r): r for r in records(out)}
    todo = [c for c in drawn if must_judge(judged.get(key_of(facts(c, texts))), again=asked.again)]
    if todo:
        import_ahead()
    for room in dict.fromkeys(room_of(c.file) for c in todo):
        own = dict(sources_of(room))
        make_map(asked.work, room, own, asked.jobs)
        tests = TestMap(asked.work, room, own)
        judge_all([c for c in todo if room_of(c.file) == room], own, tests, asked)
    return report(
        [facts(c, texts) for c in drawn], {key_of(r): r for r in records(out)}, texts, drawn
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="FILE:LINE", help="below src/apoptosis; all its changes")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation.jsonl"))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "apoptosis-mutation"
    )
    parser.add_argument("--again", action="store_true", help="judge again what was missed")
    parser.add_argument("--most-s", type=float, default=60.0, help="of tests for one change")
    parser.add_argument("--jobs", type=int, default=1)
    return parser.parse_args()


# --- drawing ---
def sources_of(room: str) -> Iterator[tuple[str, str]]:
    base = ROOT / "src" / "apoptosis"
    files = [base / "task.py"] if room == "task" else sorted((base / room).glob("*.py"))
    for path in files:
        yield str(path.relative_to(base)), path.read_text()


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def draw(asked: argparse.Namespace, texts: dict[str, str]) -> list[Change]:
    """Places are drawn evenly, then one of the changes of the place."""
    if asked.only:
        file, line = asked.only.split(":")
        return [
            c
            for c in changes_of(file, texts[file])
            if c.line == int(line) and c.is_code(texts[file])
        ]
    places: dict[tuple[str, int, int], list[Change]] = {}
    for file, text in texts.items():
        if room_of(file) in asked.rooms and file not in NOT_CODE:
            for change in changes_of(file, text):
                places.setdefault((file, change.start, change.end), []).append(change)
    generator = random.Random(asked.seed)
    found: list[Change] = []
    for place in generator.sample(sorted(places), len(places)):
        if len(found) == asked.count:
            break
        change = generator.choice(places[place])
        if change.is_code(texts[change.file]):
            found.append(change)
    return sorted(found, key=lambda change: ROOMS.index(room_of(change.file)))


def drawn_before(out: Path, texts: dict[str, str]) -> list[Change]:
    """The draw of a run that is taken up again, in the code of now; what is gone from it is told."""
    if not out.exists():
        return []
    kept = json.loads(out.read_text().splitlines()[0])["drawn"]
    found, gone = list[Change](), 0
    of_file: dict[str, dict[Any, Change]] = {}
    for fact in kept:
        file = fact["file"]
        if file not in of_file:
            changes = changes_of(file, texts.get(file, ""))
            of_file[file] = {key_of(facts(c, texts)): c for c in changes}
        change = of_file[file].get(key_of(fact))
        gone += change is None
        found += [] if change is None else [change]
    if gone:
        print(f"{gone} of {len(kept)} changes are of code that is no more")
    return found


def facts(change: Change, texts: dict[str, str]) -> dict[str, Any]:
    old, new = change.lines(texts[change.file])
    known = {"file": change.file, "where": change.where, "old": old, "new": new}
    return known | {"kind": change.kind, "line": change.line}


def key_of(fact: dict[str, Any]) -> tuple[str, ...]:
    return tuple(fact[name] for name in KEY)


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()[:12]


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def append(out: Path, fact: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(fact) + "\n")


# --- judging ---
def must_judge(record: dict[str, Any] | None, *, again: bool) -> bool:
    return record is None or (again and not record["by"])


def judge_all(
    todo: list[Change], texts: dict[str, str], tests: TestMap, asked: argparse.Namespace
) -> None:
    """Each change in a tree of its own; a line in the file for each as it is known."""
    idle = [asked.work / f"changed{n}" for n in range(asked.jobs)]
    for tree in idle:
        copy_tree(tree)
    trees: dict[Change, Path] = {}

    def begin(change: Change, chosen: list[str]) -> Child:
        tree = trees[change] = idle.pop()
        at = tree / "src" / "apoptosis" / change.file
        at.write_text(change.apply(texts[change.file]))
        parts = tests.in_parts(chosen, asked.most_s)
        return start(lambda: judge(tree, parts, tests.cpu), tree, tree.with_suffix(".json"))

    def jobs() -> Iterator[tuple[Any, Callable[[], Child]]]:
        for change in todo:
            # A line that no test runs may have run at import, such as the making of a rule.
            chosen = tests.of(change.file, change.runs_at) or tests.of(change.file, None)
            yield (change, len(chosen)), lambda change=change, chosen=chosen: begin(change, chosen)

    for (change, num), child, ended in run_all(jobs(), asked.jobs):
        answer = {"by": ended, "num": 0} if ended else json.loads(child.answer.read_text())
        fact = facts(change, texts) | {"by": answer["by"], "ran": answer["num"], "of": num}
        append(asked.out, fact)
        idle.append(tree := trees.pop(change))
        shutil.copy2(
            ROOT / "src" / "apoptosis" / change.file, tree / "src" / "apoptosis" / change.file
        )
        told = f"caught by {answer['by']}" if answer["by"] else "NOT CAUGHT"
        print(
            f"{change.file}:{change.line} {change.kind}: {told} ({answer['num']} of {num})",
            flush=True,
        )


# --- telling ---
def report(
    drawn: list[dict[str, Any]],
    judged: dict[tuple[str, ...], dict[str, Any]],
    texts: dict[str, str],
    changes: list[Change],
) -> int:
    """Counts by room and the difference of each survivor; 1 if there is one."""
    equal = {key_of(entry) for entry in tomllib.loads(EQUAL.read_text()).get("equal", [])}
    counts: dict[str, Counter[str]] = {}
    for fact, change in zip(drawn, changes, strict=True):
        record = judged.get(key_of(fact))
        if record is None:
            continue
        verdict = "caught" if record["by"] else "equal" if key_of(fact) in equal else "missed"
        counts.setdefault(room_of(fact["file"]), Counter())[verdict] += 1
        if verdict == "missed":
            text = texts[fact["file"]]
            lines = difflib.unified_diff(
                text.splitlines(), change.apply(text).splitlines(), lineterm="", n=2
            )
            print(f"\nnot caught: src/apoptosis/{fact['file']}:{fact['line']} in {fact['where']}")
            print("\n".join(list(lines)[2:]))
    print(f"\n{'room':<12}{'drawn':>7}{'same meaning':>14}{'caught':>8}{'missed':>8}{'share':>8}")
    total = sum(counts.values(), Counter())
    for room, own in [*sorted(counts.items()), ("all", total)]:
        differ = own["caught"] + own["missed"]
        share = own["caught"] / differ if differ else 1.0
        num = differ + own["equal"]
        row = f"{num:>7}{own['equal']:>14}{own['caught']:>8}{own['missed']:>8}{share:>8.1%}"
        print(f"{room:<12}{row}")
    return int(total["missed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
