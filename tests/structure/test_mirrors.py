"""Attributes of torch's modules say what their tensors are after a cut, read by forward or not."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from apoptosis.structure import Plan, cut, trace

BESIDE = {"training", "_is_hf_initialized"}


def says(module: nn.Module) -> dict[str, Any]:
    """Numbers and shapes among the attributes of a module."""
    kinds = (int, tuple, list)
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k not in BESIDE}


class Read(nn.Module):
    """A layer whose weights are read by somebody else, between two linear ones: its own forward never runs."""

    def __init__(self, own: nn.Module, read: Callable[[Any, Tensor], Tensor], ends: int) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(5, 8), own
        self.last = nn.Linear(ends, 3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(self.own, self.first(x)))


@dataclass(frozen=True)
class Case:
    id: str
    made: Callable[[int, int], nn.Module]
    """The layer as torch's constructor makes it, of so many inputs and outputs."""
    read: Callable[[Any, Tensor], Tensor]
    outputs: int = 6


def _depthwise(own: Any, x: Tensor) -> Tensor:
    rows = x.transpose(1, 2)
    return F.conv1d(rows, own.weight, own.bias, padding=1, groups=rows.shape[1]).transpose(1, 2)


def _turned(own: Any, x: Tensor) -> Tensor:
    rows = x.transpose(1, 2)
    out = F.conv_transpose1d(rows, own.weight, own.bias, padding=1, groups=rows.shape[1])
    return out.transpose(1, 2)


def _convolved(own: Any, x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), own.weight, own.bias, padding=1).transpose(1, 2)


def _normed(own: Any, x: Tensor) -> Tensor:
    return (x * own.weight.exp() + own.bias) * own.running_var.rsqrt()


CASES = [
    Case("linear", nn.Linear, lambda m, x: F.linear(x, m.weight, m.bias)),
    Case("convolution", lambda i, o: nn.Conv1d(i, o, 3, padding=1), _convolved),
    Case("depthwise", lambda i, _: nn.Conv1d(i, i, 3, padding=1, groups=i), _depthwise, 8),
    Case("two each", lambda i, _: nn.Conv1d(i, 2 * i, 3, padding=1, groups=i), _depthwise, 16),
    Case(
        "depthwise, transposed",
        lambda i, _: nn.ConvTranspose1d(i, i, 3, padding=1, groups=i),
        _turned,
        8,
    ),
    Case("batch norm", lambda i, _: nn.BatchNorm1d(i), _normed, 8),
    Case("layer norm", lambda i, _: nn.LayerNorm(i), lambda m, x: x * m.weight + m.bias, 8),
    Case("rms norm", lambda i, _: nn.RMSNorm(i), lambda m, x: x * m.weight, 8),
    Case("group norm", lambda i, _: nn.GroupNorm(1, i), lambda m, x: x * m.weight + m.bias, 8),
    Case("prelu", lambda i, _: nn.PReLU(i), lambda m, x: x.relu() - m.weight * (-x).relu(), 8),
    Case("embedding", lambda _, o: nn.Embedding(4, o), lambda m, x: x[..., :1] + m.weight[2], 6),
    Case("bag", lambda _, o: nn.EmbeddingBag(4, o), lambda m, x: x[..., :1] + m.weight[2], 6),
]


def half(model: nn.Module, x: Any) -> Plan:
    structure = trace(model, x)
    return structure.plan({g.name: range(0, g.size, 2) for g in structure.groups if g.size > 2})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_layer_that_is_never_called_says_what_it_holds(case: Case) -> None:
    model = Read(case.made(8, case.outputs), case.read, case.outputs).eval()
    before, x = copy.deepcopy(says(model.own)), torch.randn(2, 7, 5)
    plan = half(model, x)
    small = cut(model, plan)
    assert says(small.own) == says(case.made(4, case.outputs // 2)) != before
    assert says(model.own) == before
    assert small(x).shape == (2, 7, 3)
    assert says(cut(model, Plan.from_json(plan.to_json())).own) == says(small.own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_so_it_does_after_a_second_cut(case: Case) -> None:
    model = Read(case.made(8, case.outputs), case.read, case.outputs).eval()
    structure = trace(model, torch.randn(2, 7, 5))
    one = structure.plan({g.name: range(g.size - 2) for g in structure.groups if g.size > 2})
    two = structure.after(one)
    two_plan = two.plan({g.name: range(g.size - 2) for g in two.groups if g.size > 2})
    in_two = cut(cut(model, one), two_plan)
    at_once = cut(model, one.then(two_plan))
    assert says(in_two.own) == says(at_once.own) == says(case.made(4, case.outputs - 4))


def test_parts_of_groups_leave_their_number() -> None:
    """Outputs within the groups of a convolution go, evenly: there are as many groups as before."""
    own = nn.Conv1d(8, 16, 3, padding=1, groups=4)

    def read(m: Any, x: Tensor) -> Tensor:
        return F.conv1d(x.transpose(1, 2), m.weight, m.bias, padding=1, groups=4).transpose(1, 2)

    model = Read(own, read, 16).eval()
    structure = trace(model, torch.randn(2, 7, 5))
    group = next(group for group in structure.groups if "own" in group.name)
    small = cut(model, structure.plan({group.name: range(group.size // 2)}))
    assert small.own.groups == 4
    assert small.own.out_channels == small.own.weight.shape[0] == 8


def test_a_normalised_weight_counts_its_groups_too() -> None:
    own = weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=8), dim=0)
    model = Read(own, _depthwise, 8).eval()
    small = cut(model, half(model, torch.randn(2, 7, 5)))
    assert (small.own.groups, small.own.in_channels, small.own.out_channels) == (4, 4, 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_say_what_they_hold(kind: type[nn.RNNBase]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own, self.last = nn.Linear(5, 8), kind(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.own(self.first(x))[0])

    model = Net().eval()
    small = cut(model, half(model, torch.randn(7, 2, 5)))
    expected = says(kind(4, 3))
    assert {k: says(small.own)[k] for k in ("input_size", "hidden_size", "proj_size")} == {
        k: expected[k] for k in ("input_size", "hidden_size", "proj_size")
    }


def test_a_transformer_knows_its_width() -> None:
    model = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True).eval()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.own, self.down = nn.Linear(5, 8), model, nn.Linear(8, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.down(self.own(self.up(x), self.up(y)))

    net, x = Net().eval(), (torch.randn(2, 4, 5), torch.randn(2, 3, 5))
    structure = trace(net, x)
    stream = next(g for g in structure.groups if g.name == "up")
    small = cut(net, structure.plan({"up": range(stream.size - 2)}))
    attention = small.own.encoder.layers[0].self_attn
    assert (small.own.d_model, attention.embed_dim, attention.kdim, attention.vdim) == (6, 6, 6, 6)
    assert small(*x).shape == (2, 3, 3)
