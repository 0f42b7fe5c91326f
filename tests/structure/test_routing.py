"""Ways that depend on values: a program of them is refused, and a module keeps whole what other ways may read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError
from oracles.building import Net, built

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
WIDTH, EXPERTS = 8, 3


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Mixture(nn.Module):
    """The best expert for each token; the stem's units are the width that all experts read."""

    def __init__(self, route: Callable[..., Tensor], *, literal: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.router = nn.Linear(5, EXPERTS)
        self.route, self.literal = route, literal

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if self.literal:  # no attribute can make it run at another width
            h = h.view(-1, 2, 4).relu().reshape(-1, WIDTH)
        return self.head(h + self.route(self, h, self.router(x).argmax(-1)))


def by_length(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        (who,) = torch.where(best == number)
        if len(who):
            out = out.index_add(0, who, own(h[who]))
    return out


def by_nonzero(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        who = (best == number).nonzero().flatten()
        if who.numel() > 0:
            out = out.index_add(0, who, own(h[who]))
    return out


def by_shape(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        who = torch.argwhere(best == number)[:, 0]
        if who.shape[0] == 0:
            continue
        out[who] += own(h[who])
    return out


def by_any(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        mask = best == number
        if mask.any():
            out[mask] = own(h[mask])
    return out


def by_mask_size(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        mask = best == number
        chosen = h[mask]
        if chosen.size(0):
            out = out.masked_scatter(mask[:, None], own(chosen))
    return out


def by_list(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number in sorted(set(best.tolist())):
        mask = (best == number)[:, None]
        out = out + net.experts[number](h) * mask
    return out


def by_iteration(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number in F.one_hot(best, EXPERTS).sum(0).nonzero():
        out = out + net.experts[number](h) * (best == number)[:, None]
    return out


def by_unique(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for number in torch.unique(best):
        out = out + net.experts[int(number)](h) * (best == number)[:, None]
    return out


def by_rows(net: Mixture, h: Tensor, best: Tensor) -> Tensor:
    """Goes through chosen rows one by one; nothing but their number depends on values."""
    out = torch.zeros_like(h)
    for number, own in enumerate(net.experts):
        for row in h[best == number]:
            out = out + own(row) * (best == number)[:, None]
    return out


ROUTES = [
    by_length,
    by_nonzero,
    by_shape,
    by_any,
    by_mask_size,
    by_list,
    by_iteration,
    by_unique,
    by_rows,
]
each_route = pytest.mark.parametrize("route", ROUTES, ids=lambda code: code.__name__)


def mixture(route: Any, *, literal: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, tokens that all go to expert 0, and others."""
    model = built(lambda: Mixture(route, literal=literal))
    with torch.no_grad():
        model.router.bias[0] += 20  # noise, which replays draw, goes to expert 0 as well
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    far = 200 * tokens
    best = model.router(far).argmax(-1)
    assert (model.router(tokens).argmax(-1) == 0).all()
    return model, tokens[:4], torch.cat([far[best == n][:2] for n in (1, 2, 0)])


@each_route
def test_a_program_is_refused(route: Any) -> None:
    model, own, _ = mixture(route, literal=True)
    structure = ap.trace(model, own)
    for group in structure.groups:
        try:
            plan = structure.plan({group.name: range(1, group.size)})
        except PlanMismatchError as error:
            assert "cannot be written as a program" in str(error)  # noqa: PT017
            assert "test_routing.py" in str(error)  # noqa: PT017
            continue
        assert plan.delivery == "module"


@each_route
def test_a_module_keeps_whole_what_other_experts_read(route: Any) -> None:
    model, own, others = mixture(route, literal=False)
    structure = ap.trace(model, own)
    assert "experts.0.0" in {group.name for group in structure.groups}
    assert "stem" not in {group.name for group in structure.groups}
    reasons = {pin.reason for pin in structure.pinned if pin.tensor.startswith("stem.")}
    assert any("experts.1" in reason or "mask" in reason for reason in reasons), reasons
    for group in structure.groups:
        plan = structure.plan({group.name: range(1, group.size)})
        small, twin = ap.cut(model, plan), ap.zero(model, plan)
        assert type(small) is type(model)
        torch.testing.assert_close(small(others), twin(others), **TOLERANCE)


@each_route
def test_all_experts_visited_leave_nothing_pinned(route: Any) -> None:
    model, _, others = mixture(route, literal=False)
    structure = ap.trace(model, others)
    names = {group.name for group in structure.groups}
    assert {f"experts.{n}.0" for n in range(EXPERTS)} <= names
    assert not any(pin.op == "not visited" for pin in structure.pinned)


def either_way(net: Net, x: Tensor) -> Tensor:
    y = net.stem(x).relu()
    return net.head(y) if float(x.sum()) > 0 else net.other(y)


def an_early_exit(net: Net, x: Tensor) -> Tensor:
    y = net.stem(x).relu()
    if (net.head(y).amax() < 50).item():
        return net.head(y)
    return net.head(net.other(y).tanh().repeat(1, 3)[:, :WIDTH])


class Gate(nn.Module):
    """Tells its caller which way to go."""

    def forward(self, x: Tensor) -> bool:
        return bool(x.sum() > 0)


def a_gate(net: Net, x: Tensor) -> Tensor:
    y = net.stem(x).relu()
    return net.head(y) if net.gate(x) else net.other(y)


def a_list_of_weights(net: Net, x: Tensor) -> Tensor:
    y = net.stem(x).relu()
    return net.head(y) + y @ net.weights[int((x.sum() < 0).long())]


@pytest.mark.parametrize("code", [either_way, an_early_exit, a_gate, a_list_of_weights])
def test_what_another_way_may_read_stays_whole(code: Any) -> None:
    parts = {"stem": nn.Linear(5, WIDTH), "head": nn.Linear(WIDTH, 3), "gate": Gate()}
    if code is a_list_of_weights:
        parts["weights"] = nn.ParameterList(torch.randn(WIDTH, 3) for _ in range(2))
    else:
        parts["other"] = nn.Linear(WIDTH, 3)
    model = built(lambda: Net(code, **parts))
    x = torch.ones(2, 5, dtype=torch.float64)
    structure = ap.trace(model, x)
    assert [group.name for group in structure.groups] == []
    assert any(pin.op == "not visited" for pin in structure.pinned)


def test_heads_by_task_are_called_alike() -> None:
    code = lambda net, x, task: net.heads[task](net.stem(x).relu())  # noqa: E731
    heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 3), "b": nn.Linear(WIDTH, 2)})
    model = built(lambda: Net(code, stem=nn.Linear(5, WIDTH), heads=heads))
    structure = ap.trace(model, (torch.ones(2, 5, dtype=torch.float64), "a"))
    (pin,) = {
        pin.reason for pin in structure.pinned if pin.tensor == "stem.weight" and pin.dim == 0
    }
    assert (
        pin
        == "heads.b.weight was not reached by the example, and may read this as heads.a.weight does"
    )


def test_a_head_that_no_value_leads_to_holds_nothing_back() -> None:
    code = lambda net, x: net.head(net.stem(x).relu())  # noqa: E731
    parts = {
        "head": nn.Linear(WIDTH, 3),
        "spare": nn.Linear(WIDTH, 2),
        "token": nn.Parameter(torch.ones(1, WIDTH)),
    }
    model = built(lambda: Net(code, stem=nn.Linear(5, WIDTH), **parts))
    structure = ap.trace(model, torch.ones(2, 5, dtype=torch.float64))
    assert [group.name for group in structure.groups] == ["stem"]
    assert {name.partition(".")[0] for name in structure.unused} == {"spare", "token"}
