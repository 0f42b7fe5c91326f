"""Softmax and attention.

S = softmax(a) has the symmetric Jacobian J v = S·(v − ⟨S, v⟩), so its backward kernel is its tangent:
Ŝ = S·(â − ⟨S, â⟩), rows of which sum to 0. (Algorithm 1 of the paper prints softmax(â), which is no derivative.) Its
curvature, frozen in `connectivity`, is

    ∇ₐ ⟨B, J(a) â⟩ = J(B·â − B·⟨S, â⟩ − â·⟨B, S⟩).

Attention is two products with a softmax between: q·k and S·v count as products. The common case is one operation
(`attention`); masks that are learnt and dropout take it apart.
"""

from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.attention import fused_attention, is_fusable
from apoptosis.curvature.duals import Dual, lift, map_dual
from apoptosis.curvature.rules import inputs, keep, sample, tangent_rule
from apoptosis.curvature.rules_linear import add, apply_linear, masked_fill
from apoptosis.curvature.rules_product import bilinear
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

aten = torch.ops.aten


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: Switches, dim: int, x: Tensor, tangent: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.dim = dim
        ctx.set_materialize_grads(False)
        s = torch.softmax(x, dim)
        save(ctx, s, tangent if kept.curved else None)
        return s, _pull(tangent, s, dim)

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        s, tangent = saved
        dim = ctx.dim
        to_tangent = None if on_tangent is None else _pull(on_tangent, s, dim)
        if tangent is not None and on_tangent is not None:
            bend = on_tangent * (tangent - (s * tangent).sum(dim, keepdim=True))
            bend -= tangent * (on_tangent * s).sum(dim, keepdim=True)
            on_value = bend if on_value is None else bend + on_value
        to_value = None if on_value is None else _pull(on_value, s, dim)
        return None, None, to_value, to_tangent


def _pull(v: Tensor, s: Tensor, dim: int) -> Tensor:
    return aten._softmax_backward_data(v.contiguous(), s, dim, s.dtype)


@tangent_rule(
    "softmax",
    family="attention",
    samples=lambda: [
        sample(inputs((2, 3, 4))[0], -1),
        sample(inputs((2, 3))[0], 0, dtype=torch.float64),
    ],
)
def softmax(kept: Switches, x: Dual, dim: int, dtype: torch.dtype | None = None) -> Dual:
    """Ŝ = S·(â − ⟨S, â⟩)."""
    if dtype is not None:
        x = apply_linear(kept, torch.Tensor.to, (x, dtype), {})
    if x.tangent is None:
        return Dual(torch.softmax(x.value, dim))
    return Dual(*apply_pair(_Softmax, kept, dim, x.value, x.tangent))


@tangent_rule(
    "log_softmax",
    family="attention",
    samples=lambda: [sample(inputs((2, 3, 4))[0], -1)],
)
def log_softmax(kept: Switches, x: Dual, dim: int, dtype: torch.dtype | None = None) -> Dual:
    """â − ⟨S, â⟩."""
    if dtype is not None:
        x = apply_linear(kept, torch.Tensor.to, (x, dtype), {})
    value = torch.log_softmax(x.value, dim)
    if x.tangent is None:
        return Dual(value)
    s = torch.exp(keep(value, kept.curved))
    return Dual(value, x.tangent - (s * x.tangent).sum(dim, keepdim=True))


@tangent_rule(
    "scaled_dot_product_attention",
    family="attention",
    samples=lambda: [
        sample(*inputs((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))),
        sample(*inputs((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)), is_causal=True, scale=0.7),
        sample(
            *inputs((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)),
            attn_mask=torch.tensor([[True, False, True]] * 3),
            enable_gqa=True,
        ),
        sample(*inputs((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4), (2, 1, 3, 3))),
    ],
)
def attention(  # noqa: PLR0913, PLR0917 - torch's signature
    kept: Switches,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Dual:
    """softmax(q kᵀ·scale + mask) v."""
    q, k, v = lift(query), lift(key), lift(value)
    if enable_gqa:
        repeats = q.value.shape[-3] // k.value.shape[-3]
        k, v = (map_dual(x, lambda t: t.repeat_interleave(repeats, -3)) for x in (k, v))
    factor = q.value.shape[-1] ** -0.5 if scale is None else scale
    mask = attn_mask
    if is_causal:
        rows, columns = q.value.shape[-2], k.value.shape[-2]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.value.device).tril()
    if dropout_p == 0 and is_fusable(kept, q, k, v, mask):
        return fused_attention(kept, factor, q, k, v, mask)
    scores = bilinear(
        kept, torch.matmul, map_dual(q, lambda t: t * factor), map_dual(k, lambda t: t.mT)
    )
    weights = _attend(kept, scores, mask)
    if dropout_p > 0:
        dropped = torch.dropout(torch.ones_like(weights.value), dropout_p, True)
        weights = map_dual(weights, lambda t: t * dropped)
    return bilinear(kept, torch.matmul, weights, v)


def _attend(kept: Switches, scores: Dual, mask: Any) -> Dual:
    """Softmax of the masked scores; a row that may look at nothing gets weights 0, as in torch."""
    blind = None
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        scores = masked_fill(kept, scores, ~mask, float("-inf"))
        blind = ~mask.any(-1, keepdim=True)
    elif mask is not None:
        scores = add(kept, scores, mask)
        blind = (lift(mask).value == float("-inf")).all(-1, keepdim=True)
    if blind is not None and bool(blind.any()):
        scores = masked_fill(kept, scores, blind, 0.0)
        return masked_fill(kept, softmax(kept, scores, -1), blind, 0.0)
    return softmax(kept, scores, -1)
