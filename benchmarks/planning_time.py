"""Claim: from scores to a smaller network takes a moment: gathering, planning and cutting, beside what scoring takes.

Bar: ResNet50 to 50 % of the MACs, planning and cutting at most 10 s of CPU beyond scoring.

`gather` is `unit_scores` of magnitudes (for networks on the meta device random unit scores are made instead), `plan` is
`make_plan` to half of the MACs by score per MAC, with the confirming run of the model's own code in it, `cut` makes the
small network. `steps` is how long the same takes twenty times over, as `prune` does, without the scoring. CPU seconds
of one process with one thread; medians over `--repeats` rounds after one of warm-up.

    python benchmarks/planning_time.py --out experiments/results/planning_time.md
"""

import argparse
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import apoptosis as ap
from apoptosis.criteria import UnitScores, magnitude
from apoptosis.models import resnet50, vit_b16
from apoptosis.structure import Structure
from structure_time import llama_8b, torchvision_model

ROOT = Path(__file__).parents[1]
IMAGES = (1, 3, 224, 224)


def scored(model: nn.Module, structure: Structure) -> UnitScores:
    if not any(p.is_meta for p in model.parameters()):
        return ap.unit_scores(magnitude(model), structure)
    generator = torch.Generator().manual_seed(0)
    values = {
        g.name: torch.rand(g.size, generator=generator, dtype=torch.float64)
        for g in structure.groups
    }
    return UnitScores(values, "random")


def one_round(make: Callable[[], tuple[nn.Module, Any]], steps: int) -> dict[str, float]:
    """Seconds of each part, and of many steps."""
    model, inputs = make()
    model.eval()
    structure = ap.trace(model, inputs)
    found: dict[str, float] = {}
    start = time.process_time()
    units = scored(model, structure)
    found["gather"], start = time.process_time() - start, time.process_time()
    plan = ap.make_plan(structure, units, ap.Budget(flops=0.5))
    found["plan"], start = time.process_time() - start, time.process_time()
    ap.cut(model, plan)
    found["cut"], start = time.process_time() - start, time.process_time()
    small, now = model, structure
    for _ in range(steps):
        plan = ap.make_plan(now, scored(small, now), ap.Budget(flops=0.5 ** (1 / steps)))
        small, now = ap.cut(small, plan), now.after(plan)
    found["steps"] = time.process_time() - start
    found["kept"] = now.macs() / structure.macs()
    found["groups"], found["units"] = len(structure.groups), sum(g.size for g in structure.groups)
    return found


def on_meta(make: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    def made() -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            return make()

    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    networks: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "ResNet50": lambda: (resnet50(), torch.zeros(IMAGES)),
        "ViT-B/16": lambda: (vit_b16(), torch.zeros(IMAGES)),
        "DenseNet201 (meta)": on_meta(torchvision_model("densenet201")),
        "Llama 8B (meta)": on_meta(llama_8b),
    }
    lines = [
        f"| network | groups | units | gather s | plan s | cut s | {options.steps} steps s | MACs kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, make in networks.items():
        rounds = [one_round(make, options.steps) for _ in range(options.repeats + 1)][1:]
        m = {key: median(own[key] for own in rounds) for key in rounds[0]}
        parts = " | ".join(f"{m[key]:.2f}" for key in ("gather", "plan", "cut", "steps"))
        lines.append(
            f"| {name} | {m['groups']:.0f} | {m['units']:.0f} | {parts} | {m['kept']:.4f} |"
        )
        print(lines[-1], flush=True)
    if options.out is not None:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        about = f"torch {torch.__version__}, Python {platform.python_version()}, one thread, commit {commit.strip()}"
        page = f"# What planning and cutting cost\n\n`python {shlex.join(sys.argv)}`\n\n{about}, median of "
        page += (
            f"{options.repeats}. CPU seconds, scoring not included.\n\n" + "\n".join(lines) + "\n"
        )
        options.out.write_text(page)


if __name__ == "__main__":
    main()
