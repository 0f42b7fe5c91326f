"""`gradual`: zero some single weights, fine-tune, zero more and fine-tune again, until the asked share is left."""

from dataclasses import dataclass, replace

from torch import nn

from apoptosis.checkpoint import Journal
from apoptosis.criteria import Criterion, Saliency, find_criterion
from apoptosis.masks import MaskPlan
from apoptosis.modes import outside_inference_mode
from apoptosis.planning import Sparsity
from apoptosis.records import Outcome
from apoptosis.task import Task
from apoptosis.training import FitOptions
from apoptosis.workflow.sparsifying import DEFAULT_WEIGHT_CRITERION, default_stages, sparsify
from apoptosis.workflow.tuning import DEFAULT_TUNING, Material, fine_tuned, part_of

__all__ = ["Sparsifying", "gradual"]


@dataclass(frozen=True, kw_only=True)
class Sparsifying:
    """What `sparsify` may be told, as one object for the runs that call it."""

    criterion: Criterion | str = DEFAULT_WEIGHT_CRITERION
    stages: int | None = None
    saliency: Saliency | str | None = None
    batch_norm: str = "frozen"


@outside_inference_mode
def gradual(  # noqa: PLR0913 - each word is one a user may want to say
    model: nn.Module,
    sparsity: Sparsity,
    data: Material,
    task: Task | None = None,
    *,
    sparsifying: Sparsifying | None = None,
    fit: FitOptions | None = None,
    journal: Journal | None = None,
) -> Outcome[MaskPlan]:
    """A network with most of its weights zero, trained after every stage; the given one is untouched.

    Args:
        model: a trained network; also the teacher, where `fit.distil` asks for one.
        sparsity: what may stay.
        data: batches to score on, to train on, and to choose epochs by.
        task: what a batch is; classification unless said.
        sparsifying: how to choose weights. Its `stages` are those between which the network is trained; one unless
            said where weights alone rank.
        fit: how to fine-tune after each stage; 20 epochs of SGD unless said.
        journal: where notes are kept; a run that was killed goes on from them to the same end.

    Returns:
        What `sparsify` returns; `settings["training"]` has a record of the epochs of each stage.
    """
    how = sparsifying or Sparsifying()
    named = how.criterion if isinstance(how.criterion, Criterion) else find_criterion(how.criterion)
    stages = default_stages(named) if how.stages is None else how.stages
    layers = sparsity.layers(model)
    last: Outcome[MaskPlan] | None = None
    for stage in range(1, stages + 1):
        here = sparsity.on_the_way(stage / stages, layers)
        if here is None or (
            stage > 1 and here == sparsity.on_the_way((stage - 1) / stages, layers)
        ):
            continue  # whole weights of a pattern go at some stages only
        notes = part_of(journal, f"stage{stage}", on_the_way=last is not None)
        found = sparsify(
            model if last is None else last.model,
            data.scoring,
            here,
            task,
            criterion=how.criterion,
            stages=1,
            saliency=how.saliency,
            batch_norm=how.batch_norm,
            journal=part_of(notes, "sparsify"),
        )
        steps = [replace(step, step=stage) for step in found.history]
        before = () if last is None else last.history
        trained = [] if last is None else last.settings.get("training", [])
        found = replace(
            found,
            history=(*before, *steps),
            settings={**found.settings, "stages": stages, "training": trained},
        )
        last = fine_tuned(found, model, data, task, fit or DEFAULT_TUNING, part_of(notes, "fit"))
    assert last is not None, "the last stage is always taken"
    return last
