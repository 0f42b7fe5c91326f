"""Functions with bounds are zero at zero exactly where they are: bounds above, at and below 0 are told apart."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from oracles.building import Net, built


@dataclass(frozen=True)
class Function:
    id: str
    of: Callable[[Tensor], Tensor]


BOUNDS = (-0.25, 0.0, 0.25)
FUNCTIONS = [
    *(
        Function(
            f"threshold({limit}, {instead})", lambda y, t=limit, v=instead: F.threshold(y, t, v)
        )
        for limit in BOUNDS
        for instead in BOUNDS
    ),
    *(
        Function(f"clamp({low}, {high})", lambda y, a=low, b=high: y.clamp(a, b))
        for low in (None, -0.75, *BOUNDS)
        for high in (*BOUNDS, 0.75, None)
        if (low, high) != (None, None) and (low is None or high is None or low < high)
    ),
    *(
        Function(f"hardtanh({low}, {high})", lambda y, a=low, b=high: F.hardtanh(y, a, b))
        for low in (-0.75, *BOUNDS)
        for high in (*BOUNDS, 0.75)
        if low < high
    ),
    *(Function(f"clamp_min({n})", lambda y, n=n: torch.clamp_min(y, n)) for n in BOUNDS),
    *(Function(f"clamp_max({n})", lambda y, n=n: torch.clamp_max(y, n)) for n in BOUNDS),
    *(Function(f"|y| to the {n}", lambda y, n=n: y.abs().pow(n)) for n in (0.5, 1, 2)),
    Function("1 to the y", lambda y: torch.pow(2.0, y)),
    *(
        Function(f"masked_fill({n})", lambda y, n=n: y.masked_fill(_mask_like(y), n))
        for n in (0.0, 0.5)
    ),
    *(
        Function(f"where(mask, y, {n})", lambda y, n=n: torch.where(_mask_like(y), y, n))
        for n in (0.0, 0.5)
    ),
    *(
        Function(f"where(mask, {n}, y)", lambda y, n=n: torch.where(_mask_like(y), n, y))
        for n in (0.0, 0.5)
    ),
    Function("where of two", lambda y: torch.where(_mask_like(y), y, 2 * y)),
    Function("where of what is not zero", lambda y: torch.where(_mask_like(y), y, y.cos())),
]


def _mask_like(y: Tensor) -> Tensor:
    """Some places of a dimension that no unit stands in."""
    return (torch.arange(y.shape[1]) % 2 == 0)[None, :, None]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.id)
def test_a_sum_over_units_is_exact_where_the_function_is_zero_at_zero(function: Function) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y * function.of(y).sum(-1, keepdim=True))

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    zero_at_zero = not function.of(torch.zeros(1, 5, 1, dtype=torch.float64)).any()
    structure = ap.trace(model, x)
    assert structure["a"].exact == zero_at_zero, structure["a"].inexact_because
    plan = structure.plan({"a": [0, 2, 5]})
    difference = (ap.cut(model, plan)(x) - ap.zero(model, plan)(x)).abs().max()
    assert difference < 1e-12 if zero_at_zero else difference > 1e-4
