"""Axis rules of operations that take tensors apart and put them together: splits, slices, joins, pads."""

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, sum_of, times
from apoptosis.structure.flows import AnyOf, Flow, Joined, Nowhere, through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.rules_shape import reordered
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "shapes"

aten = torch.ops.aten


def pieces(expr: Expr, sizes: list[int]) -> list[Expr]:
    """An axis cut into consecutive parts."""
    parts: list[Expr] = []
    rest = expr
    for size in sizes:
        part, rest = algebra.split(rest, size)
        parts.append(part)
    return [algebra.resolve(part) for part in parts]


def _cut_up(step: Step, x: Value, dim: int) -> list[Expr]:
    """State the outputs of a split as consecutive parts of `x`; returns the parts."""
    sizes = [value.shape[dim] for value in step.call.outputs]
    parts = pieces(step.axes(x)[dim], sizes)
    for part in parts:
        axes = list(step.axes(x))
        axes[dim] = part
        step.out(axes, through(x))
    step.facts.replacement = lambda size: (
        aten.split_with_sizes.default,
        {"self": x, "split_sizes": [size(algebra.resolve(part)) for part in parts], "dim": dim},
    )
    return parts


@axis_rule(
    *("chunk.default", "split.Tensor", "unsafe_chunk.default", "unsafe_split.Tensor"),
    *("tensor_split.sections", "hsplit.int", "vsplit.int", "dsplit.int"),
    family=FAMILY,
    samples={
        "unsafe_chunk.default": lambda: [sample(tensor(2, 6), 2, 1, free="2 3 3")],
        "unsafe_split.Tensor": lambda: [sample(tensor(2, 6), 3, 1, free="2 3 3")],
        "hsplit.int": lambda: [
            sample(tensor(2, 6), 2, free="2 3 3"),
            sample(tensor(6), 2, free="3 3"),
        ],
        "vsplit.int": lambda: [sample(tensor(6, 2), 2, free="3 3 2")],
        "dsplit.int": lambda: [sample(tensor(2, 3, 4), 2, free="2 3 2 2")],
        "chunk.default": lambda: [
            sample(tensor(2, 6), 2, 1, free="2 3 3"),
            sample(tensor(6, 5), 3, free="2 2 2 5"),
            sample(tensor(2, 8), 3, -1, free="2 3 3 2"),
        ],
        "split.Tensor": lambda: [
            sample(tensor(2, 6), 3, 1, free="2 3 3"),
            sample(tensor(2, 8), 3, -1, free="2 3 3 2"),
        ],
        "tensor_split.sections": lambda: [sample(tensor(2, 7), 3, -1, free="2 3 2 2")],
    },
)  # fmt: skip
def chunk(step: Step) -> None:
    """n := a + b + …, equally long as long as it is Python that cuts."""
    x = step.args[0]
    parts = _cut_up(step, x, _split_dim(step, x))
    same = [part for part in parts if algebra.size_of(part) == algebra.size_of(parts[0])]
    step.tie(*same)
    if step.call.name.startswith(("split", "unsafe_split")):
        step.size("split_size", parts[0])


def _split_dim(step: Step, x: Value) -> int:
    """The dimension that is cut up; some have it in their name."""
    named = {"vsplit": 0, "hsplit": min(x.ndim - 1, 1), "dsplit": 2}
    dim = named.get(step.call.name.partition(".")[0])
    return step["dim"] % x.ndim if dim is None else dim


@axis_rule(
    *("tensor_split.indices", "hsplit.array", "vsplit.array", "dsplit.array"),
    family=FAMILY,
    samples={
        "tensor_split.indices": lambda: [
            sample(tensor(2, 7), [2, 5], 1, free="2 2 3 2"),
            sample(tensor(7, 2), [3], -2, free="3 4 2"),
            sample(tensor(2, 5), [2, -1], 1, free="2 2 2"),
            sample(tensor(2, 5), [3, 1], 1, free="refused"),
        ],
        "hsplit.array": lambda: [sample(tensor(2, 7), [2, 5], free="2 2 3 2")],
        "vsplit.array": lambda: [sample(tensor(7, 2), [2], free="2 5 2")],
        "dsplit.array": lambda: [sample(tensor(2, 3, 5), [2], free="2 3 2 3")],
    },
)
def tensor_split(step: Step) -> None:
    """n := a + b + …, cut at places that are counted from the start or the end."""
    x, places = step.args[:2]
    dim = _split_dim(step, x)
    if sum(value.shape[dim] for value in step.call.outputs) != x.shape[dim]:
        raise Declined("its parts overlap, or leave something out")
    parts = _cut_up(step, x, dim)
    for number, place in enumerate(places):
        inside = parts[: number + 1] if place >= 0 else parts[number + 1 :]
        step.size("indices", sum_of(inside), number, negative=place < 0)


