"""Checkpoints of format 1, written once and read for ever.

The two folders under `fixtures/format-1` are never written again. If this test fails, people's checkpoints cannot be
read any more: a new format gets a new number and a new fixture, and this one stays.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apoptosis.checkpoint import load, read_run
from apoptosis.structure import CutProgram

FIXTURES = Path(__file__).parent / "fixtures" / "format-1"
INPUTS = torch.linspace(-1, 1, 8).view(2, 4)


class Module(nn.Module):
    """Delivered as itself; tied, with a norm, a frozen bias and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False)
        self.c = nn.Linear(4, 8, bias=False)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))) + self.c(x)) * self.scale


class Program(nn.Module):
    """Has a size in its code, and is delivered as a program."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, pair: tuple[Tensor, Tensor], *, factor: float) -> Tensor:
        x = torch.relu(self.a(pair[0] + pair[1])).view(-1, 6)
        return self.head(x) * factor


def test_a_module_is_read():
    found = load(FIXTURES / "module", dense=Module)
    assert type(found) is Module
    assert found.a.weight is found.c.weight
    assert [name for name, p in found.named_parameters() if not p.requires_grad] == ["a.bias"]
    with torch.no_grad():
        outputs = found(INPUTS)
    torch.testing.assert_close(outputs, torch.tensor(MODULE_OUTPUTS), rtol=1e-5, atol=1e-6)


def test_a_program_is_read():
    found = load(FIXTURES / "program", dense=Program)
    assert isinstance(found, CutProgram)
    with torch.no_grad():
        outputs = found((INPUTS.bfloat16(), INPUTS.bfloat16()), factor=2.0)
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), torch.tensor(PROGRAM_OUTPUTS), rtol=2e-2, atol=1e-2)


def test_records_are_read():
    module, program = read_run(FIXTURES / "module"), read_run(FIXTURES / "program")
    assert module.format == program.format == 1
    assert module.settings == {"criterion": "oba", "steps": 2, "seeds": [0, 1]}
    assert [(s.step, s.loss, s.removed) for s in module.history] == [
        (1, 0.5, {"a": 5}),
        (2, None, {}),
    ]
    assert module.history[0].scores["a"].highest == float("inf")
    assert str(module.spent[0]) == "MACs: asked 50.0%, got 37.50% (36 of 96)"
    assert module.shapes["a.weight"] == (3, 4)
    assert module.tied == (("a.weight", "c.weight"),)
    assert program.dtypes["a.weight"] == "bfloat16"
    assert program.delivery == "program"


@pytest.mark.parametrize("name", ["module", "program"])
def test_fixtures_are_small(name):
    assert sum(file.stat().st_size for file in (FIXTURES / name).iterdir()) < 8_000


MODULE_OUTPUTS = [
    [0.0033511249348521233, -0.15180303156375885, -0.07502339035272598, 0.20015671849250793],
    [-0.22425711154937744, 0.4913666844367981, -0.2446286827325821, -0.22188612818717957],
]
PROGRAM_OUTPUTS = [[-0.40234375, 0.7265625, 0.494140625], [0.384765625, -0.1962890625, 0.59375]]
