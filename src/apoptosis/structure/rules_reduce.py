"""Axis rules of reductions and orders.

A sum over an axis is a contraction: exact where the operand is zero at removed units. A mean depends on how many there
are, an order or a softmax on which ones: the first is inexact, the second pins.
"""

from typing import Any

from apoptosis.structure.axes import ONE, Expr
from apoptosis.structure.flows import Nowhere, Through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

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


def _over_dims(mark: str) -> list[Sample]:
    """Reductions over lists of dimensions, with what becomes of those: nothing, "~" or "pinned"."""
    x = tensor(2, 3, 4)

    def free(*reduced: int) -> str:
        left = [f"{n}{mark}" if n in reduced else str(n) for n in x.shape]
        return " ".join(size for size in left if not size.endswith("pinned"))

    return [
        sample(x, [1], free=free(3)),
        sample(x, [0, -1], True, free=free(2, 4)),
        sample(x, [], free=free(2, 3, 4)),
        sample(tensor(2, 1), [1], free="2"),
    ]


def _over_dim(*before: object) -> list[Sample]:
    """Reductions over one pinned dimension, arguments before it."""
    x = tensor(2, 3, 4)
    return [
        sample(x, *before, 1, free="2 4"),
        sample(x, *before, -1, True, free="2 3"),
    ]


def _over_all() -> list[Sample]:
    return [sample(tensor(2, 3), free=""), sample(tensor(), free="")]


@axis_rule(
    "sum.dim_IntList",
    "nansum.default",
    family=FAMILY,
    samples=lambda: [*_over_dims(""), sample(tensor(2, 3), None, free="2 3")],
)
def sum_(step: Step) -> None:
    """A sum over some axes."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.contract(step.axes(x)[dim], (x, dim))
    _reduced(step, x, dims)


@axis_rule("sum.default", family=FAMILY, samples=lambda: [sample(tensor(2, 3), free="2 3")])
def sum_all(step: Step) -> None:
    """A sum over all axes."""
    sum_(step)


@axis_rule(
    "linalg_vector_norm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 2, [1], free="2 3 4"),
        sample(tensor(2, 3, 4), 1, [0, -1], True, free="2 3 4"),
        sample(tensor(2, 3), 2.5, None, free="2 3"),
        sample(tensor(2, 3), float("inf"), [1], free="2"),
        sample(tensor(2, 3), 0, [0], free="3"),
    ],
)
def vector_norm(step: Step) -> None:
    """‖x‖ over some axes: a sum inside."""
    x, order = step.args[:2]
    order, dims = 2 if order is None else order, _dims(step, x)
    if order <= 0 or order == float("inf"):
        _ordered(step, x, dims, "the norm is no sum")
    else:
        for dim in dims:
            step.contract(step.axes(x)[dim], (x, dim))
    _reduced(step, x, dims)


@axis_rule(
    "linalg_norm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), None, [1], free="2 3 4"),
        sample(tensor(2, 3, 4), 1, [-1], True, free="2 3 4"),
        sample(tensor(2, 3), free="2 3"),
        sample(tensor(2, 3), 2, [0, 1], free="refused"),
    ],
)
def linalg_norm(step: Step) -> None:
    """‖x‖ of vectors: a sum inside; norms of matrices pin."""
    x, order, dims = step.args[:3]
    if order is not None and len(dims or x.shape) != 1:
        raise Declined("a norm of matrices is no sum of entries")
    vector_norm(step)


@axis_rule(
    *("linalg_matrix_norm.str_ord", "linalg_norm.ord_str"),
    family=FAMILY,
    samples={
        "linalg_matrix_norm.str_ord": lambda: [
            sample(tensor(2, 3, 4), "fro", [0, 2], free="2 3 4"),
            sample(tensor(2, 3, 4), "nuc", free="refused"),
        ],
        "linalg_norm.ord_str": lambda: [sample(tensor(3, 4), "fro", [0, 1], True, free="3 4")],
    },
)
def frobenius(step: Step) -> None:
    """The root of a sum of squares; other norms of matrices pin."""
    x = step.args[0]
    if step["ord"] != "fro":
        raise Declined("this norm of matrices is no sum of entries")
    for dim in (dims := _dims(step, x)):
        step.contract(step.axes(x)[dim], (x, dim))
    _reduced(step, x, dims)


@axis_rule(
    "norm.ScalarOpt_dim",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 2, [1], True, free="2 3 4"),
        sample(tensor(2, 3), None, [-1], free="2 3"),
    ],
)
def norm(step: Step) -> None:
    """‖x‖ over some axes: a sum inside."""
    vector_norm(step)


@axis_rule(
    "mean.dim",
    "nanmean.default",
    family=FAMILY,
    samples={
        "mean.dim": lambda: _over_dims("~"),
        "nanmean.default": lambda: [*_over_dims("~"), sample(tensor(2, 3), free="2~ 3~")],
    },
)
def mean(step: Step) -> None:
    """A mean over some axes: it depends on their length."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.statistic(step.axes(x)[dim], "a mean runs over it")
    _reduced(step, x, dims)


