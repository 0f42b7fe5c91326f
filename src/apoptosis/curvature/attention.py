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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.duals import Dual
from apoptosis.curvature.switches import Switches

__all__ = ["fused_attention", "is_fusable"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """The factor of the scores, the keys that are no padding, and the dimensions between samples and queries."""

    scale: float
    num_keys: int
    heads: tuple[int, ...]


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
    flat = [t for d in (q, k, v) for t in (d.value, d.tangent)]
    return Dual(*apply_pair(_Attention, kept, scale, mask, *flat))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: Switches, scale: float, mask: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = inputs[::2]
        ctx.kept, ctx.form = kept, Form(scale, k.shape[-2], tuple(q.shape[1:-2]))
        ctx.set_materialize_grads(False)
        flat = _pack(inputs)
        save(ctx, mask, *flat)
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        o_t = torch.empty_like(o)
        for part in _parts(flat[0], flat[2]):
            pieces = [_rows(x[part]) for x in flat]
            s, s_t, _ = _weights(ctx.form, _mask_of(mask, part, q), *pieces[:4])
            out, out_t = _rows(o[part]), _rows(o_t[part])
            torch.bmm(s, pieces[4], out=out)
            torch.bmm(s_t, pieces[4], out=out_t)
            out_t.baddbmm_(s, pieces[5])
        return o, o_t

    @staticmethod
    @adjoint
    def backward(
        ctx: Any, saved: Saved, on_value: Tensor | None, on_tangent: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mask, *flat = saved
        if on_value is None and on_tangent is None:
            return (None,) * 9
        on_value = None if on_value is None else on_value.contiguous()
        on_tangent = None if on_tangent is None else on_tangent.contiguous()
        results = [torch.empty_like(x) for x in flat]
        for part in _parts(flat[0], flat[2]):
            pieces = [_rows(x[part]) for x in flat]
            weights = _weights(ctx.form, _mask_of(mask, part, flat[0]), *pieces[:4])
            _pull_part(
                ctx.kept,
                ctx.form.scale,
                weights,
                pieces,
                None if on_value is None else _rows(on_value[part]),
                None if on_tangent is None else _rows(on_tangent[part]),
                [_rows(x[part]) for x in results],
            )
        made = [*results[:2], *(x[..., : ctx.form.num_keys, :] for x in results[2:])]
        if on_tangent is None:
            made[1::2] = [None] * 3  # pyright: ignore[reportCallIssue, reportArgumentType]
        return None, None, None, *made


def _pack(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Contiguous copies, keys and values with rows of zeros up to a multiple of 8, which GPUs multiply much faster."""
    q, q_t, *others = inputs
    rows = -(-others[0].shape[-2] // 8) * 8
    packed = [q.contiguous(), q_t.contiguous()]
    for x in others:
        if x.shape[-2] == rows:
            packed.append(x.contiguous())
            continue
        wide = x.new_zeros(*x.shape[:-2], rows, x.shape[-1])
        wide[..., : x.shape[-2], :] = x
        packed.append(wide)
    return packed


def _rows(x: Tensor) -> Tensor:
    """(samples, heads, ...) as one batch of matrices; a view."""
    return x.view(-1, *x.shape[-2:])


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of the samples in which S has at most 4 times the entries of all queries (or 2 million)."""
    each = q[0].numel() // q.shape[-1] * k.shape[-2]
    step = max(1, max(4 * q.numel(), 2**21) // max(1, each))
    return (slice(i, i + step) for i in range(0, q.shape[0], step))


def _mask_of(mask: Tensor | None, part: slice, q: Tensor) -> Tensor | None:
    by_sample = mask is not None and mask.dim() == q.dim() and mask.shape[0] > 1
    return mask[part] if mask is not None and by_sample else mask


def _weights(
    form: Form, mask: Tensor | None, q: Tensor, q_t: Tensor, k: Tensor, k_t: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """S, Ŝ and â."""
    scale = form.scale
    a = torch.bmm(q * scale, k.mT)
    if form.num_keys < k.shape[1]:
        a[..., form.num_keys :] = float("-inf")
    if mask is None:
        s = torch.softmax(a, -1)
    else:
        by_head = a.view(-1, *form.heads, *a.shape[1:])[..., : form.num_keys]
        if mask.dtype == torch.bool:
            by_head.masked_fill_(~mask, float("-inf"))
        else:
            by_head.add_(mask)
        s = aten._safe_softmax(a, -1)  # a row that may look at nothing gets weights 0
    a_t = torch.bmm(q_t, k.mT).baddbmm_(q, k_t.mT, beta=scale, alpha=scale)
    return s, _jacobian(a_t, s), a_t


def _jacobian(x: Tensor, s: Tensor) -> Tensor:
    return aten._softmax_backward_data(x, s, -1, s.dtype)


def _pull_part(  # noqa: PLR0913, PLR0917 - what one part of the backward reads and writes
    kept: Switches,
    scale: float,
    weights: tuple[Tensor, Tensor, Tensor],
    flat: list[Tensor],
    on_value: Tensor | None,
    on_tangent: Tensor | None,
    results: list[Tensor],
) -> None:
    """Write the adjoints of q, q̂, k, k̂, v, v̂ for some samples into `results`."""
    q, q_t, k, k_t, v, v_t = flat
    to_q, to_q_t, to_k, to_k_t, to_v, to_v_t = results
    s, s_t, a_t = weights
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
