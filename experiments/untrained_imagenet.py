"""How much do public ImageNet networks lose without training, by who chooses and who repairs?

    python experiments/untrained_imagenet.py resnet50 --images 500 --out experiments/results/untrained_imagenet_a.csv

The bar: ResNet50 and ViT-tiny with 20, 35 and 42 % of their MACs gone, no training; the ResNet50 loses at most 3.5
points at 42 %. Scores and repairs see a draw of the 1,000 calibrating images (labels only for criteria that want them),
figures are those on the 2,000 judging images. `difference` is what a network has right more often than the dense one,
in points, `difference_se` its standard error from the same images' differences, `right` the images that it has right,
as bits in hexadecimal, so that networks can be paired with each other too.

A way is criterion:steps, with `+` where the network is refitted between the steps; ahead of it `aligned/` where
attention heads are first turned into their principal axes (the seconds of choosing have that in them). Scores of a
single step are taken once for all budgets and kinds, and their seconds stand in the line of each. Kinds are those of
groups that may shrink: `all`, or some, as in `channel` (ResNet50: inside blocks, and its first) and `head+hidden`.
Widths are `global` (all units ranked together, per cost) or `uniform`. `missing` counts groups that the criterion could
not score; they stay whole. Draws are seeds, for criteria that draw as well; with all 1,000 images they differ by that
and by the order, so by which images are held against which.

One line per network, written when it is done; `--skip` leaves out what other files have. A refusal is a line too.
Memory (MiB) is the most that the process ever had. A JSON file beside the lines tells options, commit and environment;
`untrained_imagenet_tables.py` makes the page.
"""

import argparse
import json
import math
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from imagenet import NETWORKS, load_images
from narrow_lines import Row, read_lines, write_lines
from sparse_resnet50 import environment, judged
from torch import Tensor, nn

from apoptosis.alignment import align_heads
from apoptosis.criteria import UnitScores, find_criterion
from apoptosis.errors import ApoptosisError
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.repair import Refit, RefitBlocks, Repair, batch_norm
from apoptosis.structure import Plan, cut, trace
from apoptosis.workflow import prune

REMOVED = (0.2, 0.35, 0.42)
WAYS = ("magnitude-l2:1", "obs:1", "gates:1", "taylor-activation:1", "oba:1", "random:1")
REPAIRS: dict[str, tuple[Repair, ...]] = {
    "none": (),
    "batch_norm": (batch_norm,),
    "refit": (Refit(),),
    "refit+blocks": (Refit(), RefitBlocks()),
}
FIGURES = (
    *("accuracy", "loss", "difference", "difference_se", "macs_left", "params_left", "missing"),
    *("choosing_s", "repair_s", "peak_mib", "right", "failure"),
)
ALIGNED = "aligned/"
MOST_IN_STEP = 32
"""Batches: a refit of more makes a pass for each layer. Scores take small ones, for the memory of their graphs."""


@dataclass(frozen=True)
class Cell:
    """A network to make; `judge` is the number of images that it is judged on."""

    network: str
    judge: int
    images: int
    draw: int
    way: str
    kinds: str
    widths: str
    removed: float
    repair: str


@dataclass(frozen=True)
class Chosen:
    """What goes, how many groups could not be scored, and the seconds it took."""

    plan: Plan
    missing: int
    seconds: float


class Bench:
    """The dense network, the images, and what it has right."""

    def __init__(self, args: argparse.Namespace, earlier: Iterable[Row]) -> None:
        network = NETWORKS[args.network]
        judge, self.calibrate = (
            load_images(which, args.data, args.device, args.batch, network.normalisation)
            for which in ("judge", "calibrate")
        )
        self.judge = judge.draw(0, args.judge)
        self.model = network.load(args.data, args.device)
        self.structure = trace(self.model, next(iter(self.judge))[0][:1])
        cell = Cell(
            args.network, len(self.judge.labels), 0, 0, "dense", "all", "global", 0.0, "none"
        )
        known = [row for row in earlier if cell_of(row) == cell]
        self.new = [] if known else [self.judged_dense(cell)]
        self.dense = bits((known or self.new)[0])

    def judged_dense(self, cell: Cell) -> Row:
        right, loss = judged(self.model, self.judge)
        self.dense = right.cpu()
        return self.line(cell, (right, loss), Chosen(self.structure.identity(), 0, 0.0), 0.0)

    def line(self, cell: Cell, found: tuple[Tensor, float], chosen: Chosen, repair_s: float) -> Row:
        right, loss = found[0].cpu(), found[1]
        change = 100 * (right.double() - self.dense.double())
        figures = (
            float(right.double().mean()),
            loss,
            float(change.mean()),
            float(change.std() / math.sqrt(len(change))),
            self.structure.macs(chosen.plan) / self.structure.macs(),
            self.structure.params(chosen.plan) / self.structure.params(),
            chosen.missing,
            chosen.seconds,
            repair_s,
            peak_mib(right_on=found[0]),
            hex(int("".join(map(str, right.int().tolist())), 2)),
            "",
        )
        return {**asdict(cell), **dict(zip(FIGURES, figures, strict=True))}


