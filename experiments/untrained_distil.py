"""What steps towards the dense network add to the repairs without training: the public narrow ResNet32, no labels.

    python experiments/untrained_distil.py --device cuda --draws 0 1 2 --out untrained_distil.csv

Channels inside blocks go by `--ways` in one step, layers and blocks are refitted on a draw of 2,000 images, as in
`untrained.py`; then `Distil` on all training images of `--cifar`, moved and flipped at random, labels unread. The same
columns, so `untrained_tables.py` puts the lines on the same page; seconds are those of distilling alone, once a few
steps have warmed the device up. 1,900 steps of 200 images are half a minute of an H200.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from cifar import Cifar, load_cifar, public_network
from narrow_lines import Row, write_lines
from torch import nn
from untrained import REMOVED, Choice, first

from apoptosis.data import Augmentation, Batches
from apoptosis.repair import Distil, Refit, RefitBlocks
from apoptosis.structure import cut, trace
from apoptosis.training import evaluate

MOVED = Augmentation(pad=4)


def networks(
    args: argparse.Namespace, data: Cifar, everything: Cifar, dense: nn.Module
) -> Iterator[list[Row]]:
    structure = trace(dense, data.test[0][:1])
    distil = Distil(steps=args.steps, learning_rate=args.learning_rate)
    for way, draw, removed in product(args.ways, args.draws, args.removed):
        batches = first(data.draw(draw, 250), 2000)
        plan, chosen_s = Choice(dense, structure, batches, way, draw).plan(removed)
        small = cut(dense, plan)
        for repair in (Refit(), RefitBlocks()):
            small = repair(dense, small, plan, batches, None)
        images = Batches(
            *everything.train, size=args.batch_size, shuffle_seed=draw, augmentation=MOVED
        )
        replace(distil, steps=5)(dense, small, plan, images, None)
        start = time.perf_counter()
        small = distil(dense, small, plan, images, None)
        seconds = time.perf_counter() - start
        judged = {
            half: evaluate(small, getattr(data, half)()).metrics["correct"]
            for half in ("choose", "report")
        }
        yield [
            {
                "device": args.device,
                "network": "narrow",
                "of": "channels",
                "draw": draw,
                "way": way,
                "removed": removed,
                "repair": f"refit+blocks+distil:{args.steps}x{args.batch_size}",
                "images": 2000,
                **judged,
                "choosing_s": chosen_s,
                "repair_s": seconds,
            }
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", default="data/cifar10.npz")
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draws", type=int, nargs="+", default=[0])
    parser.add_argument("--removed", type=float, nargs="+", default=REMOVED)
    parser.add_argument("--ways", nargs="+", default=["obs:1"])
    parser.add_argument("--steps", type=int, default=1900)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data, everything = (load_cifar(own, args.device) for own in (args.data, args.cifar))
    dense = public_network(32, args.weights, args.device)
    count = len(args.ways) * len(args.draws) * len(args.removed)
    write_lines(args.out, networks(args, data, everything, dense), count)


if __name__ == "__main__":
    main()
