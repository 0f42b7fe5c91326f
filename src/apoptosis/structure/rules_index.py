"""Axis rules of look-ups, scatters and tensors made from nothing."""

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE, Expr
from apoptosis.structure.program import Value
from apoptosis.structure.rules import (
    AllOf,
    Declined,
    Everywhere,
    Flow,
    Nowhere,
    Step,
    Through,
    axis_rule,
    broadcast,
    through,
)

FAMILY = "indices"


@axis_rule("embedding.default", family=FAMILY, samples=list)
def embedding(step: Step) -> None:
    """v e, indices → indices e; rows are looked up by number."""
    weight, indices, *_ = step.args
    step.pin(step.axes(weight)[0], "its rows are looked up by number")
    step.role(weight, 1, "producer")
    step.kind(step.axes(weight)[1], "hidden")
    dims = (*[None] * indices.ndim, 1)
    step.out([*step.axes(indices), step.axes(weight)[1]], Through(weight, dims))


@axis_rule("embedding_bag.default", "_embedding_bag.default", family=FAMILY, samples=list)
def embedding_bag(step: Step) -> None:
    """v e, bags → bags e."""
    weight, indices, offsets, *_ = step.args
    for value in (indices, offsets):
        for expr in step.axes(value) if value is not None else []:
            step.pin(expr, "bags of indices", quiet=True)
    step.pin(step.axes(weight)[0], "its rows are looked up by number")
    step.role(weight, 1, "producer")
    for number, out in enumerate(step.call.outputs):
        axes = step.fixed(out.shape, "bags")
        if number == 0:
            axes[-1] = step.axes(weight)[1]
        step.out(axes, Through(weight, (None, 1)) if number == 0 else Nowhere())


@axis_rule("index_select.default", family=FAMILY, samples=list)
def index_select(step: Step) -> None:
    """Indices are looked up by number along one axis, the others pass."""
    x, dim, index = step.args
    dim %= x.ndim
    step.pin(step.axes(x)[dim], "indices of it are looked up by number")
    axes = list(step.axes(x))
    axes[dim] = step.axes(index)[0] if index.ndim else ONE
    step.out(axes, Through(x, tuple(None if d == dim else d for d in range(x.ndim))))


@axis_rule("gather.default", "take_along_dim.default", family=FAMILY, samples=list)
def gather(step: Step) -> None:
    """Indices are looked up by number along one axis."""
    x, dim, index = (
        step[name]
        for name in ("self", "dim", "index" if "index" in step.call.arguments else "indices")
    )
    if dim is None:
        raise Declined("without a dimension everything is flattened")
    step.pin(step.axes(x)[dim], "indices of it are looked up by number")
    _aligned_or_pinned(step, x, index, dim % x.ndim)
    step.out(list(step.axes(index)), Nowhere())


