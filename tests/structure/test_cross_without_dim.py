"""A cross product without `dim` runs over the first axis of size 3, which a cut may make another one."""

import torch
from torch import Tensor, nn

import apoptosis as ap


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.head = nn.Linear(4, 15), nn.Linear(4, 15), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        p, q = (layer(x).unflatten(1, (5, 3)) for layer in (self.p, self.q))
        return self.head(
            torch.cross(p, q).sum(1)
        )  # torch warns once that it looks for the dimension


def test_axes_ahead_of_the_one_it_finds_stay_whole(recwarn) -> None:
    structure = ap.trace(Crossed(), torch.randn(2, 4))
    assert all(group.size != 5 for group in structure.groups)
    assert recwarn is not None
