"""Axis rules of operations that move entries about: views, permutations, cuts, joins, repeats."""

from typing import Any

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE, Expr, sum_of, times
from apoptosis.structure.program import Value
from apoptosis.structure.rules import (
    AnyOf,
    Declined,
    Joined,
    Moved,
    Nowhere,
    Sample,
    Step,
    Through,
    axis_rule,
    sample,
    tensor,
    through,
)

FAMILY = "shapes"

aten = torch.ops.aten


COPIES = [
    f"{name}.default"
    for name in (
        *("contiguous", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy"),
        *("positive", "resolve_conj", "resolve_neg", "conj"),
    )
]
DROPOUTS = [f"{kind}dropout.default" for kind in ("", "feature_", "alpha_", "native_")]


@axis_rule(
    *COPIES,
    *DROPOUTS,
    "_conj.default",
    *("to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(COPIES, lambda: [sample(tensor(2, 1, 3), free="2 3")]),
        **dict.fromkeys(DROPOUTS, lambda: [sample(tensor(2, 3), 0.5, False, free="2 3")]),
        **dict.fromkeys(
            ["to.other", "type_as.default"],
            lambda: [sample(tensor(2, 3), tensor(5).float(), free="2 3 5")],
        ),
        "_conj.default": lambda: [
            sample(torch.complex(tensor(2, 3), tensor(2, 3, seed=1)), free="2 3")
        ],
        "to.dtype": lambda: [sample(tensor(2, 3), torch.float32, free="2 3")],
        "to.device": lambda: [sample(tensor(2, 3), "cpu", torch.float32, free="2 3")],
        "to.dtype_layout": lambda: [sample(tensor(2, 3), dtype=torch.float32, free="2 3")],
    },
)
def identity(step: Step) -> None:
    """The same axes."""
    for number, _ in enumerate(step.call.outputs):  # the second, if any, is a mask
        step.same(step.args[0], flow=through(step.args[0]) if number == 0 else Nowhere())


def _view_samples() -> list[Sample]:
    return [
        sample(tensor(2, 3, 12), [2, 3, 3, 4], free="2 3 3 4"),
        sample(tensor(2, 3, 4, 5), [2, 12, 5], free="2 3 4 5"),
        sample(tensor(2, 12), [-1, 3], free="2 4 3"),
        sample(tensor(6, 4), [4, 6], free=""),
        sample(tensor(4, 6), [8, 3], free="4 2 3"),
        sample(tensor(2, 3, 4), [6, 2, 2], free="2 3 2 2"),
        sample(tensor(2, 1, 6), [12], free="2 6"),
        sample(tensor(2, 6), [1, 2, 1, -1, 1], free="2 6"),
        sample(tensor(3, 1), [3], free="3"),
        sample(tensor(1, 1), [], free=""),
    ]


@axis_rule(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "view_copy.default",
    family=FAMILY,
    samples=_view_samples,
)
def view(step: Step) -> None:
    """Blocks of dimensions of equal product are equated as products in row-major order."""
    x = step.args[0]
    axes = _reshaped(step, x)
    name = list(step.call.arguments)[1]
    for place, (asked, expr) in enumerate(zip(step[name], axes, strict=True)):
        if asked != -1:
            step.size(name, expr, place)
    step.out(axes, Moved(x))


def _reshaped(step: Step, x: Value) -> list[Expr]:
    """Fresh axes for the result of a view, equated block by block."""
    shape = step.call.outputs[0].shape
    if 0 in x.shape:
        return [step.fresh(size, pin="empty") for size in shape]
    result: list[Expr] = []
    sources = list(step.axes(x))
    for wanted in _blocks(x.shape, shape):
        num_in, sizes = wanted
        block, sources = sources[:num_in], sources[num_in:]
        if len(block) == len(sizes) == 1:
            result += block
            continue
        fresh = [step.fresh(size) for size in sizes]
        step.equal(times(*block), times(*fresh))
        result += fresh
    return [algebra.resolve(expr) for expr in result]


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Shortest runs of dimensions with equal products: how many old ones, and the new sizes."""
    blocks: list[tuple[int, list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        num, sizes, a, b = 0, [], 1, 1
        if i < len(old) and (j >= len(new) or old[i] != 1 or new[j] == 1):
            a, num, i = old[i], 1, i + 1
        if j < len(new) and not (num and a == 1 and new[j] != 1):
            b, j = new[j], j + 1
            sizes.append(b)
        while a != b:
            if a < b:
                a, num, i = a * old[i], num + 1, i + 1
            else:
                sizes.append(new[j])
                b, j = b * new[j], j + 1
        blocks.append((num, sizes))
    return blocks


@axis_rule(
    "flatten.using_ints",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 1, free="2 3 4"),
        sample(tensor(2, 3, 4), 0, -2, free="2 3 4"),
        sample(tensor(2, 1, 4), free="2 4"),
        sample(tensor(), free=""),
    ],
)
def flatten(step: Step) -> None:
    """Some dimensions become one, their product."""
    step.out(_reshaped(step, step.args[0]), Moved(step.args[0]))


@axis_rule(
    "view_as.default",
    "reshape_as.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 12), tensor(2, 3, 4), free="2 3 4"),
        sample(tensor(2, 3, 1), tensor(6), free="2 3"),
    ],
)
def view_as(step: Step) -> None:
    """As `view`, to the axes of another tensor."""
    x, like = step.args
    axes = _reshaped(step, x)
    for own, other in zip(axes, step.axes(like), strict=True):
        step.equal(own, other)
    step.out([algebra.resolve(expr) for expr in axes], Moved(x))


@axis_rule(
    "unflatten.int",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 12), 1, [3, 4], free="2 3 4"),
        sample(tensor(2, 12), -1, [3, -1], free="2 3 4"),
        sample(tensor(12, 2), 0, [3, 1, 4], free="2 3 4"),
    ],
)
def unflatten(step: Step) -> None:
    """One dimension becomes a product."""
    x, dim, sizes = step.args
    axes = _reshaped(step, x)
    for place, asked in enumerate(sizes):
        if asked != -1:
            step.size("sizes", axes[dim % x.ndim + place], place)
    step.out(axes, Moved(x))


@axis_rule(
    "permute.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), [2, 0, 1], free="2 3 4"),
        sample(tensor(2, 3, 3), [-1, 0, 1], free="2 3 3"),
    ],
)
def permute(step: Step) -> None:
    """The same axes in another order."""
    x, dims = step.args
    _reordered(step, x, [dim % x.ndim for dim in dims])


def _reordered(step: Step, x: Value, order: list[int | None]) -> None:
    """The axes of `x` in that order, None for a new dimension of size 1."""
    axes = step.axes(x)
    step.out([ONE if dim is None else axes[dim] for dim in order], Through(x, tuple(order)))


@axis_rule(
    "transpose.int", "swapaxes.default", "swapdims.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), 1, -1, free="2 3 4"),
        sample(tensor(3, 3), -2, 1, free="3 3"),
    ],
)  # fmt: skip
def transpose(step: Step) -> None:
    """Two axes change places."""
    x, a, b = step.args
    order = list(range(x.ndim))
    if x.ndim:
        order[a], order[b] = order[b], order[a]
    _reordered(step, x, [*order])


@axis_rule(
    "t.default", "numpy_T.default", "mT.default", "mH.default", "adjoint.default",
    family=FAMILY,
    samples={
        "t.default": lambda: [sample(tensor(3, 4), free="3 4"), sample(tensor(3), free="3")],
        "numpy_T.default": lambda: [sample(tensor(3, 4), free="3 4"), sample(tensor(3), free="3")],
        **dict.fromkeys(
            ["mT.default", "mH.default", "adjoint.default"],
            lambda: [sample(tensor(2, 3, 4), free="2 3 4")],
        ),
    },
)  # fmt: skip
def t(step: Step) -> None:
    """The last two axes change places, or all of them."""
    x = step.args[0]
    order = list(range(x.ndim))
    if step.call.name.startswith("numpy_T"):
        order.reverse()
    elif x.ndim > 1:
        order[-2:] = [order[-1], order[-2]]
    _reordered(step, x, [*order])


@axis_rule(
    "movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist",
    family=FAMILY,
    samples={
        **dict.fromkeys(
            ["movedim.int", "moveaxis.int"],
            lambda: [
                sample(tensor(2, 3, 4), 0, 2, free="2 3 4"),
                sample(tensor(2, 3, 4), -1, 0, free="2 3 4"),
            ],
        ),
        **dict.fromkeys(
            ["movedim.intlist", "moveaxis.intlist"],
            lambda: [sample(tensor(2, 3, 4, 5), [0, 1], [-1, 0], free="2 3 4 5")],
        ),
    },
)  # fmt: skip
def movedim(step: Step) -> None:
    """Some axes move, the others close ranks."""
    x, source, target = step.args
    sources, targets = (
        [s % x.ndim for s in (n if isinstance(n, list) else [n])] for n in (source, target)
    )
    rest = iter(dim for dim in range(x.ndim) if dim not in sources)
    moved = dict(zip(targets, sources, strict=True))
    _reordered(step, x, [moved[d] if d in moved else next(rest) for d in range(x.ndim)])


@axis_rule(
    "unsqueeze.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3), 1, free="2 3"),
        sample(tensor(2, 3), -1, free="2 3"),
        sample(tensor(), 0, free=""),
    ],
)
def unsqueeze(step: Step) -> None:
    """A new dimension of size 1."""
    x, dim = step.args
    order: list[int | None] = list(range(x.ndim))
    order.insert(dim % (x.ndim + 1), None)
    _reordered(step, x, order)


@axis_rule(
    "squeeze.default", "squeeze.dim", "squeeze.dims",
    family=FAMILY,
    samples={
        "squeeze.default": lambda: [
            sample(tensor(3, 1, 4), free="3 4"),
            sample(tensor(1, 1), free=""),
        ],
        "squeeze.dim": lambda: [
            sample(tensor(3, 1, 4), 1, free="3 4"),
            sample(tensor(3, 1, 4), -1, free="3 4"),
        ],
        "squeeze.dims": lambda: [sample(tensor(1, 3, 1, 4), [0, -2, 3], free="3 4")],
    },
)  # fmt: skip
def squeeze(step: Step) -> None:
    """Dimensions of size 1 vanish; without a list of them, nothing else may shrink to 1."""
    x = step.args[0]
    dims = step.args[1] if len(step.args) > 1 else list(range(x.ndim))
    dims = [d % x.ndim for d in (dims if isinstance(dims, list) else [dims])] if x.ndim else []
    for dim, expr in enumerate(step.axes(x)):
        if dim in dims and x.shape[dim] != 1:
            step.facts.floors.append(expr)
    _reordered(step, x, [d for d in range(x.ndim) if d not in dims or x.shape[d] != 1])


@axis_rule(
    "expand.default", "broadcast_to.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 1, 3), [2, 4, -1], free="2 3 4"),
        sample(tensor(3), [2, 3], free="2 3"),
        sample(tensor(1), [1, 3], free="3"),
        sample(tensor(), [3], free="3"),
    ],
)  # fmt: skip
def expand(step: Step) -> None:
    """A dimension of size 1 becomes a new axis, along which everything is the same."""
    x, sizes, *_ = step.args
    axes = _expanded(step, x, step.call.outputs[0].shape)
    for place, (asked, expr) in enumerate(zip(sizes, axes, strict=True)):
        if asked != -1:
            step.size("size", expr, place)
    step.out(axes, through(x, len(axes) - x.ndim))


def _expanded(step: Step, x: Value, shape: tuple[int, ...]) -> list[Expr]:
    old = [ONE] * (len(shape) - x.ndim) + step.axes(x)
    return [
        step.fresh(size, origin="repeat") if algebra.size_of(expr) == 1 and size != 1 else expr
        for expr, size in zip(old, shape, strict=True)
    ]


@axis_rule(
    "expand_as.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 1), tensor(2, 3), free="2 3"),
        sample(tensor(3), tensor(2, 3), free="2 3"),
    ],
)
def expand_as(step: Step) -> None:
    """As `expand`, to the axes of another tensor."""
    x, like = step.args
    axes = _expanded(step, x, like.shape)
    for own, other in zip(axes, step.axes(like), strict=True):
        step.equal(own, other)
    step.out([algebra.resolve(expr) for expr in axes], through(x, like.ndim - x.ndim))


@axis_rule(
    "repeat.default", "tile.default",
    family=FAMILY,
    samples={
        "repeat.default": lambda: [
            sample(tensor(2, 3), [2, 1, 3], free="2 3 2 3"),
            sample(tensor(1, 3), [4, 2], free="4 2 3"),
        ],
        "tile.default": lambda: [
            sample(tensor(2, 3), [2, 1, 3], free="2 3 2 3"),
            sample(tensor(2, 3), [4], free="2 3 4"),
        ],
    },
)  # fmt: skip
def repeat(step: Step) -> None:
    """n becomes r·n."""
    x, repeats = step.args
    ndim = max(len(repeats), x.ndim)
    repeats = [1] * (ndim - len(repeats)) + list(repeats)
    old = [ONE] * (ndim - x.ndim) + step.axes(x)
    name, offset = list(step.call.arguments)[1], ndim - len(step.args[1])
    axes: list[Expr] = []
    for place, (own, number) in enumerate(zip(old, repeats, strict=True)):
        again = step.fresh(number, origin="repeat")
        if place >= offset:
            step.size(name, again, place - offset)
        axes.append(times(again, own))
    step.out([algebra.resolve(expr) for expr in axes], through(x, ndim - x.ndim))


@axis_rule(
    "repeat_interleave.self_int",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3), 2, 1, free="2 3 2"),
        sample(tensor(2, 3), 4, -2, output_size=8, free="2 3 4"),
        sample(tensor(2, 3), 2, free="refused"),
    ],
)
def repeat_interleave(step: Step) -> None:
    """n becomes n·r."""
    x, number, dim, total = step.args
    if dim is None:
        raise Declined("without a dimension everything is flattened")
    again = step.fresh(number, origin="repeat")
    step.size("repeats", again)
    axes = list(step.axes(x))
    axes[dim] = algebra.resolve(times(axes[dim], again))
    if total is not None:
        step.size("output_size", axes[dim])
    step.out(axes, through(x))


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
    "chunk.default", "split.Tensor", "tensor_split.sections",
    family=FAMILY,
    samples={
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
    x, number, dim = step.args
    parts = _cut_up(step, x, dim % x.ndim)
    same = [part for part in parts if algebra.size_of(part) == algebra.size_of(parts[0])]
    step.tie(*same)
    if step.call.name.startswith("split"):
        step.size("split_size", parts[0])
    assert number, "torch refuses 0 parts"


@axis_rule(
    "split_with_sizes.default", "split.sizes",
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
        if start:
            step.size("start", sum_of([part, after]) if start < 0 else before, negative=start < 0)
        if end is not None and end <= n:
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
        _reordered(step, x, [*rest])


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
    values, dim = step.args
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
    step.out(axes, Padded(x) if constant and zero else Nowhere())


def Padded(x: Value) -> Any:  # noqa: N802 - reads as the flows beside it
    """Zeros around a value: it is zero where the value is, and in the new parts."""
    return Joined((x,), tuple(range(x.ndim)))


@axis_rule(
    "pixel_shuffle.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 12, 4, 5), 2, free="2 3"),
        sample(tensor(12, 4, 5), 2, free="3"),
    ],
)
def pixel_shuffle(step: Step) -> None:
    """c·r·r becomes c, the rest goes to space."""
    x, factor = step.args
    _shuffled(step, x, step.axes(x)[-3], factor, inverse=False)


@axis_rule(
    "pixel_unshuffle.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4, 6), 2, free="2 3"),
        sample(tensor(3, 4, 6), 2, free="3"),
    ],
)
def pixel_unshuffle(step: Step) -> None:
    """c becomes c·r·r."""
    x, factor = step.args
    _shuffled(step, x, step.axes(x)[-3], factor, inverse=True)


def _shuffled(step: Step, x: Value, channels: Expr, factor: int, *, inverse: bool) -> None:
    squares = step.fixed([factor, factor], "positions inside a pixel")
    for expr in step.axes(x)[-2:]:
        step.pin(expr, "space", quiet=True)
    if inverse:
        result = times(channels, *squares)
    else:
        result = step.fresh(algebra.size_of(channels) // factor**2)
        step.equal(channels, times(result, *squares))
    space = step.fixed(step.call.outputs[0].shape[-2:])
    lead = step.axes(x)[:-3]
    dims = (*range(x.ndim - 2), None, None)
    step.out([*lead, algebra.resolve(result), *space], Through(x, dims))


@axis_rule(
    "channel_shuffle.default",
    "native_channel_shuffle.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6, 4, 5), 2, free="2 2 3 4 5"),
        sample(tensor(2, 6, 4, 5), 3, free="2 2 3 4 5"),
    ],
)
def channel_shuffle(step: Step) -> None:
    """g·c becomes c·g."""
    x, groups = step.args
    group, own = step.fresh(groups), step.fresh(x.shape[1] // groups)
    step.equal(step.axes(x)[1], times(group, own))
    step.size("groups", group)
    axes = list(step.axes(x))
    axes[1] = algebra.resolve(times(own, group))
    step.out(axes, through(x))


@axis_rule(
    "im2col.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4, 5), [2, 3], [1, 1], [0, 0], [1, 1], free="2 3"),
        sample(tensor(3, 4, 5), [2, 2], [1, 1], [1, 1], [2, 2], free="3"),
    ],
)
def im2col(step: Step) -> None:
    """n c s → n c·k l."""
    x, kernel = step.args[:2]
    for expr in step.axes(x)[-2:]:
        step.pin(expr, "space", quiet=True)
    window = step.fixed([kernel[0] * kernel[1]], "positions in a window")[0]
    lead = [*step.axes(x)[:-3], times(step.axes(x)[-3], window)]
    places = step.fixed(step.call.outputs[0].shape[-1:])
    step.out([*lead, *places], Through(x, (*range(x.ndim - 2), None)))


@axis_rule(
    "unfold.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6), 1, 3, 2, free="2"),
        sample(tensor(2, 6, 3), -2, 3, 1, free="2 3"),
    ],
)
def unfold(step: Step) -> None:
    """Windows over an axis keep it whole."""
    x, dim, _size, _stride = step.args
    step.pin(step.axes(x)[dim], "windows slide over it", quiet=True)
    axes = list(step.axes(x))
    out = step.call.outputs[0].shape
    axes[dim] = step.fresh(out[dim % x.ndim], pin="windows")
    order = [None if d == dim % x.ndim else d for d in range(x.ndim)]
    step.out([*axes, step.fresh(out[-1], pin="places in a window")], Through(x, (*order, None)))


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
