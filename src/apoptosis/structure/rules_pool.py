"""Axis rules of pools, resizes and pads: space changes, channels pass."""

from functools import partial

from apoptosis.structure.flows import Nowhere, Through
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

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
    f"upsample_{kind}.{overload}"
    for kind in (
        "nearest1d",
        "nearest2d",
        "nearest3d",
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
