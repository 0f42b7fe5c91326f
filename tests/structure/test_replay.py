"""Programs that could not stand for their model are refused, or bound to the sizes and arguments they were made for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError, TraceError


class Net(nn.Module):
    """A literal view forces a program; the rest of forward is a test's."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)
        self.memory = torch.zeros(16, dtype=torch.float64)
        self.run = forward

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x).view(*x.shape[:-1], 4, 4).relu().flatten(-2)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Any:
        return self.run(self, x, *([] if y is None else [y]), scale)


def traced(code: Callable[..., Any], *inputs: Tensor) -> tuple[Net, ap.Structure]:
    model = Net(code).double().eval()
    return model, ap.trace(model, inputs)


def planned(structure: ap.Structure) -> ap.Plan:
    group = structure.groups[0]
    return structure.plan({group.name: range(group.size - 1)})


def mean_of_the_batch(net: Net, x: Tensor, _scale: float) -> Tensor:
    h = net.hidden(x)
    return net.b(h - h.sum(0) / float(h.shape[0]) * 0.5)


def remembers(net: Net, x: Tensor, _scale: float) -> Tensor:
    h = net.hidden(x)
    net.memory = 0.9 * net.memory + 0.1 * h.mean(0)
    return net.b(h + net.memory)


def branches_on_what_it_wrote(net: Net, x: Tensor, _scale: float) -> Tensor:
    flag = torch.zeros(1, dtype=x.dtype)
    flag[0] = x.sum()
    h = net.hidden(x)
    return net.b(h if flag.item() > 0 else 2 * h)


def branches_on_closeness(net: Net, x: Tensor, _scale: float) -> Tensor:
    h = net.hidden(x)
    return net.b(2 * h if torch.allclose(x, x.abs()) else h)


def computes_in_a_thread(net: Net, x: Tensor, _scale: float) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: x.detach().sum(-1, keepdim=True) * 2).result()
    return net.b(net.hidden(x)) * beside


def differentiates(net: Net, x: Tensor, _scale: float) -> Tensor:
    with torch.enable_grad():
        own = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((own**3).sum(), own)
    return net.b(net.hidden(slope))


class Result:
    """Nothing that could be rebuilt."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


REFUSED = [
    remembers,
    branches_on_what_it_wrote,
    branches_on_closeness,
    computes_in_a_thread,
    lambda net, x, _scale: Result(net.b(net.hidden(x))),
    lambda net, x, _scale: net.b(torch.vmap(lambda row: 2 * row)(net.hidden(x))),
]


@pytest.mark.parametrize("code", REFUSED, ids=lambda code: code.__name__)
def test_what_cannot_be_replayed_is_refused(code: Any) -> None:
    _, structure = traced(code, torch.ones(2, 6, dtype=torch.float64))
    with pytest.raises(PlanMismatchError, match="cannot be written as a program"):
        planned(structure)


def test_what_torch_sees_can_be_replayed_or_is_refused() -> None:
    model, structure = traced(differentiates, torch.ones(2, 6, dtype=torch.float64))
    try:
        plan = planned(structure)
    except PlanMismatchError:
        return
    x = torch.randn(2, 6, dtype=torch.float64)
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x))


def test_a_number_made_of_the_batch_binds_the_program_to_it() -> None:
    model, structure = traced(mean_of_the_batch, torch.randn(3, 6, dtype=torch.float64))
    program = ap.cut(model, plan := planned(structure))
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(program(x), ap.zero(model, plan)(x))
    with pytest.raises(TraceError, match="must have size 3 along dimension 0"):
        program(torch.randn(4, 6, dtype=torch.float64))


def test_a_number_made_of_a_batch_of_one_is_refused() -> None:
    _, structure = traced(mean_of_the_batch, torch.randn(1, 6, dtype=torch.float64))
    with pytest.raises(PlanMismatchError, match="numbers of the size of the batch"):
        planned(structure)


def test_a_number_made_of_a_length_binds_the_program_to_it() -> None:
    code = lambda net, x, _scale: net.b(net.hidden(x).sum(1) / float(x.shape[1]))  # noqa: E731
    model, structure = traced(code, torch.randn(2, 5, 6, dtype=torch.float64))
    program = ap.cut(model, planned(structure))
    program(torch.randn(4, 5, 6, dtype=torch.float64))
    with pytest.raises(TraceError, match="must have size 5 along dimension 1"):
        program(torch.randn(2, 9, 6, dtype=torch.float64))


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    x, y = (torch.randn(2, 6, dtype=torch.float64) for _ in range(2))
    model, structure = traced(
        lambda net, a, b, _scale: net.b(net.hidden(a)) - net.b(net.hidden(b)).exp(), x, x
    )
    program = ap.cut(model, plan := planned(structure))
    torch.testing.assert_close(program(x, y), ap.zero(model, plan)(x, y))


def test_other_arguments_must_be_those_of_the_example() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    model, structure = traced(lambda net, a, scale: net.b(net.hidden(a)) * scale, x)
    program = ap.cut(model, planned(structure))
    program(x, scale=1.0)
    with pytest.raises(TraceError, match=r"scale=1\.0 and got 5\.0"):
        program(x, scale=5.0)
