"""Claim: on every network of the zoo a random cut to 60 % of the MACs is exact, or it is refused; never wrong.

For each of `zoo_models.ENTRIES` (real widths for torchvision and timm, small configurations for transformers, toys),
in a process of its own, on one core, in float64, within five minutes of CPU time: trace, keep random units of exact
groups, cut, and check

- `equal`: the cut network gives what the uncut one gives with the removed units zeroed (1e-10, relative to the
  greatest output), at the example's batch size and (`batch`) at another one;
- `params`, `macs`: the costs that the structure foretold are those counted on the cut network: by `numel`, and by
  torch's flop counter with attention in its open form (see `zoo_checks`); dense MACs likewise;
- `state_dict`: saved, loaded strictly into a copy with other weights, the same outputs bit for bit;
- `train`: one step of SGD in train mode, finite; `flags`: names, ties and `requires_grad` of parameters as before.

`own` is how many exact groups can be cut alone (with those tied to them) in the model's own class, of those tried
(40 at most, for half a minute); the others are delivered as a rewritten program, which is as exact.
`--peer` adds Torch-Pruning on the same list (see `zoo_peer`). `--list second` is another zoo, `zoo_second`, with checks
of its own: plans elsewhere than traced, train mode, and whole prunings (see `zoo_second_checks`).

    python benchmarks/zoo.py --peer
    python benchmarks/zoo.py --only 'timm*' --fresh
    PYTHONPATH=zoo_site python benchmarks/zoo.py --list second    # packages: zoo_second.txt

Results of single networks are kept in runs/zoo and runs/zoo_second, so an interrupted run goes on where it was;
`--fresh` starts anew. Exit code 1 if a network is wrong or hangs. Where exact groups cannot reach 60 %, inexact ones
are cut as well, and the twin is one whose statistics see the kept units alone (`tests/oracles/kept_sums.py`); a note
says so.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # runs as a script, not installed
sys.path.insert(0, str(HERE.parent / "src"))

SEED = 0
CPU_LIMIT_S = 300
WALL_LIMIT_S = 900  # other work on the machine may slow a child down, but not forever
RESULTS = HERE.parent / "experiments" / "results"
LISTS = {"first": "zoo_models", "second": "zoo_second"}
CHECKS = ("equal", "params", "macs", "state_dict", "train", "batch", "flags")
BAD = ("WRONG", "hang")
Record = dict[str, Any]


# -- one network ------------------------------------------------------------------------------------------------------


def run_one(name: str, out: Path, *, peer: bool) -> None:
    """In the child: measure one network and write its record."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 10))
    import torch

    torch.set_num_threads(1)
    import zoo_models

    measurer = import_module("zoo_peer" if peer else "zoo_ours")
    entry = next(entry for entry in zoo_models.ENTRIES if entry.id == name)
    record = measurer.measure(entry, SEED)
    out.write_text(json.dumps(record, indent=1, default=str))


def measured(name: str, folder: Path, *, peer: bool) -> Record:
    """In the parent: the record of one network, from the run folder or from a new child."""
    out = _file(folder, name, peer=peer)
    if not out.exists():
        start = time.perf_counter()
        record = _from_child(name, out, peer=peer)
        record |= {"wall_s": time.perf_counter() - start, "commit": _commit()}
        out.write_text(json.dumps(record, indent=1))
    return json.loads(out.read_text())


def _file(folder: Path, name: str, *, peer: bool) -> Path:
    return folder / f"{_plain(name)}{'.peer' if peer else ''}.json"


def _plain(name: str) -> str:
    """Fit for a file."""
    return re.sub(r"[^\w.-]+", "_", name)


