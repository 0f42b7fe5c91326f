"""Axis rules of look-ups and scatters, and of numbers that Python looks at."""

from collections.abc import Callable

import torch

from apoptosis.structure.axes import ONE, Expr
from apoptosis.structure.flows import AllOf, Nowhere, Through, through
from apoptosis.structure.letters import broadcast
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, integers, sample, tensor

FAMILY = "indices"


@axis_rule(
    "embedding.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(5, 4), integers(2, 3, below=5), free="2 3 4"),
        sample(tensor(5, 4), torch.tensor(3), free="4"),
    ],
)
def embedding(step: Step) -> None:
    """v e, indices → indices e; rows are looked up by number."""
    weight, indices, *_ = step.args
    step.pin(step.axes(weight)[0], "its rows are looked up by number")
    step.role(weight, 1, "producer")
    step.kind(step.axes(weight)[1], "hidden")
    dims = (*[None] * indices.ndim, 1)
    step.out([*step.axes(indices), step.axes(weight)[1]], Through(weight, dims))


def _bag_samples() -> list[Sample]:
    indices, offsets = integers(7, below=5), torch.tensor([0, 3])
    return [
        sample(tensor(5, 4), indices, offsets, free="4"),
        sample(tensor(5, 4), indices, offsets, False, 1, free="4"),
        sample(tensor(5, 4), indices, offsets, False, 0, False, tensor(7), free="4"),
    ]


@axis_rule(
    *("embedding_bag.default", "_embedding_bag.default", "embedding_bag.padding_idx"),
    family=FAMILY,
    samples={
        **dict.fromkeys(["embedding_bag.default", "_embedding_bag.default"], _bag_samples),
        "embedding_bag.padding_idx": lambda: [
            sample(
                *(tensor(5, 4), integers(7, below=5), torch.tensor([0, 3])),
                *(False, 0, False, None, False, 2),
                free="4",
            )
        ],
    },
)
def embedding_bag(step: Step) -> None:
    """v e, bags → bags e."""
    weight, indices, offsets, *_ = step.args
    for value in (indices, offsets, step["per_sample_weights"]):
        for expr in step.axes(value) if value is not None else []:
            step.pin(expr, "bags of indices", quiet=True)
    step.pin(step.axes(weight)[0], "its rows are looked up by number")
    step.role(weight, 1, "producer")
    for number, out in enumerate(step.call.outputs):
        axes = step.fixed(out.shape, "bags")
        if number == 0:
            axes[-1] = step.axes(weight)[1]
        step.out(axes, Through(weight, (None, 1)) if number == 0 else Nowhere())


@axis_rule(
    "embedding_renorm.default",
    family=FAMILY,
    samples=lambda: [sample(tensor(5, 4), integers(2, 3, below=5), 1.0, 2.0, free="4")],
)
def embedding_renorm(step: Step) -> None:
    """Rows that are looked up are scaled to a norm: a sum inside."""
    weight, indices, _norm, order = step.args
    step.pin(step.axes(weight)[0], "its rows are looked up by number")
    for expr in step.axes(indices):
        step.pin(expr, "places by number", quiet=True)
    if order <= 0 or order == float("inf"):
        step.pin(step.axes(weight)[1], "the norm is no sum")
    else:
        step.contract(step.axes(weight)[1], (weight, 1))
    step.same(weight)


@axis_rule(
    "index_select.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 5, 4), 1, integers(3, below=5), free="2 3 4"),
        sample(tensor(2, 5), -1, torch.tensor(3), free="2"),
    ],
)
def index_select(step: Step) -> None:
    """Indices are looked up by number along one axis, the others pass."""
    x, dim, index = step.args
    dim %= x.ndim
    step.pin(step.axes(x)[dim], "indices of it are looked up by number")
    axes = list(step.axes(x))
    axes[dim] = step.axes(index)[0] if index.ndim else ONE
    step.out(axes, Through(x, tuple(None if d == dim else d for d in range(x.ndim))))


