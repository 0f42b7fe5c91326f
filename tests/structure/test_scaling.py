"""The √d of attention without a scale: folded into the rows that make the queries, exactly, or not at all."""

from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from oracles.building import Net, built
from oracles.shrinking import small_case

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
FUSED = small_case("fused")
WIDTH = "parts.0.qkv:head_dim"


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_rows_of_the_queries_and_no_others_are_scaled() -> None:
    model, x = FUSED.model(), FUSED.inputs()
    plan = ap.trace(model, x).plan({WIDTH: [0, 2, 3]})
    assert plan.delivery == "module", plan.delivery_because
    small = ap.cut(model, plan)
    # (3, heads, width) rows: queries first. Two heads of four, of which three stay.
    whole = model.parts[0].qkv.weight.view(3, 2, 4, 8)[:, :, [0, 2, 3]]
    expected = torch.cat([whole[:1] * sqrt(3 / 4), whole[1:]]).flatten(0, 2)
    torch.testing.assert_close(small.parts[0].qkv.weight, expected, rtol=1e-15, atol=0)
    bias = model.parts[0].qkv.bias.view(3, 2, 4)[:, :, [0, 2, 3]]
    expected = torch.cat([bias[:1] * sqrt(3 / 4), bias[1:]]).flatten()
    torch.testing.assert_close(small.parts[0].qkv.bias, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_heads_need_no_scaling() -> None:
    model, x = FUSED.model(), FUSED.inputs()
    assert ap.trace(model, x).plan({"parts.0.qkv:head": [1]}).scalings == ()


def test_a_program_writes_the_old_scale_out_instead() -> None:
    model, x = FUSED.model(), FUSED.inputs()
    structure = ap.trace(model, x)
    plan = structure.plan({WIDTH: [0, 2, 3]})
    object.__setattr__(plan, "scalings", ())
    program = structure.program(model, plan)
    torch.testing.assert_close(program(x), ap.zero(model, plan)(x), **TOLERANCE)
    assert torch.equal(
        program.parts.get_parameter("0.qkv.weight")[:3], model.parts[0].qkv.weight[[0, 2, 3]]
    )


def test_a_scale_of_its_own_is_left_alone() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for part in (net.q, net.k, net.v)
        )
        return net.o(F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2))

    model = built(lambda: Net(forward, **{n: nn.Linear(8, 8) for n in "qkv"}, o=nn.Linear(8, 8)))
    x = numbers(2, 4, 8)
    plan = ap.trace(model, x).plan({"q:qk_dim": [0, 2, 3]})
    assert plan.delivery == "module"
    assert plan.scalings == ()
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


SHARED = [
    "queries read elsewhere",
    "queries changed on the way",
    "queries are the keys",
    "a projection used twice",
]


@pytest.mark.parametrize("how", SHARED)
def test_where_rows_make_more_than_queries_a_program_is_made(how: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for part in (net.q, net.k, net.v)
        )
        other: Tensor | float = 0.0
        if how == "queries read elsewhere":
            other = (q * q.tanh()).sum((1, 3))[..., None]
        if how == "queries changed on the way":
            q = q.tanh()
        if how == "queries are the keys":
            k = q
        if how == "a projection used twice":
            k = net.q(x.flip(1)).view(*x.shape[:2], 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return net.o(y) + other

    model = built(lambda: Net(forward, **{n: nn.Linear(8, 8) for n in "qkv"}, o=nn.Linear(8, 8)))
    x = numbers(2, 4, 8)
    structure = ap.trace(model, x)
    group = next(g for g in structure.groups if g.kind == "qk_dim" and g.exact)
    plan = structure.plan({group.name: [0, 2, 3]})
    assert plan.delivery == "program"
    assert plan.scalings == ()
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_scalings_of_two_cuts_multiply() -> None:
    model, x = FUSED.model(), FUSED.inputs()
    structure = ap.trace(model, x)
    first = structure.plan({WIDTH: [0, 2, 3]})
    second = structure.after(first).plan({WIDTH: [1]})
    both = first.then(second)
    small = ap.cut(model, both)
    rows = model.parts[0].qkv.weight.view(3, 2, 4, 8)[0, :, 2]
    torch.testing.assert_close(
        small.parts[0].qkv.weight[:2], rows * sqrt(1 / 4), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(small(x), ap.zero(model, both)(x), **TOLERANCE)
