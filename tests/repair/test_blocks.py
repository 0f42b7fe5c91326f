"""Which layers make up a block, in networks of every build."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.masks import MaskPlan
from apoptosis.models import digits_cnn, resnet20
from apoptosis.repair import blocks
from apoptosis.repair.blocks import Block, find_blocks
from apoptosis.repair.reaching import quietly
from apoptosis.repair.survey import look_around
from apoptosis.structure import copy_with
from apoptosis.task import Task
from oracles.building import Net, built


def stages_of(model: nn.Module, *inputs: Tensor) -> list[tuple[str | None, list[str]]]:
    """Blocks by path, and layers in none with None, with what they hold."""
    small = copy_with(model, {})
    with quietly(model, small):
        around = look_around(model, small, MaskPlan({}, ""), (*inputs, None), Task.classification())
    found = find_blocks(around.layers, around.repeatable.__contains__)
    return [
        (own.path, [layer.path for layer in own.layers])
        if isinstance(own, Block)
        else (None, [own[0].path])
        for own in found
    ]


class Branch(nn.Module):
    def __init__(self, width: int, *, shortcut: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, 6, 1, bias=False), nn.Conv2d(6, width, 1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(6), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1) if shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.b(F.relu(self.norm(self.a(x)))))
        return F.relu(y + self.shortcut(x))


IMAGE = torch.randn(2, 3, 4, 4, dtype=torch.float64)


def with_head(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *parts, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_branches_are_blocks_and_what_is_around_them_stands_alone():
    model = built(lambda: with_head(Branch(4), Branch(4, shortcut=True)))
    assert stages_of(model, IMAGE) == [
        (None, ["0"]),
        ("1", ["1.a", "1.b"]),
        ("2", ["2.a", "2.b", "2.shortcut"]),
        (None, ["5"]),
    ]


def test_the_blocks_of_a_resnet_are_its_own():
    found = stages_of(resnet20().eval(), torch.randn(2, 3, 8, 8))
    assert sum(path is not None for path, _ in found) == 9
    assert [layers for path, layers in found if path is None] == [["conv1"], ["linear"]]


class Encoder(nn.Module):
    """Post-norm: the feed-forward's module holds the attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Net(
            lambda m, x: m.out(torch.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)) + x,
            **{name: nn.Linear(4, 4) for name in ("q", "k", "v", "out")},
        )
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.attention(x))
        return x + self.down(F.gelu(self.up(x)))


def test_a_module_that_holds_an_earlier_block_takes_it_in():
    model = built(lambda: nn.Sequential(Encoder(), nn.Linear(4, 2)))
    parts = ["0.attention.q", "0.attention.k", "0.attention.v", "0.attention.out"]
    want = [("0", [*parts, "0.up", "0.down"]), (None, ["1"])]
    assert stages_of(model, torch.randn(2, 3, 4, dtype=torch.float64)) == want


def test_without_sums_the_smallest_modules_with_several_layers_are_blocks():
    plain = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2)]
    model = built(lambda: nn.Sequential(*plain, nn.Linear(4, 2)))
    rows = torch.randn(3, 4, dtype=torch.float64)
    assert stages_of(model, rows) == [
        ("0", ["0.0", "0.2"]),
        ("1", ["1.0", "1.2"]),
        (None, ["2"]),
    ]


def test_a_network_without_parts_is_one_block():
    found = stages_of(digits_cnn().eval(), torch.randn(2, 1, 8, 8))
    assert [path for path, _ in found] == [""]
    assert found[0][1][-1] == "head"


def test_what_holds_many_layers_is_no_block(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_LAYERS", 3)
    assert all(path is None for path, _ in stages_of(digits_cnn().eval(), torch.randn(2, 1, 8, 8)))


class Cache:
    """Grows whenever it is handed over."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


@pytest.mark.parametrize("why", ["called twice", "given a cache"])
def test_modules_that_cannot_be_called_again_alike_are_no_blocks(why):
    inner = Net(lambda m, x, _: m.b(F.relu(m.a(x))) + x, a=nn.Linear(4, 6), b=nn.Linear(6, 4))
    calls = {
        "called twice": lambda m, x: m.head(m.inner(m.inner(x, None), None)),
        "given a cache": lambda m, x: m.head(m.inner(x, Cache())),
    }
    model = built(lambda: Net(calls[why], inner=inner, head=nn.Linear(4, 2)))
    found = stages_of(model, torch.randn(3, 4, dtype=torch.float64))
    assert "inner" not in [path for path, _ in found]