@axis_rule(
    *("index_fill.int_Scalar", "index_fill.int_Tensor"),
    family=FAMILY,
    samples={
        "index_fill.int_Scalar": lambda: [
            sample(tensor(2, 5, 4), 1, integers(3, below=5), 0.5, free="2 4")
        ],
        "index_fill.int_Tensor": lambda: [
            sample(tensor(2, 5), -1, integers(3, below=5), tensor(), free="2")
        ],
    },
)
def index_fill(step: Step) -> None:
    """Entries are filled in by number along one axis, the others pass."""
    x, dim, index, _value = step.args
    step.pin(step.axes(x)[dim], "entries of it are filled in by number")
    for expr in step.axes(index):
        step.pin(expr, "places by number", quiet=True)
    step.same(x, flow=Nowhere())


@axis_rule(
    *("bucketize.Tensor", "isin.Tensor_Tensor", "searchsorted.Tensor"),
    family=FAMILY,
    samples={
        "bucketize.Tensor": lambda: [sample(tensor(2, 3), tensor(5).sort()[0], free="2 3")],
        "isin.Tensor_Tensor": lambda: [sample(tensor(2, 3), tensor(5), free="2 3")],
        "searchsorted.Tensor": lambda: [
            sample(tensor(5).sort()[0], tensor(2, 3), free="2 3"),
            sample(tensor(2, 5).sort()[0], tensor(2, 3), free="3"),
        ],
    },
)
def looked_up_in_order(step: Step) -> None:
    """Each entry is looked up among others, which stay whole."""
    table, x = step.args[:2]
    if not step.call.name.startswith("searchsorted"):
        table, x = x, table
    for value in (table, step.call.arguments.get("sorter")):
        for expr in step.axes(value) if isinstance(value, Value) else []:
            step.pin(expr, "other entries are looked up in it")
    if table.ndim > 1:  # as many tables as there are rows
        for expr in step.axes(x)[:-1]:
            step.pin(expr, "each row has a table of its own", quiet=True)
    step.same(x, flow=Nowhere())


@axis_rule(
    "gather.default",
    "take_along_dim.default",
    family=FAMILY,
    samples={
        "gather.default": lambda: [
            sample(tensor(2, 5, 4), 1, integers(2, 3, 4, below=5), free="2 4"),
            sample(tensor(4, 5), -1, integers(2, 3, below=5), free=""),
        ],
        "take_along_dim.default": lambda: [
            sample(tensor(2, 5), integers(2, 3, below=5), -1, free="2"),
            sample(tensor(2, 5), integers(4, below=10), free="refused"),
            sample(tensor(2, 5), integers(1, 3, below=5), 1, free="refused"),
        ],
    },
)
def gather(step: Step) -> None:
    """Indices are looked up by number along one axis."""
    x, dim, index = (
        step[name]
        for name in ("self", "dim", "index" if "index" in step.call.arguments else "indices")
    )
    if dim is None:
        raise Declined("without a dimension everything is flattened")
    if step.call.outputs[0].shape != index.shape:
        raise Declined("the indices are broadcast")
    step.pin(step.axes(x)[dim], "indices of it are looked up by number")
    _aligned_or_pinned(step, x, index, dim % x.ndim)
    step.out(list(step.axes(index)), Nowhere())


def _scatter_samples(*more: object, src: bool = True) -> Callable[[], list[Sample]]:
    """An index that covers the other axes, and one that covers a part of them."""

    def make() -> list[Sample]:
        whole, part = integers(2, 3, 4, below=5), integers(1, 3, below=5)
        return [
            sample(
                tensor(2, 5, 4), 1, whole, *([tensor(2, 3, 4)] if src else []), *more, free="2 4"
            ),
            sample(tensor(2, 5), -1, part, *([tensor(2, 3)] if src else []), *more, free=""),
        ]

    return make


