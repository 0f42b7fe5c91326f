"""Norms: n = (x − μ)·r with r = 1/√(variance + ε), then y = γ·n + β.

The Jacobian of the normalisation over one row of m entries is symmetric,

    J v = r·(v − mean(v) − n·mean(n·v)),

so the backward kernel of a norm *is* its tangent. Its curvature, for a row weight w and tangent x̂, is

    ∇ₓ ⟨w, J(x) x̂⟩ = −(r/m)·( n·⟨w, Jx̂⟩ + ⟨n, x̂⟩·Jw + ⟨n, w⟩·Jx̂ ),

frozen in `connectivity`. (RMS norms: the same without the means.) The product γ·n counts in every kind but `ggn`: for
δ = θ,

    ŷ = γ·Jx̂ + y,    Hθ for γ = Σ A·n + B·Jx̂,    adjoint of x = J(γA) + J(γB) + curvature.

BatchNorm in eval mode has constant μ and r: an affine map per channel (`fixed_norm`). In train mode its statistics
run over the batch; they are computed here and the running ones are never touched.
"""

import math
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.duals import Dual, lift, map_dual, same_data
from apoptosis.curvature.fixed_norm import fixed_norm
from apoptosis.curvature.rules import inputs, sample, tangent_rule
from apoptosis.curvature.rules_linear import add
from apoptosis.curvature.rules_product import mul
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

aten = torch.ops.aten
MaybeTensors = tuple[Tensor | None, ...]


class _LayerNorm(torch.autograd.Function):
    """LayerNorm with affine weights and δ = θ."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - each input has an adjoint
        ctx: Any,
        kept: Switches,
        options: tuple[list[int], float],
        x: Tensor,
        tangent: Tensor | None,
        weight: Tensor,
        weight_tangent: Tensor,  # noqa: ARG004 - an input so that its adjoint can be asked for
        bias: Tensor | None,
        bias_tangent: Tensor | None,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor]:
        shape, eps = options
        ctx.kept, ctx.shape = kept, shape
        ctx.set_materialize_grads(False)
        y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, eps)
        if tangent is None:
            save(ctx, x, mean, rstd, weight, bias, None, None)
            return y, y.clone()
        moved = aten.native_layer_norm_backward(
            tangent, x, shape, mean, rstd, None, None, [True, False, False]
        )[0]
        along = None
        if kept.curved:
            along = _row_sum((x - mean) * rstd * tangent, shape)
        needs_moved = kept.lower or kept.curved
        save(ctx, x, mean, rstd, weight, bias, moved if needs_moved else None, along)
        return y, torch.addcmul(y, moved, weight)

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> MaybeTensors:
        x, mean, rstd, weight, bias, moved, along = saved
        shape, kept = ctx.shape, ctx.kept
        _, _, _, needs_tangent, *needs = ctx.needs_input_grad
        to_x = to_tangent = to_weight = to_bias = gradient = bias_gradient = None

        def pull(adjoint: Tensor, mask: list[bool]) -> MaybeTensors:
            return aten.native_layer_norm_backward(
                adjoint, x, shape, mean, rstd, weight, bias, mask
            )

        if on_value is not None:
            to_x, to_weight, to_bias = pull(on_value, [True, True, bias is not None])
        if on_tangent is not None:
            wants_gradient = needs[1] or needs[3]
            to_tangent, gradient, bias_gradient = pull(
                on_tangent, [True, wants_gradient, wants_gradient and bias is not None]
            )
            assert to_tangent is not None, "asked for"
            if kept.lower and moved is not None:
                from_below = (on_tangent * moved).flatten(0, -len(shape) - 1).sum(0)
                to_weight = from_below if to_weight is None else to_weight.add_(from_below)
            if kept.upper:
                to_x = to_tangent.clone() if to_x is None else to_x.add_(to_tangent)
            if kept.curved and moved is not None:
                n = (x - mean) * rstd
                bend = _curvature(n, rstd, on_tangent * weight, moved, to_tangent, along, shape)
                to_x = bend if to_x is None else to_x.add_(bend)
        to_tangent = to_tangent if needs_tangent else None
        return None, None, to_x, to_tangent, to_weight, gradient, to_bias, bias_gradient


def _row_sum(x: Tensor, shape: list[int]) -> Tensor:
    return x.sum(tuple(range(-len(shape), 0)), keepdim=True)


def _curvature(  # noqa: PLR0913, PLR0917 - the symbols of the formula
    n: Tensor,
    rstd: Tensor,
    w: Tensor,
    moved: Tensor,
    pulled: Tensor,
    along: Tensor,
    shape: list[int],
) -> Tensor:
    """−(r/m)·(n⟨w, Jx̂⟩ + ⟨n, x̂⟩Jw + ⟨n, w⟩Jx̂), with `moved` = Jx̂, `pulled` = Jw, `along` = ⟨n, x̂⟩."""
    bend = n * _row_sum(w * moved, shape) + along * pulled + _row_sum(n * w, shape) * moved
    return bend.mul_(-rstd / math.prod(shape))


class _Normalise(torch.autograd.Function):
    """n = (x − μ)·r over the rows of a matrix, without weights; `centred` False for RMS norms."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Switches,
        eps: float,
        centred: bool,  # noqa: FBT001
        x: Tensor,
        tangent: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.centred = kept, centred
        ctx.set_materialize_grads(False)
        if centred:
            x = x - x.mean(1, keepdim=True)
        rstd = torch.rsqrt((x * x).mean(1, keepdim=True) + eps)
        n = x * rstd
        moved = _jacobian(tangent, n, rstd, centred=centred)
        along = (n * tangent).sum(1, keepdim=True) if kept.curved else None
        save(ctx, n, rstd, moved if kept.curved else None, along)
        return n, moved

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> MaybeTensors:
        n, rstd, moved, along = saved
        to_x = to_tangent = None
        if on_value is not None:
            to_x = _jacobian(on_value, n, rstd, centred=ctx.centred)
        if on_tangent is not None:
            to_tangent = _jacobian(on_tangent, n, rstd, centred=ctx.centred)
            if moved is not None:
                bend = _curvature(n, rstd, on_tangent, moved, to_tangent, along, [n.shape[1]])
                to_x = bend if to_x is None else to_x + bend
        return None, None, None, to_x, to_tangent


