"""MACs are those of what they are said to be: one sample, or the first batch where experts share the work."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import apoptosis as ap
from apoptosis.training import FitOptions
from apoptosis.workflow import Material, Pruning, iterative


class Mixture(nn.Module):
    """Each row goes to the likeliest expert alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.stem, self.head = nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8))
            for wide in (48, 24, 12)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_copy(0, rows, expert(x[rows]))
        return self.head((y + self.stem(x)).relu())


class Looking(nn.Module):
    """Looks at values, and costs the same whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu() if bool(x.isfinite().all()) else self.first(x))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 8, generator=generator), torch.arange(24) % 4


def counted(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return Mixture().eval()


def test_a_mixture_of_experts_meets_its_budget_on_its_own_batch() -> None:
    model, (x, y) = mixture(), batch()
    outcome = ap.prune(model, [(x, y)], ap.Budget(flops=0.6), criterion="magnitude", steps=1)
    assert "first batch of 24 samples" in outcome.settings["macs_counted_for"]
    (line,) = [line for line in outcome.spent if line.what == "flops"]
    assert (line.dense, line.left) == (counted(model, x), counted(outcome.model, x))
    assert line.left <= 0.6 * line.dense


def test_one_sample_would_have_told_something_else() -> None:
    model, (x, _) = mixture(), batch()
    one, whole = ap.trace(model, x[:1]), ap.trace(model, x)
    assert whole.macs() != 24 * one.macs()


@pytest.mark.parametrize(
    "net", [Looking, lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))]
)
def test_networks_whose_samples_cost_alike_are_counted_for_one(net: type[nn.Module]) -> None:
    outcome = ap.prune(
        net().eval(), [batch()], ap.Budget(flops=0.6), criterion="magnitude", steps=1
    )
    assert outcome.settings["macs_counted_for"] == "one sample"
    assert outcome.example_inputs[0].shape[0] == 1


def test_what_is_said_is_what_is_counted_for() -> None:
    model, (x, y) = mixture(), batch()
    outcome = ap.prune(
        *(model, [(x, y)], ap.Budget(flops=0.8)),
        criterion="magnitude",
        steps=1,
        example_inputs=x[:5],
    )
    assert outcome.settings["macs_counted_for"] == "the example inputs"
    assert outcome.spent[0].dense == counted(model, x[:5])


def test_every_round_counts_for_the_same() -> None:
    model, data = mixture(), [batch()]
    material = Material(scoring=data, training=data)
    how = Pruning(criterion="magnitude", steps=1)
    rounds = iterative(
        *(model, [ap.Budget(flops=0.8), ap.Budget(flops=0.6)], material),
        pruning=how,
        fit=FitOptions(epochs=1),
    )
    for outcome in rounds:
        assert "24 samples" in outcome.settings["macs_counted_for"]
        assert outcome.spent[0].dense == counted(model, data[0][0])


def test_a_batch_that_cannot_be_run_whole_leaves_one_sample() -> None:
    class OneByOne(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 1:
                raise ValueError("one at a time")
            return super().forward(x)

    x, y = batch()
    task_batches = [(x[n : n + 1], y[n : n + 1]) for n in range(4)]
    outcome = ap.prune(
        OneByOne().eval(), task_batches, ap.Budget(params=0.9), criterion="magnitude", steps=1
    )
    assert outcome.settings["macs_counted_for"] == "one sample"
