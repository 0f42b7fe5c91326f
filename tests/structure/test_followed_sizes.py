"""Numbers that Python makes of sizes in a program are those that the dense network makes, whatever has been cut."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap


class Repeated(nn.Module):
    """Heads in the batch, as in DeBERTa: how often a table is repeated is told by a size and the number of heads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads = how, 4
        self.q, self.pos = nn.Linear(6, 20), nn.Linear(6, 20)
        self.table = nn.Parameter(torch.randn(1, 3, 6))
        self.o = nn.Linear(15, 2)

    def split(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], x.shape[1], self.heads, 5)  # a size written into the code
        return x.transpose(1, 2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, pos = self.split(self.q(x)), self.split(self.pos(self.table))
        if self.how == "repeat":
            pos = pos.repeat(q.size(0) // self.heads, 1, 1)
        elif self.how == "expand":
            batch = q.shape[0] // 4
            pos = pos[None].expand(batch, -1, -1, -1).flatten(0, 1)
        else:
            times = q.shape[0] // pos.shape[0]
            pos = pos.repeat(times, 1, 1)
        scores = (q @ pos.transpose(1, 2)).view(len(x), -1, x.shape[1], 3)
        return self.o(nn.functional.pad(scores.sum(1), (0, 12)))


@pytest.mark.parametrize("how", ["repeat", "expand", "of both"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_size_with_a_cut_axis_is_read_as_it_was(how: str, batch: int) -> None:
    torch.manual_seed(0)
    model = Repeated(how).double().eval()
    structure = ap.trace(model, torch.randn(2, 7, 6, dtype=torch.float64))
    heads = next(group for group in structure.groups if group.size == 4)
    widths = [group for group in structure.groups if group.size == 5]
    plan = structure.plan({heads.name: [0, 2]} | {group.name: [0, 1, 4] for group in widths})
    assert plan.delivery == "program"
    x = torch.randn(batch, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x))
