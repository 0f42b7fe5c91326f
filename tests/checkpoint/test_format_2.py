"""A checkpoint of format 2, written once and read for ever.

The folder under `fixtures/format-2` is never written again. If this test fails, people's masked checkpoints cannot be
read any more: a new format gets a new number and a new fixture, and this one stays.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from apoptosis.checkpoint import load, load_masks, load_outcome, read_run
from apoptosis.masks import MaskPlan, masks_of

FIXTURE = Path(__file__).parent / "fixtures" / "format-2" / "masked"
INPUTS = (torch.arange(64) * 37 % 64 - 32).div(16).view(2, 2, 4, 4)


class Masked(nn.Module):
    """Saved with channels last; tied, with a norm, a frozen weight, 2:4, an emptied layer, and numbers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.empty, self.whole = nn.Linear(4, 4), nn.Linear(4, 3)
        self.low = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        x = self.two(torch.relu(self.one(x))) + self.empty(x)
        return self.whole(x @ self.low.float()) * self.scale


def test_a_masked_network_is_read():
    found = load(FIXTURE, dense=Masked)
    assert type(found) is Masked
    assert found.one.weight is found.two.weight
    assert found.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not found.conv.weight.is_contiguous()
    assert found.low.dtype == torch.bfloat16
    assert not found.empty.weight.any()
    assert [name for name, p in found.named_parameters() if not p.requires_grad] == ["whole.weight"]
    with torch.no_grad():
        outputs = found(INPUTS)
    torch.testing.assert_close(outputs, torch.tensor(OUTPUTS), rtol=1e-5, atol=1e-6)


def test_its_masks_are_read():
    masks = masks_of(load(FIXTURE, dense=Masked))
    assert masks.same_as(load_masks(FIXTURE / "masks.safetensors"))
    assert {key: own.bits.tolist() for key, own in masks.masks.items()} == BITS
    assert masks.masks["one.weight"].names == ("one.weight", "two.weight")
    assert {key: str(own.pattern) for key, own in masks.masks.items() if own.pattern} == {
        "one.weight": "2:4"
    }
    assert masks.masks["one.weight"].dim == 1


def test_its_record_is_read():
    run, outcome = read_run(FIXTURE), load_outcome(FIXTURE, dense=Masked)
    assert isinstance(outcome.plan, MaskPlan)
    assert (run.format, run.delivery) == (2, "masks")
    assert run.settings == outcome.settings == {"criterion": "oba", "stages": 2, "seeds": [0, 1]}
    assert [(s.step, s.loss, s.macs, s.params) for s in run.history] == [
        (1, 0.5, None, 90),
        (2, None, None, 76),
    ]
    assert str(run.spent[0]) == "weights: asked 50.0%, got 47.73% (63 of 132)"
    assert {held.names[0]: held.kept for held in run.tensors if held.kept is not None} == {
        "conv.weight": 36,
        "one.weight": 8,
        "empty.weight": 0,
        "low": 7,
    }
    assert run.tied == (("one.weight", "two.weight"),)


def test_the_fixture_is_small():
    assert sum(file.stat().st_size for file in FIXTURE.iterdir()) < 10_000


OUTPUTS = [
    [-0.6894083619117737, -1.4073247909545898, -0.21428807079792023],
    [-0.621142566204071, -1.2882580757141113, -0.19060586392879486],
]
BITS = {
    "low": [169, 84],
    "conv.weight": [165, 165, 165, 165, 165, 165, 165, 165, 165],
    "one.weight": [163, 172],
    "empty.weight": [0, 0],
    "whole.weight": [255, 15],
}
