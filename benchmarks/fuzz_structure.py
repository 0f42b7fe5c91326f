"""Claim: on random networks every cut of every exact group equals the zeroed twin, and every cost is right.

Networks are real modules built from some sixty kinds of blocks by a seed (`tests/oracles/random_networks.py`). Of each,
every group is cut by one unit and by a random subset, then many groups at once; what is checked, and against what, is
in `tests/oracles/cut_checks.py`. A failing network is made small and its blueprint printed.

Float64, one thread, CPU. The exit status is 1 if anything was wrong or crashed.

    python benchmarks/fuzz_structure.py --networks 2000 --seed 0
    python benchmarks/fuzz_structure.py --networks 4000 --seed 0 --resume    # goes on where the first one stopped
    python benchmarks/fuzz_structure.py --networks 1 --seed 123 --show       # one network, with its code's modules
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # not installed

import torch

from oracles.cut_checks import TOLERANCE, Report, check
from oracles.random_networks import RandomNetwork, build, random_blueprint, shrink

SAVE_EVERY = 25
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results" / "structure_fuzz.json"


@dataclass
class Totals:
    """All that was seen; written to JSON, and read back by `--resume`."""

    first_seed: int
    networks: int = 0
    groups: int = 0
    exact: int = 0
    tallies: Counter[str] = field(default_factory=Counter)
    groups_per_network: Counter[int] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    commits: list[str] = field(default_factory=list)
    """Of the code that ran, one for each time the run was started or resumed."""

    def add(self, network: RandomNetwork, report: Report) -> None:
        self.networks += 1
        self.groups += report.groups
        self.exact += report.exact
        self.tallies.update(report.tallies)
        self.groups_per_network[report.groups] += 1
        self.blocks.update(placed.name for placed in network.blueprint.blocks)

    @property
    def crashed(self) -> int:
        return sum(any("crash" in kind for kind in own["kinds"]) for own in self.failures)

    @property
    def wrong(self) -> int:
        return sum(any("crash" not in kind for kind in own["kinds"]) for own in self.failures)


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    totals = Totals(options.seed)
    if options.resume and options.out.exists():
        totals = read(options.out, options.seed)
    totals.commits.append(f"{commit()} from seed {options.seed + totals.networks}")
    since, end = time.time() - totals.seconds, options.seed + options.networks
    for seed in range(options.seed + totals.networks, end):
        if options.minutes and time.time() - since > 60 * options.minutes:
            break
        network = build(random_blueprint(seed))
        if options.show:
            print(network.blueprint, network.model, sep="\n")
        report = check(network)
        totals.add(network, report)
        if report.findings:
            totals.failures.append(failure(network, report))
            print(json.dumps(totals.failures[-1], indent=1), flush=True)
        totals.seconds = time.time() - since
        if totals.networks % SAVE_EVERY == 0 and not options.dry:
            write(totals, options.out)
    if not options.dry:
        write(totals, options.out)
    print(summary(totals))
    return 1 if totals.failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=2000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first network; the next is one more"
    )
    parser.add_argument("--minutes", type=float, default=0, help="stop after that long")
    parser.add_argument("--resume", action="store_true", help="go on from the file of results")
    parser.add_argument("--show", action="store_true", help="print each network")
    parser.add_argument("--dry", action="store_true", help="write no files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def failure(network: RandomNetwork, report: Report) -> dict[str, Any]:
    """What went wrong, and the smallest network found that goes wrong in the same way."""
    kinds = {finding.kind for finding in report.findings}

    def fails(other: RandomNetwork) -> bool:
        return bool(kinds & {finding.kind for finding in check(other).findings})

    small = shrink(network.blueprint, fails)
    findings = {f.kind: f for f in reversed(check(build(small)).findings)}
    return {
        "seed": network.blueprint.seed,
        "kinds": sorted(kinds),
        "blueprint": str(network.blueprint),
        "smallest": str(small),
        "findings": [asdict(finding) for finding in findings.values()],
    }


def summary(totals: Totals) -> str:
    cut = totals.tallies
    told = cut["cuts that change the output"]
    spread = sorted(totals.groups_per_network.items())
    lines = [
        f"networks           {totals.networks} (seeds {totals.first_seed} … {totals.first_seed + totals.networks - 1})",
        f"groups             {totals.groups}, of which exact {totals.exact}",
        f"plans cut          {cut['plans']} (as module {cut['module']}, as program {cut['program']})",
        f"  of exact groups  {cut['cuts of exact groups']}, that change the output {told}",
        f"  of inexact ones  {cut['cuts of inexact groups']}, equal all the same {cut['inexact yet equal']}",
        f"  composed         {cut['composed']}",
        f"wrong networks     {totals.wrong}",
        f"crashed networks   {totals.crashed}",
        f"groups per network {', '.join(f'{n}: {times}' for n, times in spread)}",
        f"seconds            {totals.seconds:.0f}",
    ]
    return "\n".join(lines)


def write(totals: Totals, path: Path) -> None:
    environment = {
        "command": shlex.join(["python", "benchmarks/fuzz_structure.py", *sys.argv[1:]]),
        "commit": "; ".join(totals.commits),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tolerance": TOLERANCE,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment} | vars(totals), indent=1) + "\n")
    about = "\n".join(f"- {name}: `{value}`" for name, value in environment.items())
    failing = (
        "\n".join(f"- {own['kinds']}: {own['smallest']}" for own in totals.failures) or "None."
    )
    title = "# Random networks, every group cut"
    text = f"{title}\n\n{about}\n\n```\n{summary(totals)}\n```\n\nFailing networks, made small:\n\n{failing}\n"
    path.with_suffix(".md").write_text(text)


def read(path: Path, seed: int) -> Totals:
    data = json.loads(path.read_text())
    data.pop("environment")
    if data["first_seed"] != seed:
        raise SystemExit(f"{path} starts at seed {data['first_seed']}, not {seed}.")
    data["tallies"], data["blocks"] = Counter(data["tallies"]), Counter(data["blocks"])
    spread = data["groups_per_network"].items()
    data["groups_per_network"] = Counter({int(n): times for n, times in spread})
    return Totals(**data)


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "src"]
    found = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    dirty = subprocess.run(changed, capture_output=True, text=True, check=True).stdout.strip()
    return f"{found} with uncommitted changes" if dirty else found


if __name__ == "__main__":
    sys.exit(main())
