"""Axis rules of normalisations. A statistic over an axis makes cutting it inexact; scale and shift go along."""

from apoptosis.structure.axes import times
from apoptosis.structure.flows import AllOf, AnyOf, Divided, Flow, Through, through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "norms"


def _affine(
    step: Step, x: Value, scale: tuple[Value | None, Value | None], dims: list[int]
) -> tuple[Flow, ...]:
    """Equate weight and bias with the dimensions they act on; gives their zeros."""
    flows: list[Flow] = []
    for value in scale:
        if value is None:
            continue
        for own, dim in enumerate(dims):
            step.equal(step.axes(x)[dim], step.axes(value)[own])
            step.role(value, own, "carrier")
        places = [dims.index(d) if d in dims else None for d in range(x.ndim)]
        flows.append(Through(value, tuple(places)))
    return tuple(flows)


@axis_rule(
    "layer_norm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), [4], tensor(4), tensor(4, seed=1), free="2 3 4~"),
        sample(tensor(2, 3, 4), [4], tensor(4), free="2 3 4~"),
        sample(tensor(2, 3, 4), [4], None, tensor(4), free="2 3 4~"),
        sample(tensor(2, 3, 4), [3, 4], free="2 3~ 4~"),
        sample(tensor(2, 3, 4), [3, 4], tensor(3, 4), tensor(3, 4, seed=1), free="2 3~ 4~"),
    ],
)
def layer_norm(step: Step) -> None:
    """Mean and variance run over the last dimensions."""
    x, shape, weight, bias, *_ = step.args
    dims = list(range(x.ndim - len(shape), x.ndim))
    flows = _affine(step, x, (weight, bias), dims)
    for place, dim in enumerate(dims):
        step.statistic(step.axes(x)[dim], "LayerNorm's statistics run over it")
        step.size("normalized_shape", step.axes(x)[dim], place)
    nothing = Through(x, (None,) * x.ndim)
    step.same(x, flow=AllOf(flows) if weight is not None else nothing)


@axis_rule(
    "rms_norm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), [4], tensor(4), free="2 3 4~"),
        sample(tensor(2, 3, 4), [4], free="2 3 4~"),
        sample(tensor(2, 3, 4), [3, 4], tensor(3, 4), 1e-5, free="2 3~ 4~"),
    ],
)
def rms_norm(step: Step) -> None:
    """A mean square runs over the last dimensions."""
    x, shape, weight, _ = step.args
    dims = list(range(x.ndim - len(shape), x.ndim))
    flows = _affine(step, x, (weight, None), dims)
    for place, dim in enumerate(dims):
        step.statistic(step.axes(x)[dim], "RMSNorm's mean square runs over it")
        step.size("normalized_shape", step.axes(x)[dim], place)
    step.same(x, flow=AnyOf((through(x), *flows)))


def _batch_norm_samples() -> list[Sample]:
    weight, bias, mean, var = (tensor(3, seed=n) for n in range(4))
    var, x, rest = var.abs() + 0.5, tensor(2, 3, 4, 5), (0.1, 1e-5, False)
    return [
        sample(x, weight, bias, mean, var, False, *rest, free="2 3 4 5"),
        sample(x, None, None, mean, var, False, *rest, free="2 3 4 5"),
        sample(x, weight, None, mean, var, False, *rest, free="2 3 4 5"),
        sample(x[..., 0, 0], weight, bias, mean, var, False, *rest, free="2 3"),
        sample(x, weight, bias, None, None, True, *rest, free="2~ 3 4~ 5~"),
        sample(x, None, None, None, None, True, *rest, free="2~ 3 4~ 5~"),
    ]


@axis_rule("batch_norm.default", family=FAMILY, samples=_batch_norm_samples)
def batch_norm(step: Step) -> None:
    """Each channel by itself."""
    x, weight, bias, mean, var, training, *_ = step.args
    scale = _affine(step, x, (weight, None), [1])
    shift = _affine(step, x, (bias, None), [1])
    centre = _affine(step, x, (mean, None), [1])
    _affine(step, x, (var, None), [1])
    whole = through(x)
    if training or mean is None:  # statistics over the batch: a channel of zeros stays one
        centre, whole = (), Through(x, (None, 1, *[None] * (x.ndim - 2)))
        for dim in (0, *range(2, x.ndim)):
            step.statistic(step.axes(x)[dim], "BatchNorm's statistics run over it")
    step.same(x, flow=AllOf((AnyOf((*scale, AllOf((whole, *centre)))), *shift)))


