"""Axis rules of products: linear, matmul, einsum. Most are letters; see `letters.product`."""

from string import ascii_letters
from typing import Any

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr
from apoptosis.structure.flows import AllOf, aligned
from apoptosis.structure.letters import product, product_flow
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Declined, Step, axis_rule
from apoptosis.structure.samples import Sample, sample, tensor

FAMILY = "products"


def _linear_samples() -> list[Sample]:
    return [
        sample(tensor(2, 3, 4), tensor(5, 4), tensor(5), free="2 3 4 5"),
        sample(tensor(4), tensor(5, 4), free="4 5"),
        sample(tensor(4), tensor(5, 4), tensor(5), free="4 5"),
        sample(tensor(2, 4), tensor(1, 4), tensor(1), free="2 4"),
        sample(tensor(2, 3, 4), tensor(4), free="2 3 4"),
        sample(tensor(2, 1), tensor(5, 1), tensor(5), free="2 5"),
        sample(tensor(4, 4), tensor(4, 4, seed=1), free="4 4 4"),
    ]


@axis_rule("linear.default", family=FAMILY, samples=_linear_samples)
def linear(step: Step) -> None:
    """… i, o i, o → … o."""
    x, weight, bias = step.args
    batch = ascii_letters[: x.ndim - 1]
    operands = [(x, batch + "I"), (weight, "OI"[-weight.ndim :])]
    _summed(step, operands, batch + "O" * (weight.ndim - 1), bias)
    if weight.ndim == 2:
        step.kind(step.axes(weight)[0], "hidden")


def _summed(step: Step, operands: list[tuple[Value, str]], result: str, bias: Any) -> None:
    """State a product plus a bias that is broadcast to it."""
    axes = product(step, operands, result)
    flow = product_flow(operands, result)
    if isinstance(bias, Value):
        _add_bias(step, bias, axes)
        flow = AllOf((flow, aligned(bias, len(result))))
    step.out([algebra.resolve(expr) for expr in axes], flow)


def _add_bias(step: Step, bias: Value, axes: list[Expr]) -> None:
    for dim in range(-bias.ndim, 0):
        if bias.shape[dim] != 1:
            step.equal(axes[dim], step.axes(bias)[dim])
            step.role(bias, dim, "producer")


@axis_rule(
    "matmul.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(4, 5), free="2 3 4 5"),
        sample(tensor(2, 1, 3, 4), tensor(6, 4, 5), free="2 6 3 4 5"),
        sample(tensor(3, 4), tensor(2, 6, 4, 5), free="2 6 3 4 5"),
        sample(tensor(4), tensor(2, 4, 5), free="2 4 5"),
        sample(tensor(2, 3, 4), tensor(4), free="2 3 4"),
        sample(tensor(4, 4), tensor(4, 4, seed=1), free="4 4 4"),
        sample(tensor(2, 1), tensor(1, 3), free="2 3"),
        sample(tensor(4), tensor(4, seed=1), free="4"),
    ],
)
def matmul(step: Step) -> None:
    """… m k, … k n → … m n, the batch broadcast; vectors lack m or n."""
    a, b = step.args
    batch = ascii_letters[: max(a.ndim, b.ndim, 2) - 2]
    a_letters = (batch + "MK")[-a.ndim :] if a.ndim > 1 else "K"
    b_letters = (batch + "KN")[-b.ndim :] if b.ndim > 1 else "K"
    result = batch + "M" * (a.ndim > 1) + "N" * (b.ndim > 1)
    _summed(step, [(a, a_letters), (b, b_letters)], result, None)


@axis_rule(
    "mm.default",
    "bmm.default",
    family=FAMILY,
    samples={
        "mm.default": lambda: [
            sample(tensor(3, 4), tensor(4, 5), free="3 4 5"),
            sample(tensor(3, 1), tensor(1, 5), free="3 5"),
        ],
        "bmm.default": lambda: [sample(tensor(2, 3, 4), tensor(2, 4, 5), free="2 3 4 5")],
    },
)
def mm(step: Step) -> None:
    """(b) m k, (b) k n → (b) m n."""
    matmul(step)


@axis_rule(
    "mv.default",
    "dot.default",
    "vdot.default",
    family=FAMILY,
    samples={
        "vdot.default": lambda: [sample(tensor(4), tensor(4, seed=1), free="4")],
        "mv.default": lambda: [sample(tensor(3, 4), tensor(4), free="3 4")],
        "dot.default": lambda: [sample(tensor(4), tensor(4, seed=1), free="4")],
    },
)
def mv(step: Step) -> None:
    """m k, k → m."""
    matmul(step)


@axis_rule(
    "outer.default",
    "ger.default",
    family=FAMILY,
    samples=lambda: [sample(tensor(3), tensor(4), free="3 4")],
)
def outer(step: Step) -> None:
    """m, n → m n."""
    a, b = step.args
    _summed(step, [(a, "m"), (b, "n")], "mn", None)


