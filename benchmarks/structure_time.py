"""Claim: solving a network's axes costs little beyond running it, and grows linearly with the network.

Bars, CPU seconds of one process with one thread, everything on the meta device (shapes alone):

| network                                   | what                                   | at most |
|-------------------------------------------|----------------------------------------|---------|
| DenseNet201, ViT-L/16 (torchvision, 224)  | `trace` less the recorded run in it    | 1 s     |
| Llama with the sizes of 8B (transformers) | building, `trace`, a plan, the cut     | 20 s    |

and a chain of blocks of growing depth: seconds per block stay the same. `run` is the recording alone: the model's own
Python, torch's dispatch and our notes; `solve` is the rest of `trace`: rules, groups, ties and the copy on the meta
device. `plan` cuts a quarter of every exact group that is not tied to another and includes the confirming run.

Medians over `--repeats` rounds after one round of warm-up.

    python benchmarks/structure_time.py --out experiments/results/structure_time
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure.recording import Example, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from oracles.library import define_torchvision_ops  # noqa: E402


@dataclass(frozen=True)
class Row:
    """CPU seconds."""

    network: str
    operations: int
    groups: int
    build_s: float
    run_s: float
    trace_s: float
    plan_s: float
    cut_s: float
    delivery: str

    @property
    def solve_s(self) -> float:
        return max(0.0, self.trace_s - self.run_s)


def torchvision_model(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        define_torchvision_ops()
        import torchvision

        return getattr(torchvision.models, name)(), torch.zeros(1, 3, 224, 224, device="meta")

    return make


def llama_8b() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
    return transformers.LlamaForCausalLM(config), {"input_ids": ids}


class Chain(nn.Module):
    """Residual blocks, each with a hidden layer of its own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 24, 3, padding=1),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.Conv2d(24, 16, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def chain(depth: int) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Chain(depth), torch.zeros(1, 3, 8, 8, device="meta"))


def measured(name: str, make: Callable[[], tuple[nn.Module, Any]], repeats: int) -> Row:
    """Medians of one network."""
    rounds: list[Row] = []
    for _ in range(repeats + 1):
        start = time.process_time()
        with torch.device("meta"):
            model, inputs = make()
        model.eval()
        build_s = time.process_time() - start
        doubled = Example.of(inputs).map(lambda t: torch.cat([t, t]))
        start = time.process_time()
        program = record(model, doubled)
        run_s = time.process_time() - start
        start = time.process_time()
        structure = ap.trace(model, inputs)
        trace_s = time.process_time() - start
        tied = {name for tie in structure.ties for name, _ in tie.members}
        kept = {
            group.name: range(max(group.smallest, group.size * 3 // 4))
            for group in structure.choose()
            if group.name not in tied
        }
        start = time.process_time()
        plan = structure.plan(kept)
        plan_s = time.process_time() - start
        start = time.process_time()
        ap.cut(model, plan)
        cut_s = time.process_time() - start
        numbers = (build_s, run_s, trace_s, plan_s, cut_s)
        rounds.append(Row(name, len(program.calls), len(structure.groups), *numbers, plan.delivery))
    rounds = rounds[1:]
    times = {
        key: median(getattr(row, key) for row in rounds)
        for key in ("build_s", "run_s", "trace_s", "plan_s", "cut_s")
    }
    return Row(**{**asdict(rounds[0]), **times})


def plot(rows: list[Row], path: Path) -> None:
    """Seconds over the number of operations; linear is a straight line."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for key, label in (
        ("run_s", "run and record"),
        ("solve_s", "solve"),
        ("plan_s", "plan and confirm"),
    ):
        axes.plot([r.operations for r in rows], [getattr(r, key) for r in rows], "o-", label=label)
    axes.set_xlabel("operations of the network")
    axes.set_ylabel("CPU seconds")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def table(rows: list[Row]) -> str:
    lines = [
        "| network | operations | groups | build s | run s | solve s | plan s | cut s | all s | delivered as |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        total = r.build_s + r.trace_s + r.plan_s + r.cut_s
        numbers = (r.build_s, r.run_s, r.solve_s, r.plan_s, r.cut_s, total)
        cells = " | ".join(f"{number:.2f}" for number in numbers)
        lines.append(f"| {r.network} | {r.operations} | {r.groups} | {cells} | {r.delivery} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", default="4,16,64,128,256")
    parser.add_argument("--out", type=Path, help="writes .md, .json and .png under this name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    networks = [
        ("ResNet50", torchvision_model("resnet50")),
        ("DenseNet201", torchvision_model("densenet201")),
        ("ViT-L/16", torchvision_model("vit_l_16")),
        ("Llama 8B", llama_8b),
    ]
    rows = [measured(name, make, options.repeats) for name, make in networks]
    depths = [int(depth) for depth in options.depths.split(",")]
    chains = [measured(f"chain of {depth}", chain(depth), options.repeats) for depth in depths]
    print(table(rows + chains))
    if options.out is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    command = f"python {shlex.join(sys.argv)}"
    about = f"torch {torch.__version__}, Python {platform.python_version()}, one thread, commit {commit}"
    about += f", median of {options.repeats}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plot(chains, options.out.with_suffix(".png"))
    data = {"command": command, "about": about, "rows": [asdict(r) for r in rows + chains]}
    options.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(
        f"# What tracing costs\n\n`{command}`\n\n{about}. CPU seconds; `solve` is `trace` without the run in it.\n\n"
        f"{table(rows + chains)}\n\n![seconds over operations]({options.out.name}.png)\n"
    )


if __name__ == "__main__":
    main()
