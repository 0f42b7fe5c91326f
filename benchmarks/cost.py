"""Claim: the exact curvature product costs about two training steps, in time and in memory.

Bars, `connectivity` product alone against plain forward + backward of the same batch (limit by arithmetic: 2.0 times):

| hardware                    | network                              | time   | peak memory |
|-----------------------------|--------------------------------------|--------|-------------|
| one H200                    | wide ResNet32, batch >= 256, fp32    | <= 2.2 | <= 2.2      |
| one H200                    | ViT-B/16 at 224, batch 64, fp32      | <= 2.6 | <= 2.6      |
| one H200                    | ViT-B/16 at 224, batch 64, tf32      | <= 3.3 |             |
| CPU, 2 cores                | wide ResNet32, fp32                  | <= 2.4 |             |
| CPU, 2 cores                | ViT, 6 layers, dim 192, 64 tokens    | <= 2.6 |             |

Trials: all methods in one process, in turn, `--repeats` rounds; medians, and the range over rounds of the ratio to the
plain step of the same round. Warm-up comes before and apart: `--warmup` calls, then the call whose memory is measured.
Memory is the peak above what was there before, less the bytes of what the call returns (gradients, products).
Everything `curvature_product` does is counted, its checks of input and result as well.

`error` is the relative distance to double backward (hessian) or to curvlinops (ggn), in the precision of the run.
curvlinops' Hessian is off by percents on networks with LayerNorm: it is `jvp` of `jacrev`, which torch 2.13 gets wrong
there, where `jvp` of `grad` and double backward agree with finite differences.
On a machine that others use too, set OMP_WAIT_POLICY=passive: threads that spin while they wait make all rows slow.

    python benchmarks/cost.py --device cpu --peers
    python benchmarks/cost.py --device cuda --models resnet32,vit-b --precision fp32,tf32,bf16 --out cost.json
"""

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler, which counts memory, is chatty

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from apoptosis.curvature import curvature_product
from networks import NETWORKS, settle

MIB = 2**20
PLAIN, DOUBLE, PEER_GGN = "plain step", "double backward", "curvlinops GGN"
REFERENCES = {"hessian": DOUBLE, "ggn": PEER_GGN}
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Method:
    """One way to compute `quantity`. `ours` must not fail; others may, and then get a note instead of numbers."""

    name: str
    quantity: str
    call: Callable[[], Any]
    ours: bool = False


@dataclass
class Row:
    """What was measured of one method."""

    name: str
    quantity: str
    times_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    result_bytes: int | None = None
    left_bytes: int | None = None
    error: float | None = None
    note: str = ""

    @property
    def time_s(self) -> float | None:
        return median(self.times_s) if self.times_s else None

    @property
    def extra_bytes(self) -> int | None:
        if self.peak_bytes is None or self.result_bytes is None:
            return None
        return self.peak_bytes - self.result_bytes


@dataclass(frozen=True)
class Case:
    """A network with a batch, ready to run on a device in a precision."""

    model: nn.Module
    x: Tensor
    labels: Tensor
    device: str
    precision: str

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        return nullcontext()

    def loss(self) -> Tensor:
        with self.autocast():
            return F.cross_entropy(self.model(self.x), self.labels)


# -- methods ----------------------------------------------------------------------------------------------------------


def methods_of(case: Case, *, peers: bool) -> list[Method]:
    """The rows of the table, the plain step first."""
    generator = torch.Generator(case.device).manual_seed(1)
    direction = {
        name: torch.randn(p.shape, generator=generator, device=p.device) * 0.02
        for name, p in case.model.named_parameters()
    }

    def ours(kind: str, **options: Any) -> Callable[[], Any]:
        def call() -> Any:
            with case.autocast():
                return curvature_product(case.model, [(case.x, case.labels)], kind=kind, **options)

        return call

    found = [
        Method(PLAIN, "gradient", lambda: plain_step(case), ours=True),
        Method("connectivity", "connectivity", ours("connectivity"), ours=True),
        Method("functional", "functional", ours("functional"), ours=True),
        Method("hessian", "hessian", ours("hessian"), ours=True),
        Method("ggn", "ggn", ours("ggn"), ours=True),
        Method("connectivity + gradient", "both", ours("connectivity", gradient=True), ours=True),
        Method(
            "connectivity, general direction",
            "connectivity",
            ours("connectivity", direction=direction),
            ours=True,
        ),
        Method(DOUBLE, "hessian", lambda: double_backward(case)),
        Method("torch.func (jvp of grad)", "hessian", lambda: forward_over_reverse(case)),
    ]
    return found + (peer_methods(case) if peers else [])


def plain_step(case: Case) -> tuple[Tensor, ...]:
    """Forward and backward, as a training step does it."""
    return torch.autograd.grad(case.loss(), list(case.model.parameters()))


