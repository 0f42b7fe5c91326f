"""Ranks of low-rank adapters are told by what they are, and stay whole unless somebody asks for them."""

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.cli.inspect import as_data, show
from apoptosis.errors import BudgetError, ConfigError
from apoptosis.planning import Budget, Selection
from apoptosis.structure import KINDS, Structure, cut, trace, zero

RANK = 4


class Adapter(nn.Module):
    """As peft writes it: A, then B, scaled, beside the layer."""

    def __init__(self, layer: nn.Linear, *, num: int = 1) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleList(
            nn.Linear(layer.in_features, RANK, bias=False) for _ in range(num)
        )
        self.lora_B = nn.ModuleList(
            nn.Linear(RANK, layer.out_features, bias=False) for _ in range(num)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for a, b in zip(self.lora_A, self.lora_B, strict=True):
            result = result + b(a(self.dropout(x.to(a.weight.dtype)))) * 2.0
        return result


class ByHand(nn.Module):
    """Two matrices as parameters, added in place and the other way round."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(layer.in_features, RANK))
        self.b = nn.Parameter(torch.randn(RANK, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        around = (x @ self.a) @ self.b
        around += self.layer(x)
        return around


class Merged(nn.Module):
    """The product of the two is added to the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(RANK, layer.in_features))
        self.b = nn.Parameter(torch.randn(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight + 0.5 * (self.b @ self.a), self.layer.bias)


class Net(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = wrap(nn.Linear(12, 24)), wrap(nn.Linear(24, 10))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 16, 3, padding=1)
        self.a = nn.Conv2d(8, RANK, 3, padding=1, bias=False)
        self.b = nn.Conv2d(RANK, 16, 1, bias=False)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(x) + self.b(self.a(x)) / 4))


class Looked(nn.Module):
    """An adapter of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(30, 16)
        self.a = nn.Parameter(torch.randn(RANK, 30))
        self.b = nn.Parameter(torch.randn(16, RANK))
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        around = F.embedding(ids, self.a.T) @ self.b.T
        return self.head(torch.relu(self.layer(ids) + around * 2.0))


X = torch.randn(2, 5, 12)
ADAPTED: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "peft": (lambda: Net(Adapter), X, 2),
    "two at once": (lambda: Net(lambda own: Adapter(own, num=2)), X, 4),
    "by hand": (lambda: Net(ByHand), X, 2),
    "merged": (lambda: Net(Merged), X, 2),
    "convolution": (Convolved, torch.randn(2, 8, 6, 6), 1),
    "embedding": (Looked, torch.randint(0, 30, (2, 7)), 1),
}


def ranks(structure: Structure) -> list[str]:
    found = [group for group in structure.groups if group.kind == "rank"]
    assert all(group.size == RANK for group in found)
    return [group.name for group in found]


@pytest.mark.parametrize("name", ADAPTED)
def test_ranks_are_found_and_left_whole(name: str) -> None:
    make, x, num = ADAPTED[name]
    model = make().eval()
    structure = trace(model, x)
    assert len(ranks(structure)) == num
    assert not {g.name for g in structure.choose()} & set(ranks(structure))
    labels = torch.zeros(2, dtype=torch.long)
    task = ap.Task.classification(lambda z, y: z.square().mean() + 0 * y.sum())
    outcome = ap.prune(
        model, [(x, labels)], Budget(params=0.75), task, criterion="magnitude", steps=2, repair=[]
    )
    assert outcome.plan.kept
    assert not outcome.plan.kept.keys() & set(ranks(structure))


@pytest.mark.parametrize("name", ADAPTED)
def test_who_asks_for_them_gets_them(name: str) -> None:
    make, x, num = ADAPTED[name]
    model = make().eval()
    structure = trace(model, x)
    selection = Selection(kinds=("rank",))
    assert [group.name for group in selection.groups(structure)] == ranks(structure)
    plan = structure.plan({own: [0, 2] for own in ranks(structure)})
    assert len(plan.kept) == num
    torch.testing.assert_close(cut(model, plan)(x), zero(model, plan)(x))


NOT_ADAPTERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "something between": lambda m, x: m.wide(x) + m.b(torch.relu(m.a(x))),
    "a norm between": lambda m, x: m.wide(x) + m.b(m.norm(m.a(x))),
    "no layer beside": lambda m, x: F.pad(x, (0, 8)) + m.b(m.a(x)),
    "a layer of another input": lambda m, x: m.wide(torch.tanh(x)) + m.b(m.a(x)),
    "multiplied": lambda m, x: m.wide(x) * m.b(m.a(x)),
    "nothing added": lambda m, x: m.b(m.a(x)),
}


class Other(nn.Module):
    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor], middle: int = RANK) -> None:
        super().__init__()
        self.way = way
        self.wide, self.a = nn.Linear(12, 20), nn.Linear(12, middle)
        self.norm, self.b, self.head = nn.LayerNorm(middle), nn.Linear(middle, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.way(self, x)))


@pytest.mark.parametrize("name", NOT_ADAPTERS)
def test_other_narrow_layers_are_none(name: str) -> None:
    structure = trace(Other(NOT_ADAPTERS[name]).eval(), X)
    assert not ranks(structure)
    assert any(group.size == RANK for group in structure.groups)


@pytest.mark.parametrize("middle", [12, 16, 20, 30])
def test_a_middle_as_wide_as_an_end_is_none(middle: int) -> None:
    def way(m: nn.Module, x: Tensor) -> Tensor:
        return m.wide(x) + m.b(m.a(x))

    assert not any(g.kind == "rank" for g in trace(Other(way, middle).eval(), X).groups)
    assert any(g.kind == "rank" for g in trace(Other(way, 11).eval(), X).groups)


def test_inspect_says_so() -> None:
    structure = trace(Net(Adapter).eval(), X)
    console = Console(file=io.StringIO(), width=140)
    show("net", structure, structure.groups, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"rank: {KINDS['rank']}" in " ".join(text.split())
    assert "cut only on request" in KINDS["rank"]
    kinds = {group["kind"] for group in as_data("net", structure, structure.groups)["groups"]}
    assert "rank" in kinds


def test_a_budget_that_needs_them_says_who_is_in_the_way() -> None:
    model, batches = Other(lambda m, x: m.wide(x) + m.b(m.a(x))), [(X, torch.zeros(2).long())]
    with pytest.raises(
        BudgetError, match=r"ranks of adapters, cut only if `kinds` names them \(a:rank\)"
    ):
        ap.prune(model, batches, Budget(params=0.05), criterion="magnitude")
    with pytest.raises(ConfigError, match="No group is chosen"):
        trace(model.eval(), X).choose(names=("a:rank",))
