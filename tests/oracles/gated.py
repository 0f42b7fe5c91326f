"""Gates put in by hand, and the Gauss-Newton matrix by them from dense Jacobians and Hessians of whole batches.

Nothing here knows of samples, factors or hooks on gradients: the outputs of a batch are one vector z(γ), the loss is a
function of it, and G = Jᵀ H J with J = ∂z/∂γ and H = ∂²L/∂z².
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.curvature import Gate, Place
from apoptosis.task import Batch, Task

__all__ = ["Gated", "brute_force", "loss_without", "of_gates"]


@dataclass(frozen=True)
class Gated:
    """A group, the modules that read it (or make it: `q output`), and which entries each unit owns there."""

    group: str
    places: tuple[str, ...]
    dim: int
    entries: tuple[tuple[int, ...], ...]

    @classmethod
    def plain(cls, group: str, places: tuple[str, ...], dim: int, size: int) -> "Gated":
        """Unit u is entry u."""
        return cls(group, places, dim, tuple((u,) for u in range(size)))

    @property
    def size(self) -> int:
        return len(self.entries)

    def gates(self) -> list[Gate]:
        """The same for the library."""
        sides = [
            (p.removesuffix(" output"), "output" if " " in p else "input") for p in self.places
        ]
        indices = np.array(self.entries)
        return [Gate(self.group, Place(m, 0, side), self.dim, indices) for m, side in sides]


def of_gates(groups: list[Gated]) -> list[Gate]:
    return [gate for gated in groups for gate in gated.gates()]


@contextmanager
def _multiplied(model: nn.Module, groups: list[Gated], gamma: Tensor) -> Iterator[None]:
    handles, start = [], 0
    for gated in groups:
        own, start = gamma[start : start + gated.size], start + gated.size

        def scaled(tensor: Tensor, gated: Gated = gated, own: Tensor = own) -> Tensor:
            tensor = tensor.movedim(gated.dim, -1)
            for unit, entries in enumerate(gated.entries):
                mask = torch.zeros(tensor.shape[-1], dtype=tensor.dtype)
                mask[list(entries)] = 1
                tensor = tensor * (1 + (own[unit] - 1) * mask)
            return tensor.movedim(-1, gated.dim)

        for place in gated.places:
            module = model.get_submodule(place.removesuffix(" output"))
            if place.endswith(" output"):
                hook = module.register_forward_hook(lambda _m, _a, out, by=scaled: by(out))
            else:
                hook = module.register_forward_pre_hook(
                    lambda _m, args, by=scaled: (by(args[0]), *args[1:])
                )
            handles.append(hook)
    yield
    for handle in handles:
        handle.remove()


def _outputs(model: nn.Module, batch: Batch, task: Task, groups: list[Gated], gamma: Tensor):
    with _multiplied(model, groups, gamma):
        args, kwargs = task.inputs(batch)
        return task.outputs(model(*args, **kwargs))


def brute_force(
    model: nn.Module, batch: Batch, task: Task, groups: list[Gated]
) -> tuple[Tensor, Tensor]:
    """(units,) gradient and (units, units) Gauss-Newton matrix of the mean loss, by all gates at 1."""
    ones = torch.ones(sum(gated.size for gated in groups), dtype=torch.float64)

    def outputs(gamma: Tensor) -> Tensor:
        return _outputs(model, batch, task, groups, gamma)

    z = outputs(ones).detach()

    def loss(flat: Tensor) -> Tensor:
        return task.loss(flat.view(z.shape), batch)

    jacobian = torch.autograd.functional.jacobian(outputs, ones).reshape(z.numel(), -1)
    hessian = torch.autograd.functional.hessian(loss, z.flatten())
    slope = torch.autograd.functional.jacobian(loss, z.flatten())
    return jacobian.T @ slope, jacobian.T @ hessian @ jacobian


def loss_without(
    model: nn.Module, batch: Batch, task: Task, groups: list[Gated], gone: list[int], step=1.0
) -> float:
    """The loss with the gates of some units at 1 − step."""
    gamma = torch.ones(sum(gated.size for gated in groups), dtype=torch.float64)
    gamma[gone] -= step
    with torch.no_grad():
        return float(task.loss(_outputs(model, batch, task, groups, gamma), batch))