@axis_rule(
    "inner.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(5, 4), free="2 3 4 5"),
        sample(tensor(4), tensor(5, 4), free="4 5"),
        sample(tensor(4), tensor(4, seed=1), free="4"),
        sample(tensor(2, 3), tensor(), free="2 3"),
    ],
)
def inner(step: Step) -> None:
    """… k, ∗ k → … ∗."""
    a, b = step.args
    left, right = ascii_letters[: a.ndim - 1], ascii_letters[26 : 26 + b.ndim - 1]
    if not a.ndim or not b.ndim:  # a number times a tensor
        left, right = ascii_letters[: a.ndim], ascii_letters[26 : 26 + b.ndim]
        _summed(step, [(a, left), (b, right)], left + right, None)
        return
    _summed(step, [(a, left + "z"), (b, right + "z")], left + right, None)


@axis_rule(
    "tensordot.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(4, 5), [2], [0], free="2 3 4 5"),
        sample(tensor(2, 3, 4), tensor(4, 5, 3), [-1, 1], [0, 2], free="2 3 4 5"),
        sample(tensor(2, 3), tensor(4), [], [], free="2 3 4"),
        sample(tensor(2, 3), tensor(5, 3), [1], [1], free="2 3 5"),
    ],
)
def tensordot(step: Step) -> None:
    """Some dimensions of both are summed over, the others stand side by side."""
    a, b, a_dims, b_dims = step.args
    left, right = list(ascii_letters[: a.ndim]), list(ascii_letters[26 : 26 + b.ndim])
    for own, other in zip(a_dims, b_dims, strict=True):
        right[other] = left[own]
    result = "".join(x for x in (*left, *right) if not (x in left and x in right))
    _summed(step, [(a, "".join(left)), (b, "".join(right))], result, None)


@axis_rule(
    "linalg_vecdot.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(3, 4), free="2 3 4"),
        sample(tensor(2, 3, 4), tensor(2, 1, 4), dim=0, free="2 3 4"),
    ],
)
def vecdot(step: Step) -> None:
    """… k, … k → …, the rest broadcast."""
    a, b, dim = step.args
    letters = ascii_letters[: max(a.ndim, b.ndim)]
    own = letters[len(letters) - a.ndim :][dim] if dim < 0 else letters[dim]
    operands = [(value, letters[len(letters) - value.ndim :]) for value in (a, b)]
    _summed(step, operands, letters.replace(own, ""), None)


@axis_rule(
    *("addmv.default", "addr.default", "addbmm.default"),
    family=FAMILY,
    samples={
        "addmv.default": lambda: [sample(tensor(3), tensor(3, 4), tensor(4), free="3 4")],
        "addr.default": lambda: [
            sample(tensor(3, 4), tensor(3), tensor(4), beta=2, free="3 4"),
            sample(tensor(4), tensor(3), tensor(4), free="3 4"),
        ],
        "addbmm.default": lambda: [
            sample(tensor(3, 5), tensor(2, 3, 4), tensor(2, 4, 5), alpha=2, free="2 3 4 5")
        ],
    },
)
def add_product(step: Step) -> None:
    """bias + m k, k → m; bias + m, n → m n; bias + Σ b m k, b k n → m n."""
    bias, a, b, *_ = step.args
    letters = {"addmv": ("mk", "k", "m"), "addr": ("m", "n", "mn"), "addbmm": ("bmk", "bkn", "mn")}
    left, right, result = letters[step.call.name.partition(".")[0]]
    _summed(step, [(a, left), (b, right)], result, bias)


@axis_rule(
    "addmm.default",
    "baddbmm.default",
    family=FAMILY,
    samples={
        "addmm.default": lambda: [
            sample(tensor(5), tensor(3, 4), tensor(4, 5), free="3 4 5"),
            sample(tensor(3, 1), tensor(3, 4), tensor(4, 5), alpha=2, free="3 4 5"),
            sample(tensor(3, 5), tensor(3, 4), tensor(4, 5), beta=2, free="3 4 5"),
        ],
        "baddbmm.default": lambda: [
            sample(tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5), free="2 3 4 5"),
            sample(tensor(1, 5), tensor(2, 3, 4), tensor(2, 4, 5), beta=2, free="2 3 4 5"),
        ],
    },
)
def addmm(step: Step) -> None:
    """bias + (b) m k, (b) k n → (b) m n."""
    bias, a, b, *_ = step.args
    batch = "b" * (a.ndim - 2)
    _summed(step, [(a, batch + "mk"), (b, batch + "kn")], batch + "mn", bias)
    step.kind(step.axes(b)[-1], "hidden")


