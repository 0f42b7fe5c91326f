"""What forward writes to while it is traced is put back: parameters, inputs, random numbers."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError


class Momentum(nn.Module):
    """Moves one layer towards another in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.5).add_(self.fast.weight, alpha=0.5)
            self.slow.bias.data = self.fast.bias.data.clone()
        return self.out(self.slow(x) + self.fast(x))


def test_parameters_that_forward_moves_are_put_back() -> None:
    model = Momentum()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    ap.trace(model, torch.randn(2, 4))
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_an_embedding_with_a_greatest_norm_keeps_its_rows() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.1), nn.Linear(8, 2))
    before = model[0].weight.clone()
    ap.trace(model, torch.tensor([[1, 2, 3]]))
    assert model[0].weight.equal(before)


def test_inputs_that_forward_writes_to_are_left_alone() -> None:
    x = -torch.ones(3, 4)
    ap.trace(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Linear(8, 2)), x)
    assert x.equal(-torch.ones(3, 4))


def test_random_numbers_of_python_and_numpy_go_on() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * (1 + random.random() + np.random.rand() + torch.rand(())))  # noqa: NPY002

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    structure = ap.trace(Drawing(), torch.ones(2, 4))
    ap.verify(structure)
    found = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    Drawing()
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    assert found == expected


def test_two_threads_may_trace_at_once() -> None:
    found: list[int] = []

    def trace_one() -> None:
        net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
        found.append(len(ap.trace(net, torch.zeros(2, 8)).groups))

    threads = [threading.Thread(target=trace_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [19] * 4


def test_a_trace_within_a_trace_says_so() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            ap.trace(nn.Linear(4, 4), x)
            return self.a(x)

    with pytest.raises(TraceError, match="is being traced already"):
        ap.trace(Nested(), torch.zeros(2, 4))


def test_a_result_in_an_object_is_pinned() -> None:
    class Holder:
        __slots__ = ("inner",)

        def __init__(self, inner: object) -> None:
            self.inner = inner

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Holder:
            return Holder(Holder([self.b(self.a(x))]))

    structure = ap.trace(Wrapped(), torch.zeros(2, 4))
    assert {group.name for group in structure.groups} == {"a"}


def test_an_unknown_operation_does_not_double_the_costs_of_one_sample() -> None:
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(torch.special.bessel_j0(x)).relu())

    one, two = (ap.trace(Bessel(), torch.zeros(n, 6)) for n in (1, 2))
    assert (one.macs(), two.macs()) == (144, 288)
    assert [op for op, _ in one.without_rule] == ["special_bessel_j0.default"]
