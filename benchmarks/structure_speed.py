"""Claim: a cut network is not only smaller on paper; here is what it saves in time.

Each network is cut at random to about half of its MACs, every exact group to the same share of its units, once with any
number of units and once with multiples of 8, which is what tensor cores and vector units like. Forward passes of dense
and cut network alternate in one process; medians over `--repeats` rounds, and the ratio within each round. Random
weights: time does not depend on them. The cut is checked against its zeroed twin in float64 before it is timed.

    python benchmarks/structure_speed.py --device cuda --out experiments/results/structure_speed_cuda.md
    python benchmarks/structure_speed.py --device cpu --models resnet50 --batch 4
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure.recording import Example

ROOT = Path(__file__).parents[1]
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def timm_model(name: str) -> Callable[[int], tuple[nn.Module, Any]]:
    def make(batch: int) -> tuple[nn.Module, Any]:
        import timm

        return timm.create_model(name), torch.randn(batch, 3, 224, 224)

    return make


def llama(batch: int) -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {
        "input_ids": torch.randint(0, 32000, (batch, 256))
    }


MODELS = {
    "resnet50": timm_model("resnet50"),
    "vit-b/16": timm_model("vit_base_patch16_224"),
    "llama, 8 layers of 1B": llama,
}


def half(structure: ap.Structure, multiple: int, seed: int) -> ap.Plan:
    """Keep the same share of every exact group, the largest that does not exceed half of the MACs."""
    chosen = [g for g in structure.choose() if g.kind not in ("qk_dim", "v_dim", "head_dim")]

    def counts(share: float) -> dict[str, int]:
        found: dict[str, int] = {}
        for group in chosen:
            step = multiple if group.size >= 8 * multiple else 1
            found[group.name] = max(step, round(group.size * share / step) * step)
        return found

    low, high = 0.1, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if structure.macs(counts(middle)) > structure.macs() / 2
            else (middle, high)
        )
    rng = random.Random(seed)
    return structure.plan(
        {n: sorted(rng.sample(range(structure[n].size), k)) for n, k in counts(low).items()}
    )


def seconds(run: Callable[[], Any], device: str) -> float:
    """One call, synchronised."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def moved(example: Example, device: str, dtype: torch.dtype) -> Example:
    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return example.map(move)


def first_output(example: Example, model: nn.Module) -> Tensor:
    out = example.run(model)
    return out if isinstance(out, Tensor) else out[0]


def measure(name: str, options: argparse.Namespace) -> list[str]:
    torch.manual_seed(0)
    model, inputs = MODELS[name](2)
    model.eval().to(options.device)
    example = moved(Example.of(inputs), options.device, torch.float32)
    structure = ap.trace(model, (example.args or example.kwargs))
    rows: list[str] = []
    for multiple in (1, 8):
        plan = half(structure, multiple, seed=0)
        double = moved(example, options.device, torch.float64)
        wide = model.double()
        with torch.no_grad():
            a, b = (first_output(double, m) for m in (ap.cut(wide, plan), ap.zero(wide, plan)))
        error = ((a - b).abs().max() / b.abs().max()).item()
        model.float()
        small = ap.cut(model, plan)
        for precision in options.precision.split(","):
            dtype = PRECISIONS[precision]
            _, many = MODELS[name](options.batch)
            batch = moved(Example.of(many), options.device, dtype)
            pair = [m.to(dtype) for m in (model, small)]
            with torch.inference_mode():
                for _ in range(5):
                    for network in pair:
                        batch.run(network)
                rounds = [
                    [seconds(lambda n=n, b=batch: b.run(n), options.device) for n in pair]
                    for _ in range(options.repeats)
                ]
            dense, cut = (median(r[i] for r in rounds) for i in range(2))
            ratios = sorted(r[0] / r[1] for r in rounds)
            spread = f"{ratios[len(ratios) // 10]:.2f}–{ratios[-1 - len(ratios) // 10]:.2f}"
            macs, params = (f(plan) / f() for f in (structure.macs, structure.params))
            rows.append(
                f"| {name} | {multiple} | {precision} | {macs:.1%} | {params:.1%} | "
                f"{dense * 1e3:.2f} | {cut * 1e3:.2f} | {dense / cut:.2f} ({spread}) | {error:.0e} | {plan.delivery} |"
            )
            print(rows[-1], flush=True)
            model.float()
            small.float()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = (
        "| network | multiple of | precision | MACs | parameters | dense ms | cut ms | times faster (10–90 %) | "
        "error | as |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    print(head)
    rows = [
        row
        for name in MODELS
        if name in options.models.split(",") or options.models == ",".join(MODELS)
        for row in measure(name, options)
    ]
    if options.out is None:
        return
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    commit = os.environ.get("GIT_COMMIT") or git.stdout.strip()
    device = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    about = (
        f"{device}, torch {torch.__version__}, batch {options.batch}, n = {options.repeats}, seed 0"
    )
    about += f", commit {commit}"
    options.out.write_text(
        f"# What half of the MACs saves in time\n\n`python {shlex.join(sys.argv)}`\n\n{about}\n\n{head}\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
