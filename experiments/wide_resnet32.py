"""The wide ResNet32 of the paper's tables on CIFAR-10: trained, cut to 30 % and 6 % of its MACs, fine-tuned.

    python experiments/wide_resnet32.py train --seeds 0 1 2 --device cuda --workers 3 --out dense.csv
    python experiments/wide_resnet32.py prune --seeds 0 1 2 --device cuda --workers 6 --out prune.csv

45,000 images to train on, 5,000 to choose by, figures on the 10,000 test images, which choose nothing. `train` writes
weights to `--weights`; `prune` makes networks of them: every way (criterion and allocation) under one fine-tuning
budget, in one go or in rounds that share it. One line per network, written when it is done, in the order of what
matters most; `--skip` leaves out what other files have. `wide_tables.py` makes the page.
"""

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from narrow_lines import Row, read_lines, write_lines
from safetensors.torch import load_file, save_file
from torch import nn

from apoptosis.checkpoint import write_file
from apoptosis.data import Augmentation, DataSet, Split, cifar10
from apoptosis.errors import ApoptosisError
from apoptosis.models import resnet32
from apoptosis.planning import Budget, Selection
from apoptosis.structure import cut, trace
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.workflow import Material, Pruning, iterative

BATCH, JUDGED = 512, 2500
BUDGETS = (0.3, 0.06)
ROUNDS = {0.3: (0.55, 0.3), 0.06: (0.5, 0.25, 0.12, 0.06)}
"""Of iterative pruning."""
ALLOCATIONS = {
    "default": (None, Selection()),
    "capped": (None, Selection(cap=0.9)),
    "unit": (None, Selection(per="unit")),
    "paper": ("paper", Selection(per="unit")),
    "paper-capped": ("paper", Selection(per="unit", cap=0.9)),
    "uniform": (None, Selection(widths="uniform")),
}
"""How scores become those of units, and units compete: (aggregation, selection)."""
WAYS = (
    "oba:default",
    "oba-hessian:default",
    "taylor:default",
    "magnitude-l2:default",
    "random:default",
    "magnitude-l2:uniform",
    "oba:uniform",
    "oba:paper",
    "magnitude:paper",
    "taylor:paper",
)


@dataclass(frozen=True)
class Way:
    """One pruned network."""

    criterion: str
    allocation: str
    budget: float
    schedule: str
    seed: int
    epochs: int

    @property
    def rounds(self) -> tuple[float, ...]:
        return ROUNDS[self.budget] if self.schedule == "iterative" else (self.budget,)


