"""Operations without a usable derivative of their backward in torch, taken apart into ones that have it.

`_weight_norm`'s double backward is wrong, `cdist`'s and `pdist`'s is missing; the generic path would inherit that. As
one operation each they are frozen in `connectivity`.
"""

from dataclasses import replace
from typing import Any

import torch

from apoptosis.curvature.duals import Dual, lift
from apoptosis.curvature.fallback import apply_any
from apoptosis.curvature.rules import inputs, sample, tangent_rule
from apoptosis.curvature.rules_linear import apply_linear, sub
from apoptosis.curvature.rules_pointwise import pointwise, power
from apoptosis.curvature.rules_product import mul
from apoptosis.curvature.switches import Switches

__all__: list[str] = []


def _as_one(kept: Switches) -> Switches:
    """One operation: all of its curvature or none."""
    return replace(kept, upper=kept.curved, lower=kept.curved, parallel=kept.curved)


@tangent_rule(
    "_weight_norm",
    family="composite",
    samples=lambda: [
        sample(*inputs((3, 2, 2), (3, 1, 1)), 0),
        sample(inputs((3, 2))[0], inputs(())[0], -1),
    ],
)
def weight_norm(kept: Switches, v: Any, g: Any, dim: int = 0) -> Dual:
    """g·v/‖v‖, the norm over all dimensions but one."""
    kept, v = _as_one(kept), lift(v)
    others = [d for d in range(v.value.dim()) if d != dim]
    squares = apply_linear(kept, torch.sum, (power(kept, v, 2), others, True), {})
    return mul(kept, v, mul(kept, g, pointwise(kept, "rsqrt", squares)))


@tangent_rule(
    "cdist",
    family="composite",
    samples=lambda: [
        sample(*inputs((2, 3, 4), (2, 5, 4))),
        sample(*inputs((3, 4), (5, 4)), 1.0),
        sample(*inputs((3, 4), (5, 4)), 3.0),
    ],
)
def cdist(kept: Switches, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Dual:  # noqa: ARG001
    """‖x − y‖ for all pairs of rows."""
    left, right = lift(x1), lift(x2)
    gaps = sub(kept, _unsqueezed(left, -2), _unsqueezed(right, -3))
    return apply_any(_as_one(kept), torch.linalg.vector_norm, (gaps, p, -1), {})[0]


def _unsqueezed(x: Dual, dim: int) -> Dual:
    tangent = None if x.tangent is None else x.tangent.unsqueeze(dim)
    return Dual(x.value.unsqueeze(dim), tangent, x.weight)


@tangent_rule("pdist", family="composite", samples=lambda: [sample(inputs((4, 3))[0])])
def pdist(kept: Switches, x: Dual, p: float = 2.0) -> Dual:
    """‖xᵢ − xⱼ‖ for i < j."""
    rows, columns = torch.triu_indices(len(x.value), len(x.value), 1, device=x.value.device)
    left = apply_linear(kept, torch.index_select, (x, 0, rows), {})
    right = apply_linear(kept, torch.index_select, (x, 0, columns), {})
    gaps = sub(kept, left, right)
    return apply_any(_as_one(kept), torch.linalg.vector_norm, (gaps, p, -1), {})[0]
