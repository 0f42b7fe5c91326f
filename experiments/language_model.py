"""What does a small language model lose without training? MiniMind2-small, by who chooses and who repairs.

    python experiments/language_model.py --out experiments/results/language_model.csv

80 % and 60 % of the MLPs' hidden units stay, and as many of the heads: `Budget(units=…)` over all layers, for each of
the two by itself, since hidden units alone would meet one budget for 11,264 of them and 32 units of heads. With grouped
queries such a unit (`query_head`) is one query of each key-value head, two of a layer's eight heads. Scores and repairs
see a draw of text, half manual pages and half the network's own samples (`language_text`); loss and KL(dense ‖ small)
per token are measured on other text of both kinds. A way is a criterion, in one step; with `:uniform` every layer keeps
the same share of its hidden units. One line per network, written when it is done; `--skip` leaves out what other files
have. A .json beside the lines says what they were measured with. `language_model_tables.py` makes the page.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from language_text import KINDS, LENGTH, Text, load_text, load_tokenizer, public_llama
from narrow_lines import Row, read_lines, write_lines
from tokenizers import Tokenizer
from torch import Tensor

from apoptosis.criteria import UnitScores, find_criterion, gates
from apoptosis.curvature import GateOptions
from apoptosis.planning import Budget, Selection, make_plan
from apoptosis.repair import Refit, RefitBlocks, Repair
from apoptosis.structure import Plan, Structure, cut, trace
from apoptosis.task import Task

KEPT = (0.8, 0.6)
WAYS = ("obs", "gates", "magnitude-l2", "taylor-activation", "oba", "random")
REPAIRS: dict[str, tuple[Repair, ...]] = {
    "none": (),
    "refit": (Refit(),),
    "refit:1e-2": (Refit(ridge=1e-2),),
    "refit+blocks": (Refit(), RefitBlocks()),
}
TASK = Task.language_model()
PROMPT = "<|im_start|>user\n请介绍一下长城。<|im_end|>\n<|im_start|>assistant\n"
Cell = tuple[int, str, float, str]
"""Draw, way, share that stays, repair."""
DENSE: Cell = (0, "dense", 1.0, "none")


@dataclass
class Cost:
    """Seconds of what happens within, and the most memory that the whole process had meanwhile."""

    seconds: float = 0.0
    megabytes: float = 0.0
    _start: float = field(default=0.0, repr=False)

    def __enter__(self) -> "Cost":
        with suppress(OSError):  # forgets earlier peaks; where that is not Linux, they count
            Path("/proc/self/clear_refs").write_text("5")
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Judge:
    """Measures networks on text that scores and repairs do not see; holds the dense one's predictions for it."""

    def __init__(self, dense: Any, text: Text, num: int, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._batches = {kind: text.judge(kind, num) for kind in KINDS}
        self._count = num * (LENGTH - 1)
        with torch.no_grad():
            self._chances = {
                kind: [dense(tokens).logits[:, :-1].softmax(2) for tokens in batches]
                for kind, batches in self._batches.items()
            }

    def __call__(self, model: Any) -> Row:
        found: Row = {"judged": self._count}
        for kind in KINDS:
            found[f"{kind}_loss"], found[f"{kind}_kl"] = self._means(model, kind)
        return found | self._speech(model)

    @torch.no_grad()
    def _means(self, model: Any, kind: str) -> tuple[float, float]:
        """Loss and KL(dense ‖ small), per token."""
        sums = torch.zeros(2, dtype=torch.float64)
        for tokens, chances in zip(self._batches[kind], self._chances[kind], strict=True):
            logs = model(tokens).logits[:, :-1].log_softmax(2)
            losses = -logs.gather(2, tokens[:, 1:, None])
            divergences = -(torch.special.entr(chances) + chances * logs).sum(2)
            sums += torch.stack([losses.double().sum(), divergences.double().sum()])
        loss, divergence = (sums / self._count).tolist()
        return loss, divergence

    @torch.no_grad()
    def _speech(self, model: Any) -> Row:
        """What `generate` says with its cache, greedily, and the share of it that one plain run says too."""
        asked = torch.tensor([self._tokenizer.encode(PROMPT).ids])
        said = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            do_sample=False,
            max_new_tokens=32,
            pad_token_id=0,
        )
        answer, start = said[:, asked.shape[1] :], asked.shape[1] - 1
        plain = model(said).logits[:, start:-1].argmax(2)
        text = self._tokenizer.decode(answer[0].tolist())
        return {
            "agreed": float((plain == answer).double().mean()),
            "says": " ".join(text.split()),
        }