def double_backward(case: Case) -> tuple[Tensor, ...]:
    """The Hessian times θ by differentiating ⟨gradient, θ⟩."""
    parameters = list(case.model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        gradients = torch.autograd.grad(case.loss(), parameters, create_graph=True)
        vectors = [p.detach() for p in parameters]
        return torch.autograd.grad(gradients, parameters, vectors)


def forward_over_reverse(case: Case) -> dict[str, Tensor]:
    """The Hessian times θ as the directional derivative of the gradient."""
    parameters = {name: p.detach() for name, p in case.model.named_parameters()}
    buffers = dict(case.model.named_buffers())

    def loss(values: dict[str, Tensor]) -> Tensor:
        with case.autocast():
            outputs = torch.func.functional_call(case.model, (values, buffers), (case.x,))
            return F.cross_entropy(outputs, case.labels)

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(torch.func.grad(loss), (parameters,), (parameters,))[1]


def peer_methods(case: Case) -> list[Method]:
    """`curvlinops-for-pytorch`, with its operators built beforehand."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    parameters = list(case.model.parameters())
    vectors = [p.detach().clone() for p in parameters]

    def product(operator: Any) -> Callable[[], Any]:
        built = operator(
            case.model,
            nn.CrossEntropyLoss(),
            parameters,
            [(case.x, case.labels)],
            check_deterministic=False,
        )

        def call() -> Any:
            with sdpa_kernel(SDPBackend.MATH), case.autocast():
                return built @ vectors

        return call

    return [
        Method("curvlinops Hessian", "hessian", product(HessianLinearOperator)),
        Method(PEER_GGN, "ggn", product(GGNLinearOperator)),
    ]


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case, methods: list[Method], repeats: int, warmup: int) -> list[Row]:
    """Warm up, compare results, measure memory, then time in turn."""
    rows = {m.name: Row(m.name, m.quantity) for m in methods}
    results: dict[str, Tensor] = {}
    running: list[Method] = []
    for method in methods:
        try:
            for _ in range(warmup):
                method.call()
            result = measure_memory(case, method, rows[method.name])
            if method.quantity in REFERENCES:
                results[method.name] = flat(result)
            del result
        except (RuntimeError, TypeError, ValueError) as error:
            if method.ours:
                raise
            rows[method.name].note = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            continue
        running.append(method)
    note_errors(rows, results)
    results.clear()
    for _ in range(repeats):
        for method in running:
            rows[method.name].times_s.append(timed(case, method))
    return list(rows.values())


def timed(case: Case, method: Method) -> float:
    """Seconds of one call."""
    gc.collect()
    if case.device == "cpu":
        start = time.perf_counter()
        method.call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    method.call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000


def measure_memory(case: Case, method: Method, row: Row) -> Any:
    """Note the peak above the start, the result's bytes and what stays behind besides; return the result."""
    gc.collect()
    if case.device == "cpu":
        row.peak_bytes, end, result = trace_memory(method)
        row.result_bytes = bytes_of(result)
        row.left_bytes = end - row.result_bytes
        return result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = method.call()
    torch.cuda.synchronize()
    row.peak_bytes = torch.cuda.max_memory_allocated() - before
    row.result_bytes = bytes_of(result)
    row.left_bytes = torch.cuda.memory_allocated() - before - row.result_bytes
    return result


def trace_memory(method: Method) -> tuple[int, int, Any]:
    """Peak, end and result of a call on the CPU, in the running sum of what the allocator gave and took back.

    Work space that the kernels' own libraries allocate for themselves is not seen.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = method.call()
    results = profile.profiler.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak, total, result


def note_errors(rows: dict[str, Row], results: dict[str, Tensor]) -> None:
    """Relative distance to the reference method of the same quantity."""
    for name, result in results.items():
        reference = REFERENCES[rows[name].quantity]
        if name != reference and reference in results:
            truth = results[reference]
            rows[name].error = float((result - truth).norm() / truth.norm())


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Every tensor a method returned, in the order of the parameters."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for item in result.values():
            yield from tensors_of(item)
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_of(item)
    elif result is not None:
        yield from tensors_of(result.product)
        yield from tensors_of(result.gradient)


def bytes_of(result: Any) -> int:
    """Bytes of all storages of a result, each counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, tensors_of(result))}
    return sum(storages.values())


def flat(result: Any) -> Tensor:
    """A result as one vector on the CPU."""
    return torch.cat([t.detach().double().cpu().flatten() for t in tensors_of(result)])


