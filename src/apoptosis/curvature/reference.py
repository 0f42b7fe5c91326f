"""The reference path: the same products another way, slow, universal, and simple enough to be believed.

`hessian` and `functional` are double backward: the gradient of ⟨gradient, δ⟩. `ggn` is Jᵀ(∇²loss)J by two
vector-Jacobian products. `connectivity` is the definition itself: every operation that is no product is replaced by
its linearisation at the current point,

    f(x₀) + J_f(x₀)·(x − x₀),

and what is left is differentiated twice (`linearised`). Tests check this path by finite differences.

torch's obvious route, `grad` of `jvp`, is silently wrong on norms. Double backward is right but for a few operations
that torch differentiates twice wrongly or not at all; they are replaced by equal ones (`corrections`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from apoptosis.curvature.containment import contained
from apoptosis.curvature.corrections import Corrections, PaddingRows
from apoptosis.curvature.duals import Ledger
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.curvature.linearisation import LinearisingMode
from apoptosis.curvature.problem import Curvature, Pass, Problem, mean_over, pose, start_backward
from apoptosis.curvature.switches import find_kind
from apoptosis.errors import ModelError
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["reference_product"]


@one_at_a_time
def reference_product(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    kind: str = "connectivity",
    direction: Mapping[str, Tensor] | None = None,
    gradient: bool = False,
) -> Curvature:
    """What `curvature_product` computes, by double backward: for checking, and for models that it cannot follow."""
    task = task or Task.classification()
    problem = pose(model, direction, find_kind(kind), wants_gradient=gradient)
    with (
        contained(problem.model, checkpoints=False),
        buffers_restored(model),
        sdpa_kernel(SDPBackend.MATH),
    ):
        return mean_over(problem, batches, task, lambda batch: _one_pass(problem, task, batch))


def _one_pass(problem: Problem, task: Task, batch: Batch) -> Pass:
    parameters = list(problem.parameters.values())
    direction = [
        torch.zeros_like(p) if (d := problem.direction[n]) is None else d
        for n, p in problem.parameters.items()
    ]
    padding = PaddingRows()
    outputs = _forward(problem, task, batch, padding)
    moved = _push_forward(outputs, parameters, direction) if problem.kind.starts_value else None
    start = start_backward(task, batch, outputs, moved, problem.kind)
    product: list[Tensor | None] = [None] * len(parameters)
    if problem.kind.starts_value:
        product = _pull_back(outputs, parameters, start.on_value)
    if problem.kind.starts_tangent:
        product = _add(product, _curvature_of_network(outputs, start.slope, parameters, direction))
    padding.drop(parameters, product)
    gradient = None
    if problem.wants_gradient:
        slopes = _pull_back(outputs, parameters, start.slope)
        padding.drop(parameters, slopes)
        gradient = dict(zip(problem.parameters, slopes, strict=True))
    return Pass(start.loss, dict(zip(problem.parameters, product, strict=True)), gradient)


def _forward(problem: Problem, task: Task, batch: Batch, padding: PaddingRows) -> Tensor:
    args, kwargs = task.inputs(batch)
    if problem.kind.name == "connectivity":
        ledger = Ledger(dict.fromkeys(problem.parameters.values()))
        for tensor in problem.tensors:
            ledger.own(tensor)
        mode = LinearisingMode(ledger, padding)
        with mode.watching_norms(), mode:
            outputs = task.outputs(problem.model(*args, **kwargs))
        outputs = ledger.current(outputs)[0]
    else:
        with Corrections(padding):
            outputs = task.outputs(problem.model(*args, **kwargs))
    if not outputs.requires_grad:
        raise ModelError(
            "The model's outputs depend on none of its trainable parameters. Let it return differentiable outputs."
        )
    return outputs


def _pull_back(outputs: Tensor, parameters: list[Any], adjoint: Tensor) -> list[Tensor | None]:
    """Jᵀ a."""
    return list(
        torch.autograd.grad(outputs, parameters, adjoint, retain_graph=True, allow_unused=True)
    )


def _push_forward(outputs: Tensor, parameters: list[Any], direction: list[Tensor]) -> Tensor:
    """J δ, as the derivative of u ↦ ⟨Jᵀu, δ⟩."""
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled: list[Tensor | None] = list(
        torch.autograd.grad(outputs, parameters, probe, create_graph=True, allow_unused=True)
    )
    pairs = [(v, d) for v, d in zip(pulled, direction, strict=True) if v is not None]
    return torch.autograd.grad(
        [v for v, _ in pairs], probe, [d for _, d in pairs], retain_graph=True
    )[0]


def _curvature_of_network(
    outputs: Tensor, slope: Tensor, parameters: list[Any], direction: list[Tensor]
) -> list[Tensor | None]:
    """∇ ⟨Jᵀc, δ⟩ with c = ∂loss/∂z held fixed."""
    gradient: list[Tensor | None] = list(
        torch.autograd.grad(outputs, parameters, slope, create_graph=True, allow_unused=True)
    )
    pairs = [
        (g, d)
        for g, d in zip(gradient, direction, strict=True)
        if g is not None and g.requires_grad
    ]
    if not pairs:
        return [None if g is None else torch.zeros_like(g) for g in gradient]
    curved: list[Tensor | None] = list(
        torch.autograd.grad(
            [g for g, _ in pairs],
            parameters,
            [d for _, d in pairs],
            retain_graph=True,
            allow_unused=True,
        )
    )
    return [
        torch.zeros_like(g) if c is None and g is not None else c
        for c, g in zip(curved, gradient, strict=True)
    ]


def _add(a: list[Tensor | None], b: list[Tensor | None]) -> list[Tensor | None]:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]
