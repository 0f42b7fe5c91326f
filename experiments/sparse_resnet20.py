"""Which criterion, in how many stages, finds the weights that the public narrow ResNet20 can do without?

    python experiments/sparse_resnet20.py choose --device cuda --workers 8 --out data/sparse_raw/choose.csv
    python experiments/sparse_resnet20.py report --device cuda --workers 8 --out data/sparse_raw/report.csv

No training anywhere. Scored on draws of 2,000 training images. `choose` tries every form of ranking on draw 0 and
`report` some of them on three draws; choices are made on test images 0–4,999, figures reported on 5,000–9,999. Both
policies for batch norms; under `frozen` also the same network with its norms measured once, at the end (`late`).

One line per network, written when it is done, what matters most first; `--skip` leaves out what other files have, so
that a run that was stopped goes on. `seconds` are those of `sparsify` while the workers share the device; the scores of
the dense network are taken once per process, criterion and draw, and are in the seconds of the first network alone.
`sparse_lines.py` joins the files, `sparse_tables.py` makes the pages.
"""

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from cifar import DRAWS, load_cifar, public_network
from narrow_lines import Row, read_lines, write_lines
from torch import nn

from apoptosis.criteria import CRITERIA, Criterion, Saliency, Scores
from apoptosis.masks import identity_masks, masks_of
from apoptosis.planning import Sparsity
from apoptosis.repair import batch_norm
from apoptosis.training import evaluate
from apoptosis.workflow import sparsify

REMOVED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
FIRST = ((0.8, 0.9), (0.5, 0.7, 0.95))
"""Shares that are measured before the others, on all draws."""
POLICIES = ("frozen", "re-estimate")
CHOICES = {
    f"{normalise}{'+w' if magnitude else ''}": Saliency(normalise, magnitude)
    for normalise, magnitude in itertools.product(("none", "max", "l2", "mean"), (0.0, 1.0))
}
CRITERIA_OF_WEIGHTS = tuple(name for name, own in CRITERIA.items() if own.score is not None)
REPORTED = ("magnitude", "taylor", "obd-fisher", "oba", "oba-hessian", "oba-ggn")
REPORTED_FORMS = ("max+w", "max", "none")
LOADED = ("data", "weights", "device")
"""Options that say what a process holds."""


@dataclass(frozen=True)
class Way:
    """One way to remove a share of the weights, on one draw: one network. The dense one has no criterion."""

    criterion: str
    draw: int
    how: Saliency = Saliency()
    policy: str = "frozen"
    stages: int = 0
    removed: float = 0.0

    @property
    def is_known(self) -> bool:
        """What another way finds: magnitudes with more of them, or in stages, for their ranks stay; norms measured
        after one stage, or at its end."""
        ranks_stay = self.criterion == "magnitude" and self.how.normalise in ("none", "max")
        return (
            (ranks_stay and self.how.normalise == "none" and self.how.magnitude > 0)
            or (ranks_stay and self.stages > 1)
            or (self.stages == 1 and self.policy == "re-estimate")
        )

    @property
    def place(self) -> tuple[int, int]:
        """Which come first: shares that matter most, then draw by draw."""
        urgency = next((n for n, own in enumerate(FIRST) if self.removed in own), len(FIRST))
        return (0 if self.criterion == "dense" else 1 + urgency, self.draw)


def ways(args: argparse.Namespace) -> list[Way]:
    """What is to be measured, in order; nothing twice, nothing that the skipped files have."""
    choosing = args.kind == "choose"
    draws = args.draws or ((0,) if choosing else DRAWS)
    asked = itertools.product(
        args.forms or (CHOICES if choosing else REPORTED_FORMS),
        args.stages or ((1,) if choosing else (1, 5, 20)),
        args.only or (CRITERIA_OF_WEIGHTS if choosing else REPORTED),
        args.policies,
        draws,
        args.removed,
    )
    found = [] if choosing else [Way("dense", draw) for draw in draws]
    for form, stages, criterion, policy, draw, removed in asked:
        found.append(Way(criterion, draw, CHOICES[form], policy, stages, removed))
    done = measured(args.skip)
    left = [way for way in dict.fromkeys(found) if way not in done and not way.is_known]
    return sorted(left, key=lambda way: way.place)