class Bench:
    """What one process holds: the images of one seed, and its dense network."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.args = args
        self._data: dict[int, DataSet[Split]] = {}

    def data(self, seed: int) -> DataSet[Split]:
        if seed not in self._data:
            data = cifar10(self.args.data, seed=seed)
            if most := self.args.limit:
                parts = {n: getattr(data, n).first(most) for n in ("train", "validation", "test")}
                data = replace(data, **parts)
            self._data = {seed: data}
        return self._data[seed]

    def material(self, seed: int, *, cutout: int = 0) -> Material:
        data, device = self.data(seed), self.args.device
        assert data.validation is not None
        return Material(
            scoring=data.train.first(self.args.samples).batches(
                self.args.score_batch, device=device
            ),
            training=data.train.batches(
                BATCH,
                shuffle_seed=seed,
                device=device,
                augmentation=Augmentation(cutout=cutout),
            ),
            validation=data.validation.batches(JUDGED, device=device),
        )

    def judged(self, model: nn.Module, seed: int) -> Row:
        data, found = self.data(seed), Row()
        for name, part in (("validation", data.validation), ("test", data.test)):
            assert part is not None
            result = evaluate(model, part.batches(JUDGED, device=self.args.device))
            found |= {name: result.metrics["correct"], f"{name}_loss": result.loss}
        return found

    def dense(self, seed: int) -> nn.Module:
        model = resnet32()
        model.load_state_dict(load_file(weights_of(self.args, seed)))
        return model.to(self.args.device).eval()

    def train(self, seed: int) -> Row:
        """A dense network of one seed."""
        args = self.args
        torch.manual_seed(seed)
        model = resnet32().to(args.device)
        material = self.material(seed, cutout=args.cutout)
        assert material.training is not None
        start = time.perf_counter()
        options = self.fit(args.epochs, args.learning_rate, seed, smoothing=args.label_smoothing)
        fit = fit_(model, material.training, options=options, validation=material.validation)
        seconds = time.perf_counter() - start
        state = {name: own.contiguous() for name, own in model.state_dict().items()}
        place = weights_of(args, seed)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, lambda file: save_file(state, file))
        return {
            "seed": seed,
            "epochs": args.epochs,
            "learning_rate": args.learning_rate,
            "label_smoothing": args.label_smoothing,
            "cutout": args.cutout,
            "kept": fit.kept,
            "seconds": seconds,
            **self.judged(model, seed),
        }

    def prune(self, way: Way) -> Row:
        """A network by one way; rounds share the epochs. `cut_test`: the dense network cut so, before any training."""
        args, dense = self.args, self.dense(way.seed)
        aggregation, selection = ALLOCATIONS[way.allocation]
        selection = replace(selection, round_to=args.round_to)
        material = self.material(way.seed)
        structure = trace(dense, torch.zeros(1, 3, 32, 32, device=args.device))
        steps = max(1, args.steps // len(way.rounds))
        pruning = Pruning(
            criterion=way.criterion,
            steps=1 if way.allocation == "uniform" or way.criterion == "obs" else steps,
            aggregation=aggregation,
            selection=selection,
        )
        fit = self.fit(way.epochs // len(way.rounds), args.fine_rate, way.seed)
        start = time.perf_counter()
        rounds = iterative(
            dense, [Budget(flops=share) for share in way.rounds], material, pruning=pruning, fit=fit
        )
        seconds = time.perf_counter() - start
        last = rounds[-1]
        trained = [epoch for part in last.settings["training"] for epoch in part["epochs"]]
        untrained = cut(dense, last.plan)
        widths = [structure[name].size for name in last.plan.sizes]
        kept = [
            len(last.plan.kept[name]) if name in last.plan.kept else last.plan.sizes[name]
            for name in last.plan.sizes
        ]
        return {
            "criterion": way.criterion,
            "allocation": way.allocation,
            "budget": way.budget,
            "schedule": way.schedule,
            "seed": way.seed,
            "epochs": way.epochs,
            "round_to": args.round_to,
            "macs": last.spent[0].got,
            "params": last.spent[1].got,
            "thinnest": min(k / w for k, w in zip(kept, widths, strict=True)),
            "cut_test": self.judged(untrained, way.seed)["test"],
            "seconds": seconds,
            "fit_seconds": sum(epoch["seconds"] for epoch in trained),
            "prune_seconds": sum(step.seconds for step in last.history),
            "training_loss": trained[-1]["loss"],
            **self.judged(last.model, way.seed),
        }

    def fit(self, epochs: int, rate: float, seed: int, *, smoothing: float = 0.0) -> FitOptions:
        cuda = self.args.device == "cuda"
        return FitOptions(
            epochs=epochs,
            learning_rate=rate,
            schedule="one-cycle",
            weight_decay=5e-4,
            label_smoothing=smoothing,
            precision="bfloat16" if cuda else "float32",
            channels_last=cuda,
            seed=seed,
        )


def weights_of(args: argparse.Namespace, seed: int) -> Path:
    return Path(args.weights) / f"wide_resnet32_seed{seed}.safetensors"


def ways(args: argparse.Namespace) -> list[Way]:
    """What is to be made, in order; nothing that the skipped files have."""
    asked = itertools.product(
        args.epochs_after, args.schedules, args.seeds, args.budgets, args.ways
    )
    found = [
        Way(*way.split(":"), budget, schedule, seed, epochs)
        for epochs, schedule, seed, budget, way in asked
    ]
    assert all(way.epochs >= len(way.rounds) for way in found), "an epoch for every round, at least"
    done = measured(args.skip)
    return [way for way in dict.fromkeys(found) if way not in done]


def measured(paths: Iterable[Path]) -> set[Way]:
    return {
        Way(
            row["criterion"],
            row["allocation"],
            row["budget"],
            row["schedule"],
            int(row["seed"]),
            int(row["epochs"]),
        )
        for path in paths
        for row in read_lines(path)
    }


# -- processes, command line ------------------------------------------------------------------------------------------

_bench: Bench | None = None


def _job(job: tuple[Way | int, argparse.Namespace]) -> list[Row]:
    global _bench
    what, args = job
    _bench = _bench or Bench(args)
    try:
        return [_bench.train(what) if isinstance(what, int) else _bench.prune(what)]
    except ApoptosisError as error:  # others go on
        print(f"{what}: {type(error).__name__}: {error}", flush=True)
        return []


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["train", "prune"])
    parser.add_argument("--data", default="data/cifar10.npz")
    parser.add_argument("--weights", default="data/wide")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=75)
    parser.add_argument("--learning-rate", type=float, default=0.4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--cutout", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="criterion:allocation")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--schedules", nargs="+", default=["one-shot"])
    parser.add_argument("--epochs-after", type=int, nargs="+", default=[12])
    parser.add_argument("--fine-rate", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2560)
    parser.add_argument("--score-batch", type=int, default=256)
    parser.add_argument(
        "--round-to", type=int, default=8, help="widths, as GPUs want them in 16 bits"
    )
    parser.add_argument("--limit", type=int, help="at most so many images of each part, to try it")
    parser.add_argument("--skip", type=Path, nargs="*", default=())
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    jobs = [(what, args) for what in (args.seeds if args.kind == "train" else ways(args))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with get_context("spawn").Pool(args.workers) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))


if __name__ == "__main__":
    main()
