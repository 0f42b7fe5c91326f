"""What a unit is, read off its use: the same network written in two ways has the same kinds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure import KINDS
from oracles.building import Net
from oracles.shrinking import small_case

EXPECTED = {
    "mlp": {"0": "hidden", "2": "hidden"},
    "residual": {"stem.0": "stream", "blocks.0.conv1": "channel", "blocks.1.conv1": "channel"},
    "fused": {
        "embed": "stream",
        "parts.0.qkv:head": "head",
        "parts.0.qkv:head_dim": "head_dim",
    },
    "separate": {
        "embed": "stream",
        "parts.0.q:head": "head",
        "parts.0.q:qk_dim": "qk_dim",
        "parts.0.v:v_dim": "v_dim",
    },
    "gqa": {
        "embed": "stream",
        "parts.0.q:kv_head": "kv_head",
        "parts.0.q:query_head": "query_head",
        "parts.0.q:qk_dim": "qk_dim",
        "parts.0.v:v_dim": "v_dim",
    },
    "glu": {"embed": "stream", "parts.0.both": "hidden"},
    "experts": {"embed": "stream", "parts.0.up": "hidden"},
    "recurrent": {"cell.weight_ih_l0": "hidden"},
    "tied": {"words": "stream", "inner": "hidden"},
}


@pytest.mark.parametrize("id", EXPECTED)
def test_networks_have_the_kinds_their_authors_would_name(id: str) -> None:
    case = small_case(id)
    structure = ap.trace(case.model(), case.inputs())
    assert {g.name: g.kind for g in structure.groups} == EXPECTED[id]
    assert {g.kind for g in structure.groups} <= set(KINDS)


def kinds(forward, x: Tensor, **parts: nn.Module) -> set[str]:
    return {g.kind for g in ap.trace(Net(forward, **parts), x).groups}


def projections(num: int = 3) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8) for name in "qkvo"[: num + 1]}


def split(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, -1).transpose(1, 2)


ATTENTION = {
    "fused kernel": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "matmul": lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "with a mask": lambda q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(torch.eye(4) > 0, -9.0), -1) @ v
    ),
    "with dropout": lambda q, k, v: F.dropout(torch.softmax(q @ k.mT + 1, -1), 0.1, False) @ v,
}


@pytest.mark.parametrize("how", ATTENTION)
def test_attention_is_known_by_what_it_does(how: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        mixed = ATTENTION[how](split(net.q(x)), split(net.k(x)), split(net.v(x)))
        return net.o(mixed.transpose(1, 2).flatten(2))

    assert kinds(forward, torch.randn(3, 4, 8), **projections()) == {"head", "qk_dim", "v_dim"}


def test_a_softmax_of_one_layer_is_no_attention() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.v(torch.softmax(net.q(x), 1) * net.k(x))

    assert kinds(forward, torch.randn(3, 4, 8), **projections(2)) == {"hidden"}


def test_an_addition_within_a_layer_is_no_stream() -> None:
    """tanh's GELU adds x³ to x; both were made by one layer."""

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.q(x)
        return net.k(y * torch.sigmoid(y + 0.04 * y**3))

    assert kinds(forward, torch.randn(3, 8), **projections(1)) == {"hidden"}


def test_a_channel_is_what_a_convolution_makes_even_behind_a_linear_layer() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x).relu().flatten(1))

    assert kinds(forward, torch.randn(2, 3, 4, 4), a=nn.Conv2d(3, 5, 3), b=nn.Linear(20, 2)) == {
        "channel"
    }
