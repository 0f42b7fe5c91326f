"""What do repairs without labels bring back on the public narrow ResNet32 with half of its inner channels gone?

    python experiments/narrow_repair.py --out experiments/results/narrow_repair.csv

The 560 channels inside blocks, half of them removed in one step, at least 2 left in each block; scores and repairs on
draw 0 (2,000 training images), accuracy on test images 5,000–9,999. One seed. Seconds are those of the last repair of a
row, of one CPU thread.
"""

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cifar import load_cifar, public_network

from apoptosis.criteria import CRITERIA
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.repair import Distil, Refit, Repair, batch_norm
from apoptosis.structure import cut, trace
from apoptosis.training import evaluate

CRITERIA_NAMES = ("magnitude-l2", "taylor-activation")
REPAIRS: dict[str, Sequence[Repair]] = {
    "none": (),
    "batch_norm": (batch_norm,),
    "refit consumers": (Refit(scope="consumers"),),
    "refit": (Refit(),),
    "refit, batch_norm": (Refit(), batch_norm),
    "distil": (Distil(),),
    "refit, distil": (Refit(), Distil()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--removed", type=float, default=0.5)
    parser.add_argument("--repairs", nargs="*", default=list(REPAIRS))
    parser.add_argument("--criteria", nargs="*", default=CRITERIA_NAMES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, model = load_cifar(args.data), public_network(32, args.weights)
    structure = trace(model, data.train[0][:1])
    selection = Selection(kinds=("channel",), per="unit", floor=2)
    with args.out.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("criterion", "removed", "repair", "accuracy", "loss", "seconds"))
        for name in args.criteria:
            units = CRITERIA[name].units(model, structure, data.draw(0, 250))
            plan = make_plan(structure, units, Budget(units=1 - args.removed), selection)
            mended = {(): cut(model, plan)}
            for label in args.repairs:
                repairs, start = tuple(REPAIRS[label]), time.process_time()
                begun = repairs[:-1] if repairs[:-1] in mended else ()
                small = mended[begun]
                for repair in repairs[len(begun) :]:
                    small = repair(model, small, plan, data.draw(0, 250), None)
                seconds = time.process_time() - start
                mended[repairs] = small
                found = evaluate(small, data.report())
                row = (name, args.removed, label, found.metrics["correct"], found.loss, seconds)
                lines.writerow(row)
                file.flush()
                print(*row)


if __name__ == "__main__":
    main()