class Choice:
    """One way on one draw."""

    def __init__(self, bench: Bench, way: str, draw: int, images: int) -> None:
        self.bench = bench
        self.is_aligned = way.startswith(ALIGNED)
        name, _, steps = way.removeprefix(ALIGNED).partition(":")
        self.criterion = find_criterion(name).seeded(draw)
        self.steps, self.refits_between = int(steps.rstrip("+")), steps.endswith("+")
        self.images = bench.calibrate.draw(draw, images)
        num_in_step = math.ceil(len(self.images.labels) / MOST_IN_STEP)
        self.in_step = replace(self.images, size=max(self.images.size, num_in_step))

    @cached_property
    def model(self) -> nn.Module:
        """The dense network, in the axes of this way."""
        bench = self.bench
        if not self.is_aligned:
            return bench.model
        return align_heads(bench.model, bench.structure, self.images).model

    @cached_property
    def scored(self) -> tuple[UnitScores, float]:
        """Of the dense network, and the seconds."""
        start = time.perf_counter()
        structure = self.bench.structure
        may_go = replace(structure, groups=tuple(structure.choose()))
        units = self.criterion.units(self.model, may_go, self.images)
        return units, time.perf_counter() - start

    def chosen(self, removed: float, selection: Selection) -> Chosen:
        budget, spent = Budget(flops=1 - removed), 0.0
        if self.steps == 1:
            units, spent = self.scored
        start = time.perf_counter()
        if self.steps == 1:
            names = set(units.values)
            plan = make_plan(self.bench.structure, units, budget, selection)
        else:
            outcome = prune(
                self.model,
                self.in_step if self.refits_between else self.images,
                budget,
                criterion=self.criterion,
                steps=self.steps,
                selection=selection,
                align=False,  # it is
                repair=[Refit()] if self.refits_between else [],
                repair_between=self.refits_between,
            )
            names, plan = set(outcome.history[0].scores), outcome.plan
        missing = sum(group.name not in names for group in selection.groups(self.bench.structure))
        return Chosen(plan, missing, spent + time.perf_counter() - start)

    def lines(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """All repairs of one plan."""
        first = cells[0]
        kinds = None if first.kinds == "all" else tuple(first.kinds.split("+"))
        try:
            chosen = self.chosen(first.removed, Selection(kinds=kinds, widths=first.widths))
        except ApoptosisError as error:
            yield from (refused(cell, error) for cell in cells)
            return
        mended = {(): (cut(self.model, chosen.plan), 0.0)}
        for cell in cells:
            repairs = REPAIRS[cell.repair]
            try:
                for done in range(len(repairs)):
                    if repairs[: done + 1] not in mended:
                        mended[repairs[: done + 1]] = self.repaired(
                            *mended[repairs[:done]], chosen.plan, repairs[done]
                        )
            except ApoptosisError as error:
                yield refused(cell, error)
            else:
                model, seconds = mended[repairs]
                yield self.bench.line(cell, judged(model, self.bench.judge), chosen, seconds)

    def repaired(
        self, small: nn.Module, before_s: float, plan: Plan, repair: Repair
    ) -> tuple[nn.Module, float]:
        """One more repair, and the seconds of all so far."""
        start = time.perf_counter()
        mended = repair(self.model, small, plan, self.in_step, None)
        return mended, before_s + time.perf_counter() - start


def lines(args: argparse.Namespace, bench: Bench, earlier: Iterable[Row]) -> Iterator[list[Row]]:
    """What is not there yet, one line at a time."""
    done = {cell_of(row) for row in earlier}
    yield from ([row] for row in bench.new)
    for draw, way in product(args.draws, args.ways):
        choice = Choice(bench, way, draw, args.images)
        num_images = min(args.images, len(bench.calibrate.labels))
        given = (args.network, len(bench.dense), num_images, draw, way)
        for where in product(args.kinds, args.widths, args.removed):
            cells = [Cell(*given, *where, repair) for repair in args.repairs]
            if wanted := [cell for cell in cells if cell not in done]:
                yield from ([row] for row in choice.lines(wanted))


def cell_of(row: Row) -> Cell:
    """Read numbers are floats, and equal to the whole numbers they were."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def bits(row: Row) -> Tensor:
    """Which images the network of a line has right, (judge,)."""
    text = f"{int(row['right'], 16):0{int(row['judge'])}b}"
    return torch.tensor([bit == "1" for bit in text])


def refused(cell: Cell, error: ApoptosisError) -> Row:
    failure = f"{type(error).__name__}: {error}"
    return {**asdict(cell), **dict.fromkeys(FIGURES, ""), "failure": failure}


def peak_mib(right_on: Tensor) -> float:
    if right_on.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--data", default="data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--batch", type=int, default=10, help="at a time; larger is slower on a CPU"
    )
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--judge", type=int, default=2000)
    parser.add_argument("--draws", type=int, nargs="+", default=[0])
    parser.add_argument("--removed", type=float, nargs="+", default=REMOVED, help="of the MACs")
    parser.add_argument("--kinds", nargs="+", default=["all"])
    parser.add_argument("--widths", nargs="+", default=["global"], help="of Selection")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--repairs", nargs="+", default=["none", "refit"], choices=REPAIRS)
    parser.add_argument("--skip", nargs="*", default=())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start, about = time.perf_counter(), args.out.with_suffix(".json")
    about.write_text(json.dumps(environment(args, None), indent=1) + "\n")
    earlier = [row for path in args.skip for row in read_lines(Path(path))]
    bench = Bench(args, earlier)
    choices = (args.draws, args.ways, args.kinds, args.widths, args.removed, args.repairs)
    write_lines(args.out, lines(args, bench, earlier), 1 + math.prod(map(len, choices)))
    about.write_text(json.dumps(environment(args, time.perf_counter() - start), indent=1) + "\n")


if __name__ == "__main__":
    main()
