"""`connectivity` by its definition: every operation that is no product is replaced by its linearisation.

    f̃(x) = f(x₀) + J_f(x₀)·(x − x₀)

has f's value and slope and no curvature. What remains curved are the products: weight × input, left × right.
Composite operations are taken apart into products and the rest: norms into normalisation and affine part, attention
into q·k, softmax and S·v.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.curvature.calls import Call
from apoptosis.curvature.corrections import EQUAL, PaddingRows
from apoptosis.curvature.duals import Dual, Ledger
from apoptosis.curvature.fallback import Randomness, is_view_of
from apoptosis.curvature.interception import Interceptor
from apoptosis.curvature.nesting import mapped, supplied, tensors_of
from apoptosis.curvature.rules import RULES, duals_in, values_of

__all__ = ["LinearisingMode", "linearised"]


class LinearisingMode(Interceptor):
    """Runs a model with everything but products linearised. There are no tangents here: double backward follows."""

    def __init__(self, ledger: Ledger, padding: PaddingRows) -> None:
        """Note the padding rows of embeddings in `padding`."""
        super().__init__(ledger)
        self._padding = padding

    def operate(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation's surrogate."""
        if call.name == "embedding":
            return Dual(self._padding.look_up(*values_of(args), **values_of(kwargs)))
        if call.name in _APART:
            return Dual(_APART[call.name](*values_of(args), **values_of(kwargs)))
        rule = RULES.get(call.name)
        family = rule.family if rule is not None else ""
        if call.name == "embedding_bag":
            return _recorded(EQUAL[call.name](*values_of(args), **values_of(kwargs)))
        if family == "linear" or (family in ("product", "layer") and self._is_product(call, args)):
            return _recorded(func(*values_of(args), **values_of(kwargs)))
        return _recorded(_linearise_call(EQUAL.get(call.name, func), args, kwargs))

    def _is_product(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Products of two things; not divisions, not squares, not activations inside a hand-written norm."""
        if call.name in ("div", "addcdiv"):
            return False
        duals = duals_in(args)
        if len(duals) > 1 and all(dual.value is duals[0].value for dual in duals):
            return False
        weights = sum(dual.weight for dual in duals)
        return not self.norm_depth or len(duals) < 2 or 0 < weights < len(duals)


def linearised(f: Callable[..., Any], *xs: Tensor) -> Any:
    """f(x₀) + J_f(x₀)·(x − x₀), differentiable by x, with value f(x)."""
    points = [x.detach().requires_grad_() for x in xs]
    with torch.enable_grad():
        outputs = f(*points)
        flat = [y for y in tensors_of(outputs) if y.requires_grad]
        probes = [torch.zeros_like(y, requires_grad=True) for y in flat]
        pulled: list[Tensor | None] = list(
            torch.autograd.grad(flat, points, probes, create_graph=True, allow_unused=True)
        )
        pairs = [
            (v, _step(x))
            for v, x in zip(pulled, xs, strict=True)
            if v is not None and v.requires_grad
        ]
        if not pairs:  # rounding: the slope is 0
            return mapped(outputs, Tensor.detach)
        slopes: list[Tensor | None] = list(
            torch.autograd.grad(
                [v for v, _ in pairs],
                probes,
                [d for _, d in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
    surrogates = iter(
        y.detach() if slope is None else y.detach() + slope
        for y, slope in zip(flat, slopes, strict=True)
    )
    return mapped(outputs, lambda t: next(surrogates) if t.requires_grad else t)


def _step(x: Tensor) -> Tensor:
    """x − x₀; masked attention scores are −∞ and do not move."""
    finite = torch.where(torch.isfinite(x), x, 0)
    return finite - finite.detach()


def _linearise_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    duals = duals_in((args, kwargs))
    randomness = Randomness(duals[0].value.device)
    with torch.enable_grad():
        plain = func(*values_of(args), **values_of(kwargs))
    produced = [t for t in tensors_of(plain) if t.requires_grad]
    if not produced or all(is_view_of(t, duals) for t in produced):
        return plain
    randomness.restore()

    def run(*points: Tensor) -> Any:
        supply = iter(points)
        return func(*supplied(args, supply), **supplied(kwargs, supply))

    return linearised(run, *(dual.value for dual in duals))


def _recorded(result: Any) -> Any:
    """Everything that depends on parameters gets a record."""
    return mapped(result, lambda t: Dual(t) if t.requires_grad else t)


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Any) -> Tensor:
    n = n if weight is None else weight.view(shape) * n
    return n if bias is None else n + bias.view(shape)


def _batch_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,  # noqa: FBT001
    _momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    use_batch = training or mean is None

    def normalise(t: Tensor) -> Tensor:
        if use_batch:
            return F.batch_norm(t, None, None, training=True, eps=eps)
        return F.batch_norm(t, mean, variance, eps=eps)

    n = linearised(normalise, x) if x.requires_grad else normalise(x)
    return _affine(n, weight, bias, (1, -1, *(1,) * (x.dim() - 2)))


def _instance_norm(  # noqa: PLR0913, PLR0917 - torch's signature
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    use_input_stats: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, variance, False, momentum, eps)
    return _group_norm(x, x.shape[1], weight, bias, eps)


def _layer_norm(
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _affine(_frozen(lambda t: F.layer_norm(t, shape, eps=eps), x), weight, bias, shape)


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _affine(_frozen(lambda t: F.rms_norm(t, shape, eps=eps), x), weight, None, shape)


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return _affine(_frozen(lambda t: F.group_norm(t, groups, eps=eps), x), weight, bias, shape)


def _frozen(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return linearised(f, x) if x.requires_grad else f(x)


def _attention(  # noqa: PLR0913 - torch's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = _frozen(lambda t: torch.ops.aten._safe_softmax(t, -1), scores)
    if dropout_p:
        weights = weights * torch.dropout(torch.ones_like(weights), dropout_p, True)
    return weights @ v


def _einsum(equation: str, *operands: Any, path: Any = None) -> Tensor:  # noqa: ARG001 - torch's order of contraction
    """A product of its operands; what stands in it more than once is no product with itself."""
    factors = list(operands[0]) if isinstance(operands[0], (tuple, list)) else list(operands)
    for x in factors:
        places = [i for i, y in enumerate(factors) if y is x]
        if len(places) > 1 and x.requires_grad:
            point = x.detach()
            still = [point if i in places else y for i, y in enumerate(factors)]
            moving = [[x if i == place else y for i, y in enumerate(still)] for place in places]
            terms = [_einsum(equation, *part) for part in moving]
            return sum(terms[1:], terms[0]) - (len(places) - 1) * _einsum(equation, *still)
    return torch.einsum(equation, *factors)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * linearised(torch.sigmoid, b)


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    shape = (1, -1, *(1,) * (x.dim() - 2)) if weight.numel() > 1 else (1,)
    return x.clamp(min=0) + weight.view(shape) * x.clamp(max=0)


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x + weight * (end - x)


_APART: dict[str, Callable[..., Tensor]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "glu": _glu,
    "prelu": _prelu,
    "lerp": _lerp,
}
