"""Activations: y = φ(x) entry by entry, ŷ = φ'(x)·x̂.

The slope φ'(x)·v is the operation's own backward kernel applied to v; the same kernel serves the tangent forward and
both adjoints backward. With A, B the adjoints of y, ŷ:

    adjoint of x̂ = φ'(x)·B          adjoint of x = φ'(x)·A + φ''(x)·x̂·B

The last term is curvature (`Switches.curved`); without it x̂ need not be remembered. A `bend` of None says φ'' = 0
almost everywhere: piecewise linear.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
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
from apoptosis.curvature.stacking import empty_stack
from apoptosis.curvature.switches import Switches

__all__ = ["pointwise"]

aten = torch.ops.aten
Function1 = Callable[..., Tensor]


@dataclass(frozen=True)
class Activation:
    """φ, its slope and its bend.

    Attributes:
        value: φ(x, *options).
        slope: φ'·v from `(v, saved, *options)`, saved being y where `from_output`, else x.
        bend: φ'' from `(saved, *options)`; None where it vanishes.
        options: names and defaults of what follows x in torch's signature.
        writes: value and slope again, writing their result: `(x, out)` and `(v, saved, out)`. What feeds layers has
            them, so that value and tangent come to lie side by side (`stacking`).
        positive: samples must be.
    """

    value: Function1
    slope: Function1
    bend: Function1 | None
    from_output: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    writes: tuple[Function1, Function1] | None = None
    positive: bool = False


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kept: Switches,
        activation: Activation,
        options: tuple[Any, ...],
        x: Tensor,
        tangent: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # Side by side only where the layer above remembers both: half a buffer keeps the other half in memory.
        if activation.writes is not None and kept.lower and x.shape == tangent.shape:
            y, moved = empty_stack(x)
            write_value, write_slope = activation.writes
            write_value(x, *options, y)
            write_slope(tangent, y if activation.from_output else x, *options, moved)
        else:
            y = activation.value(x, *options)
            moved = activation.slope(tangent, y if activation.from_output else x, *options)
        saved = y if activation.from_output else x
        ctx.activation, ctx.options = activation, options
        bends = kept.curved and activation.bend is not None
        save(ctx, saved, tangent if bends else None)
        ctx.set_materialize_grads(False)
        return y, moved

    @staticmethod
    @adjoint
    def backward(ctx: Any, saved: Saved, *adjoints: Tensor | None) -> tuple[Tensor | None, ...]:
        on_value, on_tangent = adjoints
        x, tangent = saved
        slope, bend, options = ctx.activation.slope, ctx.activation.bend, ctx.options
        to_value = None if on_value is None else slope(on_value, x, *options)
        to_tangent = None if on_tangent is None else slope(on_tangent, x, *options)
        if tangent is not None and on_tangent is not None:
            curved = bend(x, *options).mul_(tangent).mul_(on_tangent)
            to_value = curved if to_value is None else curved.add_(to_value)
        return None, None, None, to_value, to_tangent


def pointwise(kept: Switches, name: str, x: Dual, *options: Any) -> Dual:
    """φ(x)' = φ'(x)·x' for an activation of the table."""
    activation = ACTIVATIONS[name]
    if x.value.is_complex():  # slopes would have to be conjugated
        raise Declined
    if x.tangent is None:
        return Dual(activation.value(x.value, *options))
    return Dual(*apply_pair(_Pointwise, kept, activation, options, x.value, x.tangent))


@tangent_rule(
    "clamp",
    family="pointwise",
    samples=lambda: [
        sample(inputs((3, 4))[0], -0.5, 0.7),
        sample(inputs((3, 4))[0], min=0.3),
        sample(*inputs((3, 4), (4,))),
    ],
)
def clamp(_kept: Switches, x: Any, min: Any = None, max: Any = None) -> Dual:  # noqa: A002
    """The tangent of whichever of x, min and max is returned."""
    x = lift(x)
    value, tangent = x.value, x.tangent
    for bound, beyond in ((min, torch.lt), (max, torch.gt)):
        if bound is None:
            continue
        bound = lift(bound)
        outside = beyond(value.detach(), bound.value)
        there = 0 if bound.tangent is None else bound.tangent
        if tangent is not None or bound.tangent is not None:
            tangent = torch.where(outside, there, 0 if tangent is None else tangent)
        value = torch.where(outside, bound.value, value)
    return Dual(value, tangent)


@tangent_rule("clamp_min", family="pointwise", samples=lambda: [sample(inputs((3, 4))[0], 0.3)])
def clamp_min(kept: Switches, x: Any, min: Any) -> Dual:  # noqa: A002 - torch's name
    """The tangent of whichever is returned."""
    return clamp(kept, x, min=min)


