"""A query that may look at nothing gives zeros, whatever kind of mask says so; its neighbours are not touched."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.curvature import KINDS, curvature_product, reference_product
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close

WIDTH, HEADS, LENGTH = 16, 2, 4
INF = float("inf")
SEES = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()
BIAS = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~SEES, -INF)
MASKS: dict[str, Tensor] = {
    "bool": SEES,
    "float": BIAS,
    "float of several sizes": BIAS + torch.linspace(-1, 1, LENGTH, dtype=torch.float64),
    "by head": torch.stack([BIAS, BIAS.flip(0)]),
    "by sample": torch.stack([BIAS, BIAS.flip(0), BIAS.flip(1), BIAS])[:, None],
    "by sample, bool": torch.stack([SEES, SEES.flip(0), SEES.flip(1), SEES])[:, None],
}


def network(mask: Tensor, p: float) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x).view(len(x), LENGTH, HEADS, -1).transpose(1, 2)
        q, k, v = h[..., :1], h[..., :1].tanh(), h[..., 1:] ** 2
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return m.head((y + 0.1 * v).transpose(1, 2).flatten(1))

    return built(
        lambda: Net(forward, stem=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH // 2, CLASSES)),
        train=True,
    )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["hessian", "connectivity"])
def test_products_are_those_of_the_reference(name: str, p: float, kind: str) -> None:
    """Queries and keys have one coordinate, so that lengths and widths are not mistaken for each other."""
    assert set(KINDS) >= {"hessian", "connectivity"}
    model = network(MASKS[name], p)
    asked: dict[str, Any] = {"kind": kind, "gradient": True}
    found = curvature_product(model, [rows(4)], **asked)
    want = reference_product(model, [rows(4)], **asked)
    assert all(own.isfinite().all() for own in found.product.values())
    assert_products_close(found.gradient, want.gradient, tolerance=EXACT)
    assert_products_close(found.product, want.product, tolerance=EXACT)


def test_a_learned_bias_may_blind_a_query() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x).view(len(x), LENGTH, -1)[:, None]
        bias = m.bias.weight.masked_fill(~SEES, -INF)
        y = F.scaled_dot_product_attention(h, h.tanh(), h, attn_mask=bias)
        return m.head(y.flatten(1))

    model = built(
        lambda: Net(
            forward,
            stem=nn.Linear(4, WIDTH),
            head=nn.Linear(WIDTH, CLASSES),
            bias=nn.Linear(LENGTH, LENGTH, bias=False),
        )
    )
    found = curvature_product(model, [rows(4)], kind="hessian", gradient=True)
    want = reference_product(model, [rows(4)], kind="hessian", gradient=True)
    assert_products_close(found.gradient, want.gradient, tolerance=EXACT)
    assert_products_close(found.product, want.product, tolerance=EXACT)