def measured(paths: Iterable[Path]) -> set[Way]:
    """The ways whose lines are in these files."""
    return {
        Way(
            row["criterion"],
            int(row["draw"]),
            Saliency(row["normalise"], row["magnitude"]),
            row["policy"],
            int(row["stages"]),
            row["removed"],
        )
        for path in paths
        for row in read_lines(path)
    }


class Bench:
    """What one process holds: the images, the network, and what each criterion says of it on each draw."""

    def __init__(self, data: str, weights: str, device: str) -> None:
        torch.set_num_threads(1)
        self.data, self.model = load_cifar(data, device), public_network(20, weights, device)
        self.scorers: dict[tuple[str, int], Criterion] = {}

    def row(self, way: Way) -> Row:
        """Make the network and judge it."""
        batches = self.data.draw(way.draw, 1000)
        start = time.perf_counter()
        if way.criterion == "dense":
            model, masks, got = self.model, identity_masks(self.model), 1.0
        else:
            outcome = sparsify(
                self.model,
                batches,
                Sparsity(keep=1 - way.removed, allow_empty=True),
                criterion=self.scorer(way),
                stages=way.stages,
                saliency=way.how,
                batch_norm=way.policy,
            )
            model, masks, got = outcome.model, outcome.plan, outcome.spent[0].got
        seconds = time.perf_counter() - start
        found = late = self.judged(model)
        if way.policy == "frozen":
            late = self.judged(batch_norm(self.model, model, masks, batches))
        return {
            "criterion": way.criterion,
            "normalise": way.how.normalise,
            "magnitude": way.how.magnitude,
            "stages": way.stages,
            "policy": way.policy,
            "draw": way.draw,
            "removed": way.removed,
            "true": 1 - got,
            "emptied": sum(not kept for kept, _ in masks.counts().values()),
            "seconds": seconds,
            **found,
            **{f"late_{name}": value for name, value in late.items()},
        }

    def scorer(self, way: Way) -> Criterion:
        key = (way.criterion, way.draw)
        if key not in self.scorers:
            self.scorers[key] = once_for_the_dense(CRITERIA[way.criterion])
        return self.scorers[key]

    def judged(self, model: nn.Module) -> Row:
        found: Row = {}
        for half in ("choose", "report"):
            result = evaluate(model, getattr(self.data, half)(2500))
            found |= {f"{half}_loss": result.loss, half: result.metrics["correct"]}
        return found


def once_for_the_dense(criterion: Criterion) -> Criterion:
    """The same criterion, which scores a network that has lost nothing only the first time it is asked."""
    assert criterion.score is not None, "single weights are scored"
    score, known = criterion.score, list[Scores]()

    def remembered(model: nn.Module, *data: object) -> Scores:
        masks = masks_of(model)
        if masks is None or masks.num_kept < masks.num_weights:
            return score(model, *data)
        if not known:
            known.append(score(model, *data))
        return known[0]

    return replace(criterion, score=remembered)


# -- processes, command line ------------------------------------------------------------------------------------------

_bench: Bench | None = None


def _job(job: tuple[Way, dict[str, str]]) -> list[Row]:
    global _bench
    way, loaded = job
    _bench = _bench or Bench(**loaded)
    return [_bench.row(way)]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["choose", "report"])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--draws", type=int, nargs="*")
    parser.add_argument("--stages", type=int, nargs="*")
    parser.add_argument("--forms", nargs="*", choices=CHOICES)
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=POLICIES)
    parser.add_argument("--only", nargs="*", help="criteria")
    parser.add_argument("--removed", type=float, nargs="*", default=REMOVED)
    parser.add_argument("--skip", type=Path, nargs="*", default=(), help="files of measured lines")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    loaded = {option: getattr(args, option) for option in LOADED}
    jobs = [(way, loaded) for way in ways(args)]
    with get_context("spawn").Pool(args.workers) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))


if __name__ == "__main__":
    main()
