"""Do scores know what a unit is worth? Rank correlation with the true loss change, the form of the paper's Table 1.

    python experiments/narrow_ranking.py --device cuda --out experiments/results/narrow_ranking.csv

Public narrow ResNet32, every unit of every group. Truth: the change of the loss when the unit is zeroed, on the same
2,000 training images the scores saw, and on test images 5,000–9,999. Three draws. Spearman per layer (mean over
groups) and over all units, for every criterion, every place of the abs and every normaliser.
"""

import argparse
import itertools
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import torch
from cifar import DRAWS, load_cifar, public_network
from narrow_lines import Row, gathered, write_lines
from torch import Tensor

from apoptosis.criteria import CRITERIA, Aggregation, spearman, unit_scores, unit_truth
from apoptosis.criteria.aggregation import normalised
from apoptosis.structure import trace

EVERY_ROLE = ("producer", "carrier", "consumer")
ROLES = (EVERY_ROLE, ("producer", "consumer"), ("consumer",), ("producer", "carrier"))
NORMALISERS = ("none", "max", "minmax", "l2", "mean")


def rows_of(draw: int, args: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    data, model = load_cifar(args.data, args.device), public_network(32, args.weights, args.device)
    structure = trace(model, data.train[0][:1])
    batches = data.draw(draw)
    truths = {
        "scoring": unit_truth(model, structure, data.draw(draw, 2000)),
        "test": unit_truth(model, structure, data.report(5000)),
    }
    for name, criterion in CRITERIA.items():
        if criterion.score is None:
            tables = [(None, criterion.units(model, structure, batches))]
        else:
            scores = criterion.score(model, batches, None)
            tables = [
                (how, unit_scores(scores, structure, how))
                for absolute, roles in itertools.product(("unit", "slice", "entry", "none"), ROLES)
                for over in ("sum", "mean")
                for how in [Aggregation(absolute=absolute, roles=roles, over_slices=over)]
            ]
        for (how, units), (where, truth) in itertools.product(tables, truths.items()):
            yield {
                "criterion": name,
                "draw": draw,
                **_form(how),
                "truth": where,
                **_correlations(units.values, truth),
            }


def _correlations(scores: dict[str, Tensor], truth: dict[str, Tensor]) -> Row:
    layers = [spearman(scores[name], truth[name]) for name in truth]
    every = torch.cat([truth[name] for name in truth])
    over_all = {
        f"all_{n}": spearman(torch.cat([normalised(scores[name], n) for name in truth]), every)
        for n in NORMALISERS
    }
    return {"per_layer": sum(layers) / len(layers), **over_all}


def _form(how: Aggregation | None) -> Row:
    told = gathered(how)
    return {option: told[option] for option in ("absolute", "over_slices", "roles")}


def _job(job: tuple[int, argparse.Namespace]) -> list[Row]:
    return list(rows_of(*job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/carry/draws.npz")
    parser.add_argument("--weights", default="data/carry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    jobs = [(draw, args) for draw in DRAWS]
    with get_context("spawn").Pool(len(jobs)) as pool:
        write_lines(args.out, pool.imap_unordered(_job, jobs), len(jobs))


if __name__ == "__main__":
    main()