@tangent_rule("clamp_max", family="pointwise", samples=lambda: [sample(inputs((3, 4))[0], 0.3)])
def clamp_max(kept: Switches, x: Any, max: Any) -> Dual:  # noqa: A002 - torch's name
    """The tangent of whichever is returned."""
    return clamp(kept, x, max=max)


@tangent_rule(
    "pow",
    family="pointwise",
    samples=lambda: [
        sample(inputs((3,))[0], 2),
        sample(inputs((3,), positive=True)[0], -0.5),
        sample(1.7, inputs((3,))[0]),
        sample(*inputs((3,), (3,), positive=True)),
    ],
)
def power(kept: Switches, x: Any, exponent: Any) -> Dual:
    """(xᵖ)' = p·xᵖ⁻¹·x' + ln(x)·xᵖ·p'; frozen in `connectivity`."""
    x, p = lift(x), lift(exponent)
    value = torch.pow(x.value, p.value)
    base, to = _keep_tensor(x.value, kept.curved), _keep_tensor(p.value, kept.curved)
    left = right = None
    if x.tangent is not None:
        left = x.tangent * (to * torch.pow(base, to - 1))
    if p.tangent is not None:
        # 0ᵖ does not move with p > 0, and torch says so too for p = 0.
        logarithm = (
            torch.log(torch.where(base == 0, 1, base))
            if isinstance(base, Tensor)
            else math.log(base)
        )
        right = p.tangent * (torch.pow(base, to) * logarithm)
    return Dual(value, add_tangents(left, right))


def _keep_tensor(value: Any, flows: bool) -> Any:  # noqa: FBT001 - as `keep`
    """As `keep`; a number has nothing to keep."""
    return keep(value, flows) if isinstance(value, Tensor) else value


