"""BatchNorm with running statistics and δ = θ: an affine map per channel, y = s·(x − μ) + β, s = γ·r, r = 1/√(σ² + ε).

    ŷ = s·x̂ + y        Hθ for γ = r·Σ (A·(x − μ) + B·x̂)        Hθ for β = Σ A        adjoints: s·(A + B), s·B

Backward by elementwise operations and sums: torch's own kernel for it, one block per channel, takes three times as
long on a GPU and twice on a CPU. The two adjoints are written side by side, for the convolution below (`stacking`).
"""

from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.duals import Dual
from apoptosis.curvature.stacking import empty_stack
from apoptosis.curvature.switches import Switches

__all__ = ["fixed_norm"]

Statistics = tuple[Tensor, Tensor, float]
MaybeTensors = tuple[Tensor | None, ...]


def fixed_norm(kept: Switches, statistics: Statistics, x: Dual, weight: Dual, bias: Dual) -> Dual:
    """γ·(x − μ)·r + β with constant `statistics` (μ, σ², ε) and δ = θ on γ and β."""
    tensors = (x.value, x.tangent, weight.value, weight.tangent, bias.value, bias.tangent)
    return Dual(*apply_pair(_FixedNorm, kept, statistics, *tensors))


class _FixedNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - each input has an adjoint
        ctx: Any,
        kept: Switches,
        statistics: tuple[Tensor, Tensor, float],
        x: Tensor,
        tangent: Tensor | None,
        weight: Tensor,
        weight_tangent: Tensor,  # noqa: ARG004 - an input so that its adjoint can be asked for
        bias: Tensor,
        bias_tangent: Tensor,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor]:
        mean, variance, eps = statistics
        ctx.kept, ctx.statistics = kept, statistics
        ctx.set_materialize_grads(False)
        save(ctx, x, tangent if kept.lower else None, weight)
        y = torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, True)
        if tangent is None:
            return y, y.clone()
        return y, torch.addcmul(y, tangent, _channels(weight * torch.rsqrt(variance + eps), y))

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> MaybeTensors:
        x, tangent, weight = saved
        mean, variance, eps = ctx.statistics
        needs = dict(zip(_NAMES, ctx.needs_input_grad[2:], strict=True))
        rstd = torch.rsqrt(variance + eps)
        scale = _channels(weight * rstd, x)
        to_x, to_tangent = _pull_fixed(ctx.kept, on_value, on_tangent, scale)
        centred = x - _channels(mean, x)
        on_weight = on_bias = gradient = bias_gradient = None
        if needs["weight_tangent"] and on_tangent is not None:
            gradient = _channel_sum(centred * on_tangent) * rstd
            bias_gradient = _channel_sum(on_tangent)
        if on_value is not None:
            centred = centred.mul_(on_value)
            on_bias = _channel_sum(on_value)
        if on_tangent is not None and tangent is not None:
            centred = (
                on_tangent * tangent if on_value is None else centred.addcmul_(on_tangent, tangent)
            )
        if on_value is not None or tangent is not None:
            on_weight = _channel_sum(centred) * rstd
        to_tangent = to_tangent if needs["tangent"] else None
        return None, None, to_x, to_tangent, on_weight, gradient, on_bias, bias_gradient


_NAMES = ("x", "tangent", "weight", "weight_tangent", "bias", "bias_tangent")


def _pull_fixed(
    kept: Switches, on_value: Tensor | None, on_tangent: Tensor | None, scale: Tensor
) -> MaybeTensors:
    """s·(A + B) and s·B, side by side for the convolution below."""
    if on_tangent is None:
        return None if on_value is None else on_value * scale, None
    to_x, to_tangent = empty_stack(on_tangent)
    torch.mul(on_tangent, scale, out=to_tangent)
    if on_value is None:
        return to_tangent.clone() if kept.upper else None, to_tangent
    if kept.upper:
        torch.addcmul(to_tangent, on_value, scale, out=to_x)
    else:
        torch.mul(on_value, scale, out=to_x)
    return to_x, to_tangent


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in the precision and along the dimension of x's channels."""
    return values.to(x.dtype).view(-1, *(1,) * (x.dim() - 2))


def _channel_sum(x: Tensor) -> Tensor:
    """Σ over samples and positions, in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.sum((0, *range(2, x.dim())), dtype=wide)