def _jacobian(v: Tensor, n: Tensor, rstd: Tensor, *, centred: bool) -> Tensor:
    if centred:
        v = v - v.mean(1, keepdim=True)
    return (v - n * (n * v).mean(1, keepdim=True)) * rstd


def _normalise(kept: Switches, x: Dual, eps: float, *, centred: bool = True) -> Dual:
    """Each row of a matrix to mean 0 (if centred) and mean square 1."""
    tangent = torch.zeros_like(x.value) if x.tangent is None else x.tangent
    return Dual(*apply_pair(_Normalise, kept, eps, centred, x.value, tangent))


def _affine(kept: Switches, n: Dual, weight: Any, bias: Any, shape: tuple[int, ...]) -> Dual:
    """γ·n + β, with γ and β laid out as `shape`, in the precision of n whatever that of γ and β is."""
    y = n
    if weight is not None:
        y = mul(kept, _shaped(lift(weight), shape), y)
    if bias is not None:
        y = add(kept, y, _shaped(lift(bias), shape))
    return map_dual(y, lambda t: t.to(n.value.dtype)) if y.value.dtype != n.value.dtype else y


def _shaped(x: Dual, shape: tuple[int, ...]) -> Dual:
    tangent = None if x.tangent is None else x.tangent.view(shape)
    return Dual(x.value.view(shape), tangent, x.weight)


def _follows(weight: Any, bias: Any) -> bool:
    """Whether δ = θ on γ and on β, where there is one."""
    weight = lift(weight)
    if weight.value is None or not weight.weight or not same_data(weight.value, weight.tangent):
        return False
    return bias is None or same_data(lift(bias).value, lift(bias).tangent)


@tangent_rule(
    "batch_norm",
    family="norm",
    samples=lambda: [
        sample(
            *inputs((4, 3, 2), (3,), (3,)), torch.ones(3), torch.ones(3) * 2, False, 0.1, 1e-5, True
        ),
        sample(
            *inputs((4, 3, 2), (3,), (3,)), torch.ones(3), torch.ones(3) * 2, True, 0.1, 1e-5, True
        ),
        sample(inputs((4, 3))[0], None, None, None, None, True, 0.1, 1e-5, True),
    ],
)
def batch_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    kept: Switches,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,  # noqa: FBT001 - torch's signature
    momentum: float,  # noqa: ARG001
    eps: float,
    cudnn_enabled: bool = True,  # noqa: ARG001, FBT001, FBT002
) -> Dual:
    """γ·n + β with the batch's statistics in train mode, with constant ones in eval mode."""
    x = lift(x)
    channels = (1, -1, *(1,) * (x.value.dim() - 2))
    if training or running_mean is None or running_var is None:
        flipped = x.value.transpose(0, 1)
        n = _normalise(kept, map_dual(x, lambda t: t.transpose(0, 1).reshape(t.shape[1], -1)), eps)
        n = map_dual(n, lambda t: t.view(flipped.shape).transpose(0, 1))
        return _affine(kept, n, weight, bias, channels)
    if bias is not None and _follows(weight, bias):
        statistics = (running_mean, running_var, eps)
        return fixed_norm(kept, statistics, x, lift(weight), lift(bias))
    scale = torch.rsqrt(running_var + eps).view(channels).to(x.value.dtype)
    shifted = Dual(
        (x.value - running_mean.view(channels).to(x.value.dtype)) * scale,
        None if x.tangent is None else x.tangent * scale,
    )
    return _affine(kept, shifted, weight, bias, channels)


