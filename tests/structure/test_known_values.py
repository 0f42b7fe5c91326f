"""Meta tensors whose numbers follow from sizes answer as real ones would; others do not."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError


class Asking(nn.Module):
    """Takes one of two layers by what a mask of positions says."""

    def __init__(self, *, by_input: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 8), nn.Linear(6, 2)
        self.by_input = by_input

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        grown = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
        grown += places
        grown[:2].mul_(3)  # through a view
        if self.by_input and (x.sum() > 1):
            return self.b(x)
        if (grown.diff() < 0).any() and grown.max().item() == x.shape[1] - 1:
            return self.c(self.a(x))
        return self.b(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_branch_on_positions_is_the_same_on_meta(device: str) -> None:
    with torch.device(device):
        model = Asking()
    structure = ap.trace(model, torch.zeros(2, 5, 4, device=device))
    assert {group.name for group in structure.groups} == {"a"}


def test_a_branch_on_inputs_cannot_be_known_on_meta() -> None:
    with torch.device("meta"):
        model = Asking(by_input=True)
    with pytest.raises(TraceError, match=r"(?s)did not run.*test_known_values\.py"):
        ap.trace(model, torch.zeros(2, 5, 4, device="meta"))
