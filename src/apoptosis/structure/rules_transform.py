"""Axis rules of transforms along whole axes: Fourier transforms, crosses, functions of matrices.

Every index of the result depends on every index of such an axis, and on where it stands: it stays whole, others pass.
"""

import torch

from apoptosis.structure.flows import Nowhere, Through
from apoptosis.structure.letters import broadcast
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "reductions"

KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
FOURIER = [f"fft_{kind}{dims}.default" for kind in KINDS for dims in ("", "2", "n")]
SHIFTS = ["fft_fftshift.default", "fft_ifftshift.default"]


def _complex(*shape: int) -> torch.Tensor:
    return torch.complex(tensor(*shape), tensor(*shape, seed=1))


def _fourier_samples(name: str) -> list[Sample]:
    """Along the last dimensions, along others, and to other sizes."""
    kind = name.removeprefix("fft_").removesuffix(".default").rstrip("2n")
    x = tensor(2, 3, 4, 6) if kind in ("rfft", "ihfft") else _complex(2, 3, 4, 6)
    if name.endswith("n.default"):
        return [sample(x, free=""), sample(x, [4, 4], free="2 3"), sample(x, dim=[1], free="2 4 6")]
    if name.endswith("2.default"):
        return [sample(x, free="2 3"), sample(x, None, [0, 2], free="3 6")]
    return [sample(x, free="2 3 4"), sample(x, 4, 1, free="2 4 6")]


@axis_rule(
    *FOURIER,
    *SHIFTS,
    family=FAMILY,
    samples={
        **{name: (lambda own=name: _fourier_samples(own)) for name in FOURIER},
        **dict.fromkeys(
            SHIFTS,
            lambda: [sample(tensor(2, 3, 4), free=""), sample(tensor(2, 3, 4), [1], free="2 4")],
        ),
    },
)
def fourier(step: Step) -> None:
    """A Fourier transform along some axes."""
    x, sizes, dims = step.args[0], step.call.arguments.get("s"), step["dim"]
    if dims is None:
        dims = list(range(-len(sizes), 0)) if sizes else list(range(x.ndim))
    _whole(step, x, dims if isinstance(dims, list) else [dims], "a Fourier transform runs over it")


def _whole(step: Step, x: Value, dims: list[int], why: str) -> None:
    """Pin some dimensions; the result has new ones in their places."""
    places = {dim % x.ndim for dim in dims}
    for dim in places:
        step.pin(step.axes(x)[dim], why)
    shape = step.call.outputs[0].shape
    axes = [
        step.fresh(shape[d], pin="transformed") if d in places else step.axes(x)[d]
        for d in range(x.ndim)
    ]
    step.out(axes, Through(x, tuple(None if d in places else d for d in range(x.ndim))))


@axis_rule(
    *("stft.default", "stft.center"),
    family=FAMILY,
    samples={
        "stft.default": lambda: [
            sample(tensor(2, 16), 8, 4, 8, tensor(8), False, True, True, free="2"),
            sample(tensor(16), 8, None, None, tensor(8), False, True, True, free=""),
        ],
        "stft.center": lambda: [
            sample(tensor(2, 16), 8, 4, 8, tensor(8), True, "reflect", False, True, True, free="2")
        ],
    },
)
def stft(step: Step) -> None:
    """Windows slide over time and are transformed; the batch passes."""
    x, window = step.args[0], step["window"]
    step.pin(step.axes(x)[-1], "windows slide over it", quiet=True)
    if window is not None:
        step.pin(step.axes(window)[0], "a window of time")
    lead = step.axes(x)[:-1]
    rest = step.fixed(step.call.outputs[0].shape[len(lead) :])
    step.out([*lead, *rest], Through(x, (*range(len(lead)), *[None] * len(rest))))


