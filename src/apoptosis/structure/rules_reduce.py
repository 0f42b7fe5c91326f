"""Axis rules of reductions, orders and pools.

A sum over an axis is a contraction: exact where the operand is zero at removed units. A mean depends on how many there
are, an order or a softmax on which ones: the first is inexact, the second pins.
"""

from typing import Any

from apoptosis.structure.axes import ONE, Expr
from apoptosis.structure.program import Value
from apoptosis.structure.rules import (
    Nowhere,
    Sample,
    Step,
    Through,
    axis_rule,
    sample,
    tensor,
)

FAMILY = "reductions"


def _dims(step: Step, x: Value) -> list[int]:
    given = step.call.arguments.get("dim")
    if given is None or given == []:
        return list(range(x.ndim))
    return [d % x.ndim for d in (given if isinstance(given, list) else [given])] if x.ndim else []


def _reduced(step: Step, x: Value, dims: list[int], *, zeros: bool = True) -> None:
    """State the axes that are left, for each output."""
    keep = bool(step.call.arguments.get("keepdim"))
    order = [None if d in dims else d for d in range(x.ndim) if keep or d not in dims]
    axes = [ONE if d is None else step.axes(x)[d] for d in order]
    for _ in step.call.outputs:
        step.out(list(axes), Through(x, tuple(order)) if zeros else Nowhere())


def _reduction_samples() -> list[Sample]:
    return [sample(tensor(2, 3, 4), [1]), sample(tensor(2, 3, 4), [0, 2], True)]


@axis_rule(
    "sum.dim_IntList", "nansum.default",
    family=FAMILY, samples=_reduction_samples,
)  # fmt: skip
def sum_(step: Step) -> None:
    """A sum over some axes."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.contract(step.axes(x)[dim], (x, dim))
    _reduced(step, x, dims)


@axis_rule("sum.default", family=FAMILY, samples=lambda: [sample(tensor(2, 3))])
def sum_all(step: Step) -> None:
    """A sum over all axes."""
    sum_(step)


@axis_rule(
    "linalg_vector_norm.default",
    family=FAMILY,
    samples=lambda: [sample(tensor(2, 3, 4), 2, [1]), sample(tensor(2, 3, 4), 1, [0], True)],
)
def vector_norm(step: Step) -> None:
    """‖x‖ over some axes: a sum inside."""
    x, order = step.args[:2]
    dims = _dims(step, x)
    if order <= 0 or order == float("inf"):
        _ordered(step, x, dims, "the norm is no sum")
    else:
        for dim in dims:
            step.contract(step.axes(x)[dim], (x, dim))
    _reduced(step, x, dims)


@axis_rule(
    "norm.ScalarOpt_dim", family=FAMILY, samples=lambda: [sample(tensor(2, 3, 4), 2, [1], True)]
)
def norm(step: Step) -> None:
    """‖x‖ over some axes: a sum inside."""
    vector_norm(step)


@axis_rule("mean.dim", family=FAMILY, samples=_reduction_samples)
def mean(step: Step) -> None:
    """A mean over some axes: it depends on their length."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.statistic(step.axes(x)[dim], "a mean runs over it")
    _reduced(step, x, dims)


@axis_rule("mean.default", family=FAMILY, samples=lambda: [sample(tensor(2, 3))])
def mean_all(step: Step) -> None:
    """A mean over all axes."""
    mean(step)


