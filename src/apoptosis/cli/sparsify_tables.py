"""What `apoptosis prune` of single weights shows: shares asked and true, layer by layer, and what was saved."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from apoptosis.cli.figures import file_size
from apoptosis.cli.finishing import Finished
from apoptosis.cli.names import counted
from apoptosis.cli.result_tables import (
    beside,
    has_batch_norms,
    load_lines,
    num_batches,
    plain_table,
    scored_on,
    scoring_cost,
    show_evaluation,
    show_next,
    show_place,
    step_as_data,
)
from apoptosis.cli.sparsify_options import SparsifyOptions
from apoptosis.cli.subject import Subject
from apoptosis.cli.training_tables import training_lines
from apoptosis.criteria import CRITERIA
from apoptosis.masks import Layer, MaskPlan, Pattern, maskable, masks_of
from apoptosis.planning import Sparsity
from apoptosis.planning.sparsity import num_of
from apoptosis.records import Outcome
from apoptosis.structure import model_tensors

__all__ = ["SparsifyDryRun", "SparsifyResult", "show_dry_run", "show_result"]

MOST_STAGES = 20
"""A table of a dry run shows so many; the JSON has all."""

NO_FASTER = "Zeros alone do not make a dense network faster, only its file smaller."
FASTER_2_4 = (
    "A GPU can use 2:4 weights of large linear layers: "
    "ap.masks.semi_structured(small.bfloat16().cuda(), inputs)."
)
FROZEN_NORMS = (
    "Its batch norms still have the dense network's statistics; --batch-norm re-estimate measures them anew after "
    "every stage, without labels."
)


@dataclass(frozen=True)
class SparsifyResult:
    """One run of the command."""

    options: SparsifyOptions
    run: Finished[MaskPlan]

    @property
    def outcome(self) -> Outcome[MaskPlan]:
        """What came out."""
        return self.run.outcome

    @property
    def removed_something(self) -> bool:
        """Whether any weight went."""
        return self.outcome.plan.num_kept < self.outcome.plan.num_weights

    @property
    def suits_a_gpu(self) -> bool:
        """Whether there are linear layers with 2:4 masks."""
        linear = (n for n, m in self.outcome.model.named_modules() if isinstance(m, nn.Linear))
        own = [
            self.outcome.plan.masks.get(f"{name}.weight" if name else "weight") for name in linear
        ]
        return any(mask is not None and mask.pattern == Pattern(2, 4) for mask in own)

    @property
    def num_kept_zeros(self) -> int:
        """Weights that may stay and are zero all the same."""
        held = model_tensors(self.outcome.model)
        masks = self.outcome.plan.masks
        return sum(own.num_kept - int(held[n].count_nonzero()) for n, own in masks.items())

    @property
    def has_frozen_norms(self) -> bool:
        """Whether batch norms have the statistics of before, which the layers ahead of them no longer give."""
        frozen = self.options.batch_norm == "frozen" and not self.run.training
        return self.removed_something and frozen and has_batch_norms(self.outcome.model)

    @property
    def left_whole(self) -> list[str]:
        """Weights of layers that were left out by name."""
        return [n for n in maskable(self.outcome.model) if n not in self.outcome.plan.masks]

    @property
    def dense_bytes(self) -> int:
        """What the tensors would take with their zeros."""
        tensors = {id(t): t for t in model_tensors(self.outcome.model).values()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def file_bytes(self) -> dict[str, int]:
        """What was written, file by file."""
        return {file.name: file.stat().st_size for file in sorted(self.run.saved.iterdir())}

    def as_data(self) -> dict[str, Any]:
        """Everything the tables show, and the stages, as plain data."""
        weights, _ = self.outcome.spent
        files = self.file_bytes()
        return {
            "model": self.options.subject.model,
            "data": self.options.subject.data,
            "kind": "weights",
            "settings": dict(self.outcome.settings),
            "spent": [asdict(line) for line in self.outcome.spent],
            "sparsity": {
                "asked": _both_ways(weights.asked),
                "got": _both_ways(weights.got),
            },
            "evaluation": self.outcome.settings["evaluation"],
            "layers": {
                name: {"weights": numel, "kept": kept, "share": kept / numel}
                for name, (kept, numel) in self.outcome.plan.counts().items()
            },
            "left_whole": self.left_whole,
            "training": self.run.training,
            "stages": [step_as_data(step, "stage") for step in self.outcome.history],
            "bytes": {"dense": self.dense_bytes, "saved": sum(files.values()), "files": files},
            "seconds": self.run.seconds,
            "saved": str(self.run.saved),
            "replaced": self.run.replaced,
            "load": load_lines(self.run),
            "next": next_command(self)[0] if self.removed_something else None,
        }


@dataclass(frozen=True)
class StagePlan:
    """What would be left after a stage that scores."""

    stage: int
    share: float
    weights: int


@dataclass(frozen=True)
class SparsifyDryRun:
    """What would be done, as far as it is known without scoring."""

    options: SparsifyOptions
    asked: float
    layers: Mapping[str, int]
    stages: tuple[StagePlan, ...]
    num_batches: int | None

    @staticmethod
    def of(
        options: SparsifyOptions,
        subject: Subject,
        sparsity: Sparsity,
        layers: Mapping[str, Layer],
    ) -> "SparsifyDryRun":
        """Look at model and data; nothing is scored."""
        masks = masks_of(subject.model)
        there = {} if masks is None else {name: kept for name, (kept, _) in masks.counts().items()}
        return SparsifyDryRun(
            options,
            sparsity.density,
            {name: prod(layer.shape) for name, layer in layers.items()},
            _stages(options.stages, sparsity, layers, there),
            num_batches(subject.data.scoring),
        )

    @property
    def num_weights(self) -> int:
        """Of all layers that may lose some."""
        return sum(self.layers.values())

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        read = CRITERIA[self.options.criterion].reads_data
        anew = self.options.batch_norm == "re-estimate"
        return {
            "model": self.options.subject.model,
            "data": self.options.subject.data,
            "kind": "weights",
            "dry_run": True,
            "criterion": self.options.criterion,
            "asked": _both_ways(self.asked),
            "weights": self.num_weights,
            "layers": dict(self.layers),
            "stages": [asdict(stage) for stage in self.stages],
            "scoring_passes": len(self.stages) if read else 0,
            "measuring_passes": len(self.stages) if anew else 0,
            "batches_per_pass": self.num_batches,
            "training_epochs": self.options.tuning.epochs * len(self.stages),
            "out": str(self.options.place),
        }


def show_result(result: SparsifyResult, console: Console) -> None:
    """The tables, and what to do with the result."""
    options, outcome = result.options, result.outcome
    console.print(
        Text.assemble(
            (options.subject.model, "bold"),
            f" sparsified by {_how(options)} in {counted(len(outcome.history), 'stage')}"
            f"{_read(result)} ({result.run.seconds:.1f} s)\n",
        )
    )
    console.print(_shares_table(outcome))
    show_evaluation(result.run, console)
    for line in training_lines(result.run.training):
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_layers_table(outcome.plan))
    if whole := result.left_whole:
        more = f" and {len(whole) - 6} more" if len(whole) > 6 else ""
        console.print(Text(f"Left whole: {', '.join(whole[:6])}{more}"), soft_wrap=True)
    console.print()
    remarks = [NO_FASTER, *([FASTER_2_4] if result.suits_a_gpu else [])]
    if zeros := result.num_kept_zeros:
        remarks.append(
            f"{zeros:,} of the weights that stay were zero before. ap.masks.zeros_of(model) makes masks of them."
        )
    if result.has_frozen_norms:
        remarks.append(FROZEN_NORMS)
    for remark in remarks:
        console.print(Text(remark), soft_wrap=True)
    console.print(Text(_sizes(result)), soft_wrap=True)
    show_place(result.run, console)
    if result.removed_something:
        show_next(*next_command(result), console)


def show_dry_run(dry: SparsifyDryRun, console: Console) -> None:
    """What would be done, and what it would cost."""
    options = dry.options
    console.print(
        Text.assemble(
            (options.subject.model, "bold"),
            f" would be sparsified by {options.criterion} in {counted(len(dry.stages), 'stage')}: of "
            f"{dry.num_weights:,} weights in {counted(len(dry.layers), 'layer')} {dry.asked:.2%} would stay. Nothing "
            "was scored or written.\n",
        )
    )
    layers = plain_table(("layer", "left"), ("weights", "right"))
    for name, numel in dry.layers.items():
        layers.add_row(Text(name), f"{numel:,}")
    console.print(layers)
    console.print()
    stages = plain_table(("stage", "right"), ("share", "right"), ("would stay", "right"))
    for stage in _some(dry.stages):
        stages.add_row(str(stage.stage), f"{stage.share:.2%}", f"{stage.weights:,}")
    console.print(stages)
    cost = scoring_cost(options.criterion, len(dry.stages), dry.num_batches)
    if options.batch_norm == "re-estimate":
        cost += " Batch norms are measured in as many passes more, forward only."
    cost += options.tuning.cost(len(dry.stages))
    console.print(Text(f"\nCost: {cost}"), soft_wrap=True)
    console.print(Text(f"It would be saved in {options.place}"), soft_wrap=True)


def next_command(result: SparsifyResult) -> tuple[str, str]:
    """Measure batch norms anew where there are any and it was not done; else, compare with the simplest criterion."""
    options, asked = result.options, result.run.asked
    if result.has_frozen_norms:
        out = beside(options.out, "re-estimated")
        return asked.line(batch_norm="re-estimate", out=out), "with batch norms measured anew"
    other = "magnitude" if options.criterion != "magnitude" else "oba"
    line = asked.line(criterion=other, out=beside(options.out, other))
    return line, "how much of this was the criterion?"


def _stages(
    num: int, sparsity: Sparsity, layers: Mapping[str, Layer], there: Mapping[str, int]
) -> tuple[StagePlan, ...]:
    """The stages that score: all of them for a share; of a pattern those at which one more of every M goes."""
    numel = {name: prod(layer.shape) for name, layer in layers.items()}
    found: list[StagePlan] = []
    before: Sparsity | None = None
    for stage in range(1, num + 1):
        here = sparsity.on_the_way(stage / num, layers)
        if here is not None and (sparsity.pattern is None or here != before):
            found.append(StagePlan(stage, here.density, _num_left(here, numel, there)))
        before = here
    return tuple(found)


def _num_left(sparsity: Sparsity, numel: Mapping[str, int], there: Mapping[str, int]) -> int:
    """How many stay; a model that keeps masks already may have fewer than are asked for."""
    share = sparsity.density
    left = {name: there.get(name, size) for name, size in numel.items()}
    if sparsity.pattern is None and sparsity.scope == "global":
        return min(max(1, num_of(share, sum(numel.values()))), sum(left.values()))
    return sum(min(num_of(share, size), left[name]) for name, size in numel.items())


def _some(stages: tuple[StagePlan, ...]) -> list[StagePlan]:
    """Evenly chosen, the last one too."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    every = [round(i * (len(stages) - 1) / (MOST_STAGES - 1)) for i in range(MOST_STAGES)]
    return [stages[i] for i in every]