def _register(name: str, activation: Activation) -> None:
    names = [option for option, _ in activation.options]
    defaults = [default for _, default in activation.options]

    def apply(
        kept: Switches,
        _func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        named = rename(kwargs)
        named.pop("inplace", None)
        x, *given = [named.pop("x"), *args] if "x" in named else args
        given += defaults[len(given) :]
        for option, value in named.items():
            given[names.index(option)] = value
        return pointwise(kept, name, x, *given)

    def samples() -> list[Sample]:
        return [Sample(tuple(inputs((3, 4), positive=activation.positive)), {})]

    register(Rule(name, "pointwise", "φ(x)' = φ'(x)·x'", apply, samples))


def _between(v: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    return torch.where((x > low) & (x < high), v, 0)


def _gaussian(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_bend(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return (2 - x * x) * _gaussian(x)
    c, k = math.sqrt(2 / math.pi), 0.044715
    inner = torch.tanh(c * (x + k * x**3))
    first, second = c * (1 + 3 * k * x * x), c * 6 * k * x
    sech = 1 - inner * inner
    return sech * first + 0.5 * x * sech * (second - 2 * inner * first * first)


def _silu_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _mish_bend(x: Tensor) -> Tensor:
    s, t = torch.sigmoid(x), torch.tanh(torch.nn.functional.softplus(x))
    sech = 1 - t * t
    return sech * s * (2 + x * (1 - s) - 2 * x * t * s)


def _elu_slope(v: Tensor, x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    return aten.elu_backward(v, alpha, scale, input_scale, False, x)


def _elu_bend(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    negative = scale * alpha * input_scale**2 * torch.exp(input_scale * x)
    return torch.where(x < 0, negative, 0)


def _softplus_bend(x: Tensor, beta: float, threshold: float) -> Tensor:
    s = torch.sigmoid(beta * x)
    return torch.where(beta * x > threshold, 0, beta * s * (1 - s))


_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)

ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu,
        lambda v, y: aten.threshold_backward(v, y, 0),
        None,
        from_output=True,
        writes=(
            lambda x, out: torch.clamp_min(x, 0, out=out),
            lambda v, y, out: aten.threshold_backward.grad_input(v, y, 0, grad_input=out),
        ),
    ),
    "gelu": Activation(
        lambda x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
        lambda v, x, approximate: aten.gelu_backward(v, x, approximate=approximate),
        _gelu_bend,
        options=(("approximate", "none"),),
        writes=(
            lambda x, approximate, out: aten.gelu.out(x, approximate=approximate, out=out),
            lambda v, x, approximate, out: aten.gelu_backward.grad_input(
                v, x, approximate=approximate, grad_input=out
            ),
        ),
    ),
    "silu": Activation(
        torch.nn.functional.silu,
        aten.silu_backward,
        _silu_bend,
        writes=(
            lambda x, out: aten.silu.out(x, out=out),
            lambda v, x, out: aten.silu_backward.grad_input(v, x, grad_input=out),
        ),
    ),
    "sigmoid": Activation(
        torch.sigmoid,
        aten.sigmoid_backward,
        lambda y: y * (1 - y) * (1 - 2 * y),
        from_output=True,
    ),
    "tanh": Activation(
        torch.tanh, aten.tanh_backward, lambda y: -2 * y * (1 - y * y), from_output=True
    ),
    "exp": Activation(torch.exp, torch.mul, torch.clone, from_output=True),
    "expm1": Activation(torch.expm1, lambda v, y: v * (y + 1), lambda y: y + 1, from_output=True),
    "log": Activation(torch.log, torch.div, lambda x: -1 / (x * x), positive=True),
    "log1p": Activation(
        torch.log1p, lambda v, x: v / (1 + x), lambda x: -((1 + x) ** -2), positive=True
    ),
    "sqrt": Activation(
        torch.sqrt,
        lambda v, y: 0.5 * v / y,
        lambda y: -0.25 * y**-3,
        from_output=True,
        positive=True,
    ),
    "rsqrt": Activation(
        torch.rsqrt,
        lambda v, y: -0.5 * v * y**3,
        lambda y: 0.75 * y**5,
        from_output=True,
        positive=True,
    ),
    "reciprocal": Activation(
        torch.reciprocal,
        lambda v, y: -v * y * y,
        lambda y: 2 * y**3,
        from_output=True,
        positive=True,
    ),
    "square": Activation(torch.square, lambda v, x: 2 * v * x, lambda x: torch.full_like(x, 2)),
    "sin": Activation(torch.sin, lambda v, x: v * torch.cos(x), lambda x: -torch.sin(x)),
    "cos": Activation(torch.cos, lambda v, x: -v * torch.sin(x), lambda x: -torch.cos(x)),
    "erf": Activation(
        torch.erf,
        lambda v, x: v * torch.exp(-x * x) * (2 / math.sqrt(math.pi)),
        lambda x: -2 * x * torch.exp(-x * x) * (2 / math.sqrt(math.pi)),
    ),
    "abs": Activation(torch.abs, lambda v, x: v * x.sign(), None),
    "hardswish": Activation(
        torch.nn.functional.hardswish,
        aten.hardswish_backward,
        lambda x: torch.where((x > -3) & (x < 3), x.new_tensor(1 / 3), 0),
    ),
    # Not torch's backward kernel: it multiplies by 1/6 rounded to float32, in any precision.
    "hardsigmoid": Activation(
        torch.nn.functional.hardsigmoid, lambda v, x: _between(v / 6, x, -3, 3), None
    ),
    "hardtanh": Activation(
        lambda x, low, high: torch.clamp(x, low, high),
        _between,
        None,
        options=(("min_val", -1.0), ("max_val", 1.0)),
    ),
    "relu6": Activation(lambda x: torch.clamp(x, 0, 6), lambda v, x: _between(v, x, 0, 6), None),
    "leaky_relu": Activation(
        lambda x, slope: torch.nn.functional.leaky_relu(x, slope),
        lambda v, x, slope: aten.leaky_relu_backward(v, x, slope, False),
        None,
        options=(("negative_slope", 0.01),),
    ),
    "elu": Activation(
        lambda x, alpha, scale, input_scale: aten.elu(x, alpha, scale, input_scale),
        _elu_slope,
        _elu_bend,
        options=(("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    ),
    "celu": Activation(
        lambda x, alpha: torch.celu(x, alpha),
        lambda v, x, alpha: _elu_slope(v, x, alpha, 1.0, 1 / alpha),
        lambda x, alpha: _elu_bend(x, alpha, 1.0, 1 / alpha),
        options=(("alpha", 1.0),),
    ),
    "selu": Activation(
        torch.selu,
        lambda v, x: _elu_slope(v, x, _SELU[0], _SELU[1], 1.0),
        lambda x: _elu_bend(x, _SELU[0], _SELU[1], 1.0),
    ),
    "softplus": Activation(
        lambda x, beta, threshold: torch.nn.functional.softplus(x, beta, threshold),
        lambda v, x, beta, threshold: aten.softplus_backward(v, x, beta, threshold),
        _softplus_bend,
        options=(("beta", 1.0), ("threshold", 20.0)),
    ),
    "mish": Activation(torch.nn.functional.mish, aten.mish_backward, _mish_bend),
    "logsigmoid": Activation(
        torch.nn.functional.logsigmoid,
        lambda v, x: v * torch.sigmoid(-x),
        lambda x: -torch.sigmoid(x) * torch.sigmoid(-x),
    ),
}

for _name, _activation in ACTIVATIONS.items():
    _register(_name, _activation)
