"""Dropout inside an attention drops the weights that torch drops, and scales what stays as torch does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.curvature import KINDS, curvature_product, reference_product
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close
from oracles.evaluation import random_direction

WIDTH, HEADS, LENGTH = 12, 2, 3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.4},
    "masked": {"attn_mask": torch.tensor([[True, False, True], [True] * 3, [False, True, True]])},
    "biased": {"attn_mask": torch.tensor([[0.3, -1.0, 0.2]] * 3, dtype=torch.float64)},
}


def network(*, fused: bool, p: float, options: dict[str, Any]) -> nn.Module:
    """Attention by torch's function, or written out with dropout of ones: the same numbers are drawn."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)
        scores = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
        mask = options.get("attn_mask")
        if options.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        return (weights * torch.dropout(torch.ones_like(weights), p, True)) @ v

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x).view(len(x), LENGTH, HEADS, -1).transpose(1, 2)
        q, k, v = h, h.tanh(), h**2
        return m.head(attend(q, k, v).transpose(1, 2).flatten(1))

    return built(
        lambda: Net(forward, stem=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH, CLASSES)), train=True
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_product_is_that_of_the_attention_written_out(name: str, p: float) -> None:
    fused, spelled = (network(fused=f, p=p, options=CASES[name]) for f in (True, False))
    delta, batch = random_direction(fused), rows(4)
    asked: dict[str, Any] = {"kind": "hessian", "direction": delta, "gradient": True}
    found = curvature_product(fused, [batch], **asked)
    want = reference_product(spelled, [batch], **asked)
    assert_products_close(found.gradient, want.gradient, tolerance=EXACT)
    assert_products_close(found.product, want.product, tolerance=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drops_the_same(kind: str) -> None:
    fused, spelled = (network(fused=f, p=0.4, options={}) for f in (True, False))
    found = curvature_product(fused, [rows(4)], kind=kind).product
    want = curvature_product(spelled, [rows(4)], kind=kind).product
    assert_products_close(found, want, tolerance=EXACT)
