"""Example inputs that were given are those a model is traced on, on every road."""

import pytest
import torch
from torch import Tensor, nn

from apoptosis.planning import Budget
from apoptosis.training import FitOptions
from apoptosis.workflow import Material, Pruning, iterative, one_shot, prune


class Wide(nn.Module):
    """Costs depend on the size that it is traced on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().mean((2, 3)))


BATCHES = [(torch.randn(6, 1, 4, 4), torch.arange(6) % 3)]
EXAMPLE = torch.zeros(2, 1, 16, 16)
DATA = Material(scoring=BATCHES, training=BATCHES)
HOW = {"criterion": "magnitude", "steps": 1, "example_inputs": EXAMPLE}


@pytest.mark.parametrize("epochs", [0, 1])
def test_they_are_traced_on_whether_it_is_trained_or_not(epochs):
    torch.manual_seed(0)
    model, budget, fit = Wide(), Budget(flops=0.5), FitOptions(epochs=epochs)
    by_hand = prune(model, BATCHES, budget, **HOW)
    dense = 256 * 8 * 9 * 2 + 2 * 8 * 3
    assert by_hand.spent[0].dense == dense
    found = one_shot(model, budget, DATA, pruning=Pruning(**HOW), fit=fit)
    rounds = iterative(model, [Budget(flops=0.8), budget], DATA, pruning=Pruning(**HOW), fit=fit)
    for outcome in (found, *rounds):
        assert outcome.spent[0].dense == dense
        assert outcome.example_inputs is EXAMPLE