@axis_rule("mean.default", family=FAMILY, samples=lambda: [sample(tensor(2, 3), free="2~ 3~")])
def mean_all(step: Step) -> None:
    """A mean over all axes."""
    mean(step)


VARIANCES = ("var", "std", "var_mean", "std_mean")


@axis_rule(
    *(f"{kind}.{variant}" for kind in VARIANCES for variant in ("default", "dim", "correction")),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            [f"{kind}.default" for kind in VARIANCES],
            lambda: [sample(tensor(2, 3), False, free="2~ 3~")],
        ),
        **dict.fromkeys(
            [f"{kind}.dim" for kind in VARIANCES],
            lambda: [
                sample(tensor(2, 3, 4), [1], False, free="2 3~ 4"),
                sample(tensor(2, 3, 4), [0, -1], False, True, free="2~ 3 4~"),
            ],
        ),
        **dict.fromkeys(
            [f"{kind}.correction" for kind in VARIANCES],
            lambda: [
                sample(tensor(2, 3, 4), [-2], correction=0, free="2 3~ 4"),
                sample(tensor(2, 3), correction=0, keepdim=True, free="2~ 3~"),
            ],
        ),
    },
)
def variance(step: Step) -> None:
    """A variance over some axes."""
    x = step.args[0]
    for dim in (dims := _dims(step, x)):
        step.statistic(step.axes(x)[dim], "a variance runs over it")
    _reduced(step, x, dims)


OVER_DIM = [
    *("max.dim", "min.dim", "median.dim", "mode.default", "argmax.default", "argmin.default"),
    *("any.dim", "all.dim", "prod.dim_int", "nanmedian.dim"),
]
OVER_ALL = [
    *("max.default", "min.default", "prod.default", "any.default", "all.default"),
    *("median.default", "nanmedian.default"),
]


@axis_rule(
    *("amax.default", "amin.default", "logsumexp.default"),
    family=FAMILY,
    samples={
        "amax.default": lambda: _over_dims("pinned"),
        "amin.default": lambda: _over_dims("pinned"),
        "logsumexp.default": lambda: _over_dims("pinned")[:2],
    },
)
def extremum(step: Step) -> None:
    """A maximum compares, so the axis stays whole."""
    x = step.args[0]
    _ordered(step, x, dims := _dims(step, x), "a maximum or the like runs over it")
    _reduced(step, x, dims, zeros=False)


@axis_rule(
    *OVER_DIM,
    *OVER_ALL,
    *("any.dims", "all.dims", "count_nonzero.dim_IntList", "count_nonzero.default"),
    *("kthvalue.default", "aminmax.default", "quantile.scalar", "nanquantile.scalar"),
    family=FAMILY,
    samples={
        **dict.fromkeys(OVER_DIM, _over_dim),
        **dict.fromkeys(OVER_ALL, _over_all),
        "any.dims": lambda: _over_dims("pinned")[:2],
        "all.dims": lambda: _over_dims("pinned")[:2],
        "kthvalue.default": lambda: _over_dim(2),
        **dict.fromkeys(
            ["quantile.scalar", "nanquantile.scalar"],
            lambda: [*_over_dim(0.3), sample(tensor(2, 3), 0.3, free="")],
        ),
        "count_nonzero.dim_IntList": lambda: [sample(tensor(2, 3, 4), [0, -1], free="3")],
        "count_nonzero.default": lambda: [
            sample(tensor(2, 3), 1, free="2"),
            sample(tensor(2, 3), free=""),
        ],
        "aminmax.default": lambda: [
            sample(tensor(2, 3), dim=1, keepdim=True, free="2"),
            sample(tensor(2, 3), free=""),
        ],
    },
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
    samples={
        **dict.fromkeys(
            ["softmax.int", "log_softmax.int"],
            lambda: [
                sample(tensor(2, 3, 4), 1, free="2 4"),
                sample(tensor(2, 3), -1, free="2"),
                sample(tensor(), 0, free=""),
            ],
        ),
        **dict.fromkeys(
            ["_softmax.default", "_log_softmax.default"],
            lambda: [sample(tensor(2, 3, 4), -2, False, free="2 4")],
        ),
    },
)
def softmax(step: Step) -> None:
    """The axis competes for one unit of probability and stays whole."""
    x = step.args[0]
    _ordered(step, x, _dims(step, x), "softmax runs over it")
    step.same(x, flow=Nowhere())


