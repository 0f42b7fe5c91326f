"""Claim: one global threshold over all weights of a ResNet50 costs neither time nor memory worth a thought.

Bars, on one core of a CPU, fp32:

| what                                                                        | seconds | memory       |
|-----------------------------------------------------------------------------|---------|--------------|
| threshold and masks of 25.5 M random scores, one tensor per layer           | <= 2    | <= 300 MB    |
| OBA scores and masks of a ResNet50, 32 images of 224 × 224 in batches of 8  |         | <= 8 GB peak |

Beside the first stand the obvious ways, which join all scores and ask for the k-th of them or sort them, then compare;
beside the second a training step on the same batches. `make_masks` does more than they do: it refuses NaN, packs bits,
and keeps the asked number where values are equal. Every row has a process of its own. Memory is the highest resident
set during the first call: above what was there before it (the scores too), and in all. CPU seconds: the median of
`--repeats` further calls (of one, for scoring); ratios are to the first row of the same table and run. Nothing is
asserted.

    OMP_NUM_THREADS=1 python benchmarks/masking.py --out experiments/results/masking_time.md
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEEP = 0.2
SELECTING = {
    "make_masks": "`make_masks`",
    "threshold": "`threshold` alone",
    "kthvalue": "`torch.cat`, `torch.kthvalue`, `>`",
    "sort": "`torch.cat`, `torch.sort`, `>`",
}
SCORING = {
    "step": "forward and backward",
    "oba": "`oba`",
    "sparsify": "`sparsify`, one stage: `oba` and masks",
}

# -- what is measured; torch is imported only in the processes that measure --------------------------------------------


def selecting(way: str) -> Callable[[], Any]:
    """Which of random scores of a ResNet50's weights stay, in one of four ways."""
    import torch

    from apoptosis.masks import maskable
    from apoptosis.models import resnet50
    from apoptosis.planning import Sparsity, make_masks, threshold

    model = resnet50()
    generator = torch.Generator().manual_seed(0)
    scores = {
        name: torch.randn(layer.shape, generator=generator).abs_()
        for name, layer in maskable(model).items()
    }
    total = sum(own.numel() for own in scores.values())
    num_kept = int(KEEP * total)

    def above(bound: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: own > bound for name, own in scores.items()}

    def joined() -> torch.Tensor:
        return torch.cat([own.flatten() for own in scores.values()])

    return {
        "make_masks": lambda: make_masks(model, scores, Sparsity(keep=KEEP)),
        "threshold": lambda: threshold(scores.values(), num_kept),
        "kthvalue": lambda: above(joined().kthvalue(total - num_kept).values),
        "sort": lambda: above(joined().sort().values[total - num_kept - 1]),
    }[way]


def scoring(way: str) -> Callable[[], Any]:
    """A ResNet50 of random weights, and images that are noise: neither changes what it costs."""
    import torch
    import torch.nn.functional as F

    from apoptosis.criteria import oba
    from apoptosis.data import Batches
    from apoptosis.models import resnet50
    from apoptosis.planning import Sparsity
    from apoptosis.workflow import sparsify

    model = resnet50().eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 224, 224, generator=generator)
    batches = Batches(images, torch.arange(32), size=8)

    def step() -> None:
        model.zero_grad()
        for inputs, labels in batches:
            F.cross_entropy(model(inputs), labels).backward()

    return {
        "step": step,
        "oba": lambda: oba(model, batches),
        "sparsify": lambda: sparsify(
            model, batches, Sparsity(keep=KEEP, allow_empty=True), criterion="oba", stages=1
        ),
    }[way]


def measure(way: str, repeats: int) -> dict[str, Any]:
    """Memory of a first call, seconds of further ones."""
    import torch

    torch.set_num_threads(1)
    call = selecting(way) if way in SELECTING else scoring(way)
    # `ru_maxrss` starts from what the parent had and never falls; the system's own mark can be set back.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_kib("VmRSS")
    call()
    peak = resident_kib("VmHWM")
    times_s = [timed(call) for _ in range(repeats)]
    return {
        "seconds": median(times_s),
        "extra_mb": (peak - before) * 1024 / 1e6,
        "peak_mb": peak * 1024 / 1e6,
        "torch": torch.__version__,
    }


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


# -- the page ---------------------------------------------------------------------------------------------------------


def table(rows: dict[str, str], repeats: int) -> tuple[list[str], str]:
    """Lines of a table whose ratios are to its first row, and torch's version."""
    lines = ["| way | CPU seconds | ratio | extra MB | peak MB |", "|---|---|---|---|---|"]
    first, version = None, ""
    for way, label in rows.items():
        command = [sys.executable, __file__, "--only", way, "--repeats", str(repeats)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        m = json.loads(run.stdout.splitlines()[-1])
        first, version = first or m["seconds"], m["torch"]
        lines.append(
            f"| {label} | {m['seconds']:.2f} | {m['seconds'] / first:.2f} | {m['extra_mb']:.0f} | {m['peak_mb']:.0f} |"
        )
        print(lines[-1], flush=True)
    return lines, version


def commit() -> str:
    """The commit that was measured, marked where the library differs from it."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "-s", "src") else "")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[*SELECTING, *SCORING], help="one row, as JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options.only, options.repeats)))
        return
    selected, version = table(SELECTING, options.repeats)
    scored, _ = table(SCORING, 1)
    about = (
        f"torch {version}, Python {platform.python_version()}, {cpu_name()}, one thread of {os.cpu_count()} cores, "
        f"commit {commit()}. Every row in a process of its own."
    )
    page = [
        "# What choosing single weights costs",
        f"`python {shlex.join(sys.argv)}`",
        about,
        f"## Threshold and masks of a ResNet50's weights, random scores, {KEEP:.0%} stay",
        "Bar: 2 s, 300 MB extra. Extra: highest resident set above the one before, which holds the scores (102 MB). "
        f"Median of {options.repeats}.",
        "\n".join(selected),
        "## Scores and masks of a ResNet50, 32 images of 224 × 224 in batches of 8",
        "Bar: 8 GB peak. Once, after one call of warm-up.",
        "\n".join(scored),
    ]
    if options.out is not None:
        options.out.write_text("\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