@axis_rule(
    "split_with_sizes.default", "split.sizes", "unsafe_split_with_sizes.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6), [1, 2, 3], 1, free="2 2 3"),
        sample(tensor(6, 2), [4, 2], -2, free="2 4 2"),
    ],
)  # fmt: skip
def split_with_sizes(step: Step) -> None:
    """n := a + b + …."""
    x, _sizes, dim = step.args
    name = list(step.call.arguments)[1]
    for place, part in enumerate(_cut_up(step, x, dim % x.ndim)):
        step.size(name, part, place)


@axis_rule(
    "slice.Tensor",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6), 1, 0, 2, free="2 2 4"),
        sample(tensor(2, 7), -1, 2, -2, free="2 2 3 2"),
        sample(tensor(2, 6), 1, -2, free="2 4 2"),
        sample(tensor(2, 6), 1, -9, 4, free="2 4 2"),
        sample(tensor(2, 6), 1, 2, 6, free="2 2 4"),
        sample(tensor(2, 6), 1, 4, 2, free="2 4 2"),
        sample(tensor(2, 6), 1, 1, None, 2, free="2 3"),
        sample(tensor(2, 7), 1, 1, None, 2, free="2"),
        sample(tensor(2, 6), 0, 0, 9223372036854775807, free="2 6"),
    ],
)
def slice_(step: Step) -> None:
    """n := a + b + c, of which b stays; with a stride s, n := m·s."""
    x, dim, start, end, stride = step.args
    dim %= x.ndim
    n, axes = x.shape[dim], list(step.axes(x))
    first = min(max(start + n if (start or 0) < 0 else start or 0, 0), n)
    last = n if end is None else min(max(end + n if end < 0 else end, first), n)
    if stride == 1:
        before, part, after = pieces(axes[dim], [first, last - first, n - last])
        if start and -n <= start:  # further back is the beginning
            step.size("start", sum_of([part, after]) if start < 0 else before, negative=start < 0)
        if end is not None and -n <= end <= n:
            step.size("end", after if end < 0 else sum_of([before, part]), negative=end < 0)
        axes[dim] = part
    elif n % stride == 0 and first < stride and last == n and (start or 0) >= 0:
        part, phase = step.fresh(n // stride), step.fresh(stride)
        step.equal(axes[dim], times(part, phase))
        step.pin(phase, f"only every {stride}th index is taken")
        axes[dim] = part
    else:
        step.pin(axes[dim], f"every {stride}th index is taken, not from the start to the end")
        axes[dim] = step.fresh(step.call.outputs[0].shape[dim], pin="part of a pinned axis")
    step.out([algebra.resolve(expr) for expr in axes], through(x))


@axis_rule(
    "narrow.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6), 1, 2, 3, free="2 2 3"),
        sample(tensor(6, 2), -2, -4, 4, free="2 2 4"),
    ],
)
def narrow(step: Step) -> None:
    """n := a + b + c, of which b stays."""
    x, dim, start, length = step.args
    n, axes = x.shape[dim], list(step.axes(x))
    start %= n
    before, part, _ = pieces(axes[dim], [start, length, n - start - length])
    step.size("start", before)
    step.size("length", part)
    axes[dim] = part
    step.out(axes, through(x))


@axis_rule(
    "select.int", "unbind.int",
    family=FAMILY,
    samples={
        "select.int": lambda: [
            sample(tensor(2, 3, 4), 1, 2, free="2 4"),
            sample(tensor(2, 3, 4), -1, -1, free="2 3"),
        ],
        "unbind.int": lambda: [
            sample(tensor(2, 3, 4), free="3 4"),
            sample(tensor(2, 3, 4), -2, free="2 4"),
        ],
    },
)  # fmt: skip
def select(step: Step) -> None:
    """Single indices are taken by their place, so the axis stays whole."""
    x, dim = step.args[0], step["dim"] % step.args[0].ndim
    step.pin(step.axes(x)[dim], "single indices of it are taken by their place")
    rest = [d for d in range(x.ndim) if d != dim]
    for _ in step.call.outputs:
        reordered(step, x, [*rest])


def _cat_samples() -> list[Sample]:
    x = tensor(2, 3)
    return [
        sample([x, tensor(2, 4)], 1, free="2 3 4"),
        sample([x, tensor(2, 3, seed=1)], -1, free="2 3 3"),
        sample([x, x, tensor(1, 3)], free="2 3"),
        sample([torch.zeros(0, dtype=torch.float64), x], 1, free="2 3"),
    ]


@axis_rule(
    "cat.default", "concat.default", "concatenate.default",
    family=FAMILY, samples=_cat_samples,
)  # fmt: skip
def cat(step: Step) -> None:
    """a, b, … → a + b + …."""
    _joined(step, *step.args)


