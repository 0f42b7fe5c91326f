"""Programs in train mode: as the model, or refused in words."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import TraceError
from apoptosis.records import Outcome
from apoptosis.structure import CutProgram
from oracles.building import Net, built

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def hidden(net: Net, x: Tensor) -> Tensor:
    """A view that only a program can cut."""
    return net.norm(net.stem(x).view(-1, 4, 4).relu().flatten(1))


def returns_losses(net: Net, x: Tensor) -> Any:
    y = net.head(hidden(net, x))
    return {"loss": y.square().mean()} if net.training else y.sigmoid()


def has_a_helper(net: Net, x: Tensor) -> Any:
    h = hidden(net, x)
    return (net.head(h), net.helper(h)) if net.training else net.head(h)


def drops_paths(net: Net, x: Tensor) -> Tensor:
    h = hidden(net, x)
    if net.training:
        h = h * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.9) / 0.9
    return net.head(h)


def drops_layers(net: Net, x: Tensor) -> Tensor:
    h = hidden(net, x)
    if net.training and random.random() < 1e-9:  # noqa: S311
        return net.head(x.new_zeros(len(x), 16))
    return net.head(h)


def keeps_an_average(net: Net, x: Tensor) -> Tensor:
    h = hidden(net, x)
    if net.training:
        net.average.mul_(0.9).add_(0.1 * h.detach().mean())
    return net.head(h) + 0 * net.average


def scales_in_eval_mode(net: Net, x: Tensor) -> Tensor:
    y = net.head(hidden(net, x))
    return y if net.training else y * 0.5


def stops(net: Net, x: Tensor) -> Tensor:
    if net.training:
        raise RuntimeError("targets are missing")
    return net.head(hidden(net, x))


def made(code: Any) -> nn.Module:
    parts: dict[str, nn.Module] = {
        "stem": nn.Linear(6, 16),
        "norm": nn.BatchNorm1d(16),
        "head": nn.Linear(16, 3),
    }
    if code is has_a_helper:
        parts["helper"] = nn.Linear(16, 2)
    model = built(lambda: Net(code, **parts))
    if code is keeps_an_average:
        model.register_buffer("average", torch.zeros((), dtype=torch.float64))
    return model


def numbers(num: int = 5, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 6, generator=generator, dtype=torch.float64)


def delivered(model: nn.Module) -> tuple[CutProgram, ap.Plan]:
    structure = ap.trace(model, numbers())
    group = structure.groups[0]
    plan = structure.plan({group.name: range(1, group.size)})
    program = ap.cut(model, plan)
    assert isinstance(program, CutProgram)
    return program, plan


OTHERS = [
    returns_losses,
    has_a_helper,
    drops_paths,
    drops_layers,
    keeps_an_average,
    scales_in_eval_mode,
    stops,
]


@pytest.mark.parametrize("code", OTHERS)
def test_a_train_mode_that_was_not_recorded_is_refused(code: Any, tmp_path: Path) -> None:
    model = made(code)
    program, plan = delivered(model)
    path = ap.save(tmp_path / "saved", Outcome(program, plan, example_inputs=numbers()))
    loaded = ap.load(path, dense=lambda: made(code))
    for network in (program, copy.deepcopy(program), loaded):
        torch.testing.assert_close(network(numbers(seed=1)), ap.zero(model, plan)(numbers(seed=1)))
        with pytest.raises(TraceError, match="in eval mode"):
            network.train()
        assert not network.training
        network.training = True
        with pytest.raises(TraceError, match="in eval mode"):
            network(numbers())


@pytest.mark.parametrize("code", OTHERS)
def test_a_model_in_train_mode_gives_a_program_in_eval_mode(code: Any) -> None:
    model = made(code).train()
    program, plan = delivered(model)
    assert not any(part.training for part in program.modules())
    twin = ap.zero(model, plan).eval()
    torch.testing.assert_close(program(numbers(seed=1)), twin(numbers(seed=1)), **TOLERANCE)


def with_flags_alone(net: Net, x: Tensor) -> Tensor:
    h = F.dropout(hidden(net, x), 0.3, net.training)
    return net.head(net.drop(h))


def test_dropout_and_norms_train_as_the_model_does() -> None:
    model = built(
        lambda: Net(
            with_flags_alone,
            stem=nn.Linear(6, 16),
            norm=nn.BatchNorm1d(16),
            drop=nn.Dropout(0.2),
            head=nn.Linear(16, 3),
        )
    )
    program, _ = delivered(model)
    assert program.train().training
    program(numbers()).sum().backward()
    assert not torch.equal(program(numbers()), program(numbers()))
    before = program.norm.running_mean.clone()
    program(numbers())
    assert not torch.equal(program.norm.running_mean, before)
