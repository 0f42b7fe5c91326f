"""Which criterion, gathered and ranked how, prunes the public narrow ResNet32 best, without any training?

    python experiments/narrow_criteria.py choose --device cuda --out experiments/results/narrow_choose.csv
    python experiments/narrow_criteria.py report --device cuda --out experiments/results/narrow_report.csv

`choose` tries every aggregation and selection for every criterion, scored once on draw 0, judged on images 0–4,999.
`report` takes the best of these, scored on three draws, once and in many steps, judged on both halves: the choice is
made on images 0–4,999, the figures are those on 5,000–9,999. Every network is judged as it was cut and with batch norms
measured anew on the scoring images. One line per network; `narrow_tables.py` makes the pages.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cifar import DRAWS, Cifar, load_cifar, public_network
from narrow_choices import REPORTED
from narrow_lines import Row, gathered, write_lines
from torch import nn

from apoptosis.criteria import CRITERIA, Aggregation, UnitScores, unit_scores
from apoptosis.criteria.aggregation import normalised
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.repair import batch_norm
from apoptosis.structure import Plan, cut, trace
from apoptosis.training import evaluate
from apoptosis.workflow import prune

KEPT = (0.7, 0.5)
EVERY_ROLE = ("producer", "carrier", "consumer")
ROLES = (EVERY_ROLE, ("producer", "consumer"), ("consumer",), ("producer", "carrier"))
NORMALISERS = ("none", "max", "minmax", "l2", "mean")


def aggregations() -> Iterator[Aggregation]:
    """Every way that can give another ranking: sum or mean over slices is a factor that normalisers take out."""
    for absolute, roles in itertools.product(("unit", "slice", "entry"), ROLES):
        for normalise in NORMALISERS:
            overs = ("sum", "mean") if normalise == "none" else ("sum",)
            for over in overs:
                yield Aggregation(
                    absolute=absolute, roles=roles, normalise=normalise, over_slices=over
                )
    yield Aggregation(
        absolute="slice",
        roles=("producer", "consumer"),
        normalise="max",
        over_slices="mean",
        parameters="weights",
    )


def selections() -> Iterator[Selection]:
    yield Selection(per="unit")
    yield Selection(per="cost")
    yield Selection(widths="uniform", per="unit")


def judged(
    model: nn.Module, small: nn.Module, plan: Plan, data: Cifar, draw: int, half: str
) -> dict[str, float]:
    """Loss and accuracy as cut, and with batch norms measured anew."""
    batches = getattr(data, half)(2500)
    plain = evaluate(small, batches)
    mended = evaluate(batch_norm(model, small, plan, data.draw(draw, 1000)), batches)
    return {
        "loss": plain.loss,
        "accuracy": plain.metrics["correct"],
        "bn_loss": mended.loss,
        "bn_accuracy": mended.metrics["correct"],
    }


def choose(name: str, draw: int, args: argparse.Namespace) -> Iterator[Row]:
    """Every aggregation and selection of one criterion, scored once."""
    data, model = _setup(args)
    structure = trace(model, data.train[0][:1])
    criterion = CRITERIA[name]
    tables: list[tuple[Aggregation | str, UnitScores]]
    if criterion.score is not None:
        scores = criterion.score(model, data.draw(draw), None)
        tables = [(a, unit_scores(scores, structure, a)) for a in aggregations()]
    else:
        units = criterion.units(model, structure, data.draw(draw))
        tables = []
        for n in NORMALISERS:
            values = {group: normalised(own, n) for group, own in units.values.items()}
            tables.append((n, type(units)(values, name)))
    for (how, units), selection, kept in itertools.product(tables, selections(), KEPT):
        told = gathered(None, how) if isinstance(how, str) else gathered(how)
        if selection.widths == "uniform" and told["normalise"] != "none":
            continue  # ranks inside a group are the same
        plan = make_plan(structure, units, Budget(flops=kept), selection)
        yield {
            "criterion": name,
            "kept": kept,
            **told,
            "widths": selection.widths,
            "per": selection.per,
            "macs": structure.macs(plan) / structure.macs(),
            "params": structure.params(plan) / structure.params(),
            **judged(model, cut(model, plan), plan, data, draw, "choose"),
        }


def report(row: int, draw: int, args: argparse.Namespace) -> Iterator[Row]:
    """One chosen way, on one draw, at both budgets."""
    data, model = _setup(args)
    chosen = REPORTED[row]
    for kept in KEPT:
        start = time.perf_counter()
        outcome = prune(
            model,
            data.draw(draw),
            Budget(flops=kept),
            criterion=chosen.named(draw),
            steps=chosen.steps,
            aggregation=chosen.aggregation,
            selection=chosen.selection,
        )
        yield {
            "label": chosen.label,
            "criterion": chosen.criterion,
            "draw": draw,
            "kept": kept,
            "steps": chosen.steps,
            **gathered(chosen.aggregation),
            "widths": chosen.selection.widths,
            "per": chosen.selection.per,
            "macs": outcome.spent[0].got,
            "params": outcome.spent[1].got,
            "seconds": time.perf_counter() - start,
            **{
                f"{half}_{what}": value
                for half in ("choose", "report")
                for what, value in judged(
                    model, outcome.model, outcome.plan, data, draw, half
                ).items()
            },
        }


def _setup(args: argparse.Namespace) -> tuple[Cifar, nn.Module]:
    torch.set_num_threads(1)
    return load_cifar(args.data, args.device), public_network(32, args.weights, args.device)


def _job(job: tuple[str, Any, int, argparse.Namespace]) -> list[Row]:
    kind, what, draw, args = job
    return list(choose(what, draw, args) if kind == "choose" else report(what, draw, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["choose", "report"])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--draws", type=int, nargs="*", default=DRAWS)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.kind == "choose":
        jobs = [("choose", name, 0, args) for name in args.only or CRITERIA]
    else:
        rows = [i for i, row in enumerate(REPORTED) if not args.only or row.label in args.only]
        jobs = [("report", row, draw, args) for row in rows for draw in args.draws]
    with get_context("spawn").Pool(args.workers) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))


if __name__ == "__main__":
    main()