def networks(args: argparse.Namespace, dense: Any, text: Text, judge: Judge) -> Iterator[list[Row]]:
    done = measured(args)
    if DENSE not in done:
        yield [_row(DENSE, 0, dense, judge)]
    structure = trace(dense, text.draw(0, 2)[0][:1])
    # Criteria look at all groups that there are. The stream is left alone here, and to price its channels takes `obs`
    # minutes: the head has 6,400 outputs.
    structure = replace(structure, groups=tuple(structure.choose(kinds=("hidden", "query_head"))))
    for draw, way in product(args.draws, args.ways):
        cells = ((draw, way, *own) for own in product(args.kept, args.repairs))
        if wanted := [cell for cell in cells if cell not in done]:
            batches = text.draw(draw, args.sequences)
            with Cost() as choosing:
                units = scored(dense, structure, batches, way, draw)
                plans = {kept: planned(structure, units, way, kept) for _, _, kept, _ in wanted}
            del units  # interactions are large
            for cell in wanted:
                plan, mending = plans[cell[2]], Cost()
                small = cut(dense, plan)
                if repairs := REPAIRS[cell[3]]:
                    with mending:
                        for repair in repairs:
                            small = repair(dense, small, plan, batches, TASK)
                yield [_row(cell, args.sequences, small, judge, choosing, mending)]


def scored(
    dense: Any, structure: Structure, batches: Sequence[Tensor], way: str, draw: int
) -> UnitScores:
    how = find_criterion(way.partition(":")[0])
    if how.name == "gates":
        # What `prune` takes, for it sees all groups; between these alone all interactions just fit, in a GiB.
        form = GateOptions(form="block")
        how = replace(how, score_units=partial(gates, options=form))
    return how.seeded(draw).units(dense, structure, batches, TASK)


def planned(structure: Structure, units: UnitScores, way: str, kept: float) -> Plan:
    """Hidden units and heads, each within a budget of their own."""
    widths = way.partition(":")[2] or "global"
    choices = (
        Selection(kinds=("hidden",), widths=widths),
        Selection(kinds=("query_head",)),
    )
    plans = [make_plan(structure, units, Budget(units=kept), own) for own in choices]
    return structure.plan({name: own for plan in plans for name, own in plan.kept.items()})


def _row(
    cell: Cell,
    sequences: int,
    model: Any,
    judge: Judge,
    choosing: Cost | None = None,
    mending: Cost | None = None,
) -> Row:
    choosing, mending = choosing or Cost(), mending or Cost()
    layers = model.model.layers
    return {
        **dict(zip(("draw", "way", "kept", "repair"), cell, strict=True)),
        "tokens": sequences * LENGTH,
        "hidden": sum(own.mlp.down_proj.in_features for own in layers),
        "heads": sum(own.self_attn.o_proj.in_features for own in layers) // model.config.head_dim,
        "params": sum(p.numel() for p in model.parameters()),
        "choosing_s": choosing.seconds,
        "choosing_mb": choosing.megabytes,
        "repair_s": mending.seconds,
        "repair_mb": mending.megabytes,
        **judge(model),
    }


def measured(args: argparse.Namespace) -> set[Cell]:
    """What other files have, of the same size; the dense network sees no draw."""
    return {
        (int(row["draw"]), row["way"], row["kept"], row["repair"])
        for path in args.skip
        for row in read_lines(path)
        if row["tokens"] in {0, args.sequences * LENGTH}
        and row["judged"] == args.judged * (LENGTH - 1)
    }


def about(args: argparse.Namespace) -> dict[str, Any]:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return {
        "command": f"python experiments/language_model.py {shlex.join(sys.argv[1:])}",
        "device": f"CPU, threads: {args.threads}",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="data")
    parser.add_argument("--text", default="data/language_text.npz")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=32, help="of a draw, at most 128")
    parser.add_argument("--judged", type=int, default=16, help="of each kind, at most 32")
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kept", type=float, nargs="+", default=KEPT)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--repairs", nargs="+", default=["none", "refit"], choices=REPAIRS)
    parser.add_argument("--skip", type=Path, nargs="*", default=())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dense, text = public_llama(args.weights), load_text(args.text)
    judge = Judge(dense, text, args.judged, load_tokenizer(args.weights))
    args.out.with_suffix(".json").write_text(json.dumps(about(args), indent=1) + "\n")
    count = 1 + len(args.draws) * len(args.ways) * len(args.kept) * len(args.repairs)
    write_lines(args.out, networks(args, dense, text, judge), count)


if __name__ == "__main__":
    main()
