"""Axis rules of elementwise operations: operands are broadcast, axes that meet are equal.

What differs between them is where the result is zero: a sum where all terms are, a product where any factor is, f(x)
where x is if f(0) = 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from apoptosis.structure.flows import AllOf, AnyOf, Divided, Flow, Nowhere, Pole, Through, aligned
from apoptosis.structure.letters import broadcast
from apoptosis.structure.program import Value, values_in
from apoptosis.structure.rules import Rule, Step, axis_rule, register
from apoptosis.structure.samples import Sample, integers, sample, tensor

FAMILY = "elementwise"

UNARY_KEEPING_ZERO = """
    abs absolute asin arcsin asinh arcsinh atan arctan atanh arctanh ceil erf erfinv expm1 floor fix frac gelu
    hardshrink hardswish leaky_relu log1p mish neg negative _prelu_kernel relu relu6 round rrelu selu elu celu sgn sign
    silu sin sinh softshrink sqrt square tan tanh trunc nan_to_num rad2deg deg2rad real imag signbit isnan isinf
    conj_physical special_entr special_i1 isposinf isneginf
"""
UNARY_LOSING_ZERO = """
    acos arccos bitwise_not cos cosh exp exp2 hardsigmoid isfinite log_sigmoid logical_not
    sigmoid sinc softplus erfc special_expit angle i0 isreal special_ndtr special_log_ndtr special_erfcx
"""
UNARY_WITH_POLE = "acosh arccosh digamma lgamma log log10 log2 logit reciprocal rsqrt"
SUMS = """
    add sub subtract maximum minimum fmax fmin logical_or bitwise_or logical_xor bitwise_xor __or__ __xor__ lerp hypot
    max.other min.other complex
"""
PRODUCTS = "mul multiply logical_and bitwise_and __and__"
QUOTIENTS = "div divide true_divide floor_divide remainder fmod"
SCALED_FIRST = "ldexp xlogy special_xlogy special_xlog1py polar"
COMPARISONS = """
    eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose rsub pow bernoulli where masked_fill clamp
    clamp_min clamp_max clip addcmul addcdiv copysign nextafter float_power atan2 hardtanh threshold logaddexp
    logaddexp2 heaviside
"""


def _all_terms(values: list[Value], ndim: int, step: Step) -> Flow:
    if any(isinstance(term, (int, float)) and term for term in step.args[:2]):
        return Nowhere()  # x + 1
    return AllOf(tuple(aligned(value, ndim) for value in values))


def _any_factor(values: list[Value], ndim: int, _step: Step) -> Flow:
    return AnyOf(tuple(aligned(value, ndim) for value in values))


def _first(values: list[Value], ndim: int, step: Step) -> Flow:
    return aligned(values[0], ndim) if values[:1] == [step.args[0]] else Nowhere()


def _numerator(values: list[Value], ndim: int, step: Step) -> Flow:
    numerator = _first(values, ndim, step)
    return Divided(numerator, aligned(values[1], ndim)) if len(values) > 1 else numerator


def _pole(values: list[Value], ndim: int, _step: Step) -> Flow:
    return Pole(aligned(values[0], ndim))


def _nowhere(_values: list[Value], _ndim: int, _step: Step) -> Flow:
    return Nowhere()


def _special(values: list[Value], ndim: int, step: Step) -> Flow:
    """Operations whose zeros depend on their numbers."""
    name, args = step.call.name.split(".")[0].rstrip("_"), step.args
    if name == "pow" and args[0] is values[0] and isinstance(args[1], (int, float)) and args[1]:
        return aligned(values[0], ndim) if args[1] > 0 else Pole(aligned(values[0], ndim))
    if name in ("clamp", "clip") and all(not isinstance(a, Value) for a in args[1:]):
        low, high = (0 if bound is None else bound for bound in args[1:3])
        return aligned(values[0], ndim) if low <= 0 <= high else Nowhere()
    if name in ("clamp_min", "clamp_max") and not isinstance(args[1], Value):
        inside = args[1] <= 0 if name == "clamp_min" else args[1] >= 0
        return aligned(values[0], ndim) if inside else Nowhere()
    if name == "hardtanh":
        low, high = args[1:]
        return aligned(values[0], ndim) if low <= 0 <= high else Nowhere()
    if name == "threshold":
        limit, instead = args[1:]
        return aligned(values[0], ndim) if limit < 0 or instead == 0 else Nowhere()
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


INTEGERS = ("bitwise", "__")
ONE_SHAPE = ("masked_fill", "bernoulli", "_prelu_kernel")  # the result has the first operand's
INSIDE_ONE = {
    *(
        "asin",
        "arcsin",
        "acos",
        "arccos",
        "atanh",
        "arctanh",
        "erfinv",
        "log",
        "log10",
        "log2",
        "log1p",
    ),
    *(
        "logit",
        "sqrt",
        "rsqrt",
        "digamma",
        "lgamma",
        "pow",
        "float_power",
        "xlogy",
        "special_xlogy",
    ),
    *("special_xlog1py", "logaddexp", "logaddexp2"),
}
"""Operations that are undefined for some numbers: theirs lie between 0 and 1."""


def _operand(name: str, place: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor that suits the operation."""
    x = tensor(*shape, seed=place)
    if (name, place) in (("where", 0), ("masked_fill", 1)):
        return x > 0
    if name.startswith(INTEGERS):
        return integers(*shape, below=8) + place
    if name == "bernoulli":
        return (x > 0).double()  # certain, so that two runs agree
    if name in ("real", "imag"):
        return torch.complex(x, tensor(*shape, seed=1))
    if name in ("acosh", "arccosh"):
        return 1 + x.abs()
    return 0.1 + 0.8 * x.sigmoid() if name in INSIDE_ONE else x


