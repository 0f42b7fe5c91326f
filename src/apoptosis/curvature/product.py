"""The fast path: value and tangent in one forward, one backward, any model.

One forward carries x and x̂ = d/dt x(θ + tδ) through every operation (`tangents`); with s = ⟨∂L/∂z, ẑ⟩ one backward
of s by θ at fixed δ gives the product (`switches` has the four kinds). With δ = θ that is 2 forward and 4 backward
products where a training step has 1 and 2: 2.0 times its arithmetic, and the same factor in memory.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing

import torch
from torch import Tensor, nn

from apoptosis.curvature import autocast
from apoptosis.curvature.calls import body_of
from apoptosis.curvature.containment import contained
from apoptosis.curvature.duals import Ledger
from apoptosis.curvature.lost import lost_tangent
from apoptosis.curvature.problem import (
    Curvature,
    Pass,
    Problem,
    mean_over,
    pose,
    start_backward,
)
from apoptosis.curvature.switches import find_kind
from apoptosis.curvature.tangents import TangentMode
from apoptosis.errors import ModelError
from apoptosis.task import Batch, Task, tensors_in
from apoptosis.turns import one_at_a_time

__all__ = ["curvature_product"]


@one_at_a_time
def curvature_product(  # noqa: PLR0913 - one question, seven answers a user may want to give
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    kind: str = "connectivity",
    direction: Mapping[str, Tensor] | None = None,
    gradient: bool = False,
    micro_batch: int | None = None,
) -> Curvature:
    """H δ of the mean loss, exactly, for every trainable parameter of an unmodified model.

    The model runs in the mode it is in (eval or train); BatchNorm's statistics are not touched in either, nor is
    anything else of it: parameters, buffers, gradients, flags, hooks and random states stay as they are.

    Args:
        model: any module; parameters with `requires_grad=False` have δ = 0 and no result.
        batches: the data, any iterable of batches as `task` understands them.
        task: how to run a batch and what its loss is; classification with cross-entropy unless said.
        kind: `connectivity` (the paper's), `functional`, `hessian` or `ggn`.
        direction: δ by parameter name, 0 where a name is left out; θ itself unless said.
        gradient: the gradient of the loss as well, for one more product per layer.
        micro_batch: at most so many samples at once, to bound memory; the result is the same.

    Returns:
        The product (and gradient), the loss, and which operations had no rule of their own.

    Raises:
        ApoptosisError: what cannot be scored, with cause and remedy; see `apoptosis.errors`.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> batches = [(torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))]
    >>> sorted(curvature_product(model, batches, kind="hessian").product)
    ['bias', 'weight']
    """
    task = task or Task.classification()
    problem = pose(model, direction, find_kind(kind), wants_gradient=gradient)
    return run(problem, batches, task, micro_batch)


def run(
    problem: Problem, batches: Iterable[Batch], task: Task, micro_batch: int | None = None
) -> Curvature:
    """The mean of the fast pass over all data."""
    with contained(problem.model):
        return mean_over(
            problem, batches, task, lambda batch: one_pass(problem, task, batch), micro_batch
        )


def one_pass(problem: Problem, task: Task, batch: Batch) -> Pass:
    """The product for one piece of data: a forward with tangents and a backward."""
    tangents = _tangents(problem)
    with closing(ledger_of(problem, tangents, batch)) as ledger:
        return _carried(problem, task, batch, tangents, TangentMode(ledger, problem.kind.kept))


def _carried(
    problem: Problem,
    task: Task,
    batch: Batch,
    tangents: dict[str, Tensor | None],
    mode: TangentMode,
) -> Pass:
    parameters = problem.parameters
    outputs, moved = forward(problem, mode, task, batch)
    start = start_backward(task, batch, outputs, moved, problem.kind)
    wanted: list[Tensor] = list(parameters.values())
    on_tangent = start.slope if problem.kind.starts_tangent else None
    if problem.wants_gradient:
        # The adjoint of δ is the gradient; it comes down with the adjoint of ẑ, which `ggn` alone has no other use for.
        wanted += [t for t in tangents.values() if t is not None]
        on_tangent = start.slope
    found = _backward(mode, [(outputs, start.on_value), (moved, on_tangent)], wanted)
    product = dict(zip(parameters, found, strict=False))
    gradient = None
    if problem.wants_gradient:
        gradient = dict(zip(parameters, found[len(parameters) :], strict=True))
    return Pass(start.loss, product, gradient, mode.fallbacks)


def _tangents(problem: Problem) -> dict[str, Tensor | None]:
    """δ as the forward needs it: with an adjoint of its own where the gradient is wanted."""
    if not problem.wants_gradient:
        return problem.direction
    return {
        name: (torch.zeros_like(problem.parameters[name]) if delta is None else delta)
        .detach()
        .requires_grad_()
        for name, delta in problem.direction.items()
    }


def ledger_of(problem: Problem, tangents: Mapping[str, Tensor | None], batch: Batch) -> Ledger:
    """Records for all that belongs to the model or the batch."""
    ledger = Ledger({p: tangents[name] for name, p in problem.parameters.items()})
    for tensor in problem.tensors:
        ledger.own(tensor)
    for tensor in tensors_in(batch):
        ledger.protect(tensor)
    return ledger


def forward(
    problem: Problem, mode: TangentMode, task: Task, batch: Batch
) -> tuple[Tensor, Tensor | None]:
    """Outputs z and their tangent ẑ."""
    args, kwargs = task.inputs(batch)
    with mode.watching_norms(), mode:
        outputs = task.outputs(problem.model(*args, **kwargs))
    outputs, record = mode.ledger.current(outputs)
    if not outputs.requires_grad:
        raise ModelError(
            "The model's outputs depend on none of its trainable parameters. Were they detached, computed under "
            "no_grad, or turned into integers? Let the model return differentiable outputs while it is scored."
        )
    if record is None:
        raise lost_tangent("the model's output", outputs)
    return outputs, record.tangent


def _backward(
    mode: TangentMode,
    starts: list[tuple[Tensor | None, Tensor | None]],
    wanted: list[Tensor],
) -> tuple[Tensor | None, ...]:
    pairs = [(y, a) for y, a in starts if y is not None and a is not None and y.requires_grad]
    if not pairs:
        return (None,) * len(wanted)
    # With the mode on: checkpointed blocks run their forward again in here. `grad` itself must not be intercepted.
    with autocast.without_autocast(), mode.watching_norms(), mode:
        return body_of(torch.autograd.grad)(  # pyright: ignore[reportArgumentType]
            [y for y, _ in pairs], wanted, [a for _, a in pairs], allow_unused=True
        )
