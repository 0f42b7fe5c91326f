"""The products from ordinary forwards and backwards alone, by central differences in float64.

    hessian      d/dt ∇L(θ+tδ)            functional   d/dt ∇⟨c, z(θ+tδ)⟩, c = ∂L/∂z held        ggn
    Jᵀ d/dt ∂L/∂z

Each derivative is taken at several steps, each by the five-point formula (error O(t⁴)); of two
neighbouring steps that agree best, the smaller one is taken. So a kink of a ReLU crossed at a large
step, or rounding at a small one, does not spoil it, and nobody has to choose a step per model.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.task import Task
from oracles.brute_force import flat_gradient, flatten, unflatten
from oracles.evaluation import forward, moved, parameters_of, undisturbed

__all__ = ["finite_difference_product", "line_derivative"]

STEPS = (2e-4, 4e-5, 8e-6, 1.6e-6)  # in units of ‖θ‖ / ‖δ‖


def finite_difference_product(
    model: nn.Module,
    batch: Any,
    task: Task | None = None,
    kind: str = "hessian",
    direction: Mapping[str, Tensor] | None = None,
    steps: Sequence[float] = STEPS,
) -> dict[str, Tensor]:
    """The product of `kind` with `direction` (default: the parameters), from first derivatives."""
    task = task or Task.classification()
    params = parameters_of(model)
    delta = unflatten(flatten(model, direction).clone(), model)
    unit = float(flatten(model).norm() / flatten(model, delta).norm().clamp_min(1e-300))
    steps = [unit * step for step in steps]

    def outputs() -> Tensor:
        return forward(model, batch, task)

    def slope(z: Tensor) -> Tensor:
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(task.loss(leaf, batch), leaf)[0]

    def pulled(weights: Tensor) -> Tensor:
        return flat_gradient((weights * outputs()).sum(), list(params.values()))

    def along(value: Callable[[], Tensor]) -> Callable[[float], Tensor]:
        def at(step: float) -> Tensor:
            with moved(model, delta, step):
                return value()

        return at

    with undisturbed(model):
        base = outputs().detach()
    if kind == "hessian":
        vector = line_derivative(
            along(lambda: flat_gradient(task.loss(outputs(), batch), list(params.values()))), steps
        )
    elif kind == "functional":
        vector = line_derivative(along(lambda: pulled(slope(base))), steps)
    elif kind == "ggn":
        change = line_derivative(along(lambda: slope(outputs())), steps)
        with undisturbed(model):
            vector = pulled(change)
    else:
        raise ValueError(f"no finite differences for {kind}")
    return unflatten(vector, model)


def line_derivative(at: Callable[[float], Tensor], steps: Sequence[float] = STEPS) -> Tensor:
    """The derivative of t ↦ at(t) at 0."""
    estimates = [_five_points(at, step) for step in steps]
    gaps = [float((a - b).norm()) for a, b in itertools.pairwise(estimates)]
    return estimates[1 + gaps.index(min(gaps))]


def _five_points(at: Callable[[float], Tensor], t: float) -> Tensor:
    near, far = at(t) - at(-t), at(2 * t) - at(-2 * t)
    return ((8 * near - far) / (12 * t)).detach()