@axis_rule(
    "_grouped_mm.default",
    family=FAMILY,
    # Its kernel takes multiples of 16 bytes alone, so a sample could not be cut anywhere.
    proved_by="tests/structure/test_rules.py: test_rows_times_the_matrices_of_their_experts",
    grid_bytes=16,
)
def grouped_mm(step: Step) -> None:
    """t k, e k n → t n: each row is multiplied by the matrix of its expert; k and n in multiples of 16 bytes."""
    a, b, offsets, bias, *_ = step.args
    if a.ndim != 2 or b.ndim != 3 or bias is not None:
        raise Declined("only rows times stacked matrices are known")
    step.pin(step.axes(b)[0], "the expert of each row is chosen by the router")
    step.pin(step.axes(a)[0], "which rows are an expert's is a matter of their places", quiet=True)
    if offsets is not None:
        step.pin(step.axes(offsets)[0], "offsets of experts")
    operands = [(a, "tk"), (b, "?kn")]
    rows, inner, columns = step.axes(a)[0], step.axes(b)[1], step.axes(b)[2]
    step.equal(step.axes(a)[1], inner)
    step.on_grid(inner, a)
    step.on_grid(columns, b)
    step.contract(inner, (a, 1), (b, 1))
    step.role(b, 1, "consumer")
    step.role(b, 2, "producer")
    step.kind(columns, "hidden")
    step.cost(rows, inner, columns)
    step.out([rows, columns], product_flow(operands, "tn"))


@axis_rule(
    "einsum.default",
    family=FAMILY,
    samples=lambda: [
        sample("bhqd,bhkd->bhqk", [tensor(2, 3, 4, 5), tensor(2, 3, 6, 5)], free="2 3 4 5 6"),
        sample("...i,oi", [tensor(2, 3, 4), tensor(5, 4)], free="2 3 4 5"),
        sample("...i,...i->...", [tensor(2, 3, 4), tensor(3, 4)], free="2 3 4"),
        sample("ab,bc,cd->ad", [tensor(2, 3), tensor(3, 4), tensor(4, 5)], free="2 3 4 5"),
        sample(
            "ab,bc,cd->ad",
            [tensor(2, 3), tensor(3, 4), tensor(4, 5)],
            path=[1, 2, 0, 1],
            free="2 3 4 5",
        ),
        sample("ki,kj->j", [tensor(3, 2), tensor(3, 4)], free="2 3 4"),
        sample("bi, bj -> bij", [tensor(2, 3), tensor(2, 4)], free="2 3 4"),
        sample("ij->ji", [tensor(2, 3)], free="2 3"),
        sample("ij->i", [tensor(2, 3)], free="2 3"),
        sample("ii->i", [tensor(3, 3)], free="refused"),
    ],
)
def einsum(step: Step) -> None:
    """As its letters say; of more than two operands, two at a time."""
    equation, values, path = step.args
    inputs, result = _letters(equation.replace(" ", ""), [value.ndim for value in values])
    if any(len(set(letters)) < len(letters) for letters in [*inputs, result]):
        raise Declined("a letter stands twice in one operand: a diagonal")
    operands = list(zip(values, inputs, strict=True))
    _summed(step, operands, result, None)
    sizes = {
        letter: step.axes(value)[dim]
        for value, letters in operands
        for dim, letter in enumerate(letters)
        if value.shape[dim] != 1
    }
    products = _pairwise(inputs, result, path)
    step.facts.costs = [tuple(sizes[x] for x in pair if x in sizes) for pair in products]


def _pairwise(inputs: list[str], result: str, path: list[int] | None) -> list[list[str]]:
    """The letters of each product of two, in torch's order; a letter that only one of them has is summed before."""
    left, products = list(inputs), list[list[str]]()
    pairs = iter(path or ())
    while len(left) > 1:
        i, j = sorted((next(pairs), next(pairs))) if path else (0, 1)
        b, a = left.pop(j), left.pop(i)
        needed = set(result).union(*left)
        products.append([x for x in sorted({*a, *b}) if x in needed or (x in a and x in b)])
        left.insert(len(left) if path else 0, "".join(x for x in products[-1] if x in needed))
    return products


def _letters(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The operands' and the result's letters, with capital letters for what `...` stands for."""
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    unused = (x for x in ascii_letters[::-1] if x not in equation)
    longest = max(
        (n - len(x.replace("...", "")) for x, n in zip(operands, ndims, strict=True)), default=0
    )
    dots = "".join(next(unused) for _ in range(longest)) if "..." in equation else ""
    filled = [
        x.replace("...", dots[len(dots) - (n - len(x.replace("...", ""))) :])
        for x, n in zip(operands, ndims, strict=True)
    ]
    if not arrow:
        letters = "".join(sorted(operands))
        right = "..." * ("..." in equation) + "".join(
            x for x in sorted(set(letters) - {"."}) if letters.count(x) == 1
        )
    return filled, right.replace("...", dots)


@axis_rule(
    "bilinear.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3), tensor(2, 4), tensor(5, 3, 4), tensor(5), free="2 3 4 5"),
        sample(tensor(2, 6, 3), tensor(2, 6, 4), tensor(5, 3, 4), None, free="2 6 3 4 5"),
    ],
)
def bilinear(step: Step) -> None:
    """… i, … j, o i j, o → … o."""
    x, y, weight, bias = step.args
    letters = (c for c in ascii_letters if c not in "oij")
    batch = "".join(c for c, _ in zip(letters, range(x.ndim - 1), strict=False))
    operands = [(x, batch + "i"), (y, batch + "j"), (weight, "oij")]
    _summed(step, operands, batch + "o", bias)
