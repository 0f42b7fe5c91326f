"""Running a model for an oracle: plain forward, first derivatives only, everything put back afterwards."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from apoptosis.task import Task

__all__ = [
    "SEED",
    "forward",
    "gradient",
    "moved",
    "parameters_of",
    "random_direction",
    "seeded",
    "undisturbed",
]

SEED = (
    20  # what the RNG starts from in every forward, so that dropout masks agree between evaluations
)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def random_direction(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A standard normal tensor per parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in parameters_of(model).items()
    }


def forward(model: nn.Module, batch: Any, task: Task) -> Tensor:
    """The outputs of one forward from a fixed RNG state, with attention as plain matrix products."""
    args, kwargs = task.inputs(batch)
    with seeded(SEED), sdpa_kernel(SDPBackend.MATH):
        return task.outputs(model(*args, **kwargs))


def gradient(model: nn.Module, batch: Any, task: Task | None = None) -> dict[str, Tensor]:
    """The gradient of the loss by one ordinary backward."""
    task = task or Task.classification()
    params = parameters_of(model)
    with undisturbed(model):
        loss = task.loss(forward(model, batch, task), batch)
        grads = torch.autograd.grad(
            loss, list(params.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(params, grads, strict=True))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start the RNG at `seed` inside, put it back outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put parameters and buffers back afterwards."""
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    before = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


@contextmanager
def moved(model: nn.Module, direction: Mapping[str, Tensor], step: float) -> Iterator[None]:
    """The model at θ + step·direction inside, bit for bit at θ outside."""
    with undisturbed(model):
        with torch.no_grad():
            for name, parameter in parameters_of(model).items():
                if name in direction:
                    parameter.add_(direction[name], alpha=step)
        yield
