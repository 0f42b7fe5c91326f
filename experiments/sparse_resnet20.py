"""Which criterion, in how many stages, finds the weights that the public narrow ResNet20 can do without?

    python experiments/sparse_resnet20.py choose --device cuda --workers 8 --out experiments/results/sparse_choose.csv
    python experiments/sparse_resnet20.py report --device cuda --workers 8 --out experiments/results/sparse_report.csv

No training anywhere. Scored on draws of 2,000 training images. `choose` tries every form of ranking on draw 0, judged
on test X
0–4,999, figures on 5,000–9,999. Both policies for batch norms; under `frozen` also the same network with its norms
measured once, at the end (`late`). One line per network; `sparse_tables.py` makes the page.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from cifar import DRAWS, Cifar, load_cifar, public_network
from narrow_lines import Row, write_lines
from torch import nn

from apoptosis.criteria import CRITERIA, Criterion, Saliency, Scores
from apoptosis.masks import masks_of
from apoptosis.planning import Sparsity
from apoptosis.repair import batch_norm
from apoptosis.training import evaluate
from apoptosis.workflow import sparsify

REMOVED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
POLICIES = ("frozen", "re-estimate")
CHOICES = {
    f"{normalise}{'+w' if magnitude else ''}": Saliency(normalise, magnitude)
    for normalise, magnitude in itertools.product(("none", "max", "l2", "mean"), (0.0, 1.0))
}
CRITERIA_OF_WEIGHTS = tuple(name for name, own in CRITERIA.items() if own.score is not None)
REPORTED = ("magnitude", "taylor", "oba", "oba-hessian", "oba-ggn")


@dataclass(frozen=True)
class Way:
    """One way to remove weights."""

    criterion: str
    draw: int
    how: Saliency
    policy: str
    stages: int

    @property
    def is_known(self) -> bool:
        """What another way finds: magnitudes with more of them; norms measured after one stage, or at its end."""
        plain = self.criterion == "magnitude" and self.how.normalise == "none"
        return (plain and self.how.magnitude > 0) or (
            self.stages == 1 and self.policy == "re-estimate"
        )


def networks(way: Way, data: Cifar, model: nn.Module, removed_shares: list[float]) -> Iterator[Row]:
    """One way at every sparsity; the dense network is scored once for all of them."""
    scorer, batches = once_for_the_dense(CRITERIA[way.criterion]), data.draw(way.draw, 1000)
    for removed in removed_shares:
        start = time.perf_counter()
        outcome = sparsify(
            model,
            batches,
            Sparsity(keep=1 - removed, allow_empty=True),
            criterion=scorer,
            stages=way.stages,
            saliency=way.how,
            batch_norm=way.policy,
        )
        seconds = time.perf_counter() - start
        late = outcome.model
        if way.policy == "frozen":
            late = batch_norm(model, outcome.model, outcome.plan, batches)
        yield {
            "criterion": way.criterion,
            "normalise": way.how.normalise,
            "magnitude": way.how.magnitude,
            "stages": way.stages,
            "policy": way.policy,
            "draw": way.draw,
            "removed": removed,
            "true": 1 - outcome.spent[0].got,
            "emptied": sum(not kept for kept, _ in outcome.plan.counts().values()),
            "seconds": seconds,
            **judged("", outcome.model, data),
            **judged("late_", late, data),
        }


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


def judged(prefix: str, model: nn.Module, data: Cifar) -> Row:
    found: Row = {}
    for half in ("choose", "report"):
        result = evaluate(model, getattr(data, half)(2500))
        found |= {f"{prefix}{half}_loss": result.loss, f"{prefix}{half}": result.metrics["correct"]}
    return found


def _job(job: tuple[Way, argparse.Namespace]) -> list[Row]:
    way, args = job
    torch.set_num_threads(1)
    data, model = load_cifar(args.data, args.device), public_network(20, args.weights, args.device)
    return list(networks(way, data, model, args.removed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["choose", "report"])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--draws", type=int, nargs="*")
    parser.add_argument("--stages", type=int, nargs="*")
    parser.add_argument("--forms", nargs="*", choices=CHOICES)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--only", nargs="*", help="criteria")
    parser.add_argument("--removed", type=float, nargs="*", default=REMOVED)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    choosing = args.kind == "choose"
    forms = args.forms or (CHOICES if choosing else ("none", "max", "max+w"))
    ways = itertools.product(
        args.only or (CRITERIA_OF_WEIGHTS if choosing else REPORTED),
        args.draws or ((0,) if choosing else DRAWS),
        [CHOICES[form] for form in forms],
        args.policies,
        args.stages or ((1,) if choosing else (20, 5, 1)),
    )
    jobs = [(way, args) for way in itertools.starmap(Way, ways) if not way.is_known]
    with get_context("spawn").Pool(args.workers) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))


if __name__ == "__main__":
    main()
