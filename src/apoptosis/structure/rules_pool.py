"""Axis rules of pools, resizes and pads: space changes, channels pass."""

from functools import partial
from math import prod

from apoptosis.structure.flows import Nowhere, Through
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import Sample, integers, sample, tensor

FAMILY = "reductions"


POOLS = [
    f"{kind}.default"
    for n in (1, 2, 3)
    for kind in (
        *(f"max_pool{n}d", f"max_pool{n}d_with_indices", f"avg_pool{n}d"),
        *(f"adaptive_avg_pool{n}d", f"adaptive_max_pool{n}d"),
        *(f"reflection_pad{n}d", f"replication_pad{n}d"),
    )
]


RESIZES = [
    f"{'_' * ('exact' in kind)}upsample_{kind}.{overload}"
    for kind in (
        "nearest1d",
        "nearest2d",
        "nearest3d",
        "nearest_exact1d",
        "nearest_exact2d",
        "nearest_exact3d",
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


def _num_spatial(name: str) -> int:
    """The 2 of `max_pool2d`."""
    return next(int(c) for c, d in zip(name, name[1:], strict=False) if c in "123" and d == "d")


def _pool_samples(name: str) -> list[Sample]:
    """With and without a batch; a kernel of 2, or 2 positions, or a pad of 1 on every side."""
    space = _num_spatial(name)
    shape, amount = [4, 5, 4][:space], [1] * 2 * space if "_pad" in name else [2] * space
    return [
        sample(tensor(2, 3, *shape), amount, free="2 3"),
        sample(tensor(3, *shape), amount, free="3"),
    ]


def _resize_samples(name: str) -> list[Sample]:
    """To a size, or by a factor."""
    space = _num_spatial(name)
    x, size = tensor(2, 3, *[4, 5, 4][:space]), [6, 3, 7][:space]
    corners = [] if "nearest" in name else [True]
    if not name.endswith("vec"):
        return [sample(x, size, *corners, free="2 3")]
    return [
        sample(x, size, *corners, None, free="2 3"),
        sample(x, None, *corners, [2.0] * space, free="2 3"),
    ]


UNPOOLS = [f"max_unpool{n}d.default" for n in (2, 3)]


def _unpool_samples(name: str) -> list[Sample]:
    """To twice the size, with and without a batch."""
    space = _num_spatial(name)
    shape = [4, 6, 4][:space]
    pooled = [n // 2 for n in shape]
    x = tensor(2, 3, *pooled)
    places = integers(*x.shape, below=prod(shape))
    if space == 2:
        return [sample(x, places, shape, free="2 3"), sample(x[0], places[0], shape, free="3")]
    return [sample(x, places, shape, [2] * 3, [0] * 3, free="2 3")]


@axis_rule(*UNPOOLS, family=FAMILY, samples={n: partial(_unpool_samples, n) for n in UNPOOLS})
def unpool(step: Step) -> None:
    """Entries go back to the places where maxima were; channels pass."""
    x, places = step.args[:2]
    lead = x.ndim - _num_spatial(step.call.name)
    for own, other in zip(step.axes(x)[:lead], step.axes(places)[:lead], strict=True):
        step.equal(own, other)
    for value in (x, places):
        for expr in step.axes(value)[lead:]:
            step.pin(expr, "space", quiet=True)
    space = step.fixed(step.call.outputs[0].shape[lead:])
    step.out([*step.axes(x)[:lead], *space], Through(x, (*range(lead), *[None] * len(space))))


@axis_rule(
    *("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            ["grid_sampler.default", "grid_sampler_2d.default"],
            lambda: [
                sample(tensor(2, 3, 4, 5), tensor(2, 6, 7, 2), mode, padding, False, free="2 3")
                for mode, padding in ((0, 0), (1, 1))
            ],
        ),
        "grid_sampler_3d.default": lambda: [
            sample(tensor(2, 3, 4, 5, 2), tensor(2, 6, 7, 4, 3), 0, 0, True, free="2 3")
        ],
    },
)
def grid_sample(step: Step) -> None:
    """Space is read at places that a grid names; channels pass."""
    x, grid, *_ = step.args
    step.equal(step.axes(x)[0], step.axes(grid)[0])
    for expr in (*step.axes(x)[2:], *step.axes(grid)[1:]):
        step.pin(expr, "space", quiet=True)
    space = step.fixed(step.call.outputs[0].shape[2:])
    flow = Through(x, (0, 1, *[None] * len(space)))
    step.out([*step.axes(x)[:2], *space], flow)


@axis_rule(
    *POOLS,
    *RESIZES,
    family=FAMILY,
    samples={name: partial(_pool_samples, name) for name in POOLS}
    | {name: partial(_resize_samples, name) for name in RESIZES},
)
def pool(step: Step) -> None:
    """Space changes and stays whole, channels pass."""
    x = step.args[0]
    space = _num_spatial(step.call.name)
    lead = x.ndim - space
    for expr in step.axes(x)[lead:]:
        step.pin(expr, "space", quiet=True)
    dims = (*range(lead), *[None] * space)
    for number, out in enumerate(step.call.outputs):  # the second, if any, says where maxima were
        flow = Through(x, dims) if number == 0 else Nowhere()
        step.out([*step.axes(x)[:lead], *step.fixed(out.shape[lead:])], flow)