@axis_rule(
    *("scatter.src", "scatter.value", "scatter_add.default", "scatter.reduce"),
    *("scatter_reduce.two", "scatter.value_reduce"),
    family=FAMILY,
    samples={
        "scatter.src": _scatter_samples(),
        "scatter.value": _scatter_samples(0.5, src=False),
        "scatter_add.default": _scatter_samples(),
        "scatter.reduce": lambda: [
            sample(tensor(2, 5), 1, integers(2, 3, below=5), tensor(2, 3), reduce="add", free="2")
        ],
        "scatter.value_reduce": lambda: [
            sample(tensor(2, 5), 1, integers(2, 3, below=5), 0.5, reduce="multiply", free="2")
        ],
        "scatter_reduce.two": _scatter_samples("amax"),
    },
)
def scatter(step: Step) -> None:
    """Entries are placed by number along one axis."""
    x, dim, index = step.args[:3]
    step.pin(step.axes(x)[dim], "entries are placed in it by number")
    for other in (index, step.call.arguments.get("src")):
        if isinstance(other, Value):
            _aligned_or_pinned(step, x, other, dim % x.ndim)
    step.same(x, flow=Nowhere())


def _aligned_or_pinned(step: Step, x: Value, other: Value, dim: int) -> None:
    for d in range(min(x.ndim, other.ndim)):
        if d == dim:
            step.pin(step.axes(other)[d], "entries are placed by number", quiet=True)
        elif x.shape[d] == other.shape[d]:
            step.equal(step.axes(x)[d], step.axes(other)[d])
        else:
            step.pin(step.axes(x)[d], "only a part of it is indexed")
            step.pin(step.axes(other)[d], "only a part of it is indexed")


def _row_samples(rows: str) -> list[Sample]:
    x, index = tensor(2, 5, 4), torch.tensor([3, 0, 4])
    return [
        sample(x, 1, index, tensor(2, 3, 4), free=f"2 4 {rows}"),
        sample(x[0], -2, index, tensor(3, 4), free=f"4 {rows}"),
    ]


@axis_rule(
    "index_add.default",
    "index_copy.default",
    family=FAMILY,
    samples={
        "index_add.default": lambda: _row_samples("3"),
        "index_copy.default": lambda: _row_samples(""),
    },
)
def index_add(step: Step) -> None:
    """Rows are added or placed by number along one axis, the others meet."""
    x, dim, index, source, *_ = step.args
    dim %= x.ndim
    step.pin(step.axes(x)[dim], "rows are added to it by number")
    if index.ndim and source.ndim:
        step.equal(step.axes(index)[0], step.axes(source)[dim])
        if step.call.name.startswith("index_add"):
            step.contract(step.axes(source)[dim], (source, dim))
        else:
            step.pin(step.axes(source)[dim], "entries are placed by number", quiet=True)
    for d in range(x.ndim):
        if d != dim:
            step.equal(step.axes(x)[d], step.axes(source)[d])
    places = tuple(None if d == dim else d for d in range(x.ndim))
    step.same(x, flow=AllOf((Through(x, places), Through(source, places))))


