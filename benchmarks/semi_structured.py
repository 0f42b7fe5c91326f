"""Claim: what 2:4 masks gain on a GPU, once as whole networks and once layer by layer.

Linear weights are masked 2:4 by magnitude and compressed by `apoptosis.masks.semi_structured`, which measures each
layer and leaves dense what would lose; the same network with the same zeros, dense, runs beside it. Forward passes
alternate in one process; medians over `--repeats` rounds and the ratio within each round, called from Python and
replayed as a CUDA graph (torch plans cuSPARSELt's products at every call, which a graph does once). The two are
compared before they are timed. Random weights: time does not depend on them.

    python benchmarks/semi_structured.py --out experiments/results/semi_structured.md
"""

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from apoptosis.masks import mask, semi_structured
from apoptosis.models import vit_b16
from apoptosis.planning import Sparsity, make_masks

ROOT = Path(__file__).parents[1]
LAYERS = (
    (768, 768),
    (768, 3072),
    (3072, 768),
    (4096, 4096),
    (4096, 11008),
    (11008, 4096),
    (8192, 8192),
)
ROWS = (256, 2048, 16384)


class Block(nn.Module):
    """Feed-forward block of a Llama, without the norms."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def cases() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    found: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
        (f"ViT-B/16, batch {batch}", vit_b16, (batch, 3, 224, 224)) for batch in (1, 32, 256)
    ]
    found += [
        (f"Llama-7B feed-forward, {rows} tokens", lambda: Block(4096, 11008), (rows, 4096))
        for rows in ROWS
    ]
    for inputs, outputs in LAYERS:
        for rows in ROWS:
            label = f"linear {inputs} → {outputs}, {rows} rows"
            found.append((label, lambda i=inputs, o=outputs: nn.Linear(i, o), (rows, inputs)))
    return found


def measured(
    make: Callable[[], nn.Module], shape: tuple[int, ...], args: argparse.Namespace
) -> dict[str, float]:
    torch.manual_seed(0)
    model = make().to("cuda", args.dtype).eval()
    names = [
        f"{n}.weight" if n else "weight"
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear)
    ]
    names = [n for n in names if not any(s % 64 for s in model.get_parameter(n).shape)]
    values = {name: model.get_parameter(name).float() for name in names}
    zeros = mask(model, make_masks(model, values, Sparsity(pattern="2:4", names=tuple(names))))
    inputs = torch.randn(shape, device="cuda", dtype=args.dtype)
    found: dict[str, float] = {}
    for way, replayed in (("called", False), ("replayed", True)):
        fast, gains = semi_structured(zeros, inputs, replayed=replayed)
        with torch.inference_mode():
            expected = zeros(inputs).float()
            error = float((expected - fast(inputs).float()).norm() / expected.norm())
            if error > 0.02:
                raise SystemExit(f"outputs differ by {error:.3g}")
            first, second = (
                replay(m, inputs) if replayed else (lambda m=m: m(inputs)) for m in (zeros, fast)
            )
            pairs = [(seconds(first), seconds(second)) for _ in range(args.repeats)]
        ratios = sorted(d / s for d, s in pairs)
        found |= {
            "error": max(error, found.get("error", 0.0)),
            f"{way}_num": sum(gain > 1 for gain in gains.values()),
            f"{way}_of": len(gains),
            f"{way}_dense": 1e3 * median(d for d, _ in pairs),
            f"{way}_sparse": 1e3 * median(s for _, s in pairs),
            f"{way}_ratio": median(ratios),
            f"{way}_low": ratios[0],
            f"{way}_high": ratios[-1],
        }
    return found


def replay(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """One forward pass as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(inputs)
    return graph.replay


def seconds(run: Callable[[], object]) -> float:
    """One run, the mean of as many as make up some 20 ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        run()
    num = 1
    while True:
        start.record()
        for _ in range(num):
            run()
        end.record()
        torch.cuda.synchronize()
        elapsed = start.elapsed_time(end) / 1e3
        if elapsed > 0.02:
            return elapsed / num
        num *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    parser.add_argument("--backend", choices=["cusparselt", "cutlass"], default="cusparselt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "This benchmark needs a CUDA device: semi-structured tensors exist only there."
        )
    torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = args.backend == "cutlass"
    warnings.filterwarnings("ignore", message=".*(prototype stage|is deprecated).*")
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    )
    lines = [
        "# What 2:4 masks gain on a GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {str(args.dtype).removeprefix('torch.')}, kernels "
        f"of {args.backend}, commit {commit}; medians of {args.repeats} rounds, ratio (smallest – largest) within a "
        "round. Above 1 the network is faster than the same one with the same zeros, all dense; *compressed*: layers "
        "that were, because alone they were faster that way.",
        "",
        f"    python benchmarks/semi_structured.py {' '.join(sys.argv[1:])}",
        "",
        "| | called: compressed | dense, ms | 2:4, ms | dense / 2:4 | graph: compressed | dense, ms | 2:4, ms "
        "| dense / 2:4 | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, make, shape in cases():
        found = measured(make, shape, args)
        cells = [label]
        for way in ("called", "replayed"):
            cells.append(f"{found[f'{way}_num']:.0f} of {found[f'{way}_of']:.0f}")
            cells += [f"{found[f'{way}_dense']:.3f}", f"{found[f'{way}_sparse']:.3f}"]
            low, high = found[f"{way}_low"], found[f"{way}_high"]
            cells.append(f"**{found[f'{way}_ratio']:.2f}** ({low:.2f} – {high:.2f})")
        lines.append(f"| {' | '.join(cells)} | {found['error']:.1e} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
