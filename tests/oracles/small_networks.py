"""Small networks with the things that a checkpoint can lose: ties, buffers, extra state, sizes written in code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.records import Outcome, ScoreSummary, Spending, StepRecord
from apoptosis.structure import Plan, cut, trace

__all__ = ["Convolutions", "Counting", "InCode", "Tied", "pruned", "step"]


class Convolutions(nn.Module):
    """Norms with statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0, 5.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.a(x)))
        return self.head(torch.relu(self.b(x)).mean((2, 3))) * self.scale


class InCode(nn.Module):
    """A size written in its code, so that it can be cut as a program only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x)).view(x.shape[0], 2, 3).flatten(1)
        return self.head(torch.relu(self.b(x)).view(x.shape[0], 6))


class Tied(nn.Module):
    """Embedding and output are one tensor, and so are two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 7, bias=False)
        self.again = self.inner
        self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(self.table(words))))))


class Counting(nn.Module):
    """Extra state beside its tensors."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(x)))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def pruned(
    make: Callable[[], nn.Module],
    example: Any,
    *,
    plan: Callable[[Any], Plan] | None = None,
    dtype: torch.dtype | None = None,
) -> Outcome:
    """A network whose every other unit is gone, and that has moved since."""
    torch.manual_seed(0)
    model = make().eval()
    if dtype is not None:
        model = model.to(dtype)
    structure = trace(model, example)
    if plan is None:
        made = structure.plan(
            {g.name: range(0, g.size, 2) for g in structure.groups if g.size // 2 >= g.smallest}
        )
    else:
        made = plan(structure)
    small = cut(model, made)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return Outcome(
        small, made, (step(),), (Spending("MACs", 0.5, 0.49, 100, 49),), {"seed": 3}, example
    )


def step() -> StepRecord:
    return StepRecord(
        step=1,
        loss=0.25,
        count=10,
        scores={"a": ScoreSummary(-1.0, 0.5, 2.0)},
        removed={"a": 4},
        left={"a": 4},
        macs=49,
        params=20,
        seconds=0.1,
    )


def with_settings(outcome: Outcome, **settings: Any) -> Outcome:
    return replace(outcome, settings=settings)