def _from_child(name: str, out: Path, *, peer: bool) -> Record:
    command = [sys.executable, __file__, "--one", name, "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    failed: Record = {"id": name, "checks": {}}
    late = {"status": "timeout" if peer else "hang", "note": f"over {CPU_LIMIT_S} s of CPU time"}
    try:
        done = subprocess.run(
            [*command, "--peer"] if peer else command,
            env=env,
            capture_output=True,
            text=True,
            timeout=WALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed | late | {"note": f"over {WALL_LIMIT_S} s"}
    if done.returncode == -signal.SIGXCPU:
        return failed | late
    if done.returncode or not out.exists():
        note = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return failed | {"status": "error" if peer else "crash", "note": note}
    return json.loads(out.read_text())


# -- reporting --------------------------------------------------------------------------------------------------------

HEADS = (
    *("network", "status", "MACs", "kept", "error", "costs", "saved", "train", "batch", "groups"),
    *("exact", "kinds", "as", "own", "trace s", "plan s"),
)
SHORT_HEADS = (
    *("network", "status", "MACs", "kept", "error", "checks", "groups", "exact", "as", "own"),
    "trace s",
)
EXPLANATION = (
    "MACs are those of one sample, seconds those of one core. What is checked, and how, is said at the top of"
    " `benchmarks/zoo.py`; *error* is the greatest distance to the zeroed twin over all outputs and two batch sizes,"
    " *saved* that weights are read back, *as* how the plan is delivered, *own* how many exact groups can be cut alone"
    " in the model's own class, of those tried."
)
PEER_EXPLANATION = (
    " Of Torch-Pruning: `=mask` equals the zeroed twin to 1e-6; `differs (norm)` does not, and norms over channels were"
    " cut; *costs* is its own MAC count over the recount."
)
PEER_HEADS = ("Torch-Pruning", "kept", "error", "costs", "saved", "train", "batch", "s")


def cells(record: Record) -> tuple[str, ...]:
    """One row for this library."""
    checks = record["checks"]
    if "macs" not in record:
        return (record["id"], record["status"], *("",) * (len(HEADS) - 2))
    costs = {key: checks[key] for key in ("params", "macs") if key in checks}  # both must be right
    return (
        record["id"],
        record["status"],
        _quantity(record["macs"] / 2),
        f"{100 * record['share']:.1f} %" if "share" in record else "",
        f"{record['error']:.0e}" if "error" in record else "",
        _mark(costs),
        _mark(checks, "state_dict", "flags"),
        _mark(checks, "train"),
        _mark(checks, "batch"),
        str(record["groups"]),
        str(record["exact_groups"]),
        " ".join(f"{kind} {num}" for kind, num in record["kinds"].items()),
        record.get("delivery", ""),
        f"{record['single']}/{record['single_tried']}" if "single" in record else "",
        f"{record['trace_s']:.2f}",
        f"{record['plan_s']:.2f}" if "plan_s" in record else "",
    )


def peer_cells(record: Record | None) -> tuple[str, ...]:
    """The same network with Torch-Pruning."""
    if record is None:
        return ("",) * len(PEER_HEADS)
    checks = record["checks"]
    return (
        record["status"],
        f"{100 * record['share']:.0f} %" if "share" in record else "",
        f"{record['error']:.0e}" if "error" in record else "",
        f"{record['own_macs_ratio']:.2f}" if "own_macs_ratio" in record else "",
        _mark(checks, "state_dict", "flags"),
        _mark(checks, "train"),
        _mark(checks, "batch"),
        f"{record['seconds']:.0f}" if "seconds" in record else "",
    )


def _mark(checks: dict[str, str], *names: str) -> str:
    own = [checks[name] for name in names or checks if name in checks]
    return "" if not own else "no" if any(own) else "yes"


def _quantity(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def notes(record: Record, *, peer: bool = False) -> list[str]:
    """What is to be said about a network, in full."""
    found = [record["note"]] if record.get("note") else []
    found += [f"{name}: {text}" for name, text in record["checks"].items() if text]
    if not peer:
        found += (
            [f"as program: {record['delivery_because']}"] if record.get("delivery_because") else []
        )
    return [" ".join(line.split())[:300] for line in dict.fromkeys(found)]


def tally(records: list[Record]) -> str:
    counts = Counter(record["status"] for record in records)
    return ", ".join(f"{num} {status}" for status, num in counts.most_common())


def environment(command: str) -> dict[str, Any]:
    """With what the numbers were made."""
    packages = ("torch", "torchvision", "timm", "transformers", "torch-pruning")
    return {
        "command": command,
        "seed": SEED,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _commit() -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(HERE.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "-s", "--", "src", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return os.environ.get("GIT_COMMIT", "unknown")


def markdown(ours: list[Record], peers: list[Record], where: dict[str, Any]) -> str:
    """The table and what stands behind it."""
    peer_of = {record["id"]: record for record in peers}
    heads = HEADS + (PEER_HEADS if peers else ())
    rows = [cells(r) + (peer_cells(peer_of.get(r["id"])) if peers else ()) for r in ours]
    lines = [
        "# The zoo: random cuts to 60 % of the MACs",
        "",
        "; ".join(f"{key} {value}" for key, value in where.items()),
        "",
        f"{len(ours)} networks: {tally(ours)}.",
        *([f"Torch-Pruning: {tally(peers)}."] if peers else []),
        "",
        EXPLANATION + (PEER_EXPLANATION if peers else ""),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "## Notes",
        "",
    ]
    for record in ours:
        lines += [f"- {record['id']}: {text}" for text in notes(record)]
    if peers:
        lines += ["", "## Notes on Torch-Pruning", ""]
        for record in peers:
            lines += [f"- {record['id']}: {text}" for text in notes(record, peer=True)[:1]]
    return "\n".join(lines) + "\n"


def show(ours: list[Record], peers: list[Record]) -> None:
    """The table on the terminal, in short."""
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=150)
    table = Table(*SHORT_HEADS, *(PEER_HEADS[:1] if peers else ()))
    peer_of = {record["id"]: record for record in peers}
    for record in ours:
        row = dict(zip(HEADS, cells(record), strict=True))
        style = {"pass": "green", "refused": "yellow"}
        row["status"] = f"[{style.get(record['status'], 'bold red')}]{record['status']}[/]"
        row["checks"] = f"{sum(not text for text in record['checks'].values())}/{len(CHECKS)}"
        more = peer_cells(peer_of.get(record["id"]))[:1] if peers else ()
        table.add_row(*(row[head] for head in SHORT_HEADS), *more)
    console.print(table)
    console.print(f"{len(ours)} networks: {tally(ours)}")
    if peers:
        console.print(f"Torch-Pruning: {tally(peers)}")


# -- command line -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random cuts of many networks, checked.")
    parser.add_argument("--list", choices=sorted(LISTS), default="first", help="which zoo")
    parser.add_argument("--only", default="*", help="pattern of network names, as 'timm*'")
    parser.add_argument("--peer", action="store_true", help="Torch-Pruning as well")
    parser.add_argument("--jobs", type=int, default=2, help="networks at a time")
    parser.add_argument("--fresh", action="store_true", help="measure anew what this run is about")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="of the second: report what is there, measure nothing",
    )
    parser.add_argument("--runs", type=Path, help="runs/zoo, or runs/zoo_second")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for structure_zoo.json and .md; by default experiments/results, and none with --only",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.one:
        run_one(args.one, args.out, peer=args.peer)
        return 0
    if args.list == "second":
        return second(args)
    names = [e.id for e in import_module(LISTS["first"]).ENTRIES if fnmatchcase(e.id, args.only)]
    args.runs = args.runs or HERE.parent / "runs" / "zoo"
    args.runs.mkdir(parents=True, exist_ok=True)
    options = ["--peer"] if args.peer else []
    options += [] if args.only == "*" else ["--only", args.only]
    where = environment(shlex.join(["python", "benchmarks/zoo.py", *options]))

    folder = args.results or (RESULTS if args.only == "*" else None)
    found: dict[tuple[str, bool], Record] = {}
    lock = Lock()

    def work(job: tuple[str, bool]) -> None:
        record = measured(job[0], args.runs, peer=job[1])
        with lock:
            found[job] = record
            if folder is not None:
                write(folder, *_sorted(names, found), where)
            print(f"{job[0]}{' (Torch-Pruning)' if job[1] else ''}: {record['status']}", flush=True)

    jobs = [(name, peer) for peer in ((False, True) if args.peer else (False,)) for name in names]
    for name, peer in jobs if args.fresh else ():
        _file(args.runs, name, peer=peer).unlink(missing_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, jobs))
    ours, peers = _sorted(names, found)
    show(ours, peers)
    return int(any(record["status"] in BAD for record in ours))


def second(args: argparse.Namespace) -> int:
    """The second zoo: other networks, other checks, a report of its own."""
    import zoo_second_checks as checks
    import zoo_second_report as report

    entries = [e for e in import_module(LISTS["second"]).ENTRIES if fnmatchcase(e.id, args.only)]
    runs = args.runs or HERE.parent / "runs" / "zoo_second"
    runs.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    for entry in entries:  # one at a time, so that times are those of one core
        parts: list[Record] = []
        for stage in checks.STAGES:
            out = runs / f"{_plain(entry.id)}.{stage}.json"
            if not args.measured and (args.fresh or not out.exists()):
                out.unlink(missing_ok=True)
                found = _from_fork(entry, stage, out)
                out.write_text(json.dumps(found | {"commit": _commit()}, indent=1))
            parts += [json.loads(out.read_text())] if out.exists() else []
        records.append(checks.joined(entry, parts))
        print(f"{entry.id}: {report.line(records[-1])}", flush=True)
    folder = args.results or (RESULTS if args.only == "*" else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        told = "python benchmarks/zoo.py --list second" + (" --measured" if args.measured else "")
        text = report.markdown(records, told)
        (folder / "zoo_second.md").write_text(_relative(text))
        data = json.dumps({"networks": records}, indent=1)
        (folder / "zoo_second.json").write_text(_relative(data) + "\n")
    print("\n".join(report.bars(records)))
    return int(any(r["status"] in ("WRONG", "raw", "hang") for r in records))


def _from_fork(entry: Any, stage: str, out: Path) -> Record:
    """What a stage finds of a network, from a child that need not import anything anew."""
    import zoo_second_checks as checks

    checks.warm_up()
    if (child := os.fork()) == 0:
        try:
            _measure_in_fork(entry, stage, out)
        finally:
            os._exit(1)  # without what the parent has yet to do
    _, code = os.waitpid(child, 0)
    if code == 0:
        return json.loads(out.read_text())
    late = os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGXCPU
    text = f"hang: over {CPU_LIMIT_S} s of CPU time" if late else f"raw: a child ended with {code}"
    return {"checks": dict.fromkeys(checks.names_of(stage), text)}


def _measure_in_fork(entry: Any, stage: str, out: Path) -> None:
    """In the child: measure, write and end."""
    import torch

    import zoo_second_checks as checks

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 10))
    torch.set_num_threads(1)
    out.write_text(json.dumps(checks.measure(entry, SEED, stage), indent=1, default=str))
    sys.stdout.flush()
    os._exit(0)


def _sorted(
    names: list[str], found: dict[tuple[str, bool], Record]
) -> tuple[list[Record], list[Record]]:
    ours, peers = (
        [found[name, peer] for name in names if (name, peer) in found] for peer in (False, True)
    )
    return ours, peers


def write(folder: Path, ours: list[Record], peers: list[Record], where: dict[str, Any]) -> None:
    """What is known so far; a run that went on after an interruption may span several commits."""
    where = where | {"commit": ", ".join(sorted({r.get("commit", "unknown") for r in ours}))}
    folder.mkdir(parents=True, exist_ok=True)
    record = {"environment": where, "networks": ours, "torch_pruning": peers}
    (folder / "structure_zoo.json").write_text(_relative(json.dumps(record, indent=1)) + "\n")
    (folder / "structure_zoo.md").write_text(_relative(markdown(ours, peers, where)))


def _relative(text: str) -> str:
    """Without the folders of this machine."""
    return re.sub(r"[^\s\"'(]*/(?:site-packages|zoo_site)/", "", text).replace(
        f"{HERE.parent}/", ""
    )


if __name__ == "__main__":
    sys.exit(main())