@axis_rule(
    *(
        "scatter.src",
        "scatter.value",
        "scatter_add.default",
        "scatter.reduce",
        "scatter_reduce.two",
    ),
    family=FAMILY,
    samples=list,
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


@axis_rule("index_add.default", "index_copy.default", family=FAMILY, samples=list)
def index_add(step: Step) -> None:
    """Rows are added by number along one axis, the others meet."""
    x, dim, index, source, *_ = step.args
    dim %= x.ndim
    step.pin(step.axes(x)[dim], "rows are added to it by number")
    if index.ndim and source.ndim:
        step.equal(step.axes(index)[0], step.axes(source)[dim])
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


@axis_rule("index.Tensor", family=FAMILY, samples=list)
def index(step: Step) -> None:
    """`x[:, i, j]`: axes with indices are looked up by number, the others pass."""
    x, indices = step.args
    axes, order = _indexed(step, x, indices)
    step.out(axes, Through(x, tuple(order)))


@axis_rule("index_put.default", family=FAMILY, samples=list)
def index_put(step: Step) -> None:
    """`x[:, i, j] = y`: axes with indices are placed by number, the others meet those of y."""
    x, indices, values, *_ = step.args
    axes, order = _indexed(step, x, indices)
    for dim in range(-min(values.ndim, len(axes)), 0):
        if values.shape[dim] != 1:
            step.equal(axes[dim], step.axes(values)[dim])
    placed: list[int | None] = [None] * x.ndim
    for dim, own in enumerate(order):
        if own is not None and dim - len(order) >= -values.ndim:
            placed[own] = dim - len(order) + values.ndim
    passed = tuple(None if d not in order else d for d in range(x.ndim))
    step.same(x, flow=AllOf((Through(x, passed), Through(values, tuple(placed)))))


@axis_rule("copy.default", family=FAMILY, samples=list)
def copy(step: Step) -> None:
    """The target takes the source's entries, broadcast."""
    target, source, *_ = step.args
    broadcast(step, target, source)
    step.same(target, flow=through(source, target.ndim - source.ndim))


@axis_rule("fill.Scalar", "fill.Tensor", "zero.default", family=FAMILY, samples=list)
def fill(step: Step) -> None:
    """The same number everywhere."""
    zero = step.call.name.startswith("zero") or step.args[1:2] == (0,)
    step.same(step.args[0], flow=Everywhere() if zero else Nowhere())


@axis_rule(
    *("zeros.default", "ones.default", "full.default", "empty.memory_format"),
    *("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
    *("rand.default", "randn.default"),
    family=FAMILY,
    samples=list,
)
def create(step: Step) -> None:
    """Axes of its own, as long as asked for."""
    axes = [step.fresh(size) for size in step.call.outputs[0].shape]
    for place, expr in enumerate(axes):
        step.size("size", expr, place)
    flow: Flow = Everywhere() if "zeros" in step.call.name else Nowhere()
    step.out([algebra.resolve(expr) for expr in axes], flow)


@axis_rule(
    *("ones_like.default", "full_like.default", "empty_like.default", "rand_like.default"),
    *("randn_like.default",),
    family=FAMILY,
    samples=list,
)
def create_like(step: Step) -> None:
    """The axes of another tensor."""
    step.same(step.args[0], flow=Nowhere())


@axis_rule("arange.default", "arange.start", "arange.start_step", family=FAMILY, samples=list)
def arange(step: Step) -> None:
    """Numbers that count places: the axis stays whole."""
    expr = step.fresh(step.call.outputs[0].shape[0])
    step.pin(expr, "its indices are counted", quiet=True)
    if step.call.name == "arange.default":
        step.size("end", expr)
    step.out([algebra.resolve(expr)], Nowhere())


@axis_rule("one_hot.default", family=FAMILY, samples=list)
def one_hot(step: Step) -> None:
    """A new axis with one index per class."""
    x = step.args[0]
    classes = step.fixed(step.call.outputs[0].shape[-1:], "one index per class")
    step.out([*step.axes(x), *classes], Nowhere())


@axis_rule(
    *("item.default", "is_nonzero.default", "_local_scalar_dense.default", "equal.default"),
    *("_assert_async.msg", "_assert_async.default", "sym_size.int", "is_floating_point.default"),
    family=FAMILY,
    samples=list,
)
def number(step: Step) -> None:
    """A number for Python: nothing is left to follow, so nothing may change it."""
    for value in step.args:
        for expr in step.axes(value) if isinstance(value, Value) else []:
            step.pin(expr, "Python looks at its values")
    for out in step.call.outputs:
        step.out(step.fixed(out.shape), Nowhere())


@axis_rule("meshgrid.default", "meshgrid.indexing", family=FAMILY, samples=list)
def meshgrid(step: Step) -> None:
    """a, b → a b, twice."""
    values = step.args[0]
    lengths = [step.axes(v)[0] if v.ndim else ONE for v in values]
    swapped = step.call.arguments.get("indexing") == "xy"
    axes = [lengths[1], lengths[0], *lengths[2:]] if swapped and len(values) > 1 else lengths
    for _ in step.call.outputs:
        step.out(list(axes), Nowhere())