def _samples(overload: torch._ops.OpOverload) -> Callable[[], list[Sample]]:
    """Broadcast operands for as many tensors as the operation takes."""

    def make() -> list[Sample]:
        name = overload._schema.name.removeprefix("aten::")
        if name in SPECIAL_SAMPLES and overload._overloadname in ("default", "Tensor_Scalar"):
            return SPECIAL_SAMPLES[name]()
        kinds = [
            str(argument.type)
            for argument in overload._schema.arguments
            if not argument.has_default_value() and not argument.kwarg_only
        ]
        if name in ("clamp", "clip"):  # of which either bound may be absent, not both
            kinds = ["Tensor"] * 3
        shapes = [(2, 3, 4), (3, 1), (4,)]
        found = [_sample(name, overload, kinds, shapes)]
        if kinds.count("Tensor") > 1 and name not in ONE_SHAPE:
            found.append(_sample(name, overload, kinds, shapes[1:] + shapes[:1]))
        if "number" in kinds and name not in QUOTIENTS.split():
            found.append(_sample(name, overload, kinds, shapes, number=0))
        return found

    return make


def _sample(
    name: str,
    overload: torch._ops.OpOverload,
    kinds: list[str],
    shapes: list[tuple[int, ...]],
    number: int = 2,
) -> Sample:
    args: list[object] = []
    for place, kind in enumerate(kinds):
        if kind == "Tensor" and (name, overload._overloadname, place) == (
            "masked_fill",
            "Tensor",
            2,
        ):
            args.append(tensor())
        elif kind == "Tensor":
            taken = [a for a in args if isinstance(a, Tensor)]
            args.append(_operand(name, place, shapes[len(taken)]))
        else:
            args.append(number if kind == "number" else 0.5)
    used = [a.shape for a in args if isinstance(a, Tensor)]
    free = _free_sizes(name, used)
    if overload._overloadname.endswith("_mode"):
        return sample(*args, rounding_mode="floor", free=free)
    return (
        sample(*args, decimals=1, free=free)
        if overload._overloadname == "decimals"
        else sample(*args, free=free)
    )


def _free_sizes(name: str, shapes: list[torch.Size]) -> str:
    """Sizes of the result; inexact along what divides, where zeros have no finite image."""
    result = torch.broadcast_shapes(*shapes)
    by = torch.Size([1] * len(result))
    if name in UNARY_WITH_POLE.split():
        by = shapes[0]
    elif name in QUOTIENTS.split() and len(shapes) > 1:
        by = torch.Size([*[1] * (len(result) - len(shapes[1])), *shapes[1]])
    return " ".join(f"{n}~" if d > 1 else str(n) for n, d in zip(result, by, strict=True) if n > 1)


