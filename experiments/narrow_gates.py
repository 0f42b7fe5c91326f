"""How much should the gradient count in gates? Rank correlation with the true loss change, by the gradient's weight.

    python experiments/narrow_gates.py --data data/carry/draws.npz --weights data/carry --device cuda

Public narrow ResNet32, the 560 channels inside blocks. Scores −w g + ½ diag G from draw 0; truth (the change of loss
when a channel is zeroed) on the same images, and on those of draw 1. `--images` takes fewer of each.
"""

import argparse
import time

import torch
from cifar import load_cifar, public_network
from torch import Tensor

from apoptosis.criteria import spearman, unit_truth
from apoptosis.criteria.gates import find_gates
from apoptosis.curvature import GateOptions, gate_curvature
from apoptosis.data import Batches
from apoptosis.structure import trace
from apoptosis.task import Task

WEIGHTS = (1.0, 0.5, 0.2, 0.0)


def correlations(scores: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, float]:
    """Mean over layers, and over all units at once."""
    layers = [spearman(scores[name], own) for name, own in truth.items()]
    every = torch.cat([scores[name] for name in truth])
    return sum(layers) / len(layers), spearman(every, torch.cat(list(truth.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    data, model = load_cifar(args.data, args.device), public_network(32, args.weights, args.device)
    structure = trace(model, data.train[0][:1])
    inside = [group for group in structure.groups if group.kind == "channel"]
    draws = [
        Batches(*(part[start : start + args.images] for part in data.train), size=250)
        for start in (0, 2000)
    ]
    start = time.perf_counter()
    gates = [gate for group in inside for gate in find_gates(model, group)]
    options = GateOptions(form="diagonal")
    found = gate_curvature(model, draws[0], Task.classification(), gates, options)
    assert found.gradient is not None, "these images have labels"
    print(f"gates of {args.images} images: {time.perf_counter() - start:.1f} s")
    for where, batches in zip(("same images", "other images"), draws, strict=True):
        truth = unit_truth(model, structure, batches, groups=[group.name for group in inside])
        for weight in WEIGHTS:
            scores = {n: own / 2 - weight * found.gradient[n] for n, own in found.diagonal.items()}
            per_layer, over_all = correlations(scores, truth)
            print(f"{where}, w={weight}: per layer {per_layer:.3f}, all {over_all:.3f}")


if __name__ == "__main__":
    main()