CUMULATIVE = [
    f"{kind}.default" for kind in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
]


@axis_rule(
    *CUMULATIVE,
    *("flip.default", "roll.default", "diff.default", "rot90.default"),
    *("sort.default", "sort.stable", "argsort.default", "argsort.stable", "topk.default"),
    *("msort.default", "fliplr.default", "flipud.default"),
    *("tril.default", "triu.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            CUMULATIVE,
            lambda: [
                sample(tensor(2, 3, 4), 1, free="2 4"),
                sample(tensor(2, 3), -1, free="2"),
                sample(tensor(), 0, free=""),
            ],
        ),
        **dict.fromkeys(
            ["sort.default", "argsort.default"],
            lambda: [sample(tensor(2, 3), free="2"), sample(tensor(2, 3), 0, True, free="3")],
        ),
        **dict.fromkeys(
            ["tril.default", "triu.default"],
            lambda: [sample(tensor(2, 3, 4), free="2"), sample(tensor(3, 4), 1, free="")],
        ),
        **dict.fromkeys(
            ["sort.stable", "argsort.stable"],
            lambda: [sample(tensor(2, 3), stable=True, dim=0, free="3")],
        ),
        "msort.default": lambda: [sample(tensor(2, 3), free="3")],
        "flipud.default": lambda: [sample(tensor(2, 3), free="3")],
        "fliplr.default": lambda: [sample(tensor(2, 3, 4), free="2 4")],
        "topk.default": lambda: [
            sample(tensor(2, 5), 3, free="2"),
            sample(tensor(5, 2), 3, 0, free="2"),
        ],
        "flip.default": lambda: [sample(tensor(2, 3, 4), [0, -1], free="3")],
        "roll.default": lambda: [
            sample(tensor(2, 3, 4), [1, 2], [0, -1], free="3"),
            sample(tensor(2, 3), [1], free=""),
        ],
        "rot90.default": lambda: [sample(tensor(2, 3, 4), 1, [0, -1], free="3")],
        "diff.default": lambda: [
            sample(tensor(2, 3), free="2"),
            sample(tensor(2, 3), 1, 0, tensor(1, 3), free="refused"),
        ],
    },
)
def by_place(step: Step) -> None:
    """What happens along the axis depends on the order of its indices."""
    x = step.args[0]
    if any(isinstance(other, Value) for other in step.args[1:]):
        raise Declined("something is put before or after it")
    if step.call.name.startswith("tri"):
        dims = [x.ndim - 2, x.ndim - 1]
    elif step.call.name.startswith(("msort", "flipud", "fliplr")):
        dims = [1 if step.call.name.startswith("fliplr") else 0]
    else:
        given: Any = step.call.arguments.get("dim", step.call.arguments.get("dims"))
        given = given if isinstance(given, list) else [given]
        whole = not x.ndim or not given or None in given
        dims = list(range(x.ndim)) if whole else [d % x.ndim for d in given]
    _ordered(step, x, dims, "its order matters here")
    for out in step.call.outputs:
        axes: list[Expr] = [
            step.fresh(out.shape[d], pin="ordered") if d in dims else step.axes(x)[d]
            for d in range(x.ndim)
        ]
        step.out(axes, Nowhere())


@axis_rule(
    "renorm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 2, 1, 0.5, free="2 3 4"),
        sample(tensor(2, 3), 1, -1, 0.5, free="2 3"),
        sample(tensor(2, 3), float("inf"), 0, 0.5, free="2"),
    ],
)
def renorm(step: Step) -> None:
    """Slices along an axis are scaled to a norm: a sum over all other axes inside."""
    x, order, dim, _most = step.args
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    if order == float("inf"):
        _ordered(step, x, others, "the norm is no sum")
    else:
        for other in others:
            step.contract(step.axes(x)[other], (x, other))
    step.same(x)


@axis_rule(
    "diagonal.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 1, 0, -1, free="3"),
        sample(tensor(3, 3, 2), free="2"),
    ],
)
def diagonal(step: Step) -> None:
    """Entries with equal indices: both axes stay whole."""
    x, _offset, a, b = step.args
    dims = [a % x.ndim, b % x.ndim]
    _ordered(step, x, dims, "a diagonal is taken")
    order = [d for d in range(x.ndim) if d not in dims]
    axes = [step.axes(x)[d] for d in order]
    last = step.fresh(step.call.outputs[0].shape[-1], pin="diagonal")
    step.out([*axes, last], Through(x, (*order, None)))
