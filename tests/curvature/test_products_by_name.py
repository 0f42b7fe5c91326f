"""A product whose factors are given by name is the same product, in every kind: it is not a curved function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import KINDS, curvature_product
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close

WIDTH = 6
SPELLINGS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "matmul": (lambda x, y: torch.matmul(x, y), lambda x, y: torch.matmul(input=x, other=y)),
    "matmul, one by name": (lambda x, y: torch.matmul(x, y), lambda x, y: torch.matmul(x, other=y)),
    "mm": (lambda x, y: torch.mm(x, y), lambda x, y: torch.mm(input=x, mat2=y)),
    "addmm": (
        lambda x, y: torch.addmm(x, x, y, beta=1),
        lambda x, y: torch.addmm(input=x, mat1=x, mat2=y),
    ),
    "addmm, weighed": (
        lambda x, y: 0.5 * x + 2 * (x @ y),
        lambda x, y: torch.addmm(x, mat2=y, mat1=x, beta=0.5, alpha=2),
    ),
    "mul": (lambda x, _y: torch.mul(x, x.sin()), lambda x, _y: torch.mul(input=x, other=x.sin())),
}


def network(spelling: Callable[..., Tensor]) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x)
        return m.head(spelling(h, h.t() @ h.tanh()))

    return built(lambda: Net(forward, stem=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH, CLASSES)))


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_names_change_nothing(name: str, kind: str) -> None:
    plain, named = (curvature_product(network(own), [rows()], kind=kind) for own in SPELLINGS[name])
    assert_products_close(named.product, plain.product, tolerance=EXACT, scale=1e-3)