@axis_rule(
    *("cross.default", "linalg_cross.default"),
    family=FAMILY,
    samples={
        "cross.default": lambda: [
            sample(tensor(2, 3, 4), tensor(2, 3, 4, seed=1), 1, free="2 4"),
            sample(tensor(2, 3), tensor(2, 3, seed=1), -1, free="2"),
            sample(tensor(5, 3, 4), tensor(5, 3, 4, seed=1), free="4"),
        ],
        "linalg_cross.default": lambda: [sample(tensor(2, 4, 3), tensor(1, 1, 3), free="2 4")],
    },
)
def cross(step: Step) -> None:
    """Three places along one axis, the others broadcast."""
    a, b, dim = step.args
    axes = broadcast(step, a, b)
    shape = step.call.outputs[0].shape
    if dim is None:
        dim = shape.index(3)
        for axis in axes[:dim]:
            step.pin(axis, "a cross product without `dim` runs over the first axis of size 3")
    step.pin(axes[dim], "a cross product runs over it")
    step.out(axes, Nowhere())


SQUARE = [
    *("det.default", "linalg_det.default"),
    *("logdet.default", "slogdet.default", "linalg_slogdet.default", "matrix_exp.default"),
    *("linalg_matrix_exp.default", "linalg_eigvals.default", "linalg_eig.default"),
]
SYMMETRIC = ["linalg_eigh.default", "linalg_eigvalsh.default"]
NOT_OF_ZEROS = ["linalg_inv.default", "inverse.default", "linalg_cholesky.default"]
OBLONG = ["linalg_qr.default", "linalg_svd.default", "linalg_svdvals.default", "svd.default"]


def _positive() -> torch.Tensor:
    x = tensor(2, 3, 3)
    return x @ x.mT + 3 * torch.eye(3, dtype=torch.float64)


@axis_rule(
    *SQUARE,
    *SYMMETRIC,
    *NOT_OF_ZEROS,
    *OBLONG,
    family=FAMILY,
    samples={
        **dict.fromkeys([*SQUARE, *SYMMETRIC], lambda: [sample(_positive(), free="2")]),
        **dict.fromkeys(NOT_OF_ZEROS, lambda: [sample(_positive(), free="")]),
        **dict.fromkeys(OBLONG, lambda: [sample(tensor(2, 3, 4), free="2")]),
    },
)
def of_matrices(step: Step) -> None:
    """A function of whole matrices; the batch passes."""
    x = step.args[0]
    lead = step.axes(x)[:-2]
    for expr in step.axes(x)[-2:]:
        step.pin(expr, "a function of whole matrices")
    for expr in lead if step.call.name in NOT_OF_ZEROS else []:
        step.pin(expr, "a matrix of zeros has none")
    for out in step.call.outputs:
        if out.shape[: len(lead)] != x.shape[:-2]:
            raise Declined("the results have another batch")
        step.out([*lead, *step.fixed(out.shape[len(lead) :], "of matrices")], Nowhere())


@axis_rule(
    "linalg_solve.default",
    family=FAMILY,
    samples=lambda: [
        sample(_positive(), tensor(2, 3, 4), free="4"),
        sample(_positive(), tensor(2, 4, 3), left=False, free="4"),
        sample(_positive()[0], tensor(3), free=""),
    ],
)
def solve(step: Step) -> None:
    """Matrices stay whole; what they are solved for passes along the other dimension."""
    matrix, right, left = step.args
    for expr in step.axes(matrix):
        step.pin(expr, "a system of equations")
    if right.ndim == 1 or right.ndim != matrix.ndim:
        for expr in (*step.axes(right), *step.axes(matrix)):
            step.pin(expr, "a system of equations")
        step.out(step.fixed(step.call.outputs[0].shape, "solutions"), Nowhere())
        return
    axes = list(step.axes(right))
    step.pin(axes[-2 if left else -1], "a system of equations")
    for dim in range(right.ndim - 2):
        if matrix.shape[dim] != right.shape[dim]:
            raise Declined("matrices and right sides are broadcast")
        step.equal(step.axes(matrix)[dim], axes[dim])
    kept = tuple(d if d == right.ndim - (1 if left else 2) else None for d in range(right.ndim))
    step.out([step.axes(right)[d] for d in range(right.ndim)], Through(right, kept))
