"""Which criterion, ranked how and in how many stages, removes single weights of the public ResNet50 best, untrained?

    python experiments/sparse_resnet50.py --device cuda --workers 4 --out experiments/results/sparse_resnet50.csv

One NVIDIA H200, float32 (tf32 only with --tf32). Weights go by one global threshold; scores and batch norms see 500
images of the calibrating set, three draws; figures are those on 2,000 judging images. Batch norms are left as they were
(`frozen`) or measured anew on the draw after every stage (`re-estimate`). No training.

One line per network, written when it is done, draw by draw. `gained` and `lost` are the shares of images that only the
sparse or only the dense network has right, `difference` = gained − lost, `difference_se` its standard error.
`nominal` is the share removed by the masks, `sparsity` that of zeros counted in the weights of the judged network.
Seconds and memory (MiB, of one process; on a CPU the most it ever had) are those of `sparsify` alone, while `--workers`
share the device. A JSON file beside the lines tells options, commit and environment.
"""

import argparse
import itertools
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from imagenet import DRAW_SIZE, DRAWS, Images, load_images, public_resnet50
from narrow_lines import Row, write_lines
from torch import Tensor, nn

from apoptosis.criteria import CRITERIA, SALIENCIES
from apoptosis.errors import ApoptosisError
from apoptosis.masks import MaskPlan, identity_masks, maskable
from apoptosis.planning import Sparsity
from apoptosis.workflow import sparsify

REMOVED = (0.5, 0.6, 0.7, 0.8, 0.9)
STAGES = (1, 5, 20)
POLICIES = ("frozen", "re-estimate")
DATA_FREE = ("magnitude", "magnitude-l2", "random")
FIGURES = (
    *("accuracy", "loss", "gained", "lost", "difference", "difference_se"),
    *("nominal", "sparsity", "zeros", "num_weights", "num_emptied", "emptied"),
)


@dataclass(frozen=True)
class Network:
    """One network to make; the dense one has no criterion."""

    criterion: str
    saliency: str = ""
    stages: int = 0
    batch_norm: str = "frozen"
    removed: float = 0.0
    draw: int = 0


def networks(args: argparse.Namespace) -> list[Network]:
    """The dense one, then draw by draw, the quick ones first."""
    found = [Network("dense")]
    for draw, stages, policy, name, how, removed in itertools.product(
        args.draws, args.stages, args.batch_norm, args.criteria, args.saliencies, args.removed
    ):
        if name in DATA_FREE:
            # Neither stages nor, without new batch norms, draws change a network whose ranking stays the same.
            assert SALIENCIES[how].normalise in ("none", "max"), "ranks change with what is left"
            if stages != args.stages[0] or (policy == "frozen" and draw != args.draws[0]):
                continue
            stages = 1
        found.append(Network(name, how, stages, policy, removed, draw))
    return found


class Bench:
    """What one process holds: the network, the images, and what the dense network gets right."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = args.tf32  # torch allows it for convolutions unless told
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        self.model = public_resnet50(args.data, args.device)
        judge, calibrate = (
            load_images(which, args.data, args.device, args.batch)
            for which in ("judge", "calibrate")
        )
        self.judge = judge if args.limit is None else judge.draw(0, args.limit)
        self.draws = {
            draw: calibrate.draw(draw, args.limit or DRAW_SIZE) for draw in set(args.draws)
        }
        self.dense, _ = judged(self.model, self.judge)

    def row(self, network: Network) -> Row:
        """Make the network and judge it; a refusal is a line too, without figures."""
        if on_cuda := self.judge.pixels.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            made, failure = self.made(network), ""
        except ApoptosisError as error:
            made, failure = None, f"{type(error).__name__}: {error}"
        if on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else _max_rss_bytes()
        return {
            **asdict(network),
            **(dict.fromkeys(FIGURES, "") if made is None else self.figures(*made)),
            "seconds": seconds,
            "peak_mib": peak_bytes / 2**20,
            "failure": failure,
        }

    def made(self, network: Network) -> tuple[nn.Module, MaskPlan]:
        """The sparse network and its masks."""
        if network.criterion == "dense":
            return self.model, identity_masks(self.model)
        outcome = sparsify(
            self.model,
            self.draws[network.draw],
            Sparsity(keep=1 - network.removed, allow_empty=True),
            criterion=network.criterion,
            stages=network.stages,
            saliency=SALIENCIES[network.saliency],
            batch_norm=network.batch_norm,
        )
        return outcome.model, outcome.plan

    def figures(self, model: nn.Module, masks: MaskPlan) -> Row:
        """Accuracy and loss, against the dense network; what went, by the masks and by the weights themselves."""
        correct, loss = judged(model, self.judge)
        change = correct.double() - self.dense.double()
        emptied = [name for name, (kept, _) in masks.counts().items() if not kept]
        weights = [model.get_parameter(name) for name in maskable(model)]
        zeros, every = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
        found = (
            float(correct.double().mean()),
            loss,
            float((change > 0).double().mean()),
            float((change < 0).double().mean()),
            float(change.mean()),
            float(change.std() / math.sqrt(len(change))),
            1 - masks.density,
            zeros / every,
            zeros,
            every,
            len(emptied),
            " ".join(emptied),
        )
        return dict(zip(FIGURES, found, strict=True))


def judged(model: nn.Module, images: Images) -> tuple[Tensor, float]:
    """Which images it has right `(n,)`, and the mean loss."""
    right, losses = [], []
    with torch.no_grad():
        for pixels, labels in images:
            logits = model(pixels)
            right.append(logits.argmax(1) == labels)
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
    return torch.cat(right), float(torch.cat(losses).double().mean())


# -- processes, command line ------------------------------------------------------------------------------------------

_bench: Bench | None = None


def _job(job: tuple[Network, argparse.Namespace]) -> list[Row]:
    global _bench
    network, args = job
    _bench = _bench or Bench(args)
    return [_bench.row(network)]


def _max_rss_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def environment(args: argparse.Namespace, seconds: float | None) -> dict[str, Any]:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "commit": commit or os.environ.get("GIT_COMMIT", "unknown"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    of_weights = [name for name, criterion in CRITERIA.items() if criterion.score is not None]
    parser.add_argument("--criteria", nargs="+", choices=of_weights, default=["magnitude", "oba"])
    parser.add_argument("--saliencies", nargs="+", choices=SALIENCIES, default=["plain", "paper"])
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--batch-norm", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--removed", type=float, nargs="+", default=REMOVED)
    parser.add_argument("--draws", type=int, nargs="+", default=DRAWS)
    parser.add_argument("--batch", type=int, default=100, help="images at a time")
    parser.add_argument("--limit", type=int, help="at most so many images of each set, to try it")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start = time.perf_counter()
    jobs = [(network, args) for network in networks(args)]
    about = args.out.with_suffix(".json")
    about.write_text(json.dumps(environment(args, None), indent=1) + "\n")
    with get_context("spawn").Pool(args.workers) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))
    about.write_text(json.dumps(environment(args, time.perf_counter() - start), indent=1) + "\n")


if __name__ == "__main__":
    main()