@axis_rule(
    "group_norm.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 6, 4), 3, tensor(6), tensor(6, seed=1), free="2 3 2~ 4~"),
        sample(tensor(2, 6, 4, 5), 1, free="2 6~ 4~ 5~"),
        sample(tensor(2, 6, 4), 6, tensor(6), free="2 6 4~"),
        sample(tensor(2, 6), 3, None, tensor(6), free="2 3 2~"),
    ],
)
def group_norm(step: Step) -> None:
    """(g c): statistics run within a group and over space, so only whole groups are exact."""
    x, groups, weight, bias, *_ = step.args
    group, own = step.fresh(groups), step.fresh(x.shape[1] // groups)
    step.equal(step.axes(x)[1], times(group, own))
    step.size("num_groups", group)
    for expr in (own, *step.axes(x)[2:]):
        step.statistic(expr, "GroupNorm's statistics run over it")
    if x.ndim == 2 and x.shape[1] > groups:
        step.facts.floors.append(own)  # torch refuses to normalise a single number
    flows = _affine(step, x, (weight, bias), [1])
    nothing = Through(x, (None,) * x.ndim)
    step.same(x, flow=AllOf(flows) if weight is not None else nothing)


def _instance_norm_samples() -> list[Sample]:
    weight, bias, mean, var = (tensor(3, seed=n) for n in range(4))
    x, rest = tensor(2, 3, 4, 5), (0.1, 1e-5, False)
    return [
        sample(x, weight, bias, None, None, True, *rest, free="2 3 4~ 5~"),
        sample(x, None, None, None, None, True, *rest, free="2 3 4~ 5~"),
        sample(x, weight, bias, mean, var.abs() + 0.5, False, *rest, free="2 3 4 5"),
    ]


@axis_rule(
    "instance_norm.default",
    family=FAMILY,
    samples=_instance_norm_samples,
)
def instance_norm(step: Step) -> None:
    """Each channel by itself; statistics run over space, unless they are remembered ones."""
    x, weight, bias, mean, var, of_input, *_ = step.args
    flows = _affine(step, x, (weight, bias), [1])
    _affine(step, x, (mean, var), [1])
    for expr in step.axes(x)[2:] if of_input else []:
        step.statistic(expr, "InstanceNorm's statistics run over it")
    step.same(x, flow=AllOf(flows) if weight is not None else Through(x, (None,) * x.ndim))


@axis_rule(
    "_weight_norm.default",
    "_weight_norm_interface.default",
    family=FAMILY,
    samples={
        "_weight_norm.default": lambda: [
            sample(tensor(4, 3), tensor(4, 1), 0, free="3 4"),
            sample(tensor(4, 3), tensor(1, 3), 1, free="3 4"),
            sample(tensor(4, 3, 2), tensor(4, 1, 1), free="2 3 4"),
        ],
        "_weight_norm_interface.default": lambda: [
            sample(tensor(4, 3), tensor(4, 1), 0, free="3 4"),
        ],
    },
)
def weight_norm(step: Step) -> None:
    """g·v/‖v‖ per slice: the norm is a sum over the other axes of v."""
    v, g, dim = step.args
    for own in range(v.ndim):
        if own == dim % v.ndim:
            step.equal(step.axes(v)[own], step.axes(g)[own])
            step.role(g, own, "producer")
            step.spare(v, own)
        else:
            step.contract(step.axes(v)[own], (v, own))
    rows = [own if own == dim % v.ndim else None for own in range(v.ndim)]
    others = [own if own != dim % v.ndim else None for own in range(v.ndim)]
    length = Through(v, tuple(rows))
    step.same(v, flow=AnyOf((Through(v, tuple(others)), Divided(through(g), length))))
    for _ in step.call.outputs[1:]:
        step.same(g, flow=length)
