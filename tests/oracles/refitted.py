"""What tests of refits share: data without labels, networks that lost half of their units, how far off they are."""

import torch
from torch import Tensor, nn

from apoptosis.structure import Plan, cut, trace

__all__ = ["CLOSE", "error", "halved", "normal", "unlabelled"]

CLOSE = {"rtol": 1e-8, "atol": 1e-10}
"""Normal equations square the condition of the data, in float64."""


def normal(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unlabelled(x: Tensor, *sizes: int) -> list[tuple[Tensor, None]]:
    return [(part, None) for part in x.split(sizes or (len(x),))]


def halved(model: nn.Module, x: Tensor, *names: str) -> tuple[Plan, nn.Module]:
    """Every group of those names, or every exact one, loses the second half of its units."""
    structure = trace(model, x[:2])
    groups = [g for g in structure.groups if g.name in names or (not names and g.exact)]
    plan = structure.plan({g.name: range((g.size + 1) // 2) for g in groups})
    return plan, cut(model, plan)


def error(small: nn.Module, dense: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((small.eval()(x) - dense.eval()(x)).square().mean())
