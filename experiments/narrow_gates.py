"""How much should the gradient count in gates? Rank correlation with the true loss change, by the gradient's weight.

    python experiments/narrow_gates.py --draws 0 1 2 --out experiments/results/narrow_gates

Public narrow ResNet32, the 560 channels inside blocks. Scores −w g + ½ diag G of each draw of 2,000 training images;
truth (the change of loss when a channel is zeroed) on the same images, and on those of the next draw, which the scores
did not see. `--images` takes fewer of each. Writes what was found as .csv and a page, .md.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from cifar import load_cifar, public_network
from narrow_lines import Row, read_lines, write_lines
from torch import Tensor

from apoptosis.criteria import spearman, unit_truth
from apoptosis.criteria.gates import find_gates
from apoptosis.curvature import GateOptions, gate_curvature
from apoptosis.data import Batches
from apoptosis.models import CifarResNet
from apoptosis.progress import track
from apoptosis.structure import trace
from apoptosis.task import Task

WEIGHTS = (1.0, 0.5, 0.2, 0.0)
FLOORS = {"per_layer": 0.93, "all": 0.94}
Truth = dict[str, Tensor]


class Truths:
    """`unit_truth` of channels inside blocks, with all before a block run once: half the work of whole forwards."""

    def __init__(self, model: CifarResNet, batches: Batches) -> None:
        self.model = model
        self.blocks = [
            (f"{stage}.{k}", block)
            for stage in ("layer1", "layer2", "layer3")
            for k, block in enumerate(getattr(model, stage))
        ]
        self.batches = batches

    @torch.no_grad()
    def all(self) -> Truth:
        count = sum(len(batch[0]) for batch in self.batches)
        found: dict[str, Tensor] = {}
        for batch in track(list(self.batches), "removing each unit"):
            images, labels = batch[0], batch[1]
            x = F.relu(self.model.bn1(self.model.conv1(images)))
            plain = self._loss(x, 0, labels)
            for number, (name, block) in enumerate(self.blocks):
                hidden = F.relu(block.bn1(block.conv1(x)))
                beside = block.shortcut(x)
                own = found.setdefault(f"{name}.conv1", torch.zeros(hidden.shape[1]).double())
                for unit in range(hidden.shape[1]):
                    without = hidden.index_fill(1, torch.tensor(unit, device=x.device), 0)
                    after = F.relu(block.bn2(block.conv2(without)) + beside)
                    loss = self._loss(after, number + 1, labels)
                    own[unit] += (loss - plain) * len(labels) / count
                x = block(x)
        return found

    def _loss(self, x: Tensor, start: int, labels: Tensor) -> float:
        for _, block in self.blocks[start:]:
            x = block(x)
        return float(F.cross_entropy(self.model.linear(x.mean((2, 3))), labels))


def correlations(scores: Truth, truth: Truth) -> tuple[float, float]:
    """Mean over layers, and over all units at once."""
    layers = [spearman(scores[name], own) for name, own in truth.items()]
    every = torch.cat([scores[name] for name in truth])
    return sum(layers) / len(layers), spearman(every, torch.cat(list(truth.values())))


def jobs(args: argparse.Namespace) -> Iterator[list[Row]]:
    data, model = load_cifar(args.data, args.device), public_network(32, args.weights, args.device)
    structure = trace(model, data.train[0][:1])
    inside = [group for group in structure.groups if group.kind == "channel"]
    gates = [gate for group in inside for gate in find_gates(model, group)]
    draws = {
        draw: Batches(
            *(part[2000 * draw : 2000 * draw + args.images] for part in data.train), size=250
        )
        for draw in range(3)
    }
    truths: dict[int, Truth] = {}

    def truth(draw: int) -> Truth:
        if draw not in truths:
            truths[draw] = Truths(model, draws[draw]).all()
        return truths[draw]

    few = Batches(*(part[:8] for part in data.train), size=8)
    name = inside[0].name
    torch.testing.assert_close(
        Truths(model, few).all()[name], unit_truth(model, structure, few, groups=[name])[name]
    )
    for draw in args.draws:
        start = time.perf_counter()
        options = GateOptions(form="diagonal")
        found = gate_curvature(model, draws[draw], Task.classification(), gates, options)
        seconds = time.perf_counter() - start
        assert found.gradient is not None, "these images have labels"
        rows: list[Row] = []
        for where, other in (("same", draw), ("other", (draw + 1) % 3)):
            for weight in WEIGHTS:
                scores = {
                    n: (own / 2 - weight * found.gradient[n]).cpu()
                    for n, own in found.diagonal.items()
                }
                per_layer, over_all = correlations(scores, truth(other))
                row = {"draw": draw, "truth": where, "weight": weight, "images": args.images}
                rows.append({**row, "per_layer": per_layer, "all": over_all, "gates_s": seconds})
        yield rows


def page(rows: Sequence[Row], about: dict[str, str]) -> Iterator[str]:
    images = int(rows[0]["images"])
    yield "# How much should the gradient count in gates? The public narrow ResNet32, CIFAR-10"
    yield ""
    yield f"`{about['command']}`"
    yield ""
    yield (
        f"{about['device']}, torch {torch.__version__}, commit {about['commit']}. Spearman's rank correlation of "
        f"−w g + ½ diag G with the change of loss when one channel is zeroed, the 560 channels inside blocks; scores "
        f"and truth on {images:,} training images each, mean ± s.d. over draws {about['draws']}. *Other*: the truth "
        f"of the next draw, which the scores did not see. Gates take {mean(row['gates_s'] for row in rows):.0f} s."
    )
    yield ""
    yield "| truth on | w | mean over layers | all 560, no normaliser |"
    yield "| --- | ---: | ---: | ---: |"
    for where in ("same", "other"):
        for weight in WEIGHTS:
            own = [row for row in rows if row["truth"] == where and row["weight"] == weight]
            cells = (spread([row[name] for row in own]) for name in ("per_layer", "all"))
            yield f"| {where} images | {weight:g} | {' | '.join(cells)} |"
    yield f"| *to beat, same images* | | {FLOORS['per_layer']:.2f} | {FLOORS['all']:.2f} |"


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if values[1:] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2], choices=range(3))
    parser.add_argument("--commit", default="unknown", help="of the code that measures")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = args.out.with_suffix(".csv")
    write_lines(lines, jobs(args), len(args.draws))
    about = {
        "command": f"python experiments/narrow_gates.py --draws {' '.join(map(str, args.draws))} --out {args.out}",
        "device": "CPU, one thread" if args.device == "cpu" else args.device,
        "commit": args.commit,
        "draws": ", ".join(map(str, args.draws)),
    }
    args.out.with_suffix(".md").write_text("\n".join(page(read_lines(lines), about)) + "\n")


if __name__ == "__main__":
    main()
