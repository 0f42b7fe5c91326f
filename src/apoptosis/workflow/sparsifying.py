"""`sparsify`: score, zero a few single weights, score again, until only the asked share of them is left.

With a share k asked for and T stages, stage t leaves k^(t/T): each removes the same part of what is there. Scores are
taken anew at every stage on the network as it is by then, and what has gone never comes back. N:M goes through (M−1):M
and so on, where there are stages for it.

What becomes of batch norms is a policy, to be said and to be the same for all that are compared: `frozen` leaves their
statistics as they were trained, `re-estimate` measures them anew on the scoring data after every stage, the last one
too. Accuracy without any training depends more on this than on the criterion (experiments/results/sparse_resnet20.md).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.checkpoint import Journal
from apoptosis.criteria import Criterion, Saliency, find_criterion, saliencies
from apoptosis.errors import ConfigError
from apoptosis.masks import Layer, MaskPlan, identity_masks, mask, mask_, masks_of
from apoptosis.modes import check_not_of_inference, outside_inference_mode
from apoptosis.planning import Sparsity, check_not_emptied, check_shares, make_masks
from apoptosis.progress import track
from apoptosis.records import Outcome, ScoreSummary, Spending, StepRecord
from apoptosis.repair import batch_norm as mend_batch_norms
from apoptosis.repair import check_has_batch_norms
from apoptosis.soundness import check_numbers
from apoptosis.structure import model_tensors
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time
from apoptosis.workflow.arguments import check_data, check_number, check_task, failures_explained
from apoptosis.workflow.delivering import check_runs
from apoptosis.workflow.notes import note_masks, noted_masks, with_network

__all__ = [
    "BATCH_NORM_POLICIES",
    "DEFAULT_WEIGHT_CRITERION",
    "default_stages",
    "sparsify",
]

BATCH_NORM_POLICIES = ("frozen", "re-estimate")
DEFAULT_WEIGHT_CRITERION = "magnitude"
"""Nothing that was tried keeps more beyond chance at 80 and 90 % removed where norms are measured anew, on a ResNet20
and a ResNet50 (experiments/results/sparse_resnet20.md); with norms frozen, at 80 %, some do."""
DEFAULT_STAGES = 20


@outside_inference_mode
@one_at_a_time
def sparsify(  # noqa: PLR0913 - each word is one a user may want to say, and none must be said
    model: nn.Module,
    batches: Iterable[Batch] | None,
    sparsity: Sparsity,
    task: Task | None = None,
    *,
    criterion: Criterion | str = DEFAULT_WEIGHT_CRITERION,
    stages: int | None = None,
    saliency: Saliency | str | None = None,
    batch_norm: str = "frozen",
    journal: Journal | None = None,
) -> Outcome[MaskPlan]:
    """A network of the same shape with most of its weights zero, which stay zero; the given one is untouched.

    Args:
        model: a trained network. Masks it keeps already stay, and count.
        batches: data to score on, read once per stage; anything that can be iterated again. None where nothing reads
            them: criteria of weights alone, with frozen batch norms.
        sparsity: what may stay: `Sparsity(keep=0.1)`, `Sparsity(pattern="2:4")`.
        task: what a batch is and what its loss is; classification unless said.
        criterion: what decides which weights go; one that scores parameters.
        stages: how often the network is scored and masked; 20 unless given, 1 for criteria that read no data. N:M has
            at most M − N of them: one weight of every M goes at each.
        saliency: how scores rank weights: `plain`, `normalised`, `paper`, `balanced`, or a `Saliency`; the criterion's
            own unless given.
        batch_norm: `frozen`, or `re-estimate` to measure statistics anew after every stage.
        journal: where a note is kept after every stage; a run that was stopped goes on from the last.

    Returns:
        The network, which keeps its masks through training, copies and checkpoints; the masks as its plan; a record of
        every stage.

    Raises:
        BudgetError: a layer would lose its last weight, and `sparsity` does not allow it.
        ConfigError: an unknown word, or a criterion of units.
        DataError: there are no batches, or they can be read only once.
        ModelError: weights are integers or complex.
        NonFiniteError: there is NaN or infinity among weights or statistics, or batch norms measure some.

    >>> from apoptosis.data import digits
    >>> from apoptosis.models import digits_cnn
    >>> outcome = sparsify(digits_cnn(), digits().train.batches(400), Sparsity(keep=0.1, scope="layer"))
    >>> print(outcome.spent[0])
    weights: asked 10.0%, got 9.99% (1,657 of 16,592)
    """
    batches = () if batches is None else batches
    check_data(batches)
    check_not_of_inference(model)
    check_task(task)
    _check_choices(sparsity, batch_norm)
    check_numbers(model, "The network to sparsify")
    how = criterion if isinstance(criterion, Criterion) else find_criterion(criterion)
    stages = default_stages(how) if stages is None else stages
    check_number("stages", stages)
    form = how.weighed(saliency)
    score = how.score
    if score is None:
        raise ConfigError(
            f"The criterion {how.name!r} scores whole units, and single weights are to go. Use one of parameters, such "
            "as oba, taylor or magnitude."
        )
    if batch_norm == "re-estimate":
        check_has_batch_norms(model)
    layers = sparsity.layers(model)
    check_shares(sparsity, layers)
    masks = masks_of(model) or identity_masks(model, sparsity.names)
    small = mask(model, masks)
    history: list[StepRecord] = []
    begun = with_network({}, model, journal)
    if (noted := noted_masks(journal, small, begun)) is not None:
        masks, history = noted
        small = mask_(small, masks)
    for stage in track(range(1, stages + 1), f"sparsifying by {how.name}"):
        if history and stage <= history[-1].step:
            continue  # in an earlier life
        start = time.perf_counter()
        here = sparsity.on_the_way(stage / stages, layers)
        before = sparsity.on_the_way((stage - 1) / stages, layers)
        if here is None or (sparsity.pattern is not None and here == before):
            continue  # whole weights of a pattern go at some stages only
        with failures_explained(f"Scoring by {how.name}"):
            scores = score(small, batches, task)
        values = saliencies(scores, small, form, layers, masks)
        later = make_masks(small, values, replace(here, allow_empty=True), start=masks)
        check_not_emptied(masks, later, sparsity)
        small = mask_(small, later)
        if batch_norm == "re-estimate":
            small = mend_batch_norms(model, small, later, batches, task)
        history.append(
            StepRecord(
                step=stage,
                loss=scores.loss,
                count=scores.count,
                scores=_summaries(values, masks),
                removed=_removed(masks, later),
                left={name: kept for name, (kept, _) in later.counts().items()},
                macs=None,
                params=_num_nonzero(small.parameters()),
                seconds=time.perf_counter() - start,
            )
        )
        masks = later
        note_masks(journal, masks, small, history, begun)
    check_runs(small, model, batches, task or Task.classification())
    settings: dict[str, Any] = {
        "criterion": how.name,
        "saliency": asdict(form),
        "sparsity": _as_data(sparsity),
        "stages": stages,
        "batch_norm": batch_norm,
    }
    return Outcome(small, masks, tuple(history), _spent(small, layers, sparsity), settings)


def default_stages(criterion: Criterion) -> int:
    """Weights by themselves rank alike whatever has gone, so one stage does."""
    return DEFAULT_STAGES if criterion.reads_data else 1


def _check_choices(sparsity: Any, batch_norm: Any) -> None:
    if not isinstance(sparsity, Sparsity):
        raise ConfigError(
            f"The sparsity is {sparsity!r}; say what share of the weights may stay: Sparsity(keep=0.1)."
        )
    if batch_norm not in BATCH_NORM_POLICIES:
        raise ConfigError(
            f"batch_norm={batch_norm!r} was asked for; there are {', '.join(BATCH_NORM_POLICIES)}."
        )


def _spent(
    small: nn.Module, layers: Mapping[str, Layer], sparsity: Sparsity
) -> tuple[Spending, ...]:
    """Asked and got; what was got is counted in the network itself, not in its masks."""
    held, parameters = model_tensors(small), list(small.parameters())
    lines: list[Spending] = []
    for what, asked, tensors in (
        ("weights", sparsity.density, [held[name] for name in layers]),
        ("params", 1.0, parameters),
    ):
        total, left = sum(t.numel() for t in tensors), _num_nonzero(tensors)
        lines.append(Spending(what, asked, left / total, total, left))
    return tuple(lines)


def _num_nonzero(tensors: Iterable[Tensor]) -> int:
    return sum(int(torch.count_nonzero(tensor)) for tensor in tensors)


def _removed(before: MaskPlan, after: MaskPlan) -> dict[str, int]:
    counts, later = before.counts(), after.counts()
    gone = {
        name: (counts[name][0] if name in counts else numel) - kept
        for name, (kept, numel) in later.items()
    }
    return {name: num for name, num in gone.items() if num}


def _summaries(values: Mapping[str, Tensor], alive: MaskPlan) -> dict[str, ScoreSummary]:
    """The spread of what ranked each tensor's weights, of those that were there."""
    found: dict[str, ScoreSummary] = {}
    for name, own in values.items():
        left = own[alive.kept(name).to(own.device)] if name in alive.masks else own
        if left.numel():
            spread = torch.stack([left.min(), left.median(), left.max()])
            found[name] = ScoreSummary(*spread.tolist())
    return found


def _as_data(sparsity: Sparsity) -> dict[str, Any]:
    pattern = None if sparsity.pattern is None else str(sparsity.pattern)
    return asdict(sparsity) | {"pattern": pattern, "names": list(sparsity.names)}
