"""Axis rules of elementwise operations: operands are broadcast, axes that meet are equal.

What differs between them is where the result is zero: a sum where all terms are, a product where any factor is, f(x)
where x is if f(0) = 0.
"""

from collections.abc import Callable

import torch

from apoptosis.structure.program import Value, values_in
from apoptosis.structure.rules import (
    AllOf,
    AnyOf,
    Flow,
    Nowhere,
    Rule,
    Sample,
    Step,
    aligned,
    broadcast,
    register,
    sample,
    tensor,
)

FAMILY = "elementwise"

UNARY_KEEPING_ZERO = """
    abs asin asinh atan atanh ceil erf erfinv expm1 floor fix frac gelu hardshrink hardswish leaky_relu log1p mish neg
    negative prelu relu relu6 round rrelu selu elu celu sgn sign silu sin sinh softshrink softsign sqrt square tan tanh
    tanhshrink trunc hardtanh nan_to_num rad2deg deg2rad real view_as_real imag signbit isnan isinf threshold
"""
UNARY_LOSING_ZERO = """
    acos arccos bitwise_not cos cosh digamma exp exp2 hardsigmoid isfinite lgamma log log10 log2 log_sigmoid logical_not
    logit reciprocal rsqrt sigmoid sinc softplus erfc acosh
"""
SUMS = "add sub subtract maximum minimum fmax fmin logical_or bitwise_or logical_xor __or__ lerp hypot max.other min.other"
PRODUCTS = "mul multiply logical_and bitwise_and __and__"
QUOTIENTS = "div divide true_divide floor_divide remainder fmod ldexp xlogy special_xlog1py atan2"
COMPARISONS = """
    eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose rsub pow bernoulli where masked_fill clamp
    clamp_min clamp_max clip addcmul addcdiv copysign nextafter float_power __xor__
"""


def _all_terms(values: list[Value], ndim: int, step: Step) -> Flow:
    if len(values) < 2 and any(isinstance(arg, (int, float)) and arg for arg in step.args[1:2]):
        return Nowhere()  # x + 1
    return AllOf(tuple(aligned(value, ndim) for value in values))


def _any_factor(values: list[Value], ndim: int, _step: Step) -> Flow:
    return AnyOf(tuple(aligned(value, ndim) for value in values))


def _first(values: list[Value], ndim: int, step: Step) -> Flow:
    return aligned(values[0], ndim) if values[:1] == [step.args[0]] else Nowhere()


def _nowhere(_values: list[Value], _ndim: int, _step: Step) -> Flow:
    return Nowhere()


def _special(values: list[Value], ndim: int, step: Step) -> Flow:
    """Operations whose zeros depend on their numbers."""
    name, args = step.call.name.split(".")[0].rstrip("_"), step.args
    if name == "pow" and args[0] is values[0] and isinstance(args[1], (int, float)) and args[1] > 0:
        return aligned(values[0], ndim)
    if name in ("clamp", "clip") and all(not isinstance(a, Value) for a in args[1:]):
        low, high = (0 if bound is None else bound for bound in args[1:3])
        return aligned(values[0], ndim) if low <= 0 <= high else Nowhere()
    if name in ("clamp_min", "clamp_max") and not isinstance(args[1], Value):
        inside = args[1] <= 0 if name == "clamp_min" else args[1] >= 0
        return aligned(values[0], ndim) if inside else Nowhere()
    if name == "masked_fill" and args[2] == 0:
        return aligned(values[0], ndim)
    if name == "where":
        terms = [a for a in args[1:] if isinstance(a, Value)]
        numbers = [a for a in args[1:] if not isinstance(a, Value)]
        return Nowhere() if any(numbers) else AllOf(tuple(aligned(v, ndim) for v in terms))
    return Nowhere()


def _pointwise(flow: Callable[[list[Value], int, Step], Flow]) -> Callable[[Step], None]:
    def apply(step: Step) -> None:
        """Operands are broadcast; axes that meet are equal."""
        values = list(values_in(step.call.arguments))
        ndim = step.call.outputs[0].ndim
        for value in values:
            if value.fixed and any(not other.fixed for other in values):
                for dim in range(value.ndim):
                    step.role(value, dim, "carrier")
        axes = broadcast(step, *values)
        for _ in step.call.outputs:
            step.out(list(axes), flow(values, ndim, step))

    return apply


def _is_elementwise(overload: torch._ops.OpOverload) -> bool:
    """Takes a tensor and gives one; no variant that writes to `out` or works on Python lists and numbers."""
    schema = overload._schema
    takes = any(
        str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in schema.arguments
    )
    gives = [str(result.type) for result in schema.returns] == ["Tensor"]
    names_dims = any(argument.name in ("dim", "dims") for argument in schema.arguments)
    return takes and gives and not names_dims and not any(a.is_out for a in schema.arguments)


def _samples(overload: torch._ops.OpOverload) -> Callable[[], list[Sample]]:
    """Broadcast operands for as many tensors as the operation takes."""

    def make() -> list[Sample]:
        shapes = [(2, 3, 4), (3, 1), (4,)]
        args: list[object] = []
        for argument in overload._schema.arguments:
            if argument.has_default_value() or argument.kwarg_only:
                break
            if str(argument.type) == "Tensor":
                args.append(tensor(*shapes[len([a for a in args if isinstance(a, torch.Tensor)])]))
            elif str(argument.type) == "number":
                args.append(2)
            else:
                return []
        name = overload._schema.name.removeprefix("aten::")
        if name == "where":
            args[0] = tensor(*shapes[0]) > 0
        elif name == "masked_fill":
            args[1] = tensor(*shapes[1]) > 0
        elif name.startswith(("bitwise", "__", "ldexp", "isin")):
            return []
        return [sample(*args)]

    return make


def _register_all(names: str, flow: Callable[[list[Value], int, Step], Flow]) -> None:
    for entry in names.split():
        name, _, only = entry.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:  # of a later version of torch
            continue
        for overload_name in [only] if only else packet.overloads():
            overload = getattr(packet, overload_name)
            if _is_elementwise(overload):
                rule = _pointwise(flow)
                register(
                    Rule(
                        f"{name}.{overload_name}",
                        FAMILY,
                        rule.__doc__ or "",
                        rule,
                        _samples(overload),
                    )
                )


_register_all(UNARY_KEEPING_ZERO, _first)
_register_all(UNARY_LOSING_ZERO, _nowhere)
_register_all(SUMS, _all_terms)
_register_all(PRODUCTS, _any_factor)
_register_all(QUOTIENTS, _first)
_register_all(COMPARISONS, _special)
