"""The reference path: the same products another way, slow, universal, and simple enough to be believed.

`hessian` and `functional` are double backward: the gradient of ⟨gradient, δ⟩. `ggn` is Jᵀ(∇²loss)J by two vector-Jacobian products. `connectivity` is the
definition itself: every operation that is no product is replaced by its linearisation at the current point,

    f(x₀) + J_f(x₀)·(x − x₀),

and what is left is differentiated twice (`linearised`). Tests check this path by finite differences.

torch's obvious route, `grad` of `jvp`, is silently wrong on norms; double backward is right but for two operations, which are
replaced here (`_Corrections`): the fused weight norm, and embeddings with a padding row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from apoptosis.curvature.duals import Ledger
from apoptosis.curvature.interception import contained
from apoptosis.curvature.linearisation import LinearisingMode
from apoptosis.curvature.problem import Curvature, Pass, Problem, mean_over, pose, start_backward
from apoptosis.curvature.switches import find_kind
from apoptosis.errors import ModelError
from apoptosis.task import Batch, Task

__all__ = ["reference_product"]


def reference_product(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    kind: str = "connectivity",
    direction: Mapping[str, Tensor] | None = None,
    gradient: bool = False,
) -> Curvature:
    """What `curvature_product` computes, by double backward. For checking, and for models that hide derivatives from it."""
    task = task or Task.classification()
    problem = pose(model, direction, find_kind(kind), wants_gradient=gradient)
    with contained(model), _buffers_restored(model), sdpa_kernel(SDPBackend.MATH):
        return mean_over(problem, batches, task, lambda batch: _one_pass(problem, task, batch))


def _one_pass(problem: Problem, task: Task, batch: Batch) -> Pass:
    parameters = list(problem.parameters.values())
    direction = [
        torch.zeros_like(p) if (d := problem.direction[n]) is None else d
        for n, p in problem.parameters.items()
    ]
    corrections = _Corrections()
    with ExitStack() as stack:
        if problem.kind.name == "connectivity":
            ledger = Ledger(dict.fromkeys(parameters))
            for tensor in (*problem.model.buffers(), *problem.model.parameters()):
                ledger.own(tensor)
            mode = LinearisingMode(ledger)
            stack.enter_context(mode.watching_norms())
            stack.enter_context(mode)
        else:
            stack.enter_context(corrections)
        args, kwargs = task.inputs(batch)
        outputs = task.outputs(problem.model(*args, **kwargs))
        if problem.kind.name == "connectivity":
            outputs = mode.ledger.current(outputs)[0]
        if not outputs.requires_grad:
            raise ModelError("The model's outputs depend on none of its trainable parameters.")
    moved = _push_forward(outputs, parameters, direction) if problem.kind.starts_value else None
    start = start_backward(task, batch, outputs, moved, problem.kind)
    product: list[Tensor | None] = [None] * len(parameters)
    if problem.kind.starts_value and start.on_value is not None:
        product = _pull_back(outputs, parameters, start.on_value)
    if problem.kind.starts_tangent:
        product = _add(product, _curvature_of_network(outputs, start.slope, parameters, direction))
    corrections.drop_padding(parameters, product)
    gradient = None
    if problem.wants_gradient:
        slopes = _pull_back(outputs, parameters, start.slope)
        corrections.drop_padding(parameters, slopes)
        gradient = dict(zip(problem.parameters, slopes, strict=True))
    return Pass(start.loss, dict(zip(problem.parameters, product, strict=True)), gradient)


def _pull_back(outputs: Tensor, parameters: list[Any], adjoint: Tensor) -> list[Tensor | None]:
    """Jᵀ a."""
    return list(
        torch.autograd.grad(outputs, parameters, adjoint, retain_graph=True, allow_unused=True)
    )


def _push_forward(outputs: Tensor, parameters: list[Any], direction: list[Tensor]) -> Tensor:
    """J δ, as the derivative of u ↦ ⟨Jᵀu, δ⟩."""
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(
        outputs, parameters, probe, create_graph=True, allow_unused=True
    )
    pairs = [(v, d) for v, d in zip(pulled, direction, strict=True) if v is not None]
    return torch.autograd.grad(
        [v for v, _ in pairs], probe, [d for _, d in pairs], retain_graph=True
    )[0]


def _curvature_of_network(
    outputs: Tensor, slope: Tensor, parameters: list[Any], direction: list[Tensor]
) -> list[Tensor | None]:
    """∇ ⟨Jᵀc, δ⟩ with c = ∂loss/∂z held fixed."""
    gradient = torch.autograd.grad(
        outputs, parameters, slope, create_graph=True, allow_unused=True
    )
    pairs = [
        (g, d)
        for g, d in zip(gradient, direction, strict=True)
        if g is not None and g.requires_grad
    ]
    if not pairs:
        return [None if g is None else torch.zeros_like(g) for g in gradient]
    curved = torch.autograd.grad(
        [g for g, _ in pairs],
        parameters,
        [d for _, d in pairs],
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(g) if c is None and g is not None else c
        for c, g in zip(curved, gradient, strict=True)
    ]


def _add(a: list[Tensor | None], b: list[Tensor | None]) -> list[Tensor | None]:
    return [
        y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)
    ]


class _Corrections(TorchFunctionMode):
    """Two operations whose double backward in torch is not the derivative of their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.padded: list[tuple[Tensor, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ARG002 - torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_weight_norm":
            return _weight_norm(*args, **kwargs)
        if name == "embedding" and not kwargs and len(args) > 2 and args[2] >= 0:
            self.padded.append((args[0], args[2]))
            return func(*args[:2])
        if name == "embedding" and getattr(func, "__module__", "") == "torch.nn.functional":
            return _enter_embedding(self, func, args, kwargs)
        return func(*args, **kwargs)

    def drop_padding(self, parameters: list[Any], results: list[Tensor | None]) -> None:
        """A padding row has no gradient, by convention, and so no row in the product."""
        for weight, row in self.padded:
            for parameter, result in zip(parameters, results, strict=True):
                if parameter is weight and result is not None:
                    result[row] = 0


def _enter_embedding(
    mode: TorchFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from apoptosis.curvature.calls import body_of

    with mode:
        return body_of(func)(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v/‖v‖, the norm over all dimensions but `dim` (-1: over all)."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.sqrt((v * v).sum(others, keepdim=True)))


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in saved:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