@axis_rule(
    *("var.dim", "std.dim", "var.correction", "std.correction", "var_mean.correction"),
    *("std_mean.correction", "var_mean.dim", "var.default", "std.default"),
    family=FAMILY,
    samples=list,  # each overload has arguments of its own: proved by norms written by hand
)
def variance(step: Step) -> None:
    """A variance over some axes."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.statistic(step.axes(x)[dim], "a variance runs over it")
    _reduced(step, x, dims)


@axis_rule(
    *("amax.default", "amin.default", "logsumexp.default"),
    family=FAMILY,
    samples=_reduction_samples,
)
def extremum(step: Step) -> None:
    """A maximum compares, so the axis stays whole."""
    x = step.args[0]
    _ordered(step, x, dims := _dims(step, x), "a maximum or the like runs over it")
    _reduced(step, x, dims, zeros=False)


@axis_rule(
    *("max.dim", "min.dim", "median.dim", "mode.default", "argmax.default", "argmin.default"),
    *("any.dim", "all.dim", "any.dims", "all.dims", "any.default", "all.default", "prod.dim_int"),
    *("max.default", "min.default", "prod.default", "count_nonzero.default"),
    *("count_nonzero.dim_IntList", "cummax.default", "aminmax.default"),
    family=FAMILY,
    samples=list,  # as `amax`
)
def extremum_with_place(step: Step) -> None:
    """A maximum compares, so the axis stays whole."""
    extremum(step)


def _ordered(step: Step, x: Value, dims: list[int], why: str) -> None:
    for dim in dims:
        step.pin(step.axes(x)[dim], why)


@axis_rule(
    *("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default"),
    family=FAMILY,
    samples=list,
)
def softmax(step: Step) -> None:
    """The axis competes for one unit of probability and stays whole."""
    x = step.args[0]
    step.pin(step.axes(x)[step["dim"]], "softmax runs over it")
    step.same(x, flow=Nowhere())


@axis_rule(
    *("cumsum.default", "cumprod.default", "flip.default", "roll.default", "diff.default"),
    *("sort.default", "sort.stable", "argsort.default", "topk.default", "kthvalue.default"),
    *("tril.default", "triu.default", "logcumsumexp.default", "rot90.default"),
    family=FAMILY,
    samples=list,
)
def by_place(step: Step) -> None:
    """What happens along the axis depends on the order of its indices."""
    x = step.args[0]
    if step.call.name.startswith("tri"):
        dims = [x.ndim - 2, x.ndim - 1]
    else:
        given: Any = step.call.arguments.get("dim", step.call.arguments.get("dims"))
        given = given if isinstance(given, list) else [given]
        dims = [d % x.ndim for d in given] if given and None not in given else list(range(x.ndim))
    _ordered(step, x, dims, "its order matters here")
    for out in step.call.outputs:
        axes: list[Expr] = [
            step.fresh(out.shape[d], pin="ordered") if d in dims else step.axes(x)[d]
            for d in range(x.ndim)
        ]
        step.out(axes, Nowhere())


POOLS = [
    f"{kind}_pool{n}d.default" for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg")
] + [
    *(f"adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
    *(f"max_pool{n}d_with_indices.default" for n in (2, 3)),
    "max_pool1d_with_indices.default",
]
RESIZES = [
    f"upsample_{kind}.{overload}"
    for kind in (
        "nearest1d",
        "nearest2d",
        "nearest3d",
        "bilinear2d",
        "bicubic2d",
        "linear1d",
        "trilinear3d",
    )
    for overload in ("default", "vec")
] + [
    "_upsample_bilinear2d_aa.default",
    "_upsample_bicubic2d_aa.default",
    "_upsample_bilinear2d_aa.vec",
    "_upsample_bicubic2d_aa.vec",
]


@axis_rule(
    *POOLS,
    *RESIZES,
    *(f"{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3)),
    family=FAMILY,
    samples=list,
)
def pool(step: Step) -> None:
    """Space changes and stays whole, channels pass."""
    x = step.args[0]
    name = step.call.name
    space = next(int(c) for c, d in zip(name, name[1:], strict=False) if c in "123" and d == "d")
    lead = x.ndim - space
    for expr in step.axes(x)[lead:]:
        step.pin(expr, "space", quiet=True)
    dims = (*range(lead), *[None] * space)
    for out in step.call.outputs:
        step.out([*step.axes(x)[:lead], *step.fixed(out.shape[lead:])], Through(x, dims))


@axis_rule("diagonal.default", family=FAMILY, samples=list)
def diagonal(step: Step) -> None:
    """Entries with equal indices: both axes stay whole."""
    x, _offset, a, b = step.args
    dims = [a % x.ndim, b % x.ndim]
    _ordered(step, x, dims, "a diagonal is taken")
    order = [d for d in range(x.ndim) if d not in dims]
    axes = [step.axes(x)[d] for d in order]
    last = step.fresh(step.call.outputs[0].shape[-1], pin="diagonal")
    step.out([*axes, last], Through(x, (*order, None)))
