"""Axis rules of products: linear, matmul, einsum, convolutions, attention. Most are letters; see `rules.product`."""

from functools import partial
from math import sqrt
from string import ascii_letters
from typing import Any

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Expr, times
from apoptosis.structure.facts import ActivationProduct
from apoptosis.structure.flows import AllOf, AnyOf, Flow, Through, aligned
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
)
def grouped_mm(step: Step) -> None:
    """t k, e k n → t n: each row is multiplied by the matrix of its expert."""
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


def _attention_samples() -> list[Sample]:
    q, k, v = tensor(2, 4, 3, 6), tensor(2, 4, 5, 6), tensor(2, 4, 5, 7)
    few, heads = tensor(2, 2, 5, 6), tensor(2, 2, 5, 7)
    return [
        sample(q, k, v, free="2 4 3 6 7"),
        sample(q, k, v, tensor(4, 3, 5), free="2 4 3 6 7"),
        sample(q, k, v, tensor(2, 1, 1, 5) > 0.1, free="2 4 3 6 7"),
        sample(q, k, v, None, 0.0, True, free="2 4 6 7"),
        sample(q, few, heads, enable_gqa=True, free="2 2 2 3 6 7"),
        sample(q[0], k[0], v[0], scale=0.3, free="4 3 6 7"),
        sample(q[0, 0], k[0, 0], v[0, 0], free="3 6 7"),
    ]


@axis_rule("scaled_dot_product_attention.default", family=FAMILY, samples=_attention_samples)
def attention(step: Step) -> None:
    """… h q e, … h k e, … h k v → … h q v; with GQA the keys and values have h / r heads."""
    q, k, v, mask, _dropout, causal, scale, gqa = step.args
    batch = _attention_batch(step, q, k, v, gqa=gqa)
    (queries, e), (keys, f) = step.axes(q)[-2:], step.axes(k)[-2:]
    step.equal(e, f)
    step.equal(keys, step.axes(v)[-2])
    step.pin(keys, "softmax runs over the keys")
    if causal:
        step.pin(queries, "which keys a query sees depends on its place", quiet=True)
    if mask is not None:
        for expr, own in zip([*batch, queries, keys][-mask.ndim :], step.axes(mask), strict=True):
            if algebra.size_of(own) != 1:
                step.equal(expr, own)
    wide = step.axes(v)[-1]
    step.contract(e, (q, q.ndim - 1), (k, k.ndim - 1))
    if scale is None:
        step.facts.frozen["scale"] = 1 / sqrt(q.shape[-1])
    for last in (e, wide):
        step.cost(*batch, queries, keys, last)
    shared = tuple(batch[1:]) if len(batch) > 1 else tuple(batch[: q.ndim - 2])
    step.facts.product = ActivationProduct((q, k), (e,), shared, (keys,))
    step.kind(e, "qk_dim")
    step.kind(wide, "v_dim")
    for expr in shared:
        step.kind(expr, "head")
    lead = tuple(range(v.ndim - 2)) if v.ndim == q.ndim else tuple([None] * (q.ndim - 2))
    step.out([*batch, queries, wide], Through(v, (*lead, None, v.ndim - 1)))


def _attention_batch(step: Step, q: Value, k: Value, v: Value, *, gqa: bool) -> list[Expr]:
    """Batch and head axes of the result."""
    if not gqa or q.shape[-3] == k.shape[-3]:
        if not q.ndim == k.ndim == v.ndim:
            raise Declined("queries, keys and values differ in their number of dimensions")
        operands = [step.axes(x)[:-2] for x in (q, k, v)]
        result: list[Expr] = []
        for exprs in zip(*operands, strict=True):
            large = [expr for expr in exprs if algebra.size_of(expr) != 1] or [exprs[0]]
            for other in large[1:]:
                step.equal(large[0], other)
            result.append(algebra.resolve(large[0]))
        return result
    step.equal(step.axes(k)[-3], step.axes(v)[-3])
    repeat = step.fresh(q.shape[-3] // k.shape[-3], origin="repeat")
    step.equal(step.axes(q)[-3], times(step.axes(k)[-3], repeat))
    _equate_batch(step, q, k)
    _equate_batch(step, q, v)
    return [*step.axes(q)[:-3], algebra.resolve(step.axes(q)[-3])]


def _equate_batch(step: Step, q: Value, k: Value) -> None:
    """Equate the axes before the heads."""
    for a, b in zip(step.axes(q)[:-3], step.axes(k)[:-3], strict=True):
        step.equal(a, b)


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
