"""Numbers that a model's code makes of a width: what their change does is made good in the rows of the queries."""

from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}


class Attention(nn.Module):
    """Three layers, two heads, and a width of heads that views and a number are made of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.width = how, 6
        if how in ("fused", "turned"):
            self.qkv = nn.Linear(8, 36)
        else:
            self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 12)
        if how == "convolution":
            self.conv = nn.Conv1d(8, 12, 1)
        elif how not in ("fused", "turned"):
            self.q = nn.Linear(8, 12)
        self.o = nn.Linear(12, 5)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.width).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():  # what stands in the way of a program
            x = x * mask[..., None]
        if self.how in ("fused", "turned"):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, self.width).transpose(1, 3).unbind(2)
        elif self.how == "convolution":
            q = self.conv(x.transpose(1, 2)).transpose(1, 2)
            q, k, v = self.split(q), self.split(self.k(x)), self.split(self.v(x))
        else:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if self.how == "turned":
            angle = torch.arange(x.shape[1]).to(x)[:, None]
            q, k = (t * angle.cos() + (-t) * angle.sin() for t in (q, k))
        if self.how in ("fused", "turned", "fused kernel"):
            mixed = F.scaled_dot_product_attention(q, k, v, scale=self.width**-0.5)
        elif self.how == "before":
            mixed = (q * self.width**-0.5 @ k.transpose(-1, -2)).softmax(-1) @ v
        elif self.how == "no root":
            mixed = (q @ k.transpose(-1, -2) / float(self.width)).softmax(-1) @ v
        else:
            mixed = (q @ k.transpose(-1, -2) / sqrt(self.width)).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).contiguous().flatten(2))


def example() -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, -1] = False
    return torch.randn(2, 4, 8, dtype=torch.float64), mask


def widths(structure: ap.Structure) -> list[str]:
    kinds = ("head_dim", "qk_dim", "v_dim")
    return [group.name for group in structure.groups if group.kind in kinds]


HOW = ["after", "before", "no root", "fused kernel", "fused", "convolution", "turned"]


@pytest.mark.parametrize("how", HOW)
def test_the_queries_make_good_for_the_number(how: str) -> None:
    torch.manual_seed(0)
    model, inputs = Attention(how).double().eval(), example()
    structure = ap.trace(model, inputs)
    plan = structure.plan({name: [0, 2, 3, 5] for name in widths(structure)})
    assert plan.delivery == "module", plan.delivery_because
    assert plan.scalings
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    longer = (torch.randn(3, 7, 8).double(), torch.ones(3, 7).bool())
    for batch in (inputs, longer):
        torch.testing.assert_close(small(*batch), twin(*batch), **TOLERANCE)

    later = structure.after(plan)
    more = plan.then(later.plan({name: [1, 2] for name in widths(structure)}))
    torch.testing.assert_close(
        ap.cut(model, more)(*longer), ap.zero(model, more)(*longer), **TOLERANCE
    )


def test_one_head_that_is_left_needs_no_copy_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model, inputs = Attention("after").double().eval(), example()
    structure = ap.trace(model, inputs)
    heads = next(group.name for group in structure.groups if group.kind == "head")
    plan = structure.plan({heads: [1]} | {name: [0, 2, 3, 5] for name in widths(structure)})
    assert plan.delivery == "module", plan.delivery_because
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    torch.testing.assert_close(small(*inputs), twin(*inputs), **TOLERANCE)


def test_heads_alone_need_no_scaling() -> None:
    model, inputs = Attention("after").double().eval(), example()
    structure = ap.trace(model, inputs)
    heads = next(group.name for group in structure.groups if group.kind == "head")
    assert structure.plan({heads: [1]}).scalings == ()


def test_a_number_that_is_no_power_of_the_width_is_refused() -> None:
    class Odd(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask) * (1 + self.width / 7)

    model, inputs = Odd("after").double().eval(), example()
    structure = ap.trace(model, inputs)
    with pytest.raises(ap.errors.PlanMismatchError, match="own code cannot run this plan"):
        structure.plan({name: [0, 2, 3, 5] for name in widths(structure)})


class Shared(Attention):
    """Others read the queries, and on request the keys."""

    both = False

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x, mask) + self.q(x).abs().sum(-1, keepdim=True)
        return out + self.k(x).abs().sum(-1, keepdim=True) if self.both else out


def test_keys_are_scaled_where_others_read_the_queries() -> None:
    torch.manual_seed(0)
    model, inputs = Shared("after").double().eval(), example()
    structure = ap.trace(model, inputs)
    plan = structure.plan({name: [0, 2, 3, 5] for name in widths(structure)})
    assert {name for scaling in plan.scalings for name in scaling.names} == {"k.weight", "k.bias"}
    small, twin = ap.cut(model, plan), ap.zero(model, plan)
    torch.testing.assert_close(small(*inputs), twin(*inputs), **TOLERANCE)


def test_where_others_read_both_the_plan_is_refused() -> None:
    model, inputs = Shared("after").double().eval(), example()
    model.both = True
    structure = ap.trace(model, inputs)
    with pytest.raises(ap.errors.PlanMismatchError, match="own code cannot run this plan"):
        structure.plan({name: [0, 2, 3, 5] for name in widths(structure)})
