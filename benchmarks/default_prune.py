"""Claim: `ap.prune(model, batches, Budget(flops=0.5))` is at least four times as fast as it was at commit 93be74b.

Every case runs in a process of its own with the sources that it is told; the older checkout and this one take turns,
round after round, since machines are shared. CPU seconds of the process (all threads), the wall clock, the largest
resident memory, and how long each stage took by what `apoptosis.progress` says of it. `--operations` runs the cases
once more and counts the tensor operations of each stage: on a GPU each is one launch or more.

What the faster one is worth is told beside: of samples that nobody fitted, how often the small network answers as the
dense one does, and the mean KL of its predictions from those of the dense one.

    git worktree add ../older 93be74b
    python benchmarks/default_prune.py --against ../older/src --rounds 2 --out experiments/results/default_prune
    python benchmarks/default_prune.py --against ../older/src --launches

Networks have random weights; images are smooth noise. `resnet18` has 256 images of 64 × 64, ten classes; `unet` has a
ResNet encoder of four stages and a decoder that joins each, 32 images of 64 × 64, a label for each pixel; `hybrid` is
timm's MobileNetV4-hybrid-medium, 64 images of 64 × 64; `llama` has 6 layers, width 256, 8 heads of 4 keys, 64
sequences of 64 words.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = "launches"
HELD_OUT = 64
"""Samples that are judged and not pruned on."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the `src` folder of an older checkout")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--operations", action="store_true")
    parser.add_argument("--out", type=Path, help="writes .md and .json under this name")
    parser.add_argument("--launches", action="store_true", help="of the elimination alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        found = launches() if options.one == LAUNCHES else one(options)
        print(json.dumps(found))
        return
    sources = {"new": ROOT / "src"}
    if options.against is not None:
        sources = {"old": options.against.resolve()} | sources
    if options.launches:
        for name, source in sources.items():
            print(name, in_process(LAUNCHES, source, options.threads, counting=False))
        return
    rows = [row for case in options.cases.split(",") for row in in_turn(case, sources, options)]
    page = table(rows)
    print(page)
    if options.out is not None:
        write(options, rows, page)


def in_turn(
    case: str, sources: dict[str, Path], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of a case: old and new by turns."""
    for number in range(options.rounds):
        for name, source in sources.items():
            found = in_process(case, source, options.threads, counting=False)
            row = {"case": case, "source": name, "round": number, **found}
            print(json.dumps(row), flush=True)
            yield row
    for name, source in sources.items() if options.operations else ():
        found = in_process(case, source, options.threads, counting=True)
        yield {"case": case, "source": name, "operations": found["operations"]}


def write(options: argparse.Namespace, rows: list[dict[str, Any]], page: str) -> None:
    """The page and its numbers, with the command and the commit."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    about = f"torch {rows[0].get('torch')}, Python {platform.python_version()}, {options.threads} thread(s), "
    about += f"commit {commit.strip()}, {options.rounds} round(s), old and new in turn"
    command = f"python {shlex.join(sys.argv)}"
    options.out.with_suffix(".json").write_text(
        json.dumps({"command": command, "about": about, "rows": rows}, indent=1) + "\n"
    )
    options.out.with_suffix(".md").write_text(
        f"# What a default prune costs\n\n`{command}`\n\n{about}.\n\n{page}\n"
    )


def in_process(case: str, source: Path, threads: int, *, counting: bool) -> dict[str, Any]:
    """One run with the library in `source`."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | {"PYTHONPATH": str(source)} | dict.fromkeys(names, str(threads))
    command = [sys.executable, __file__, "--one", case, "--threads", str(threads)]
    done = subprocess.run(
        [*command, *(["--operations"] if counting else [])],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Times, memory and worth of one default prune in this process."""
    import torch

    import apoptosis as ap
    from apoptosis.progress import Progress, listen

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, batches, judged, task = CASES[options.one]()
    stages: Counter[str] = Counter()
    began: dict[int, float] = {}
    operations = operations_counted()

    def note(event: Progress) -> None:
        if event.finished:
            stages[event.what] += time.process_time() - began.pop(event.loop)
            operations.stage = ""
        elif event.loop not in began:
            began[event.loop] = time.process_time()
            operations.stage = event.what

    cpu, wall = time.process_time(), time.perf_counter()
    with listen(note), operations if options.operations else nullcontext():
        outcome = ap.prune(model, batches, ap.Budget(flops=0.5), task)
    found = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "stages": {name: round(seconds, 2) for name, seconds in stages.items()},
        "torch": torch.__version__,
        "left_out": outcome.settings["repair_left_out"],
        "kept": {name: len(own) for name, own in outcome.plan.kept.items()},
        "source": str(Path(ap.__file__).parents[1]),
    }
    if options.operations:
        found["operations"] = dict(operations.counts)
    return found | worth(model, outcome.model, judged, task)


def worth(dense: Any, small: Any, batch: Any, task: Any) -> dict[str, float]:
    """How near the small network is to the dense one on data that neither scores nor repairs have seen."""
    import torch

    with torch.no_grad():
        args, kwargs = task.inputs(batch)
        theirs, ours = (
            task.rows(task.outputs(net.eval()(*args, **kwargs)), batch)[0].double()
            for net in (dense, small)
        )
    missed = (theirs.log_softmax(1) - ours.log_softmax(1)) * theirs.softmax(1)
    centred = [own - own.mean(1, keepdim=True) for own in (theirs, ours)]
    return {
        "agrees": float((theirs.argmax(1) == ours.argmax(1)).double().mean()),
        "kl": float(missed.sum(1).mean()),
        "logits_missed": float(
            (centred[0] - centred[1]).square().sum() / centred[0].square().sum()
        ),
    }


def launches() -> dict[str, int]:
    """Operations of finding the paths of 30 groups alike, of 64 and of 192 units: a Llama's hidden layers in small."""
    import torch

    from apoptosis.criteria import elimination

    found: dict[str, int] = {}
    for num_units in (64, 192):
        generator = torch.Generator().manual_seed(0)
        groups: list[Any] = []
        for _ in range(30):
            x = torch.randn(num_units, 2 * num_units, generator=generator, dtype=torch.float64)
            weights = torch.randn(16, num_units, generator=generator, dtype=torch.float64)
            units = torch.arange(num_units)
            inverse = torch.linalg.inv(x @ x.T)
            groups.append([elimination.Reader(inverse, weights, units, units[:, None])])
        counting = operations_counted()
        counting.stage = str(num_units)
        with counting:
            if hasattr(elimination, "eliminate_alike"):
                elimination.eliminate_alike(groups, num_units)
            else:
                for readers in groups:
                    elimination.eliminate(readers, num_units)
        found |= dict(counting.counts)
    return found


def operations_counted() -> Any:
    """A mode that counts operations by the stage they are of."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        stage = ""

        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.counts[self.stage] += 1
            return func(*args, **(kwargs or {}))

    return Counting()


def smooth_images(num: int, size: int) -> Any:
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(num, 3, size // 8, size // 8, generator=generator)
    fine = torch.randn(num, 3, size, size, generator=generator)
    return F.interpolate(coarse, size=size, mode="bilinear") + 0.3 * fine


def without_compiled_torchvision() -> None:
    """timm and transformers import torchvision, whose wheel a CPU build of torch may not be able to."""
    sys.path.insert(0, str(ROOT / "tests"))
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()


def of_timm(name: str, num: int, size: int, **options: Any) -> tuple[Any, Any, Any, Any]:
    without_compiled_torchvision()
    import timm
    import torch

    from apoptosis.task import Task

    model = timm.create_model(name, num_classes=10, **options)
    with torch.no_grad():
        for own in model.modules():
            if hasattr(
                own, "gamma"
            ):  # of new layer scales, near zero: nothing of a block would be seen
                own.gamma.fill_(0.5)
    model = settled(model, size)
    images, labels = smooth_images(num + HELD_OUT, size), torch.randint(10, (num + HELD_OUT,))
    batches = [
        (images[start : start + 64], labels[start : start + 64]) for start in range(0, num, 64)
    ]
    return model, batches, (images[num:], labels[num:]), Task.classification()


def settled(model: Any, size: int) -> Any:
    """With the statistics of batch norms that images have; those of a new network are of no network."""
    import torch

    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(smooth_images(32, size))
    return model.eval()


def unet() -> tuple[Any, Any, Any, Any]:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from apoptosis.task import Task

    class Double(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            self.short = None
            if stride > 1 or inputs != outputs:
                self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(y + (x if self.short is None else self.short(x)))

    class Unet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), classes: int = 4) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, widths[0], 3, 2, 1)
            stages = zip((widths[0], *widths), widths, strict=False)
            self.down = nn.ModuleList(
                nn.Sequential(
                    Residual(inputs, outputs, 1 if number == 0 else 2),
                    Residual(outputs, outputs, 1),
                )
                for number, (inputs, outputs) in enumerate(stages)
            )
            joined = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
            self.up = nn.ModuleList(Double(high + low, low) for high, low in joined)
            self.last = Double(widths[0], widths[0] // 2)
            self.head = nn.Conv2d(widths[0] // 2, classes, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            seen = []
            for stage in self.down:
                x = stage(x)
                seen.append(x)
            for stage, other in zip(self.up, seen[-2::-1], strict=True):
                x = stage(torch.cat([F.interpolate(x, scale_factor=2.0), other], 1))
            return self.head(self.last(F.interpolate(x, scale_factor=2.0)))

    images = smooth_images(32 + 16, 64)
    labels = torch.randint(4, (48, 64, 64))
    batches = [(images[s : s + 8], labels[s : s + 8]) for s in range(0, 32, 8)]
    return settled(Unet(), 64), batches, (images[32:], labels[32:]), Task.classification()


def llama() -> tuple[Any, Any, Any, Any]:
    import torch

    without_compiled_torchvision()
    import transformers

    from apoptosis.task import Task

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    words = torch.randint(512, (64 + HELD_OUT, 64))
    model = transformers.LlamaForCausalLM(config).eval()
    return model, [*words[:64].split(16)], words[64:], Task.language_model()


CASES: dict[str, Callable[[], tuple[Any, Any, Any, Any]]] = {
    "resnet18": lambda: of_timm("resnet18", 256, 64, zero_init_last=False),
    "unet": unet,
    "hybrid": lambda: of_timm("mobilenetv4_hybrid_medium", 64, 64),
    "llama": llama,
}


def table(rows: list[dict[str, Any]]) -> str:
    """Medians by case and source; how many times faster; each stage."""
    lines = [
        "| network | | CPU s | wall s | peak MB | agrees | KL | logits missed | stages, CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for case in cases:
        cpu: dict[str, float] = {}
        wall: dict[str, float] = {}
        for source in ("old", "new"):
            own = [r for r in rows if (r["case"], r["source"]) == (case, source) and "cpu_s" in r]
            if not own:
                continue
            cpu[source], wall[source] = (median(r[key] for r in own) for key in ("cpu_s", "wall_s"))
            last = own[-1]
            stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in last["stages"].items())
            lines.append(
                f"| {case} | {source} | {cpu[source]:.1f} | {wall[source]:.1f} | {last['peak_mb']:.0f} "
                f"| {last['agrees']:.4f} | {last['kl']:.4f} | {last['logits_missed']:.4f} | {stages} |"
            )
        if len(cpu) == 2:
            ratio, by_clock = cpu["old"] / cpu["new"], wall["old"] / wall["new"]
            lines.append(f"| {case} | **times** | **{ratio:.1f}** | **{by_clock:.1f}** | | | | | |")
    counted = [row for row in rows if "operations" in row]
    if counted:
        lines += ["", "Operations:", "", "| network | | " + " | ".join(STAGES) + " |"]
        lines.append("|---|---|" + "---|" * len(STAGES))
        for row in counted:
            cells = " | ".join(f"{row['operations'].get(stage, 0):,}" for stage in STAGES)
            lines.append(f"| {row['case']} | {row['source']} | {cells} |")
    return "\n".join(lines)


STAGES = (
    "what heads carry",
    "trying turns of heads",
    "moments of layers",
    "refitting without units",
    "refitting layers",
    "refitting blocks",
)


if __name__ == "__main__":
    main()