def _with(*arguments: tuple[object, ...]) -> Callable[[], list[Sample]]:
    return lambda: [sample(tensor(2, 3), *more, free="2 3") for more in arguments]


SPECIAL_SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    "clamp": _with((-0.5, 0.5), (0.2,), (None, -0.2), (0, None)),
    "clip": _with((-0.5, 0.5), (0.2,), (None, -0.2)),
    "clamp_min": _with((-0.5,), (0.5,), (0,)),
    "clamp_max": _with((-0.5,), (0.5,), (0,)),
    "hardtanh": _with((), (0.2, 0.5), (-0.5, -0.2)),
    "threshold": _with((0.1, 0.0), (0.1, 20.0), (-0.1, 20.0)),
    "pow": lambda: [
        *_with((2,), (0,), (3,))(),
        sample(tensor(2, 3), -1, free="2~ 3~"),
    ],
    "nan_to_num": _with((), (1.0,)),
    "elu": _with((), (0.5, 2.0, 0.5)),
    "gelu": lambda: [
        sample(tensor(2, 3), free="2 3"),
        sample(tensor(2, 3), approximate="tanh", free="2 3"),
    ],
}
"""Operations whose zeros depend on their numbers."""


def _register_all(names: str, flow: Callable[[list[Value], int, Step], Flow], zeros: str) -> None:
    for entry in names.split():
        name, _, only = entry.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:  # of a later version of torch
            continue
        for overload_name in [only] if only else packet.overloads():
            overload = getattr(packet, overload_name)
            if _is_elementwise(overload):
                says = f"Operands are broadcast, axes that meet are equal; {zeros}."
                full = f"{name}.{overload_name}"
                register(Rule(full, FAMILY, says, _pointwise(flow), _samples(overload)))


_register_all(UNARY_KEEPING_ZERO, _first, "zero where x is")
_register_all(UNARY_LOSING_ZERO, _nowhere, "zero nowhere, as f(0) ≠ 0")
_register_all(UNARY_WITH_POLE, _pole, "zero nowhere, and infinite at 0")
_register_all(SUMS, _all_terms, "zero where all terms are")
_register_all(PRODUCTS, _any_factor, "zero where any factor is")
_register_all(QUOTIENTS, _numerator, "zero where the numerator is, and not the denominator")
_register_all(SCALED_FIRST, _first, "zero where the first operand is")
_register_all(COMPARISONS, _special, "where it is zero depends on its numbers, if it is known")


@axis_rule(
    "prelu.default",
    family=FAMILY,
    samples=lambda: [
        sample(tensor(2, 3, 4), tensor(3), free="2 3 4"),
        sample(tensor(2, 3, 3), tensor(3), free="2 3 3"),
        sample(tensor(2, 3, 4), tensor(1), free="2 3 4"),
        sample(tensor(3), tensor(1), free="3"),
    ],
)
def prelu(step: Step) -> None:
    """A slope per channel, or one for all."""
    x, slope = step.args
    if slope.ndim and slope.shape[0] != 1:
        step.equal(step.axes(x)[1], step.axes(slope)[0])
        step.role(slope, 0, "carrier")
    step.same(x)


@axis_rule(
    "view_as_real.default",
    family=FAMILY,
    samples=lambda: [sample(torch.complex(tensor(3, 4), tensor(3, 4, seed=1)), free="3 4")],
)
def view_as_real(step: Step) -> None:
    """A new last axis: real and imaginary part."""
    x = step.args[0]
    dims = (*range(x.ndim), None)
    step.out([*step.axes(x), *step.fixed([2], "real and imaginary part")], Through(x, dims))


@axis_rule(
    "view_as_complex.default",
    family=FAMILY,
    samples=lambda: [sample(tensor(3, 4, 2), free="3 4")],
)
def view_as_complex(step: Step) -> None:
    """The last axis becomes real and imaginary part."""
    x = step.args[0]
    step.pin(step.axes(x)[-1], "real and imaginary part", quiet=True)
    step.out(step.axes(x)[:-1], Through(x, tuple(range(x.ndim - 1))))
