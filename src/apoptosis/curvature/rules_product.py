"""Products of two things that depend on θ, and divisions.

(x·y)' = x'·y + x·y' for every bilinear operation. These are the operations whose second derivative `connectivity`
keeps: d(x'·y)/dy. Which of the paper's terms it is depends on who is a weight (`Switches.product`). Composed of
torch's own operations, so value and tangent use torch's own kernels and derivatives; one product of activations takes
3 products forward and 6 backward against 1 and 2 without tangent, and that is the least there is.

Divisions, powers and a tensor times itself are frozen in `connectivity`: they are not products of two different things.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.duals import Dual, add_tangents, lift
from apoptosis.curvature.rules import (
    Declined,
    Rule,
    Sample,
    inputs,
    keep,
    register,
    rename,
    sample,
    tangent_rule,
)
from apoptosis.curvature.rules_linear import add, apply_linear, sub
from apoptosis.curvature.rules_pointwise import pointwise
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

Bilinear = Callable[[Any, Any], Tensor]


def bilinear(kept: Switches, f: Bilinear, x: Any, y: Any) -> Dual:
    """f(x, y)' = f(x', y) + f(x, y')."""
    x, y = lift(x), lift(y)
    left = right = None
    squared = x.value is y.value
    if x.tangent is not None:
        flows = kept.curved if squared else kept.product(of_weight=x.weight, by_weight=y.weight)
        left = f(x.tangent, _keep(y.value, flows))
    if y.tangent is not None:
        flows = kept.curved if squared else kept.product(of_weight=y.weight, by_weight=x.weight)
        right = f(_keep(x.value, flows), y.tangent)
    return Dual(f(x.value, y.value), add_tangents(left, right))


def _keep(value: Any, flows: bool) -> Any:  # noqa: FBT001
    return keep(value, flows) if isinstance(value, Tensor) else value


@tangent_rule(
    "mul",
    family="product",
    samples=lambda: [sample(*inputs((2, 3), (3,))), sample(inputs((2, 3))[0], 1.5)],
)
def mul(kept: Switches, x: Any, other: Any) -> Dual:
    """(x·y)' = x'·y + x·y'."""
    return bilinear(kept, torch.mul, x, other)


@tangent_rule(
    "div",
    family="product",
    samples=lambda: [
        sample(inputs((2, 3))[0], inputs((3,), positive=True)[0]),
        sample(inputs((2, 3))[0], 1.5),
        sample(torch.ones(3).double(), inputs((3,), positive=True)[0]),
    ],
)
def div(kept: Switches, x: Any, other: Any, *, rounding_mode: str | None = None) -> Dual:
    """(x/y)' = (x' − (x/y)·y')/y; frozen in `connectivity`."""
    x, y = lift(x), lift(other)
    if rounding_mode is not None:
        return Dual(torch.div(x.value, y.value, rounding_mode=rounding_mode).detach())
    value = x.value / y.value
    divisor = _keep(y.value, kept.curved)
    left = None if x.tangent is None else x.tangent / divisor
    if y.tangent is None:
        return Dual(value, left)
    right = -keep(value, kept.curved) * y.tangent / divisor
    return Dual(value, right if left is None else left + right)


@tangent_rule(
    "einsum",
    family="product",
    samples=lambda: [
        sample("bij,bjk->bik", *inputs((2, 3, 4), (2, 4, 2))),
        sample("ij,j,ik->k", *inputs((2, 3), (3,), (2, 4))),
        sample("bii->b", inputs((2, 3, 3))[0]),
    ],
)
def einsum(kept: Switches, equation: str, *operands: Any, path: Any = None) -> Dual:  # noqa: ARG001
    """The sum over operands of the same contraction with that operand's tangent."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    duals = [lift(x) for x in operands]
    terms: list[Tensor] = []
    for i, x in enumerate(duals):
        if x.tangent is None:
            continue
        factors = [_keep(y.value, _flows(kept, x, y)) for y in duals]
        factors[i] = x.tangent
        terms.append(torch.einsum(equation, *factors))
    return Dual(torch.einsum(equation, *(x.value for x in duals)), add_tangents(*terms))


def _flows(kept: Switches, x: Dual, y: Dual) -> bool:
    if x.value is y.value:
        return kept.curved
    return kept.product(of_weight=x.weight, by_weight=y.weight)


def _scaled(x: Dual, factor: float) -> Dual:
    if factor == 1:
        return x
    return Dual(x.value * factor, None if x.tangent is None else x.tangent * factor)


def _add_product(f: Bilinear) -> Callable[..., Dual]:
    def rule(
        kept: Switches, x: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1
    ) -> Dual:
        product = _scaled(bilinear(kept, f, left, right), alpha)
        return product if beta == 0 else add(kept, _scaled(lift(x), beta), product)

    return rule


@tangent_rule(
    "addcmul",
    family="product",
    samples=lambda: [sample(*inputs((2, 3), (2, 3), (3,)), value=0.5)],
)
def addcmul(kept: Switches, x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Dual:
    """x + a·y·z."""
    return add(kept, x, _scaled(mul(kept, tensor1, tensor2), value))


@tangent_rule(
    "addcdiv",
    family="product",
    samples=lambda: [sample(*inputs((2, 3), (2, 3)), inputs((3,), positive=True)[0], value=0.5)],
)
def addcdiv(kept: Switches, x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Dual:
    """x + a·y/z."""
    return add(kept, x, _scaled(div(kept, tensor1, tensor2), value))


@tangent_rule(
    "lerp",
    family="product",
    samples=lambda: [
        sample(*inputs((2, 3), (2, 3)), 0.3),
        sample(*inputs((2, 3), (2, 3), (2, 3))),
    ],
)
def lerp(kept: Switches, x: Any, end: Any, weight: Any) -> Dual:
    """x + w·(y − x)."""
    return add(kept, x, mul(kept, sub(kept, end, x), weight))


@tangent_rule(
    "glu",
    family="product",
    samples=lambda: [sample(inputs((2, 4))[0]), sample(inputs((4, 3))[0], 0)],
)
def glu(kept: Switches, x: Dual, dim: int = -1) -> Dual:
    """a·σ(b) for the halves a, b of x: the product counts, the sigmoid is an activation."""
    a, b = apply_linear(kept, torch.chunk, (x, 2, dim), {})
    return mul(kept, a, pointwise(kept, "sigmoid", b))


@tangent_rule(
    "tensordot",
    family="product",
    samples=lambda: [sample(*inputs((2, 3, 4), (4, 3, 5)), [2, 1], [0, 1])],
)
def tensordot(kept: Switches, x: Any, other: Any, dims_self: Any, dims_other: Any) -> Dual:
    """A contraction over pairs of dimensions."""

    def contract(left: Tensor, right: Tensor) -> Tensor:
        dims = (dims_self, dims_other)
        return torch.tensordot(left, right, dims)  # pyright: ignore[reportArgumentType]

    return bilinear(kept, contract, x, other)


@tangent_rule(
    "linalg_multi_dot",
    family="product",
    samples=lambda: [sample(inputs((2, 3), (3, 4), (4, 2)))],
)
def multi_dot(kept: Switches, x: Any) -> Dual:
    """A chain of matrix products, from the left."""
    total = lift(x[0])
    for factor in x[1:]:
        total = bilinear(kept, torch.matmul, total, factor)
    return total


@tangent_rule(
    "cross",
    family="product",
    samples=lambda: [sample(*inputs((2, 3), (2, 3)), 1)],
)
def cross(kept: Switches, x: Any, other: Any, dim: int = -1) -> Dual:
    """The cross product of vectors."""
    return bilinear(kept, lambda a, b: torch.linalg.cross(a, b, dim=dim), x, other)


@tangent_rule(
    "prelu",
    family="product",
    samples=lambda: [sample(*inputs((2, 3, 2), (3,))), sample(*inputs((2, 3), (1,)))],
)
def prelu(kept: Switches, x: Any, weight: Any) -> Dual:
    """relu(x) + w·min(x, 0)."""
    x, weight = lift(x), lift(weight)
    negative = x.value < 0
    shape = (1, -1, *(1,) * (x.value.dim() - 2)) if weight.value.numel() > 1 else (1,)
    shaped = Dual(
        weight.value.view(shape),
        None if weight.tangent is None else weight.tangent.view(shape),
        weight.weight,
    )
    below = _masked(x, negative)
    return add(kept, _masked(x, ~negative), mul(kept, shaped, below))


def _masked(x: Dual, mask: Tensor) -> Dual:
    return Dual(x.value * mask, None if x.tangent is None else x.tangent * mask, x.weight)


@tangent_rule(
    "bilinear",
    family="product",
    samples=lambda: [sample(*inputs((2, 3), (2, 4), (5, 3, 4), (5,)))],
)
def bilinear_layer(kept: Switches, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Dual:
    """x₁ᵀ W x₂ + b."""
    product = einsum(kept, "...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else add(kept, product, bias)


def _pairs(*shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[], list[Sample]]:
    return lambda: [sample(*inputs(*pair)) for pair in shapes]


_FACTORS = frozenset({"other", "mat2", "vec", "vec2", "tensor"})
_FACTOR_NAMES = {
    **dict.fromkeys(("mat1", "batch1", "vec1", "mat"), "left"),
    **dict.fromkeys(("mat2", "batch2", "vec2", "vec"), "right"),
}


def _register_bilinear(name: str, f: Bilinear, samples: Callable[[], list[Sample]]) -> None:
    def apply(
        kept: Switches,
        _func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Dual:
        named = rename(kwargs)
        first = [named.pop("x")] if "x" in named else []
        if len(args) + len(first) + len(named) != 2 or not _FACTORS.issuperset(named):
            raise Declined
        return bilinear(kept, f, *first, *args, *named.values())

    register(Rule(name, "product", "f(x, y)' = f(x', y) + f(x, y')", apply, samples))


def _register_add_product(name: str, f: Bilinear, samples: Callable[[], list[Sample]]) -> None:
    rule = _add_product(f)

    def apply(
        kept: Switches,
        _func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Dual:
        named = {_FACTOR_NAMES.get(key, key): value for key, value in rename(kwargs).items()}
        return rule(kept, *args, **named)

    register(Rule(name, "product", "(βx + αf(y, z))' by the product rule", apply, samples))


_register_bilinear("matmul", torch.matmul, _pairs(((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 2))))
_register_bilinear("mm", torch.mm, _pairs(((2, 3), (3, 4))))
_register_bilinear("bmm", torch.bmm, _pairs(((2, 2, 3), (2, 3, 4))))
_register_bilinear("mv", torch.mv, _pairs(((2, 3), (3,))))
_register_bilinear("dot", torch.dot, _pairs(((3,), (3,))))
_register_bilinear("vdot", torch.vdot, _pairs(((3,), (3,))))
_register_bilinear("inner", torch.inner, _pairs(((2, 3), (4, 3))))
_register_bilinear("outer", torch.outer, _pairs(((2,), (3,))))
_register_bilinear("kron", torch.kron, _pairs(((2, 2), (1, 3))))
_register_bilinear("linalg_cross", torch.linalg.cross, _pairs(((2, 3), (2, 3))))
_register_bilinear("linalg_vecdot", torch.linalg.vecdot, _pairs(((2, 3), (2, 3))))

_register_add_product(
    "addmm", torch.mm, lambda: [sample(*inputs((4,), (2, 3), (3, 4)), beta=0.5, alpha=2)]
)
_register_add_product(
    "baddbmm", torch.bmm, lambda: [sample(*inputs((2, 2, 4), (2, 2, 3), (2, 3, 4)), alpha=2)]
)
_register_add_product(
    "addbmm",
    lambda a, b: torch.bmm(a, b).sum(0),
    lambda: [sample(*inputs((2, 4), (2, 2, 3), (2, 3, 4)), beta=2)],
)
_register_add_product("addmv", torch.mv, lambda: [sample(*inputs((2,), (2, 3), (3,)))])
_register_add_product("addr", torch.outer, lambda: [sample(*inputs((2, 3), (2,), (3,)))])
