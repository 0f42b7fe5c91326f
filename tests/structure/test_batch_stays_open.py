"""A trace of one sample makes a program for many, however the batch stands in the inputs."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure import CutProgram
from oracles.building import Net, built

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def hidden(net: Net, x: Tensor) -> Tensor:
    """A view that only a program can cut."""
    return net.stem(x).view(*x.shape[:-1], 4, 4).relu().flatten(-2)


def beside_positions(net: Net, x: Tensor, time: Tensor, places: Tensor) -> Tensor:
    """As diffusion transformers are called: places of tokens have no batch."""
    h = hidden(net, x) + torch.sin(places).sum(-1)[:, None]
    return net.head(h * time[:, None, None])


def beside_a_number(net: Net, x: Tensor, scale: Tensor) -> Tensor:
    """A tensor without any dimension."""
    return net.head(hidden(net, x) * scale)


def joined(net: Net, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    """Two streams, each with the batch, and attention of torch between them."""
    h = torch.cat([hidden(net, x), hidden(net, y)], 1) + places.sum(-1)[:, None]
    return net.head(net.mix(h, h, h)[0])


def joined_behind_an_unknown(net: Net, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    """The same without attention, and with an operation that has no rule."""
    h = torch.cat([hidden(net, x), hidden(net, y)], 1) + places.sum(-1)[:, None]
    return net.head(h * torch.cdist(places, places).sum(-1)[:, None])


def behind_an_unknown(net: Net, x: Tensor) -> Tensor:
    """An operation without a rule, and a view behind it."""
    h = hidden(net, x)
    weights = torch.special.i0e(h.sum(-1))
    weights = torch.cdist(weights[..., None], weights[..., None]).sum(-1)
    flat = h.reshape(-1, h.shape[-1]) * weights.reshape(-1, 1)
    return net.head(flat).view(x.shape[0], x.shape[1], -1)


def mixture(net: Net, x: Tensor) -> Tensor:
    """Experts of which each token takes the best two, by sorting."""
    h = hidden(net, x)
    flat = h.reshape(-1, h.shape[-1])
    scores, best = net.router(flat).softmax(-1).topk(2, -1)
    order = best.flatten().argsort()
    tokens = flat[order // 2]
    counts = F.one_hot(best.flatten(), 3).sum(0).cumsum(0)
    bounds = torch.arange(len(order))[:, None] < counts
    own = bounds.to(h.dtype).argmax(-1)
    made = torch.einsum("nd,ndo->no", tokens, net.experts[own]) * scores.flatten()[order][:, None]
    out = torch.zeros_like(flat).index_add(0, order // 2, made)
    return net.head(out.view(h.shape))


def inputs(code: Any, num: int, length: int = 5, *, seed: int = 0) -> tuple[Tensor, ...]:
    x = numbers(num, length, 6, seed=seed)
    if code is beside_positions:
        return x, numbers(num, seed=seed + 1), numbers(length, 2, seed=7)
    if code in (joined, joined_behind_an_unknown):
        return x, numbers(num, 3, 6, seed=seed + 1), numbers(length + 3, 2, seed=7)
    if code is beside_a_number:
        return x, torch.tensor(0.5, dtype=torch.float64)
    return (x,)


CODES = [
    beside_positions,
    beside_a_number,
    joined,
    joined_behind_an_unknown,
    behind_an_unknown,
    mixture,
]


@pytest.mark.parametrize("traced_on", [1, 2])
@pytest.mark.parametrize("code", CODES)
def test_a_trace_of_one_sample_makes_a_program_for_many(code: Any, traced_on: int) -> None:
    parts: dict[str, Any] = {"stem": nn.Linear(6, 16), "head": nn.Linear(16, 3)}
    if code is mixture:
        parts |= {"router": nn.Linear(16, 3), "experts": nn.Parameter(torch.randn(3, 16, 16))}
    if code is joined:
        parts["mix"] = nn.MultiheadAttention(16, 2, batch_first=True)
    model = built(lambda: Net(code, **parts))
    structure = ap.trace(model, inputs(code, traced_on))
    name = next(group.name for group in structure.groups if group.exact)
    plan = structure.plan({name: range(1, structure[name].size)})
    program, twin = ap.cut(model, plan), ap.zero(model, plan)
    assert isinstance(program, CutProgram)
    lengths = (5,) if code in (joined, joined_behind_an_unknown) else (5, 7, 4)
    for num, length in product((1, 2, 3, 8), lengths):
        own = inputs(code, num, length, seed=num)
        torch.testing.assert_close(program(*own), twin(*own), **TOLERANCE)
