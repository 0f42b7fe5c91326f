"""How much is lost without labels and without training? Networks of CIFAR-10, by who chooses and who repairs.

    python experiments/untrained.py --device cuda --draws 0 1 2 --out untrained.csv
    python experiments/untrained.py --of macs --removed 0.5 0.7 --draws 0 1 2 --out untrained_macs_narrow.csv
    python experiments/untrained.py --of macs --network small_vit --weights data --out untrained_macs_vit.csv

The public narrow ResNet32 unless another network is named: the `wide` one (`wide_resnet32.py` trains it), or a
`small_vit`. Shares of the narrow one's 560 channels inside blocks are removed, at least 2 left in each; or of the MACs,
from everything that `prune` would cut, residual streams too. Scores and repairs see a draw of 2,000 training images
(`--images` takes fewer, the first ones); accuracy on test images 0–4,999 (`choose`) and 5,000–9,999 (`report`). A way
is criterion:steps, with `+` where the network is refitted between the steps, and `aligned/` ahead of it where attention
heads are first turned into their principal axes (the seconds of choosing have that in them). One line per network,
written when it is done; `--skip` leaves out what other files have. `untrained_tables.py` makes the page.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from cifar import Cifar, load_cifar
from narrow_lines import Row, read_lines, write_lines
from safetensors.torch import load_file
from small_vit import make as small_vit
from torch import nn

from apoptosis.alignment import align_heads
from apoptosis.criteria import UnitScores, find_criterion
from apoptosis.data import Batches
from apoptosis.models import resnet32
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.repair import Refit, RefitBlocks, Repair, batch_norm
from apoptosis.structure import Plan, Structure, cut, trace
from apoptosis.training import evaluate
from apoptosis.workflow import prune

ALIGNED = "aligned/"
REMOVED = (0.3, 0.5, 0.6, 0.7)
WAYS = (
    *("obs:1", "gates:1", "magnitude-l2:1", "obs:4+", "taylor-activation:1"),
    *("gates:6", "gates:6+", "oba:1", "oba-hessian:1", "random:1"),
)
REPAIRS: dict[str, tuple[Repair, ...]] = {
    "none": (),
    "batch_norm": (batch_norm,),
    "consumers": (Refit(scope="consumers"),),
    "refit": (Refit(),),
    "refit+blocks": (Refit(), RefitBlocks()),
}
INNER = Selection(kinds=("channel",), per="unit", floor=2)


@dataclass(frozen=True)
class Cut:
    """Who may go, and what is counted."""

    selection: Selection
    budget: Callable[[float], Budget]

    def of(self, structure: Structure) -> Structure:
        """With groups that may go alone."""
        return replace(structure, groups=tuple(self.selection.groups(structure)))


CUTS = {
    "channels": Cut(INNER, lambda removed: Budget(units=1 - removed)),
    "macs": Cut(Selection(), lambda removed: Budget(flops=1 - removed)),
}


@dataclass(frozen=True)
class Network:
    """What can be cut: how it is made, where its numbers lie in the folder of weights, what normalised its images."""

    make: Callable[[], nn.Module]
    file: str
    statistics: str

    def load(self, folder: Path | str, device: str) -> nn.Module:
        """With its numbers, in eval mode."""
        model = self.make()
        model.load_state_dict(load_file(Path(folder) / self.file))
        return model.to(device).eval()


NETWORKS = {
    "narrow": Network(
        lambda: resnet32(width=16, shortcut="pad"), "cifar10_resnet32.safetensors", "imagenet"
    ),
    "wide": Network(resnet32, "wide_resnet32_seed0.safetensors", "cifar10"),
    "small_vit": Network(small_vit, "small_vit/model.safetensors", "imagenet"),
}


def networks(args: argparse.Namespace, data: Cifar, dense: nn.Module) -> Iterator[list[Row]]:
    """All repairs of one plan are one job."""
    done = measured(args.skip)
    structure = trace(dense, data.test[0][:1])
    for draw, way in product(args.draws, args.ways):
        wanted = {
            removed: [name for name in args.repairs if (draw, way, removed, name) not in done]
            for removed in args.removed
        }
        if any(wanted.values()):
            batches = first(data.draw(draw, 250), args.images)
            choice = Choice(dense, structure, batches, way, draw, CUTS[args.of])
            for removed, names in wanted.items():
                if names:
                    rows = repaired(data, choice, (draw, way, removed), names)
                    where = {"device": args.device, "network": args.network, "of": args.of}
                    yield [{**where, **row} for row in rows]


@dataclass(frozen=True)
class Choice:
    """Who goes, by one way on one draw; scores of a single step are taken once for all shares."""

    dense: nn.Module
    structure: Structure
    batches: Sequence[tuple[torch.Tensor, ...]]
    way: str
    draw: int
    cut: Cut = CUTS["channels"]

    @cached_property
    def model(self) -> nn.Module:
        """The dense network, in the axes of this way."""
        if not self.way.startswith(ALIGNED):
            return self.dense
        return align_heads(self.dense, self.structure, self.batches).model

    @cached_property
    def scored(self) -> tuple[UnitScores, float]:
        """Of the dense network, and the seconds."""
        start = time.perf_counter()
        criterion = find_criterion(self.way.removeprefix(ALIGNED).partition(":")[0])
        units = criterion.seeded(self.draw).units(
            self.model, self.cut.of(self.structure), self.batches
        )
        return units, time.perf_counter() - start

    def plan(self, removed: float) -> tuple[Plan, float]:
        """And the seconds of the choice, those of scores that serve other shares too among them."""
        name, _, steps = self.way.removeprefix(ALIGNED).partition(":")
        start, budget = time.perf_counter(), self.cut.budget(removed)
        if steps == "1":
            units, spent = self.scored
            start = time.perf_counter()
            plan = make_plan(self.structure, units, budget, self.cut.selection)
            return plan, spent + time.perf_counter() - start
        outcome = prune(
            self.model,
            self.batches,
            budget,
            criterion=find_criterion(name).seeded(self.draw),
            steps=int(steps.rstrip("+")),
            selection=self.cut.selection,
            align=False,  # it is
            repair=[Refit()] if steps.endswith("+") else [],
            repair_between=steps.endswith("+"),
        )
        return outcome.plan, time.perf_counter() - start


def repaired(
    data: Cifar, choice: Choice, cell: tuple[int, str, float], names: Iterable[str]
) -> Iterator[Row]:
    draw, way, removed = cell
    plan, chosen_s = choice.plan(removed)
    dense, batches = choice.model, choice.batches
    mended = {(): cut(dense, plan)}
    for name in names:
        repairs, start = REPAIRS[name], time.perf_counter()
        begun = repairs[:-1] if repairs[:-1] in mended else ()
        small = mended[begun]
        for repair in repairs[len(begun) :]:
            small = repair(dense, small, plan, batches, None)
        mended[repairs] = small
        seconds = time.perf_counter() - start
        judged = {
            half: evaluate(small, getattr(data, half)()).metrics["correct"]
            for half in ("choose", "report")
        }
        yield {
            "draw": draw,
            "way": way,
            "removed": removed,
            "repair": name,
            "images": sum(len(batch[0]) for batch in batches),
            **judged,
            "choosing_s": chosen_s,
            "repair_s": seconds,
        }


def first(batches: Batches, most: int) -> list[tuple[torch.Tensor, ...]]:
    found: list[tuple[torch.Tensor, ...]] = []
    for batch in batches:
        if sum(len(own[0]) for own in found) < most:
            found.append(batch)
    return found


def measured(paths: Iterable[Path]) -> set[tuple[int, str, float, str]]:
    return {
        (int(row["draw"]), row["way"], row["removed"], row["repair"])
        for path in paths
        for row in read_lines(path)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--network", choices=NETWORKS, default="narrow")
    parser.add_argument("--of", choices=CUTS, default="channels")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--draws", type=int, nargs="+", default=[0])
    parser.add_argument("--removed", type=float, nargs="+", default=REMOVED)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--repairs", nargs="+", default=list(REPAIRS), choices=REPAIRS)
    parser.add_argument("--skip", type=Path, nargs="*", default=())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network = NETWORKS[args.network]
    data = load_cifar(args.data, args.device, network.statistics)
    dense = network.load(args.weights, args.device)
    count = len(args.draws) * len(args.ways) * len(args.removed)
    write_lines(args.out, networks(args, data, dense), count)


if __name__ == "__main__":
    main()