@tangent_rule(
    "layer_norm",
    family="norm",
    samples=lambda: [
        sample(inputs((2, 3, 4))[0], (4,), *inputs((4,), (4,)), 1e-5),
        sample(inputs((2, 3, 4))[0], (3, 4), *inputs((3, 4), (3, 4)), 1e-3),
        sample(inputs((2, 4))[0], (4,), None, None, 1e-5),
        sample(inputs((2, 4))[0], (4,), inputs((4,))[0], None, 1e-5),
    ],
)
def layer_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    kept: Switches,
    x: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001, FBT001, FBT002
) -> Dual:
    """γ·n + β over the last dimensions."""
    x, shape = lift(x), list(normalized_shape)
    if weight is not None and (dtype := lift(weight).value.dtype) != x.value.dtype:
        # Half-precision activations under autocast with float32 weights: the kernels want one dtype.
        wide = layer_norm(kept, map_dual(x, lambda t: t.to(dtype)), shape, weight, bias, eps)
        return map_dual(wide, lambda t: t.to(x.value.dtype))
    if weight is not None and _follows(weight, bias) and x.value.dim() > len(shape):
        w = lift(weight)
        b = Dual(None) if bias is None else lift(bias)  # pyright: ignore[reportArgumentType]
        tensors = (x.value, x.tangent, w.value, w.tangent, b.value, b.tangent)
        return Dual(*apply_pair(_LayerNorm, kept, (shape, eps), *tensors))
    return _rows_norm(kept, x, shape, weight, bias, eps)


@tangent_rule(
    "rms_norm",
    family="norm",
    samples=lambda: [
        sample(inputs((2, 3, 4))[0], (4,), inputs((4,))[0], 1e-5),
        sample(inputs((2, 4))[0], (4,)),
    ],
)
def rms_norm(
    kept: Switches, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Dual:
    """γ·x/rms(x) over the last dimensions."""
    x = lift(x)
    eps = torch.finfo(x.value.dtype).eps if eps is None else eps
    return _rows_norm(kept, x, list(normalized_shape), weight, None, eps, centred=False)


def _rows_norm(  # noqa: PLR0913 - what its two callers tell apart
    kept: Switches,
    x: Dual,
    shape: list[int],
    weight: Any,
    bias: Any,
    eps: float,
    *,
    centred: bool = True,
) -> Dual:
    rows = map_dual(x, lambda t: t.reshape(-1, math.prod(shape)))
    n = _normalise(kept, rows, eps, centred=centred)
    return _affine(kept, map_dual(n, lambda t: t.view(x.value.shape)), weight, bias, tuple(shape))


@tangent_rule(
    "group_norm",
    family="norm",
    samples=lambda: [
        sample(inputs((2, 4, 3))[0], 2, *inputs((4,), (4,)), 1e-5),
        sample(inputs((2, 4, 3, 2))[0], 4),
    ],
)
def group_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    kept: Switches,
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001, FBT001, FBT002
) -> Dual:
    """γ·n + β over each sample's groups of channels."""
    x = lift(x)
    size = x.value.numel() // (x.value.shape[0] * num_groups)
    n = _normalise(kept, map_dual(x, lambda t: t.reshape(-1, size)), eps)
    channels = (1, -1, *(1,) * (x.value.dim() - 2))
    return _affine(kept, map_dual(n, lambda t: t.view(x.value.shape)), weight, bias, channels)


@tangent_rule(
    "instance_norm",
    family="norm",
    samples=lambda: [
        sample(*inputs((2, 3, 4), (3,), (3,)), None, None, True, 0.1, 1e-5, True),
        sample(
            inputs((2, 3, 4))[0],
            None,
            None,
            torch.ones(3),
            torch.ones(3) * 2,
            False,
            0.1,
            1e-5,
            True,
        ),
    ],
)
def instance_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    kept: Switches,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,  # noqa: FBT001 - torch's signature
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,  # noqa: FBT001, FBT002
) -> Dual:
    """γ·n + β over each sample's channels."""
    if use_input_stats:
        return group_norm(kept, x, lift(x).value.shape[1], weight, bias, eps)
    return batch_norm(
        kept, x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
    )
