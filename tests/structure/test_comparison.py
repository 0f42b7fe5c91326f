"""Modules whose code computes something else at another size, in ways that shapes do not show, are never accepted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap


class Net(nn.Module):
    """Two layers, and a forward that a test gives."""

    def __init__(self, forward: Callable[["Net", Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(6, 16, bias=bias),
            nn.Linear(16, 3, bias=bias),
            nn.Linear(16, 3),
        )
        self.light, self.heavy = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(5.0))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def by_a_constant(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.b(h) / torch.sqrt(torch.tensor(h.shape[-1], dtype=x.dtype))


def by_a_list(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.b(h) * torch.tensor([1 / h.shape[-1]], dtype=x.dtype)


def by_a_filled_tensor(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.b(h) / torch.empty(1, dtype=x.dtype).fill_(h.shape[-1])


def by_a_number(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.b(h) / h.shape[-1]


def by_order(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    u, v = net.b(h), net.c(h)
    if h.shape[-1] < 16:
        u, v = v, u
    return u - v


def by_another_parameter(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.b(h) * (net.light if h.shape[-1] > 8 else net.heavy)


def by_a_cast(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    h = h.to(torch.int64).to(x.dtype) if h.shape[-1] < 16 else h
    return net.b(h)


def by_a_branch(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h.abs() if h.shape[-1] < 16 else h)


CODES = [
    by_a_constant,
    by_a_list,
    by_a_filled_tensor,
    by_a_number,
    by_order,
    by_another_parameter,
    by_a_cast,
    by_a_branch,
]


@pytest.mark.parametrize("example", [torch.zeros, torch.ones], ids=["zeros", "ones"])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_what_depends_on_a_size_is_delivered_right(code: Any, example: Any) -> None:
    model = Net(code, bias=False).double().eval()
    structure = ap.trace(model, example(2, 6, dtype=torch.float64))
    plan = structure.plan({"a": range(4)})
    assert plan.delivery == "program"
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x))


def test_plain_code_is_accepted() -> None:
    model = Net(lambda net, x: net.b(net.a(x).relu().to(x.dtype).contiguous())).double()
    plan = ap.trace(model, torch.zeros(2, 6, dtype=torch.float64)).plan({"a": range(4)})
    assert plan.delivery == "module"


class Doubled(nn.MultiheadAttention):
    """Attention with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * 2, weights


def test_a_subclass_of_attention_keeps_its_forward() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Doubled(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model = Block().double().eval()
    structure = ap.trace(model, torch.randn(2, 5, 16, dtype=torch.float64))
    (heads,) = [group for group in structure.groups if group.kind == "head"]
    plan = structure.plan({heads.name: [0, 2]})
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x))