def _indexed(
    step: Step, x: Value, indices: list[Value | None]
) -> tuple[list[Expr], list[int | None]]:
    """Axes of `x[indices]`, and which dimension of `x` each is (None for those of the indices)."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise Declined("a mask chooses entries by value")
    indices = [*indices, *[None] * (x.ndim - len(indices))]
    places = [d for d, index in enumerate(indices) if index is not None]
    for dim in places:
        step.pin(step.axes(x)[dim], "indices of it are looked up by number")
    looked_up = broadcast(step, *[i for i in indices if i is not None])
    adjacent = places == list(range(places[0], places[-1] + 1)) if places else True
    first = (places[0] if adjacent else 0) if places else 0
    rest: list[int | None] = [d for d in range(x.ndim) if d not in places]
    before = len([d for d in rest if d is not None and d < first]) if adjacent else 0
    order = [*rest[:before], *[None] * len(looked_up), *rest[before:]]
    own = iter(looked_up)
    return [next(own) if d is None else step.axes(x)[d] for d in order], order


def _index_samples() -> list[Sample]:
    x, i, j = tensor(2, 5, 4, 3), integers(6, below=4), integers(6, below=3)
    return [
        sample(x, [None, integers(7, below=5)], free="2 7 4 3"),
        sample(x, [None, None, i, j], free="2 5 6"),
        sample(x, [None, integers(6, below=5), None, j], free="2 4 6"),
        sample(x, [integers(6, 1, below=2), None, i], free="5 6 6 3"),
    ]


@axis_rule(
    "index.Tensor",
    "_unsafe_index.Tensor",
    family=FAMILY,
    samples={
        "index.Tensor": lambda: [
            *_index_samples(),
            sample(tensor(2, 3), [torch.tensor([True, False])], free="refused"),
        ],
        "_unsafe_index.Tensor": _index_samples,
    },
)
def index(step: Step) -> None:
    """`x[:, i, j]`: axes with indices are looked up by number, the others pass."""
    x, indices = step.args
    axes, order = _indexed(step, x, indices)
    step.out(axes, Through(x, tuple(order)))


def _index_put_samples() -> list[Sample]:
    x, rows = tensor(2, 5, 4), torch.tensor([3, 0, 4])
    return [
        sample(x, [None, rows], tensor(2, 3, 4), free="2 4"),
        sample(x, [None, rows], tensor(4), free="2 4"),
        sample(x, [None, rows], tensor(2, 1, 1), True, free="2 4"),
        sample(x, [integers(3, below=2), None, integers(3, below=4)], tensor(3, 5), free="5"),
        sample(x, [None, rows], tensor(), free="2 4"),
    ]


@axis_rule("index_put.default", family=FAMILY, samples=_index_put_samples)
def index_put(step: Step) -> None:
    """`x[:, i, j] = y`: axes with indices are placed by number, the others meet those of y."""
    x, indices, values, *_ = step.args
    axes, order = _indexed(step, x, indices)
    for expr, own in zip(axes, order, strict=True):
        if own is None:
            step.pin(expr, "entries are placed by number", quiet=True)
    for dim in range(-min(values.ndim, len(axes)), 0):
        if values.shape[dim] != 1:
            step.equal(axes[dim], step.axes(values)[dim])
    placed: list[int | None] = [None] * x.ndim
    for dim, own in enumerate(order):
        if own is not None and dim - len(order) >= -values.ndim:
            placed[own] = dim - len(order) + values.ndim
    passed = tuple(None if d not in order else d for d in range(x.ndim))
    step.same(x, flow=AllOf((Through(x, passed), Through(values, tuple(placed)))))


@axis_rule(
    "copy.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3), tensor(2, 3, seed=1), free="2 3"),
        sample(tensor(2, 3, 4), tensor(3, 1), free="2 3 4"),
    ],
)
def copy(step: Step) -> None:
    """The target takes the source's entries, broadcast."""
    target, source, *_ = step.args
    broadcast(step, target, source)
    step.same(target, flow=through(source, target.ndim - source.ndim))


@axis_rule(
    *("item.default", "is_nonzero.default", "_local_scalar_dense.default", "equal.default"),
    *("_assert_async.msg", "_assert_async.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            ["item.default", "is_nonzero.default", "_local_scalar_dense.default"],
            lambda: [sample(tensor(), free=""), sample(tensor(1, 1), free="")],
        ),
        "equal.default": lambda: [sample(tensor(2, 3), tensor(2, 4), free="")],
        "_assert_async.default": lambda: [sample(tensor(1), free="")],
        "_assert_async.msg": lambda: [sample(tensor(1), "no", free="")],
    },
)
def number(step: Step) -> None:
    """A number for Python: nothing is left to follow, so nothing may change it."""
    for value in step.args:
        for expr in step.axes(value) if isinstance(value, Value) else []:
            step.pin(expr, "Python looks at its values")
    for out in step.call.outputs:
        step.out(step.fixed(out.shape), Nowhere())


ABOUT = ["is_floating_point.default", "is_complex.default", "numel.default", "dim.default"]
OF_ONE = ["size.int", "sym_size.int"]


@axis_rule(
    *ABOUT,
    *OF_ONE,
    family=FAMILY,
    samples={
        **dict.fromkeys(ABOUT, lambda: [sample(tensor(2, 3), free="2 3")]),
        **dict.fromkeys(OF_ONE, lambda: [sample(tensor(2, 3), -1, free="2 3")]),
    },
)
def about(_step: Step) -> None:
    """Type and shape are looked at, and no value; a number made of a size is compared when a cut is tried."""