@axis_rule(
    *("hstack.default", "vstack.default", "dstack.default", "column_stack.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            ["hstack.default", "column_stack.default"],
            lambda: [sample([tensor(2, 3), tensor(2, 4)], free="2 3 4")],
        ),
        "vstack.default": lambda: [
            sample([tensor(3, 2), tensor(4, 2)], free="2 3 4"),
            sample([tensor(3), tensor(3, seed=1)], free="refused"),
        ],
        "dstack.default": lambda: [sample([tensor(2, 3, 4), tensor(2, 3, 5)], free="2 3 4 5")],
    },
)
def joined_by_name(step: Step) -> None:
    """a, b, … → a + b + … along the first, second or third dimension."""
    name = step.call.name.partition(".")[0]
    dim = {"vstack": 0, "hstack": 1, "column_stack": 1, "dstack": 2}[name]
    values = step.args[0]
    if name == "hstack" and values[0].ndim == 1:
        dim = 0
    elif any(value.ndim < max(2, dim + 1) for value in values):
        raise Declined("its operands get more dimensions first")
    _joined(step, values, dim)


def _joined(step: Step, values: list[Value], dim: int) -> None:
    """State the sum of the values' axes along a dimension; in all others they are equal."""
    values = [v for v in values if v.ndim > 1 or v.shape != (0,)] or values[:1]
    dim %= values[0].ndim
    axes: list[Expr] = []
    for d in range(values[0].ndim):
        exprs = [step.axes(v)[d] for v in values]
        if d == dim:
            axes.append(sum_of(exprs))
            continue
        for other in exprs[1:]:
            step.equal(exprs[0], other)
        axes.append(exprs[0])
    flow = Joined(tuple(values), tuple(range(len(axes))))
    step.out([algebra.resolve(expr) for expr in axes], flow)


@axis_rule(
    "stack.default",
    family=FAMILY,
    samples=lambda: [
        sample([tensor(2, 3), tensor(2, 3, seed=1)], 1, free="2 3"),
        sample([tensor(2, 3), tensor(2, 3, seed=1)], -1, free="2 3"),
        sample([tensor(), tensor(seed=1)], free=""),
    ],
)
def stack(step: Step) -> None:
    """A new axis that stays whole: one index per tensor."""
    values, dim = step.args
    dim %= values[0].ndim + 1
    axes = list(step.axes(values[0]))
    for value in values[1:]:
        for own, other in zip(axes, step.axes(value), strict=True):
            step.equal(own, other)
    order: list[int | None] = list(range(len(axes)))
    order.insert(dim, None)
    axes.insert(dim, step.fresh(len(values), pin="one index per stacked tensor"))
    step.out([algebra.resolve(expr) for expr in axes], Joined(tuple(values), tuple(order)))


def _pad_samples() -> list[Sample]:
    return [
        sample(tensor(2, 3, 4, 5), [1, 1, 0, 2], free="2 3 4 5 2"),
        sample(tensor(2, 3, 4), [0, 0, 3, 2], free="2 3 4 3 2"),
        sample(tensor(2, 3, 4), [0, -1, 0, 0], free="2 3"),
    ]


@axis_rule(
    "pad.default",
    "constant_pad_nd.default",
    family=FAMILY,
    samples={
        "pad.default": lambda: [
            *_pad_samples(),
            sample(tensor(2, 3, 4), [2, 2], "constant", 0.5, free="2 3 4 2 2"),
            sample(tensor(2, 3, 4), [1, 1], "reflect", free="2 3"),
        ],
        "constant_pad_nd.default": lambda: [
            *_pad_samples(),
            sample(tensor(2, 3, 4), [2, 2], 0.5, free="2 3 4 2 2"),
        ],
    },
)
def pad(step: Step) -> None:
    """n → before + n + after, the new parts axes of their own; reflections and the like pin."""
    x, amounts = step.args[:2]
    constant = step.call.name.startswith("constant") or step["mode"] == "constant"
    axes = list(step.axes(x))
    for num in range(len(amounts) // 2):
        dim = x.ndim - 1 - num
        around = amounts[2 * num : 2 * num + 2]
        if not any(around):
            continue
        if not constant or min(around) < 0:
            step.pin(axes[dim], "padded by its own entries, or cropped", quiet=True)
            axes[dim] = step.fresh(step.call.outputs[0].shape[dim], pin="padded")
            continue
        parts = [step.fresh(size) for size in around]
        for place, part in enumerate(parts):
            step.size("pad", part, 2 * num + place)
        axes[dim] = algebra.resolve(sum_of([parts[0], axes[dim], parts[1]]))
    zero = not step.call.arguments.get("value")
    step.out(axes, _padded(x) if constant and zero else Nowhere())


def _padded(x: Value) -> Flow:
    """Zeros around a value: it is zero where the value is, and in the new parts."""
    return Joined((x,), tuple(range(x.ndim)))


@axis_rule(
    "glu.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6), free="2 3"),
        sample(tensor(6, 2), 0, free="2 3"),
        sample(tensor(5, 6, 2), -2, free="5 3 2"),
    ],
)
def glu(step: Step) -> None:
    """n := a + a, of which one half is left."""
    x, dim = step.args
    axes, half = list(step.axes(x)), x.shape[dim] // 2
    a, b = pieces(axes[dim], [half, half])
    step.equal(a, b)
    axes[dim] = algebra.resolve(a)
    step.out(axes, AnyOf((through(x),)))
