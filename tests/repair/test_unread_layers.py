"""Layers that never run, because their weights are read by somebody else: cut and repaired as any network."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap


class Mixer(nn.Module):
    """A short convolution along the sequence, as state-space models have it: a fused kernel reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 16)
        self.conv = nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.down = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).transpose(1, 2)
        weight = self.conv.weight.squeeze(1)
        mixed = F.conv1d(rows, weight.unsqueeze(1), self.conv.bias, padding=2, groups=len(weight))
        return self.down(F.silu(mixed[..., : x.shape[1]]).transpose(1, 2)).mean(1)


@pytest.mark.parametrize("repair", [["refit"], ["refit", "refit_blocks"], None], ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_network_with_such_a_layer_is_refitted(repair: list[str] | None, steps: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 6, 5), torch.randint(0, 3, (16,))) for _ in range(2)]
    model = Mixer()
    outcome = ap.prune(
        model, batches, ap.Budget(params=0.6), criterion="oba", steps=steps, repair=repair
    )
    small = outcome.model
    left = small.up.weight.shape[0]
    assert left < 16
    assert (small.conv.groups, small.conv.in_channels, small.conv.out_channels) == (left,) * 3
    assert small(batches[0][0]).isfinite().all()
    assert not outcome.settings["repair_left_out"]
