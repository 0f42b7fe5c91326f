"""What an operation picks out of a tensor carries the tangent of the entries picked, with dimensions said or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import curvature_product, reference_product
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close

WIDTH = 6
PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort()[0],
    "sort downwards": lambda x: x.sort(descending=True)[0],
    "sort of rows": lambda x: x.sort(0)[0],
    "sort, dim by name": lambda x: x.sort(dim=0)[0],
    "topk": lambda x: x.topk(3)[0],
    "topk of rows": lambda x: x.topk(3, 0)[0],
    "topk by name": lambda x: x.topk(k=2, dim=0, largest=False)[0],
    "kthvalue": lambda x: x.kthvalue(2)[0][:, None] * x,
    "kthvalue of rows": lambda x: x.kthvalue(3, 0)[0] * x,
    "kthvalue kept": lambda x: x.kthvalue(2, keepdim=True)[0] * x,
    "kthvalue of rows kept": lambda x: x.kthvalue(2, 0, True)[0] * x,
    "median": lambda x: x.median(1)[0][:, None] * x,
    "median kept": lambda x: x.median(0, keepdim=True)[0] * x,
    "max": lambda x: x.max(0)[0] * x,
    "min kept": lambda x: x.min(-1, keepdim=True)[0] * x,
    "mode": lambda x: x.mode(0)[0] * x,
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(-1)[0],
}


def padded(x: Tensor) -> Tensor:
    """Squares, as wide as the head wants them."""
    y = (x**2).reshape(-1)
    return torch.cat([y, y.new_ones(5 * WIDTH)])[: 5 * WIDTH].view(5, WIDTH)


@pytest.mark.parametrize("name", PICKS)
def test_products_are_those_of_the_reference(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(padded(PICKS[name](m.stem(x))) * m.stem(x))

    model = built(lambda: Net(forward, stem=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH, CLASSES)))
    found = curvature_product(model, [rows(5)], kind="hessian", gradient=True)
    want = reference_product(model, [rows(5)], kind="hessian", gradient=True)
    assert_products_close(found.gradient, want.gradient, tolerance=EXACT)
    assert_products_close(found.product, want.product, tolerance=EXACT)
