"""Axis rules of operations that move entries about: views, permutations, repeats."""

import torch

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE, Expr, times
from apoptosis.structure.flows import Moved, Nowhere, Through, aligned, through
from apoptosis.structure.letters import broadcast
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "shapes"

aten = torch.ops.aten


COPIES = [
    f"{name}.default"
    for name in (
        *("contiguous", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy"),
        *("positive", "resolve_conj", "resolve_neg", "conj"),
    )
]
DROPOUTS = [
    f"{kind}dropout.default" for kind in ("", "feature_", "alpha_", "native_", "feature_alpha_")
]


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


ATLEAST = [f"atleast_{n}d.default" for n in (1, 2, 3)]


@axis_rule(
    "flatten.using_ints",
    "ravel.default",
    *ATLEAST,
    family=FAMILY,
    samples={
        "flatten.using_ints": lambda: [
            sample(tensor(2, 3, 4), 1, free="2 3 4"),
            sample(tensor(2, 3, 4), 0, -2, free="2 3 4"),
            sample(tensor(2, 1, 4), free="2 4"),
            sample(tensor(), free=""),
        ],
        "ravel.default": lambda: [sample(tensor(2, 3), free="2 3"), sample(tensor(), free="")],
        **dict.fromkeys(
            ATLEAST,
            lambda: (
                [sample(tensor(*shape), free=f) for shape, f in (((3,), "3"), ((), ""))]
                + [sample(tensor(2, 3), free="2 3"), sample(tensor(2, 3, 4), free="2 3 4")]
            ),
        ),
    },
)
def flatten(step: Step) -> None:
    """Some dimensions become one, their product; or there are more, of size 1."""
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
    reordered(step, x, [dim % x.ndim for dim in dims])


def reordered(step: Step, x: Value, order: list[int | None]) -> None:
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
    reordered(step, x, [*order])


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
    reordered(step, x, [*order])


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
    reordered(step, x, [moved[d] if d in moved else next(rest) for d in range(x.ndim)])


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
    reordered(step, x, order)


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
    reordered(step, x, [d for d in range(x.ndim) if d not in dims or x.shape[d] != 1])


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
    "broadcast_tensors.default",
    family=FAMILY,
    samples=lambda: [
        sample([tensor(2, 1, 4), tensor(3, 1), tensor()], free="2 3 4"),
        sample([tensor(2, 3), tensor(2, 3, seed=1)], free="2 3"),
    ],
)
def broadcast_tensors(step: Step) -> None:
    """Several tensors, expanded to the axes of all."""
    values = step.args[0]
    axes = broadcast(step, *values)
    for value in values:
        step.out(list(axes), aligned(value, len(axes)))


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


@axis_rule(
    *("repeat_interleave.self_Tensor", "repeat_interleave.Tensor"),
    family=FAMILY,
    samples={
        "repeat_interleave.self_Tensor": lambda: [
            sample(tensor(2, 3), torch.tensor([2, 0, 1]), 1, free="2"),
            sample(tensor(2, 3), torch.tensor([2]), 1, free="2"),
        ],
        "repeat_interleave.Tensor": lambda: [sample(torch.tensor([2, 0, 1]), free="")],
    },
)
def repeat_by_number(step: Step) -> None:
    """Each index is repeated as often as a tensor says, so the axis stays whole."""
    values = [value for value in step.args if isinstance(value, Value)]
    dim = step.call.arguments.get("dim")
    x = values[0]
    for expr in step.axes(values[-1]):
        step.pin(expr, "numbers of repeats", quiet=True)
    places = list(range(x.ndim)) if dim is None else [dim % x.ndim]
    for place in places:
        step.pin(step.axes(x)[place], "its indices are repeated by number")
    shape = step.call.outputs[0].shape
    if dim is None:
        step.out(step.fixed(shape, "repeated"), Nowhere())
        return
    axes = list(step.axes(x))
    axes[dim] = step.fresh(shape[dim], pin="repeated")
    step.out(axes, Through(x, tuple(None if d in places else d for d in range(x.ndim))))
