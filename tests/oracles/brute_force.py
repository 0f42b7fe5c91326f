"""Curvature matrices of tiny networks, column by column, straight from their definitions.

With z the outputs, c = ∂L/∂z and J = ∂z/∂θ:

    hessian      ∇²L                  functional   Σₖ cₖ ∇²zₖ                  ggn   Jᵀ (∂²L/∂z²) J

Double backward is wrong or missing for a few operations (`_weight_norm`, fused attention):
attention is forced to plain products, cases with the others say so and go to `differences` instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.task import Task
from oracles.evaluation import forward, parameters_of, undisturbed

__all__ = [
    "brute_force_product",
    "dense_ggn",
    "dense_hessian",
    "dense_kind",
    "double_backward_product",
    "flatten",
    "unflatten",
]


def dense_hessian(f: Callable[[], Tensor], params: Sequence[Tensor]) -> Tensor:
    """The Hessian (P, P) of the scalar `f()`, one backward of the gradient per column."""
    slopes = flat_gradient(f(), params, create_graph=True)
    if not slopes.requires_grad:
        return slopes.new_zeros(len(slopes), len(slopes))
    return torch.stack([flat_gradient(slope, params, retain_graph=True) for slope in slopes])


def dense_ggn(
    outputs: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], params: Sequence[Tensor]
) -> Tensor:
    """Jᵀ (∇²loss) J (P, P): J by rows, the Hessian of the loss by columns."""
    z = outputs()
    jacobian = torch.stack(
        [flat_gradient(entry, params, retain_graph=True) for entry in z.flatten()]
    )
    leaf = z.detach().requires_grad_()
    return jacobian.T @ dense_hessian(lambda: loss(leaf), [leaf]) @ jacobian


def dense_kind(
    model: nn.Module, batch: Any, task: Task | None = None, kind: str = "hessian"
) -> Tensor:
    """The matrix (P, P) of one kind at the model's parameters that require grad."""
    task = task or Task.classification()
    params = list(parameters_of(model).values())

    def outputs() -> Tensor:
        return forward(model, batch, task)

    def loss(z: Tensor) -> Tensor:
        return task.loss(z, batch)

    with undisturbed(model):
        if kind == "hessian":
            return dense_hessian(lambda: loss(outputs()), params)
        if kind == "ggn":
            return dense_ggn(outputs, loss, params)
        assert kind == "functional", f"no brute force for {kind}"
        leaf = outputs().detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf), leaf)
        return dense_hessian(lambda: (slope * outputs()).sum(), params)


def brute_force_product(
    model: nn.Module,
    batch: Any,
    task: Task | None = None,
    kind: str = "hessian",
    direction: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The dense matrix of `kind` times `direction` (default: the parameters themselves)."""
    matrix = dense_kind(model, batch, task, kind)
    return unflatten(matrix @ flatten(model, direction), model)


def double_backward_product(
    model: nn.Module, batch: Any, task: Task | None, kind: str, delta: Tensor
) -> Tensor:
    """One column's worth of `dense_kind` for `hessian` or `functional`: the gradient of ⟨gradient, delta⟩, (P,)."""
    task = task or Task.classification()
    params = list(parameters_of(model).values())
    with undisturbed(model):
        z = forward(model, batch, task)
        leaf = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(task.loss(leaf, batch), leaf)
        scalar = task.loss(z, batch) if kind == "hessian" else (slope * z).sum()
        return flat_gradient(flat_gradient(scalar, params, create_graph=True) @ delta, params)


def flatten(model: nn.Module, direction: Mapping[str, Tensor] | None = None) -> Tensor:
    """One vector (P,) of a direction by name, zeros where it has no entry; the parameters for None."""
    params = parameters_of(model)
    chosen = params if direction is None else direction
    return torch.cat(
        [chosen.get(name, torch.zeros_like(p)).detach().flatten() for name, p in params.items()]
    )


def unflatten(vector: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The inverse of `flatten`."""
    params = parameters_of(model)
    pieces = vector.split([p.numel() for p in params.values()])
    return {name: piece.view_as(p) for (name, p), piece in zip(params.items(), pieces, strict=True)}


def flat_gradient(scalar: Tensor, params: Sequence[Tensor], **options: bool) -> Tensor:
    """The gradient of a scalar as one vector, zeros for what it does not depend on."""
    if not scalar.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in params])
    grads = torch.autograd.grad(
        scalar, params, allow_unused=True, materialize_grads=True, **options
    )
    return torch.cat([g.flatten() for g in grads])