def _shares_table(outcome: Outcome[MaskPlan]) -> Table:
    """Kept and removed, for papers say sparsity and mean the latter."""
    table = plain_table(
        ("", "left"),
        ("asked to keep", "right"),
        ("kept", "right"),
        ("asked to remove", "right"),
        ("removed", "right"),
        ("dense", "right"),
        ("nonzero", "right"),
    )
    for line in outcome.spent:
        asked = line.what == "weights"
        table.add_row(
            line.what,
            f"{line.asked:.2%}" if asked else "–",
            f"{line.got:.3%}",
            f"{1 - line.asked:.2%}" if asked else "–",
            f"{1 - line.got:.3%}",
            f"{line.dense:,}",
            f"{line.left:,}",
        )
    return table


def _layers_table(plan: MaskPlan) -> Table:
    table = plain_table(
        ("layer", "left"), ("weights", "right"), ("kept", "right"), ("share", "right")
    )
    for name, (kept, numel) in plan.counts().items():
        table.add_row(Text(name), f"{numel:,}", f"{kept:,}", f"{kept / numel:.1%}")
    return table


def _sizes(result: SparsifyResult) -> str:
    files, dense = result.file_bytes(), result.dense_bytes
    weights, masks = files.get("model.safetensors", 0), files.get("masks.safetensors", 0)
    total = weights + masks
    others = sum(files.values()) - total
    if total >= dense:
        return (
            f"Weights and masks take {file_size(total)} on disk, {file_size(dense)} dense: too little went for a "
            "smaller file."
        )
    parts = f"{file_size(weights)} weights, {file_size(masks)} masks"
    return (
        f"On disk: {file_size(total)} ({parts}) instead of {file_size(dense)} dense: "
        f"{total / max(1, dense):.1%}; the record of the run {file_size(others)} more"
    )


def _how(options: SparsifyOptions) -> str:
    told = "" if options.saliency is None else f" ({options.saliency})"
    return f"{options.criterion}{told}"


def _read(result: SparsifyResult) -> str:
    """What was read, and for what."""
    history, norms = result.outcome.history, result.options.batch_norm
    scored = any(step.count for step in history)
    words = scored_on(history, result.run.counted_in) if scored else ""
    return f"{words}, batch norms measured anew" if norms == "re-estimate" else words


def _both_ways(kept: float) -> dict[str, float]:
    return {"kept": kept, "removed": 1 - kept}
