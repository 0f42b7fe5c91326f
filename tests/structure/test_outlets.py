"""Roads of outputs: a, c, the other term and the ReLU, held against what a run of the network shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.models import resnet32, resnet50
from apoptosis.structure import Outlet, Spot, find_outlets
from oracles.building import Net, built


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


def block(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A network with a branch that ends in the layer `last`; the function says what is done with `branch` of it."""
    return built(
        lambda: Net(
            function,
            first=nn.Conv2d(3, 4, 1),
            last=nn.Conv2d(4, 3, 3, padding=1),
            norm=nn.BatchNorm2d(3),
            gain=nn.Parameter(torch.randn(3, 1, 1)),
            all=nn.Parameter(torch.randn(())),
            fixed=nn.Parameter(torch.randn(1, 3, 8, 8)),
            side=nn.Conv2d(3, 3, 1),
            drop=nn.Dropout(0.5),
        )
    )


def branch(m: Any, x: Tensor) -> Tensor:
    return m.last(F.silu(m.first(x)))


@dataclass(frozen=True)
class Case:
    id: str
    function: Callable[[Any, Tensor], Tensor]
    other: Spot | None
    rectified: bool
    most: float | None = None


X = Spot("first", "input")
CASES = [
    Case("norm, sum, relu", lambda m, x: F.relu(m.norm(branch(m, x)) + x), X, True),
    Case("the sum the other way round", lambda m, x: F.relu(x + m.norm(branch(m, x))), X, True),
    Case("in place", lambda m, x: m.norm(branch(m, x)).add_(x).relu_(), X, True),
    Case("relu alone", lambda m, x: F.relu(m.norm(branch(m, x))), None, True),
    Case("relu6", lambda m, x: F.relu6(m.norm(branch(m, x))), None, True, 6.0),
    Case("hardtanh as relu6", lambda m, x: F.hardtanh(branch(m, x), 0.0, 6.0), None, True, 6.0),
    Case("a factor for each", lambda m, x: m.gain * m.norm(branch(m, x)) + x, X, False),
    Case("a factor for all", lambda m, x: m.norm(branch(m, x)) * m.all + x, X, False),
    Case("dropout, asleep", lambda m, x: m.drop(branch(m, x)) + x, X, False),
    Case("seen as another's output", lambda m, x: branch(m, x) + m.side(x), None, False),
]


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.id)
def test_the_road_leads_to_what_the_run_shows(case):
    model, x = block(case.function), image()
    outlet = find_outlets(model, (x,), {}, {"last": 1})["last"]
    assert (outlet.other, outlet.rectified, outlet.most) == (case.other, case.rectified, case.most)
    with torch.no_grad():
        a, c = (own[:, None, None] for own in outlet.affine(model, 3))
        z = a * model.last(F.silu(model.first(x))) + c + (x if outlet.other else 0)
        found = z.clamp(0, outlet.most) if outlet.rectified else z
        torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


ENDS = {
    "two readers": lambda m, x: _twice(branch(m, x)),
    "the other term comes later": CASES[-1].function,
    "the other term is fixed": lambda m, x: branch(m, x) + m.fixed,
    "the other term is spread": lambda m, x: branch(m, x) + x[:1],
    "the other term counts twice": lambda m, x: torch.add(branch(m, x), x, alpha=2),
    "itself": lambda m, x: torch.add(*[branch(m, x)] * 2),
    "another activation": lambda m, x: F.gelu(branch(m, x)),
    "a clamp elsewhere": lambda m, x: F.hardtanh(branch(m, x), -1.0, 1.0),
    "a factor for each place": lambda m, x: F.relu(branch(m, x) * m.fixed),
    "written to by a view": lambda m, x: F.relu(_first_zeroed(branch(m, x))),
    "the other term is written to by a view": lambda m, x: branch(m, x) + _first_zeroed(x),
}


def _twice(y: Tensor) -> Tensor:
    return F.relu(y) + y


def _first_zeroed(y: Tensor) -> Tensor:
    y[:, :1].zero_()
    return y


@pytest.mark.parametrize("end", ENDS)
def test_what_is_not_such_a_road_is_none(end):
    model = block(ENDS[end])
    assert find_outlets(model, (image(),), {}, {"last": 1}) == {}


def test_what_is_written_to_after_the_layer_ran_is_not_seen_in_time():
    """The block's input is what is added, but not yet what it will be."""

    def inner(m: Any, x: Tensor) -> Tensor:
        return branch(m, x) + m.rectify(x)

    def net() -> nn.Module:
        parts = {"first": nn.Conv2d(3, 4, 1), "last": nn.Conv2d(4, 3, 3, padding=1)}
        return Net(
            lambda m, x: m.block(m.stem(x)),
            stem=nn.Conv2d(3, 3, 1),
            block=Net(inner, **parts, rectify=nn.ReLU(inplace=True)),
        )

    assert find_outlets(built(net), (image(),), {}, {"block.last": 1}) == {}


def test_factors_may_be_tensors_that_are_no_parameters():
    model = block(lambda m, x: F.relu(branch(m, x) * m.plain))
    model.plain = torch.randn(3, 1, 1, dtype=torch.float64)
    found = find_outlets(model, (image(),), {}, {"last": 1})["last"]
    torch.testing.assert_close(found.affine(model, 3)[0], model.plain.flatten())


def test_a_norm_that_measures_is_none():
    model = block(lambda m, x: F.batch_norm(branch(m, x), None, None, training=True).relu())
    assert find_outlets(model, (image(),), {}, {"last": 1}) == {}


def test_layers_that_are_called_twice_have_none():
    model = block(lambda m, x: F.relu(branch(m, branch(m, x))))
    assert find_outlets(model, (image(),), {}, {"last": 1}) == {}


def test_the_last_to_run_of_two_that_are_added_sees_the_other():
    """torchvision's order: the shortcut's convolution runs when the branch is through."""
    model = block(lambda m, x: F.relu(m.norm(branch(m, x)) + m.side(x)))
    found = find_outlets(model, (image(),), {}, {"last": 1, "side": 1})
    assert found == {"side": Outlet((), Spot("norm", "output"), rectified=True)}


def test_tokens_run_along_the_last_dimension():
    model = built(
        lambda: Net(
            lambda m, x: x + m.gain * m.down(F.relu(m.up(x))),
            up=nn.Linear(4, 6),
            down=nn.Linear(6, 4),
            gain=nn.Parameter(torch.randn(4)),
        )
    )
    found = find_outlets(model, (torch.randn(2, 5, 4).double(),), {}, {"up": -1, "down": -1})
    assert found["up"] == Outlet(rectified=True)
    assert found["down"].other == Spot("up", "input")
    torch.testing.assert_close(found["down"].affine(model, 4)[0], model.gain.detach())


@pytest.mark.parametrize("make", [resnet32, resnet50])
def test_residual_networks_have_one_at_almost_every_convolution(make):
    model = make()
    layers = {n: 1 for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    found = find_outlets(model.eval(), (torch.zeros(1, 3, 32, 32),), {}, layers)
    shortcuts = sum("downsample.0" in name or "shortcut.0" in name for name in layers)
    assert len(found) == len(layers) - shortcuts  # branches beside a shortcut that has weights
    ends = [o for n, o in found.items() if n.endswith("conv2" if make is resnet32 else "conv3")]
    assert all(own.other is not None and own.rectified for own in ends)
