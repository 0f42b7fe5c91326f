"""Networks that `prune` delivers as programs run on the batches that were given, whatever their size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure import CutProgram
from oracles.building import Net, built


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def hidden(net: Net, x: Tensor) -> Tensor:
    """A view that only a program can cut."""
    return net.stem(x).view(*x.shape[:-1], 4, 4).relu().flatten(-2)


def with_places(net: Net, x: Tensor, places: Tensor) -> Tensor:
    """Places of tokens have no batch."""
    h = hidden(net, x) + torch.sin(places).sum(-1)[:, None]
    return net.head(torch.cat([h, h], 1)).mean(1)


def that_compares_the_batch(net: Net, x: Tensor) -> Tensor:
    """As libraries expand what belongs to one sample, to the same end."""
    places = torch.arange(x.shape[1])[None]
    if x.shape[0] != places.shape[0]:
        places = places.expand(x.shape[0], -1)
    return net.head(hidden(net, x) + places[..., None]).mean(1)


def behind_an_unknown(net: Net, x: Tensor) -> Tensor:
    """A count of values, which has no rule."""
    h = hidden(net, x)
    counts = torch.histc(x, bins=16, min=0, max=8)
    return net.head(h.reshape(-1, 16) + counts.var()).view(x.shape[0], x.shape[1], -1).mean(1)


@pytest.mark.parametrize("code", [with_places, that_compares_the_batch, behind_an_unknown])
def test_a_program_runs_on_the_batches_it_was_pruned_on(code: Any) -> None:
    model = built(lambda: Net(code, stem=nn.Linear(6, 16), head=nn.Linear(16, 3))).float()
    labels, x = torch.arange(8) % 3, numbers(8, 5, 6)
    inputs: Any = (x, numbers(5, 2, seed=1)) if code is with_places else x
    outcome = ap.prune(
        model, [(inputs, labels)], ap.Budget(params=0.8), criterion="magnitude", steps=1
    )
    assert isinstance(outcome.model, CutProgram)
    for num in (1, 8, 3):
        own = (x[:num], inputs[1]) if code is with_places else (x[:num],)
        assert outcome.model(*own).shape == (num, 3)
