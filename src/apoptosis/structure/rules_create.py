"""Axis rules of tensors made from nothing, or from places: zeros, counts, grids."""

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE
from apoptosis.structure.flows import Everywhere, Flow, Nowhere
from apoptosis.structure.rules import Step, axis_rule
from apoptosis.structure.samples import integers, sample, tensor

FAMILY = "indices"


@axis_rule(
    "fill.Scalar",
    "fill.Tensor",
    "zero.default",
    family=FAMILY,
    samples={
        "fill.Scalar": lambda: [
            sample(tensor(2, 3), 0, free="2 3"),
            sample(tensor(2, 3), 0.5, free="2 3"),
        ],
        "fill.Tensor": lambda: [sample(tensor(2, 3), tensor(), free="2 3")],
        "zero.default": lambda: [sample(tensor(2, 3), free="2 3")],
    },
)
def fill(step: Step) -> None:
    """The same number everywhere."""
    zero = step.call.name.startswith("zero") or step.args[1:2] == (0,)
    step.same(step.args[0], flow=Everywhere() if zero else Nowhere())


@axis_rule(
    *("zeros.default", "ones.default", "full.default", "empty.memory_format"),
    *("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
    *("rand.default", "randn.default"),
    family=FAMILY,
    samples={
        **dict.fromkeys(
            [f"{kind}.default" for kind in ("zeros", "ones", "rand", "randn")]
            + ["empty.memory_format"],
            lambda: [sample([2, 1, 3], free="2 3"), sample([], free="")],
        ),
        "full.default": lambda: [sample([2, 3], 0.5, free="2 3")],
        **dict.fromkeys(
            [f"new_{kind}.default" for kind in ("zeros", "ones", "empty")],
            lambda: [sample(tensor(2), [3, 4], free="2 3 4")],
        ),
        "new_full.default": lambda: [sample(tensor(2), [3, 4], 0.5, free="2 3 4")],
    },
)
def create(step: Step) -> None:
    """Axes of its own, as long as asked for."""
    axes = [step.fresh(size) for size in step.call.outputs[0].shape]
    for place, expr in enumerate(axes):
        step.size("size", expr, place)
    flow: Flow = Everywhere() if "zeros" in step.call.name else Nowhere()
    step.out([algebra.resolve(expr) for expr in axes], flow)


LIKE = [f"{kind}_like.default" for kind in ("zeros", "ones", "empty", "rand", "randn")]
DRAWN = [f"{kind}_.default" for kind in ("normal", "uniform", "exponential", "log_normal")]


@axis_rule(
    *LIKE,
    *DRAWN,
    *("full_like.default", "randint_like.default", "randint_like.low_dtype"),
    family=FAMILY,
    samples={
        **dict.fromkeys([*LIKE, *DRAWN], lambda: [sample(tensor(2, 1, 3), free="2 3")]),
        "randint_like.default": lambda: [sample(tensor(2, 3), 5, free="2 3")],
        "randint_like.low_dtype": lambda: [sample(tensor(2, 3), 1, 5, free="2 3")],
        "full_like.default": lambda: [sample(tensor(2, 3), 0.5, free="2 3")],
    },
)
def create_like(step: Step) -> None:
    """The axes of another tensor."""
    zero = step.call.name.startswith("zeros")
    step.same(step.args[0], flow=Everywhere() if zero else Nowhere())


@axis_rule(
    "arange.default",
    "arange.start",
    "arange.start_step",
    family=FAMILY,
    samples={
        "arange.default": lambda: [sample(5, free="")],
        "arange.start": lambda: [sample(2, 5, free="")],
        "arange.start_step": lambda: [sample(2, 8, 2, free="")],
    },
)
def arange(step: Step) -> None:
    """Numbers that count places: the axis stays whole."""
    expr = step.fresh(step.call.outputs[0].shape[0])
    step.pin(expr, "its indices are counted", quiet=True)
    if step.call.name == "arange.default":
        step.size("end", expr)
    step.out([algebra.resolve(expr)], Nowhere())


@axis_rule(
    "one_hot.default",
    family=FAMILY,
    samples=lambda: [sample(integers(2, 3, below=5), 5, free="2 3")],
)
def one_hot(step: Step) -> None:
    """A new axis with one index per class."""
    x = step.args[0]
    classes = step.fixed(step.call.outputs[0].shape[-1:], "one index per class")
    step.out([*step.axes(x), *classes], Nowhere())


@axis_rule(
    "meshgrid.default",
    "meshgrid.indexing",
    family=FAMILY,
    samples={
        "meshgrid.default": lambda: [sample([tensor(2), tensor(3), tensor()], free="2 3")],
        "meshgrid.indexing": lambda: [
            sample([tensor(2), tensor(3), tensor(4)], indexing="xy", free="2 3 4"),
            sample([tensor(2), tensor(3)], indexing="ij", free="2 3"),
        ],
    },
)
def meshgrid(step: Step) -> None:
    """a, b → a b, twice."""
    values = step.args[0]
    lengths = [step.axes(v)[0] if v.ndim else ONE for v in values]
    swapped = step.call.arguments.get("indexing") == "xy"
    axes = [lengths[1], lengths[0], *lengths[2:]] if swapped and len(values) > 1 else lengths
    for _ in step.call.outputs:
        step.out(list(axes), Nowhere())
