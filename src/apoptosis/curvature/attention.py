"""Attention with tangents as one operation, as sparing as torch's own: nothing of the size of S is remembered.

    a = c·q kᵀ + mask,  S = softmax(a),  o = S v
    â = c·(q̂ kᵀ + q k̂ᵀ),  Ŝ = J â with J x = S·(x − ⟨S, x⟩),  ô = Ŝ v + S v̂

Backward, with A, B the adjoints of o, ô, S and Ŝ are computed again from q, k and their tangents, a few samples
at a time:

    adjoint of Ŝ = B vᵀ          adjoint of S = A vᵀ + B v̂ᵀ
    adjoint of â = J(B vᵀ)       adjoint of a = J(adjoint of S + curvature of the softmax)

18 products of the size of q kᵀ against 6 without tangent is the least there is; computing S and Ŝ again adds 3.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.duals import Dual
from apoptosis.curvature.switches import Switches

__all__ = ["fused_attention", "is_fusable"]

aten = torch.ops.aten


def is_fusable(kept: Switches, q: Dual, k: Dual, v: Dual, mask: Any) -> bool:
    """Whether all three move, in the same number of heads, under a constant mask, and count as activations."""
    if any(x.tangent is None for x in (q, k, v)) or isinstance(mask, Dual):
        return False
    if any(x.weight for x in (q, k, v)) and not kept.upper == kept.lower == kept.parallel:
        return False
    return q.value.dim() >= 3 and q.value.shape[:-2] == k.value.shape[:-2] == v.value.shape[:-2]


def fused_attention(
    kept: Switches, scale: float, q: Dual, k: Dual, v: Dual, mask: Tensor | None
) -> Dual:
    """softmax(c·q kᵀ + mask) v."""
    duals = (q, k, v)
    shape = q.value.shape
    flat = [_flatten(t) for d in duals for t in (d.value, d.tangent) if t is not None]
    if mask is not None:
        mask = mask.expand(*shape[:-1], k.value.shape[-2]) if mask.dim() > 2 else mask
        mask = mask.reshape(-1, *mask.shape[-2:]) if mask.dim() > 2 else mask
    made = apply_pair(_Attention, kept, scale, mask, *flat)
    o, moved = (t.view(*shape[:-1], v.value.shape[-1]) for t in made)
    return Dual(o, moved)


def _flatten(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: Switches, scale: float, mask: Tensor | None, *flat: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.scale = kept, scale
        ctx.set_materialize_grads(False)
        save(ctx, mask, *flat)
        v, v_t = flat[4:]
        o = torch.empty(*flat[0].shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        o_t = torch.empty_like(o)
        for part in _parts(flat[0], flat[2]):
            s, s_t, _ = _weights(scale, _mask_of(mask, part), *(x[part] for x in flat[:4]))
            torch.bmm(s, v[part], out=o[part])
            torch.bmm(s_t, v[part], out=o_t[part])
            o_t[part].baddbmm_(s, v_t[part])
        return o, o_t

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mask, *flat = saved
        if on_value is None and on_tangent is None:
            return (None,) * 9
        results = [torch.empty_like(x) for x in flat]
        for part in _parts(flat[0], flat[2]):
            _pull_part(
                ctx.kept,
                ctx.scale,
                _mask_of(mask, part),
                [x[part] for x in flat],
                None if on_value is None else on_value[part],
                None if on_tangent is None else on_tangent[part],
                [x[part] for x in results],
            )
        if on_tangent is None:
            results[1::2] = [None] * 3  # pyright: ignore[reportCallIssue, reportArgumentType]
        return None, None, None, *results


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of the batch in which S is no larger than all queries (but at least 2 million entries)."""
    each = q.shape[1] * k.shape[1]
    step = max(1, max(q.numel(), 2**21) // max(1, each))
    return (slice(i, i + step) for i in range(0, q.shape[0], step))


def _mask_of(mask: Tensor | None, part: slice) -> Tensor | None:
    return mask if mask is None or mask.dim() == 2 else mask[part]


def _weights(
    scale: float, mask: Tensor | None, q: Tensor, q_t: Tensor, k: Tensor, k_t: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """S, Ŝ and â."""
    a = torch.bmm(q * scale, k.mT)
    if mask is None:
        s = torch.softmax(a, -1)
    else:
        a = a.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else a.add_(mask)
        s = aten._safe_softmax(a, -1)  # a row that may look at nothing gets weights 0
    a_t = torch.bmm(q_t, k.mT).baddbmm_(q, k_t.mT, beta=scale, alpha=scale)
    return s, _jacobian(a_t, s), a_t


def _jacobian(x: Tensor, s: Tensor) -> Tensor:
    return aten._softmax_backward_data(x, s, -1, s.dtype)


def _pull_part(  # noqa: PLR0913, PLR0917 - what one part of the backward reads and writes
    kept: Switches,
    scale: float,
    mask: Tensor | None,
    flat: list[Tensor],
    on_value: Tensor | None,
    on_tangent: Tensor | None,
    results: list[Tensor],
) -> None:
    """Write the adjoints of q, q̂, k, k̂, v, v̂ for some samples into `results`."""
    q, q_t, k, k_t, v, v_t = flat
    to_q, to_q_t, to_k, to_k_t, to_v, to_v_t = results
    s, s_t, a_t = _weights(scale, mask, q, q_t, k, k_t)
    on_s = None if on_value is None else torch.bmm(on_value, v.mT)
    terms_v = [] if on_value is None else [(s, on_value)]
    on_a_t = None
    if on_tangent is not None:
        on_s_t = torch.bmm(on_tangent, v.mT)
        on_a_t = _jacobian(on_s_t, s)
        torch.bmm(s.mT, on_tangent, out=to_v_t)
        if kept.parallel:
            on_s = _accumulate(on_s, on_tangent, v_t.mT)
            terms_v.append((s_t, on_tangent))
        if kept.curved:
            bend = _bend(on_s_t, s, a_t)
            on_s = bend if on_s is None else on_s.add_(bend)
    _products(to_v, [(w.mT, x) for w, x in terms_v], 1.0)
    on_a = None if on_s is None else _jacobian(on_s, s)
    down = [] if on_a is None else [(on_a, k)]
    across = [] if on_a is None else [(on_a.mT, q)]
    if on_a_t is not None:
        _products(to_q_t, [(on_a_t, k)], scale)
        _products(to_k_t, [(on_a_t.mT, q)], scale)
        if kept.parallel:
            down.append((on_a_t, k_t))
            across.append((on_a_t.mT, q_t))
    _products(to_q, down, scale)
    _products(to_k, across, scale)


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


def _bend(on_s_t: Tensor, s: Tensor, a_t: Tensor) -> Tensor:
    """The curvature of the softmax: B·(â − ⟨S, â⟩) − â·⟨B, S⟩."""
    along = (s * a_t).sum(-1, keepdim=True)
    across = (s * on_s_t).sum(-1, keepdim=True)
    return on_s_t * (a_t - along) - a_t * across


def _products(out: Tensor, terms: list[tuple[Tensor, Tensor]], scale: float) -> None:
    """out = scale·Σ left·right."""
    if not terms:
        out.zero_()
    for i, (left, right) in enumerate(terms):
        out.baddbmm_(left, right, beta=0 if i == 0 else 1, alpha=scale)
