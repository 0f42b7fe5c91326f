"""Verification where outputs or number types are out of the ordinary: no false alarm, and a wrong cut is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure import Structure
from apoptosis.structure.twins import distance

Finish = Callable[[Tensor], Any]


class Net(nn.Module):
    """Two layers, and something between or behind them."""

    def __init__(self, *, between: Finish = torch.relu, behind: Finish = lambda y: y) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.between, self.behind = between, behind

    def forward(self, x: Tensor) -> Any:
        return self.behind(self.second(self.between(self.first(x))))


class Half(nn.Module):
    """Computes in a type of its own, whatever its weights have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.dtype = nn.Linear(6, 16), nn.Linear(16, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            weight, bias = (p.to(self.dtype) for p in layer.parameters())
            x = nn.functional.linear(x.to(self.dtype), weight, bias).relu()
        return x


class NoDoubles(Net):
    """Refuses float64, as a kernel would."""

    def forward(self, x: Tensor) -> Any:
        if x.dtype == torch.float64 or self.first.weight.dtype == torch.float64:
            raise NotImplementedError('"kernel" not implemented for Double')
        return super().forward(x)


def masked(y: Tensor) -> Tensor:
    return y.masked_fill(torch.arange(4) > 1, -torch.inf)


def rooted(y: Tensor) -> Tensor:
    return torch.stack([y, torch.where(torch.arange(4) > 1, torch.nan, 1.0) * y])


def attention(h: Tensor) -> Tensor:
    """Noise, and an operation that could draw some and does not."""
    rows = h[None, None]
    return nn.functional.scaled_dot_product_attention(rows, rows, rows + torch.rand_like(rows))[
        0, 0
    ]


NETS: dict[str, Callable[[], nn.Module]] = {
    "masked logits": lambda: Net(behind=masked),
    "NaN in places": lambda: Net(behind=rooted),
    "complex": lambda: Net(behind=lambda y: torch.complex(y, -y)),
    "classes": lambda: Net(behind=lambda y: {"class": y.argmax(-1), "sure": y > 0, "y": y}),
    "empty beside": lambda: Net(behind=lambda y: (y, y[:0])),
    "None beside": lambda: Net(behind=lambda y: (None, y)),
    "noise within": lambda: Net(between=lambda h: h + torch.randn_like(h)),
    "noise behind": lambda: Net(behind=lambda y: y * torch.rand(4).to(y)),
    "dropout never off": lambda: Net(between=lambda h: nn.functional.dropout(h, 0.5)),
    "noise in attention": lambda: Net(between=attention),
    "bernoulli": lambda: Net(between=lambda h: h * torch.bernoulli(torch.full_like(h, 0.7))),
    "float32 alone": lambda: Net(between=lambda h: h.float().relu().to(h)),
    "half": lambda: Half(torch.float16),
    "bfloat16": lambda: Half(torch.bfloat16),
    "without float64": NoDoubles,
}


def structure_of(name: str) -> Structure:
    torch.manual_seed(0)
    return ap.trace(NETS[name]().eval(), torch.randn(3, 6))


@pytest.mark.parametrize("name", NETS)
def test_what_is_right_is_not_called_wrong(name: str) -> None:
    structure = structure_of(name)
    checked = ap.verify(structure)
    assert set(checked.errors) == {group.name for group in structure.groups}
    assert len(structure.groups) == 1
    assert not checked.failed
    assert not checked.unchecked


@pytest.mark.parametrize("name", NETS)
def test_what_is_wrong_is_found_all_the_same(name: str) -> None:
    structure = structure_of(name)
    (group,) = structure.groups
    assert set(ap.verify(shifted(structure, group.size)).failed) == {group.name}


def shifted(structure: Structure, size: int) -> Structure:
    """One whose group sits one column further in the second layer."""
    right = structure._cut_tensors

    def wrong(axes: Any) -> Any:
        return tuple(
            replace(cut, kept={dim: (kept + 1) % size for dim, kept in cut.kept.items()})
            if cut.names == ("second.weight",)
            else cut
            for cut in right(axes)
        )

    found = replace(structure)
    object.__setattr__(found, "_cut_tensors", wrong)
    return found


def test_a_model_without_numbers_is_said_to_be_unchecked() -> None:
    for behind in (lambda _y: None, lambda y: y * torch.nan, lambda y: y[:0]):
        structure = ap.trace(Net(behind=behind), torch.randn(3, 6))
        checked = ap.verify(structure)
        assert not checked.failed
        assert set(checked.unchecked) == {g.name for g in structure.groups if g.exact}
        assert checked.structure.groups == structure.groups


class Tied(nn.Module):
    """One number says how wide both are: a plain layer, and one that a norm's statistics run over."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.a, self.b = nn.Linear(6, 16), nn.Linear(6, 16)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(16, 3)
        self.also = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        plain = self.a(x).view(-1, 2, self.width)
        normed = self.norm(self.b(x).view(-1, 2, self.width))
        return self.out(plain.flatten(1).relu()) + self.also(normed.flatten(1))


class TiedAndLooking(Tied):
    """No program: Python looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > -1e9 else x


class TiedAndCast(Tied):
    """A program of it has the type of its numbers written into it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x.float()).to(x.dtype))


@pytest.mark.parametrize("kind", [Tied, TiedAndLooking, TiedAndCast])
def test_a_group_tied_to_an_inexact_one_is_not_called_wrong(kind: type[Tied]) -> None:
    structure = ap.trace(kind(), torch.randn(2, 6))
    tied = [g.name for g in structure.groups if g.exact and len(structure.step(g.name)) > 1]
    assert len(tied) == 1
    checked = ap.verify(structure)
    assert not checked.failed
    assert (tied[0] in checked.errors) == (kind is not TiedAndLooking)
    if kind is TiedAndLooking:
        assert "which is inexact" in checked.unchecked[tied[0]]
        assert tied[0] in {g.name for g in checked.structure.groups}


class WrittenAndLooking(nn.Module):
    """Neither its own code nor a program can be cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 8).flatten(1)
        return self.second(h) if x.sum() > -1e9 else x


def test_a_group_that_cannot_be_cut_is_no_failure_and_is_pinned() -> None:
    checked = ap.verify(ap.trace(WrittenAndLooking(), torch.randn(2, 6)))
    assert not checked.failed
    assert not checked.structure.groups
    assert all("cannot be written as a program" in why for why in checked.unchecked.values())
    assert "cannot be written as a program" in checked.structure.pinned[-1].reason


@pytest.mark.parametrize(
    ("found", "expected", "far"),
    [
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), 0.0),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.inf]), torch.inf),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), 0.0),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), torch.inf),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), torch.inf),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan]), torch.inf),
        (torch.tensor([1.5, torch.inf]), torch.tensor([2.0, torch.inf]), 0.25),
        (torch.tensor([3j]), torch.tensor([4j]), 0.25),
        (torch.tensor([1]), torch.tensor([2]), torch.inf),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (None, None, 0.0),
        ([torch.ones(1)], torch.ones(1), 0.0),
        (torch.ones(2), None, torch.inf),
    ],
)
def test_distance(found: Any, expected: Any, far: float) -> None:
    assert distance(found, expected) == far
