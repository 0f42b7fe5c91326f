"""Axis rules of distances and losses: two tensors compared, along an axis or entry by entry.

Along the axis that is summed over both must be zero at removed units: a difference is not zero where only one side is.
"""

from collections.abc import Callable

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE
from apoptosis.structure.flows import Nowhere
from apoptosis.structure.letters import broadcast
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "reductions"


def _sum_of_both(step: Step, dim: int, *values: Value) -> None:
    """A sum over a dimension, counted from the end, of what is zero where all values are."""
    for value in values:
        if value.ndim >= -dim and value.shape[dim] != 1:
            step.contract(step.axes(value)[dim], (value, value.ndim + dim))


def _is_sum(order: float) -> bool:
    return 0 < order < float("inf")


@axis_rule(
    "cdist.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(3, 4), tensor(5, 4), free="3 4 5"),
        sample(tensor(2, 3, 4), tensor(1, 5, 4), 1.0, free="2 3 4 5"),
        sample(tensor(3, 4), tensor(5, 4), float("inf"), free="3 5"),
    ],
)
def cdist(step: Step) -> None:
    """… m k, … n k → … m n: a norm of differences, the batch broadcast."""
    a, b, order, _ = step.args
    step.equal(step.axes(a)[-1], step.axes(b)[-1])
    if _is_sum(order):
        _sum_of_both(step, -1, a, b)
    else:
        step.pin(step.axes(a)[-1], "the distance is no sum")
    lead = [algebra.resolve(expr) for expr in _broadcast_lead(step, a, b)]
    step.out([*lead, step.axes(a)[-2], step.axes(b)[-2]], Nowhere())


def _broadcast_lead(step: Step, a: Value, b: Value) -> list[algebra.Expr]:
    """The axes of all dimensions but the last two, equated where they meet."""
    result: list[algebra.Expr] = []
    for dim in range(-max(a.ndim, b.ndim), -2):
        meeting = [step.axes(v)[dim] for v in (a, b) if v.ndim >= -dim and v.shape[dim] != 1]
        for other in meeting[1:]:
            step.equal(meeting[0], other)
        result.append(meeting[0] if meeting else ONE)
    return result


@axis_rule(
    "pdist.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(3, 4), free="4"),
        sample(tensor(3, 4), float("inf"), free=""),
    ],
)
def pdist(step: Step) -> None:
    """m k → pairs of m: a norm of differences."""
    x, order = step.args
    step.pin(step.axes(x)[0], "each of its indices is compared with each", quiet=True)
    if _is_sum(order):
        _sum_of_both(step, -1, x)
    else:
        step.pin(step.axes(x)[1], "the distance is no sum")
    step.out(step.fixed(step.call.outputs[0].shape, "pairs"), Nowhere())


@axis_rule(
    "pairwise_distance.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(3, 4), free="2 3 4~"),
        sample(tensor(3, 4), tensor(3, 4, seed=1), 1.0, 1e-6, True, free="3 4~"),
    ],
)
def pairwise_distance(step: Step) -> None:
    """… k, … k → …: a norm of differences, to each of which a small number is added."""
    a, b, order, _, keep = step.args
    axes = broadcast(step, a, b)
    if _is_sum(order):
        step.statistic(axes[-1], "a small number is added to each difference")
    else:
        step.pin(axes[-1], "the distance is no sum")
    step.out([*axes[:-1], *([ONE] if keep else [])], Nowhere())


@axis_rule(
    "cosine_similarity.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(2, 3, 4, seed=1), free="2 3 4"),
        sample(tensor(2, 3, 4), tensor(3, 1), -1, free="refused"),
        sample(tensor(2, 1, 4), tensor(5, 4), 2, free="2 4 5"),
    ],
)
def cosine_similarity(step: Step) -> None:
    """… k, … k → …: a sum of products over two norms."""
    a, b, dim, _ = step.args
    axes = broadcast(step, a, b)
    if dim >= 0:
        dim -= len(axes)
    whole = [v for v in (a, b) if v.ndim >= -dim and v.shape[dim] != 1]
    if len(whole) == 1:
        raise Declined("one of the two is the same at every index")
    _sum_of_both(step, dim, a, b)
    del axes[dim]
    step.out(axes, Nowhere())


POINTWISE = ["mse_loss.default", "l1_loss.default", "smooth_l1_loss.default", "huber_loss.default"]
NONE, MEAN = 0, 1  # torch's numbers of reductions; 2 is a sum


def _loss_samples() -> list[Sample]:
    x, y = tensor(2, 3), tensor(2, 3, seed=1)
    return [
        sample(x, y, NONE, free="2 3"),
        sample(x, y, MEAN, free="2~ 3~"),
        sample(x, y, 2, free="2 3"),
    ]


@axis_rule(*POINTWISE, family=FAMILY, samples=_loss_samples)
def pointwise_loss(step: Step) -> None:
    """Differences entry by entry, then nothing, a mean or a sum."""
    x, y, reduction, *_ = step.args
    axes = broadcast(step, x, y)
    if reduction == NONE:
        step.out(axes, Nowhere())
        return
    for place, expr in enumerate(axes):
        if reduction == MEAN:
            step.statistic(expr, "a mean runs over it")
        else:
            _sum_of_both(step, place - len(axes), x, y)
    step.out([], Nowhere())


def _class_samples(labels: Callable[[], torch.Tensor], free: str) -> Callable[[], list[Sample]]:
    return lambda: [
        sample(tensor(2, 3, 4), labels(), None, NONE, free="2 4"),
        sample(tensor(2, 3, 4), labels(), tensor(3).abs(), MEAN, free=free),
    ]


def _labels() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 1], [2, 0, 1, 0]])


@axis_rule(
    *("cross_entropy_loss.default", "nll_loss_nd.default"),
    family=FAMILY,
    samples=_class_samples(_labels, ""),
)
def class_loss(step: Step) -> None:
    """Classes compete and stay whole; so does what a mean or a sum over samples runs over."""
    x, labels, weight, reduction, *_ = step.args
    classes = 1 if x.ndim > 1 else 0
    step.pin(step.axes(x)[classes], "classes compete")
    for expr in step.axes(weight) if weight is not None else []:
        step.pin(expr, "classes compete", quiet=True)
    rest = [expr for dim, expr in enumerate(step.axes(x)) if dim != classes]
    if labels.ndim == x.ndim:  # probabilities
        for own, other in zip(step.axes(x), step.axes(labels), strict=True):
            step.equal(own, other)
    else:
        for own, other in zip(rest, step.axes(labels), strict=True):
            step.equal(own, other)
    if reduction == NONE:
        step.out([algebra.resolve(expr) for expr in rest], Nowhere())
        return
    for expr in rest:
        step.pin(expr, "samples", quiet=True)
    step.out([], Nowhere())
