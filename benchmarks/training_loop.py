"""Claim: an epoch of `fit_` costs what an epoch of a bare hand-written loop costs.

Bar: at most 1.10 times, on the CPU and on a GPU. The bare loop is the shortest that trains the same: forward, loss,
backward, step, a new rate. Both read the same batches (images as bytes on the device, augmented and normalised there),
start from the same weights and must end at the same ones. Rounds alternate in one process; the ratio is taken within
each round, medians over `--repeats` of them after one of warm-up. `noted` keeps a journal as well, as runs do that can
be resumed; its last note is always written, which is the worst case for a run of one epoch.

    python benchmarks/training_loop.py --out experiments/results/training_loop.md
    python benchmarks/training_loop.py --device cuda --model resnet32 --batch 512 --images 50000 --precision bfloat16 \
        --channels-last --out experiments/results/training_loop_cuda.md
"""

import argparse
import copy
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.checkpoint import open_journal
from apoptosis.data import Augmentation, Split
from apoptosis.models import MODELS
from apoptosis.training import FitOptions, fit_

ROOT = Path(__file__).parents[1]
LEARNING_RATE = 0.1


def bare(model: nn.Module, split: Split, args: argparse.Namespace) -> None:
    """One epoch by hand."""
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), LEARNING_RATE, 0.9, weight_decay=5e-4, nesterov=True
    )
    batches = batches_of(split, args)
    num, halves = len(batches), args.precision == "bfloat16"
    model.train()
    for step, (images, labels) in enumerate(batches):
        if args.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(args.device, torch.bfloat16) if halves else nullcontext():
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / (num - 1)))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def ours(model: nn.Module, split: Split, args: argparse.Namespace, *, noted: bool = False) -> None:
    options = FitOptions(
        epochs=1,
        learning_rate=LEARNING_RATE,
        schedule="cosine",
        precision=args.precision,
        channels_last=args.channels_last,
    )
    if not noted:
        fit_(model, batches_of(split, args), options=options)
        return
    with tempfile.TemporaryDirectory() as folder, open_journal(f"{folder}/run", {}) as journal:
        fit_(model, batches_of(split, args), options=options, journal=journal)


def batches_of(split: Split, args: argparse.Namespace):  # noqa: ANN201 - what a split gives
    return split.batches(
        args.batch, shuffle_seed=0, device=args.device, augmentation=Augmentation()
    )


def seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (args.images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (args.images,), generator=generator)
    split = Split(images, labels, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    torch.manual_seed(0)
    start = MODELS[args.model].make().to(args.device)
    ways = {"bare": bare, "fit_": ours, "noted": lambda *a: ours(*a, noted=True)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, torch.Tensor] = {}
    for number in range(args.repeats + 1):
        for name, way in ways.items():
            model = copy.deepcopy(start)
            taken = seconds(lambda way=way, model=model: way(model, split, args), args.device)
            if number:
                times[name].append(taken)
            ends[name] = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    scale = ends["bare"].norm()
    for name in ("fit_", "noted"):
        apart = float((ends[name] - ends["bare"]).norm() / scale)
        if apart > (1e-5 if args.device == "cpu" else 0.2):
            raise SystemExit(f"{name} ends elsewhere than the bare loop: {apart:.2g}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet20_narrow", choices=MODELS)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    times = measured(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    lines = [
        "# An epoch of `fit_` against a bare loop",
        "",
        f"    python benchmarks/training_loop.py {shlex.join(sys.argv[1:])}",
        "",
        f"{device}{threads}, torch {torch.__version__}, commit {args.commit or commit}; {args.model}, {args.images:,} "
        f"images of 32×32, batches of {args.batch}, {args.precision}{', channels last' * args.channels_last}; medians "
        f"of {args.repeats} rounds, ratio (smallest – largest) within a round.",
        "",
        "| | seconds per epoch | against the bare loop |",
        "|---|---|---|",
    ]
    for name, own in times.items():
        ratios = sorted(a / b for a, b in zip(own, times["bare"], strict=True))
        shown = f"**{median(ratios):.3f}** ({ratios[0]:.3f} – {ratios[-1]:.3f})"
        lines.append(f"| {name} | {median(own):.3f} | {shown if name != 'bare' else ''} |")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
