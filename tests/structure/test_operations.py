"""Operations in a network leave free what they do not order or look up, and the cut is exact."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap


class Around(nn.Module):
    """A layer of 8 units, an operation, and a layer that reads what it gives."""

    def __init__(self, call: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.made, self.read = nn.Linear(6, 8), nn.Linear(width, 2)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.call(self.made(x)))


def halves(x: Tensor) -> Tensor:
    a, b = torch.tensor_split(x, [3], dim=-1)
    return torch.cat([torch.tanh(a), torch.relu(b)], -1)


FREE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "tensor_split": (halves, 8),
    "hsplit": (lambda x: torch.cat(torch.hsplit(x, (2, 5)), -1), 8),
    "hstack": (lambda x: torch.hstack([x, x.tanh()]), 16),
    "inner": (lambda x: torch.inner(x, x.tanh()), 4),
    "tensordot": (lambda x: torch.tensordot(x, x.tanh(), dims=([1], [1])), 4),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x)[:, None].expand(4, 3), 3),
    "cdist": (lambda x: torch.cdist(x, x.tanh()), 4),
    "pdist": (lambda x: F.pdist(input=x)[:, None].expand(6, 3), 3),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x.tanh())[:, None].expand(4, 3), 3),
    "renorm": (lambda x: torch.renorm(input=x, p=2, dim=0, maxnorm=1.0), 8),
    "norm": (lambda x: x / (1 + torch.linalg.norm(x, dim=-1, keepdim=True)), 8),
    "fourier": (lambda x: torch.fft.rfft(x, dim=0).abs()[:2], 8),
    "sort over the batch": (lambda x: torch.sort(input=x, dim=0)[0], 8),
    "msort": (lambda x: torch.msort(input=x), 8),
    "median over the batch": (lambda x: x + torch.median(input=x, dim=0)[0], 8),
    "grid_sample": (
        lambda x: F.grid_sample(
            x.T[None, :, :, None], torch.linspace(-1, 1, 8).view(1, 2, 2, 2).to(x), align_corners=False
        ).mean((2, 3)),
        8,
    ),
    "broadcast_tensors": (lambda x: torch.stack(torch.broadcast_tensors(x, x[:1])).sum(0), 8),
    "drawn in place": (lambda x: x + 0 * torch.empty_like(x).normal_(), 8),
}  # fmt: skip

WHOLE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "topk": (lambda x: torch.topk(input=x, k=3, dim=-1)[0], 3),
    "sort": (lambda x: torch.sort(input=x, dim=-1)[0], 8),
    "kthvalue": (lambda x: torch.kthvalue(input=x, k=2, dim=-1, keepdim=True)[0], 1),
    "cummax": (lambda x: torch.cummax(input=x, dim=-1)[0], 8),
    "cummin": (lambda x: torch.cummin(input=x, dim=-1)[0], 8),
    "median": (lambda x: x + torch.median(input=x), 8),
    "quantile": (lambda x: torch.quantile(input=x, q=0.5, dim=-1, keepdim=True), 1),
    "unique": (lambda x: x + torch.unique(input=x).sum(), 8),
    "fourier": (lambda x: torch.fft.fft(x, dim=-1).real, 8),
}


@pytest.mark.parametrize("name", FREE)
def test_an_axis_that_is_only_passed_stays_free(name: str) -> None:
    structure = ap.trace(Around(*FREE[name]), torch.randn(4, 6))
    assert not structure.without_rule
    assert sum(group.size for group in structure.groups if group.name.startswith("made")) == 8
    assert all(group.exact for group in structure.groups)
    checked = ap.verify(structure)
    assert checked.errors.keys() == {group.name for group in structure.groups}
    assert not checked.failed


@pytest.mark.parametrize("name", WHOLE)
def test_an_axis_that_is_ordered_stays_whole(name: str) -> None:
    structure = ap.trace(Around(*WHOLE[name]), torch.randn(4, 6))
    assert not structure.groups
    assert "made.weight" in {pin.tensor for pin in structure.pinned}


class Recurrence(nn.Module):
    """Cells, step by step, the first state made of zeros or given by the cell."""

    def __init__(self, kind: str, *, given: bool) -> None:
        super().__init__()
        self.cell = (
            nn.RNNCell(6, 8, nonlinearity="relu") if kind == "RNNCell" else getattr(nn, kind)(6, 8)
        )
        self.out, self.given = nn.Linear(8, 2), given

    def forward(self, x: Tensor) -> Tensor:
        state = None
        if self.given:
            zeros = x.new_zeros(x.shape[0], self.cell.hidden_size)
            state = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros
        for now in x.unbind(1):
            state = self.cell(now, state)
        return self.out(state[0] if isinstance(state, tuple) else state)  # type: ignore[index]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_hidden_units_of_cells_are_cut_as_modules(kind: str, given: bool) -> None:  # noqa: FBT001
    net = Recurrence(kind, given=given).double().eval()
    structure = ap.trace(net, torch.randn(2, 3, 6, dtype=torch.float64))
    assert [(g.name, g.size, g.exact) for g in structure.groups] == [("cell.weight_ih", 8, True)]
    assert not ap.verify(structure).failed
    plan = structure.plan({"cell.weight_ih": [0, 1, 3, 4, 7]})
    assert plan.delivery == "module"
    small, x = ap.cut(net, plan), torch.randn(5, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(small(x), ap.zero(net, plan)(x))
    assert small.cell.hidden_size == 5  # type: ignore[union-attr]
    gates = small.cell.weight_ih.shape[0] // 5  # type: ignore[union-attr]
    assert structure.macs(plan) == 2 * 3 * gates * 5 * (6 + 5) + 2 * 5 * 2


@torch.jit.script
def divisor(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


class ScaledBySize(nn.Module):
    """Attention as DeBERTa writes it: scripted code makes a number of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT / divisor(q, 2).to(q.dtype)
        return self.o(scores.softmax(-1) @ v)


def test_a_size_that_is_read_pins_nothing_and_keeps_its_number() -> None:
    net = ScaledBySize().double()
    structure = ap.trace(net, torch.randn(2, 5, 6, dtype=torch.float64))
    assert {group.kind for group in structure.groups} == {"qk_dim", "v_dim"}
    assert not ap.verify(structure).failed
    (queries,) = [group.name for group in structure.groups if group.kind == "qk_dim"]
    plan = structure.plan({queries: [0, 2, 5]})
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(ap.cut(net, plan)(x), ap.zero(net, plan)(x))
