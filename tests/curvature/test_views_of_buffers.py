"""A buffer that forward writes to is read through any view or alias as torch would show it, tangent and all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apoptosis.curvature import curvature_product
from oracles.brute_force import double_backward_product, flatten, unflatten
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close
from oracles.evaluation import gradient, random_direction
from oracles.untouched import Snapshot

WIDTH = 6


def whole_written_view_read(m: Any, x: Tensor) -> Tensor:
    view = m.cache[: len(x)]
    m.cache.mul_(0.5)
    m.cache[: len(x)] += x
    return view.tanh() * x


def view_written_whole_read(m: Any, x: Tensor) -> Tensor:
    view = m.cache[: len(x)]
    view.copy_(x.tanh())
    return m.cache[: len(x)] * x


def view_written_other_view_read(m: Any, x: Tensor) -> Tensor:
    view, other = m.cache[: len(x)], m.cache.t()
    view.add_(x.tanh())
    return other[:, : len(x)].t() * view


def written_twice_through_different_views(m: Any, x: Tensor) -> Tensor:
    flat, table = m.cache.view(-1), m.cache[: len(x)]
    table.add_(x)
    flat[: x.numel()].mul_(0.5)
    table.mul_(x.cos())
    return (table + m.cache[: len(x)].sin()) * x


def view_of_a_view_read(m: Any, x: Tensor) -> Tensor:
    view = m.cache[: len(x)]
    part = view[:, 2:5]
    m.cache[: len(x), 1:4] += x[:, :3] ** 2
    return torch.cat([part, part.tanh()], 1) * x


def detached_alias_read(m: Any, x: Tensor) -> Tensor:
    alias = m.cache.detach()
    view = alias[: len(x)]
    m.cache[: len(x)] += x.detach()
    return view * x + alias[: len(x)].tanh()


def alias_written_view_read(m: Any, x: Tensor) -> Tensor:
    view = m.cache[: len(x)]
    with torch.no_grad():
        m.cache.data[: len(x)] += 1 + x.detach()
    return view * x


def view_handed_to_an_operation_that_writes(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(m.cache[: len(x)], x.detach(), out=m.cache[: len(x)])
    return m.cache[: len(x)] * x


def rows_written_by_index(m: Any, x: Tensor) -> Tensor:
    view = m.cache.view(3, -1, WIDTH)
    m.cache.index_copy_(0, torch.arange(len(x)), x.sin())
    m.cache[torch.tensor([0, 1])] = x[:2] ** 2
    return view.reshape(-1, WIDTH)[: len(x)] * x


WRITES = (
    whole_written_view_read,
    view_written_whole_read,
    view_written_other_view_read,
    written_twice_through_different_views,
    view_of_a_view_read,
    detached_alias_read,
    alias_written_view_read,
    view_handed_to_an_operation_that_writes,
    rows_written_by_index,
)


def network(middle: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return built(
        lambda: Net(
            lambda m, x: m.head(middle(m, m.stem(x))),
            stem=nn.Linear(4, WIDTH),
            head=nn.Linear(WIDTH, CLASSES),
            cache=torch.ones(9, WIDTH),
        )
    )


@pytest.mark.parametrize("middle", WRITES, ids=lambda f: f.__name__)
def test_what_was_written_to_a_buffer_is_seen_through_every_view(
    middle: Callable[[Any, Tensor], Tensor],
) -> None:
    batch = rows()
    want = gradient(network(middle), batch)
    scale = torch.cat([g.flatten() for g in want.values()]).norm().item()
    model = network(middle)
    delta = random_direction(model)
    before = Snapshot(model)
    found = curvature_product(model, [batch], kind="hessian", direction=delta, gradient=True)
    before.assert_unchanged()
    assert_products_close(found.gradient, want, tolerance=EXACT)
    other = network(middle)
    vector = double_backward_product(other, batch, None, "hessian", flatten(other, delta))
    assert_products_close(
        found.product, unflatten(vector, other), tolerance=EXACT, scale=scale, what="hessian"
    )
