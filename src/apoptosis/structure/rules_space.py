"""Axis rules of operations that move entries between channels and space: shuffles, windows."""

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, times
from apoptosis.structure.flows import Through, through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import sample, tensor

FAMILY = "shapes"


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
    "col2im.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 12, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1], free="2 3"),
        sample(tensor(12, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1], free="3"),
    ],
)
def col2im(step: Step) -> None:
    """n c·k l → n c s."""
    x, _size, kernel = step.args[:3]
    window = step.fixed([kernel[0] * kernel[1]], "positions in a window")[0]
    channels = step.fresh(x.shape[-2] // (kernel[0] * kernel[1]))
    step.equal(step.axes(x)[-2], times(channels, window))
    step.pin(step.axes(x)[-1], "places of windows", quiet=True)
    space = step.fixed(step.call.outputs[0].shape[-2:])
    lead = [*step.axes(x)[:-2], algebra.resolve(channels)]
    step.out([*lead, *space], Through(x, (*range(x.ndim - 1), None, None)))
