"""Axis rules of convolutions, forwards and transposed."""

from functools import partial
from typing import Any

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, times
from apoptosis.structure.flows import AllOf, AnyOf, Flow, Through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "products"


def _conv_samples(space: int, same: Any, more: Any) -> list[Sample]:
    """Plain, in groups, depthwise, one channel to two, without a batch; `same` and `more` are paddings."""
    x, kernel, one = tensor(2, 4, *[5, 4, 3][:space]), [3, 1, 3][:space], [1] * space
    return [
        sample(x, tensor(6, 4, *kernel), tensor(6), one, more, free="2 4 6"),
        sample(x, tensor(6, 2, *kernel), None, one, same, one, 2, free="2 2 2 3"),
        sample(x, tensor(4, 1, *kernel), tensor(4), one, same, one, 4, free="2 4"),
        sample(x, tensor(8, 1, *kernel), tensor(8), one, same, one, 4, free="2 4 2"),
        sample(x, tensor(4, 4, *kernel), tensor(4), one, same, one, free="2 4 4"),
        sample(x[0], tensor(6, 4, *kernel), free="4 6"),
    ]


@axis_rule(
    *(f"conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")),
    family=FAMILY,
    samples={
        **{f"conv{n}d.default": partial(_conv_samples, n, [0] * n, [2] * n) for n in (1, 2, 3)},
        **{f"conv{n}d.padding": partial(_conv_samples, n, "same", "valid") for n in (1, 2, 3)},
    },
)
def conv(step: Step) -> None:
    """n (g i) s, (g o) i k, (g o) → n (g o) s'."""
    x, weight, bias, _stride, _padding, _dilation, groups = step.args
    group = step.fresh(groups)
    outer, inner = step.fresh(weight.shape[0] // groups), step.axes(weight)[1]
    step.equal(step.axes(weight)[0], times(group, outer))
    _convolve(step, (x, weight, bias), group, (inner, outer))
    step.role(weight, 0, "carrier", group)
    step.role(weight, 0, "producer", outer)
    step.role(weight, 1, "consumer")


def _transposed_samples(space: int) -> list[Sample]:
    x, kernel = tensor(2, 4, *[5, 4, 3][:space]), [3, 1, 3][:space]
    none, one, two = [0] * space, [1] * space, [2] * space
    return [
        sample(x, tensor(4, 6, *kernel), tensor(6), two, free="2 4 6"),
        sample(x, tensor(4, 3, *kernel), None, two, none, one, 2, free="2 2 2 3"),
        sample(x, tensor(4, 1, *kernel), tensor(4), one, none, none, 4, free="2 4"),
        sample(x, tensor(4, 2, *kernel), tensor(8), one, none, none, 4, free="2 4 2"),
        sample(x[0], tensor(4, 6, *kernel), free="4 6"),
    ]


TRANSPOSED = {f"conv_transpose{n}d.{'default' if n == 1 else 'input'}": n for n in (1, 2, 3)}


@axis_rule(
    *TRANSPOSED,
    family=FAMILY,
    samples={name: partial(_transposed_samples, n) for name, n in TRANSPOSED.items()},
)
def conv_transpose(step: Step) -> None:
    """n (g i) s, (g i) o k, (g o) → n (g o) s'."""
    x, weight, bias, _stride, _padding, _output_padding, groups, _dilation = step.args
    group = step.fresh(groups)
    inner, outer = step.fresh(weight.shape[0] // groups), step.axes(weight)[1]
    step.equal(step.axes(weight)[0], times(group, inner))
    _convolve(step, (x, weight, bias), group, (inner, outer))
    step.role(weight, 0, "carrier", group)
    step.role(weight, 0, "consumer", inner)
    step.role(weight, 1, "producer")


def _convolve(
    step: Step, tensors: tuple[Value, Value, Value | None], group: Expr, io: tuple[Expr, Expr]
) -> None:
    """What both directions share; `io` are a group's input and output channels."""
    x, weight, bias = tensors
    inner, outer = io
    space = weight.ndim - 2
    channel = x.ndim - space - 1
    step.equal(step.axes(x)[channel], times(group, inner))
    kernel = step.axes(weight)[2:]
    for expr in (*kernel, *step.axes(x)[channel + 1 :]):
        step.pin(expr, "space and kernels of a convolution stay whole", quiet=True)
    result = times(group, outer)
    if bias is not None:
        step.equal(step.axes(bias)[0], result)
        step.role(bias, 0, "producer")
    result = algebra.resolve(result)
    step.contract(inner, (x, channel), (weight, 0 if step.call.name[4] == "_" else 1))
    if "groups" in step.call.arguments:
        step.size("groups", group)
    batch, out = step.axes(x)[:channel], step.call.outputs[0]
    positions = step.fixed(out.shape[channel + 1 :])
    into = step.fixed(x.shape[channel + 1 :]) if step.call.name[4] == "_" else positions
    step.cost(*batch, result, inner, *kernel, *into)
    step.kind(result, "channel")
    weight_dim = 1 if step.call.name[4] == "_" else 0
    through_x = Through(x, (*range(channel + 1), *[None] * space))
    through_weight = Through(weight, (*[None] * channel, weight_dim, *[None] * space))
    flow: Flow = AnyOf((through_weight, through_x))
    if bias is not None:
        flow = AllOf((flow, Through(bias, (*[None] * channel, 0, *[None] * space))))
    step.out([*batch, result, *positions], flow)
