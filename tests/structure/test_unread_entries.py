"""What the run did not read of a tensor stays whole: at another size it is read."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap


class Positions(nn.Module):
    """A table of places, of which a run reads as many as its input is long."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.places = nn.Parameter(torch.randn(1, 12, 6))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.how == "slice":
            own = self.places[:, :length]
        elif self.how == "narrow":
            own = self.places.narrow(1, 0, length)
        elif self.how == "split":
            own = self.places.split([length, 12 - length], 1)[0]
        elif self.how == "transposed":
            own = self.places.transpose(1, 2)[..., :length].transpose(1, 2)
        else:
            own = (2 * self.places)[:, :length]
        return self.down(self.up(x + own).relu())


@pytest.mark.parametrize("how", ["slice", "narrow", "split", "transposed", "scaled"])
def test_rows_behind_the_end_of_an_input_are_no_units(how: str) -> None:
    model = Positions(how).eval()
    structure = ap.trace(model, torch.zeros(2, 5, 6))
    assert [group.name for group in structure.groups] == ["up"]
    reasons = [pin.reason for pin in structure.pinned if (pin.tensor, pin.dim) == ("places", 1)]
    assert any("reads these entries" in reason for reason in reasons)
    plan = structure.plan({"up": [1, 4, 6]})
    longer = torch.randn(2, 9, 6)
    torch.testing.assert_close(ap.cut(model, plan)(longer), ap.zero(model, plan)(longer))


def test_ranks_that_weights_alone_are_summed_over_are_units_still() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(4, 7))
            self.second = nn.Parameter(torch.randn(7, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.first @ self.second)

    structure = ap.trace(Merged(), torch.zeros(2, 4))
    assert [group.size for group in structure.groups] == [7]