@contextmanager
def set_precision(precision: str) -> Iterator[None]:
    """Allow or forbid tf32 everywhere."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allowed = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# -- reporting --------------------------------------------------------------------------------------------------------


def table_of(rows: list[Row]) -> str:
    """Aligned text: time and memory with their ratio to the plain step."""
    plain = next(row for row in rows if row.name == PLAIN)
    heads = ("method", "ms", "x plain", "(rounds)", "MiB", "x plain", "error", "note")
    lines = [heads, *(_cells(row, plain) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    text = [
        "  ".join(
            c.ljust(w) if i in (0, 7) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in text)


def _cells(row: Row, plain: Row) -> tuple[str, ...]:
    error = "" if row.error is None else f"{row.error:.0e}"
    if row.time_s is None or row.extra_bytes is None:
        return (row.name, "-", "-", "-", "-", "-", error, row.note)
    ratios = [a / b for a, b in zip(row.times_s, plain.times_s, strict=True)]
    note = row.note
    if row.left_bytes is not None and row.left_bytes > MIB:
        note = f"{row.left_bytes / MIB:.0f} MiB not freed until garbage collection"
    return (
        row.name,
        f"{1000 * row.time_s:.1f}",
        f"{row.time_s / (plain.time_s or 1):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{row.extra_bytes / MIB:.0f}",
        f"{row.extra_bytes / (plain.extra_bytes or 1):.2f}",
        error,
        note,
    )


def record_of(row: Row, plain: Row) -> dict[str, Any]:
    """One row for the JSON file: raw numbers and ratios."""
    ratios: dict[str, float | None] = {"time_ratio": None, "memory_ratio": None}
    if row.time_s is not None and row.extra_bytes is not None:
        ratios["time_ratio"] = row.time_s / (plain.time_s or 1)
        ratios["memory_ratio"] = row.extra_bytes / (plain.extra_bytes or 1)
    return {**asdict(row), "time_s": row.time_s, "extra_bytes": row.extra_bytes, **ratios}


def environment(device: str) -> dict[str, Any]:
    """Where and with what the numbers were made."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that was measured, marked where files differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "-s") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get(
            "GIT_COMMIT", "unknown"
        )  # where a copy without its history is measured


# -- command line -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cost of the curvature product against a plain step."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default="resnet32,vit-small", help=", ".join(NETWORKS))
    parser.add_argument(
        "--batch", type=int, help="samples; by default one size per network and device"
    )
    parser.add_argument(
        "--precision", default="fp32", help="one or more of " + ", ".join(PRECISIONS)
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="calls before memory is measured")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (with --device cpu)")
    parser.add_argument(
        "--methods", help="rows to measure besides the plain step, by parts of names"
    )
    parser.add_argument("--peers", action="store_true", help="also curvlinops (CPU)")
    parser.add_argument("--out", type=Path, help="write all raw numbers here, as JSON")
    args = parser.parse_args(argv)
    args.models, args.precision = args.models.split(","), args.precision.split(",")
    for given, known, what in (
        (args.models, NETWORKS, "models"),
        (args.precision, PRECISIONS, "precision"),
    ):
        if unknown := set(given) - set(known):
            parser.error(f"--{what} {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if args.repeats < 1:
        parser.error("--repeats is at least 1")
    if args.device == "cpu" and "tf32" in args.precision:
        parser.error("tf32 exists on CUDA only")
    if args.device == "cuda" and args.peers:
        parser.error("--peers are measured on the CPU only")
    return args


def run_case(args: argparse.Namespace, name: str, precision: str) -> dict[str, Any]:
    """Measure and print one network in one precision."""
    network = NETWORKS[name]
    batch = args.batch or (network.cpu_batch if args.device == "cpu" else network.cuda_batch)
    torch.manual_seed(0)
    x = torch.randn(batch, 3, network.pixels, network.pixels).to(args.device)
    labels = torch.randint(network.num_classes, (batch,)).to(args.device)
    with set_precision(precision):
        model = settle(network.build().to(args.device), x)
        case = Case(model, x, labels, args.device, precision)
        methods = methods_of(case, peers=args.peers)
        if args.methods:
            parts = args.methods.split(",")
            methods = [
                m for m in methods if m.name == PLAIN or any(part in m.name for part in parts)
            ]
        rows = measure(case, methods, args.repeats, args.warmup)
    weights = sum(p.numel() for p in model.parameters())
    print(
        f"\n{name} ({weights / 1e6:.1f} M weights), batch {batch}, {precision}, "
        f"median of {args.repeats} rounds\n{table_of(rows)}",
        flush=True,
    )
    plain = rows[0]
    return {
        "model": name,
        "weights": weights,
        "batch": batch,
        "precision": precision,
        "repeats": args.repeats,
        "rows": [record_of(row, plain) for row in rows],
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    where = environment(args.device)
    print("  ".join(f"{key}: {value}" for key, value in where.items()))
    cases = [run_case(args, name, p) for name in args.models for p in args.precision]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"environment": where, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
