"""First derivatives over a data set: the mean gradient, and the mean squared gradient of samples (Fisher diagonal).

The gradient of the mean loss is one backward per batch. The Fisher diagonal is not its square: each sample's own
gradient is squared, then averaged,

    F_qq = Σₙ (∂(cₙ ℓₙ)/∂θ_q)² / Σₙ cₙ,        ℓₙ the mean loss of sample n over its cₙ predictions (1, or its tokens),

with labels drawn from the model's own distribution (then F is the GGN of a likelihood, in expectation) or those of
the data (the *empirical* Fisher, which converges to neither). Samples are differentiated together by `vmap` where the
model allows it, one by one where not.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from apoptosis.curvature.containment import contained
from apoptosis.curvature.problem import Curvature, Pass, Problem, mean_over, pose, start_backward
from apoptosis.curvature.switches import Kind, Switches
from apoptosis.errors import ConfigError
from apoptosis.task import Batch, Task, batch_size
from apoptosis.turns import one_at_a_time

__all__ = ["fisher_diagonal", "mean_gradient"]

_GRADIENT = Kind("gradient", Switches(), starts_value=False, starts_tangent=True)
_FISHER = replace(_GRADIENT, name="fisher")
_CHUNK_BYTES = 2**28


@one_at_a_time
def mean_gradient(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    micro_batch: int | None = None,
) -> Curvature:
    """The gradient of the mean loss, as `product` (and nothing else of the model changes)."""
    task, problem = task or Task.classification(), pose(model, None, _GRADIENT)

    def one_pass(batch: Batch) -> Pass:
        outputs = _outputs(problem, task, batch)
        start = start_backward(task, batch, outputs, None, _GRADIENT)
        parameters = list(problem.parameters.values())
        found = torch.autograd.grad(outputs, parameters, start.slope, allow_unused=True)
        return Pass(start.loss, dict(zip(problem.parameters, found, strict=True)))

    with contained(problem.model), buffers_restored(model):
        return mean_over(problem, batches, task, one_pass, micro_batch)


def fisher_diagonal(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    labels: str = "sampled",
    seed: int = 0,
) -> Curvature:
    """The mean over samples of the squared gradient, as `product`.

    Args:
        model: in eval mode; batch statistics would couple the samples.
        batches: the data.
        task: how to run a batch; its `sample` draws labels.
        labels: `sampled` from the model's own distribution, or those of the `data`.
        seed: for the sampling.

    Raises:
        ConfigError: for labels of another name.
    """
    if labels not in ("sampled", "data"):
        raise ConfigError(
            f"labels={labels!r} was asked for; a Fisher has labels 'sampled' or 'data'."
        )
    task, problem = task or Task.classification(), pose(model, None, _FISHER)
    generators: dict[torch.device, torch.Generator] = {}

    unreached: set[str] | None = None

    def one_pass(batch: Batch) -> Pass:
        nonlocal unreached
        outputs = _outputs(problem, task, batch)
        start = start_backward(task, batch, outputs, None, _FISHER)
        if unreached is None:
            unreached = _unreached(problem, outputs)
        outputs = outputs.detach()
        if labels == "sampled":
            generator = generators.setdefault(
                outputs.device, torch.Generator(outputs.device).manual_seed(seed)
            )
            batch = task.sample(outputs, batch, generator)
        squares = _squares(problem, task, batch)
        found = {n: None if n in unreached else squares.get(n) for n in problem.parameters}
        return Pass(start.loss, found)

    with contained(problem.model), buffers_restored(model):
        return mean_over(problem, batches, task, one_pass)


def _unreached(problem: Problem, outputs: Tensor) -> set[str]:
    """Parameters the outputs do not depend on; vmap gives zeros for them and cannot tell."""
    parameters = list(problem.parameters.values())
    found: list[Tensor | None] = list(
        torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    )
    return {name for name, g in zip(problem.parameters, found, strict=True) if g is None}


def _outputs(problem: Problem, task: Task, batch: Batch) -> Tensor:
    args, kwargs = task.inputs(batch)
    return task.outputs(problem.model(*args, **kwargs))


def _squares(problem: Problem, task: Task, batch: Batch) -> dict[str, Tensor]:
    """Σ (c·gradient)² / Σ c over a batch's samples."""
    bytes_each = sum(p.numel() * p.element_size() for p in problem.parameters.values())
    chunk = max(1, min(batch_size(batch), _CHUNK_BYTES // max(1, bytes_each)))
    total: dict[str, Tensor] = {}
    for piece in task.split(batch, chunk):
        counts = [task.count(sample) for sample in task.split(piece, 1)]
        squares = None
        if 0 not in counts:  # a mean over nothing is NaN, and stays NaN at weight 0
            with suppress(RuntimeError, ValueError, TypeError, NotImplementedError):
                squares = _together(problem, task, piece, counts)
        if squares is None:
            # vmap cannot follow everything (data-dependent control flow, some in-place writes).
            squares = _one_by_one(problem, task, piece, counts)
        for name, square in squares.items():
            total[name] = total[name].add_(square) if name in total else square
    return {name: square.div_(task.count(batch)) for name, square in total.items()}


def _together(problem: Problem, task: Task, piece: Batch, counts: list[int]) -> dict[str, Tensor]:
    size = batch_size(piece)
    leaves, tree = tree_flatten(piece)
    mapped = [0 if isinstance(x, Tensor) and x.dim() and len(x) == size else None for x in leaves]

    def loss(parameters: dict[str, Tensor], *parts: Any) -> Tensor:
        single = [x.unsqueeze(0) if dim == 0 else x for x, dim in zip(parts, mapped, strict=True)]
        sample = tree_unflatten(single, tree)
        args, kwargs = task.inputs(sample)
        outputs = functional_call(problem.model, parameters, args, kwargs)
        return task.loss(task.outputs(outputs), sample)

    parameters = {name: p.detach() for name, p in problem.parameters.items()}
    each = vmap(grad(loss), in_dims=(None, *mapped), randomness="different")
    found = each(parameters, *leaves)
    weights = {device: torch.tensor(counts, device=device).square() for device in problem.devices}
    return {
        name: torch.einsum("n...,n->...", g.square(), weights[g.device].to(g.dtype))
        for name, g in found.items()
    }


def _one_by_one(problem: Problem, task: Task, piece: Batch, counts: list[int]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for sample, count in zip(task.split(piece, 1), counts, strict=True):
        if count == 0:
            continue
        outputs = _outputs(problem, task, sample)
        loss = task.loss(outputs, sample)
        found: list[Tensor | None] = list(
            torch.autograd.grad(loss, list(problem.parameters.values()), allow_unused=True)
        )
        for name, gradient in zip(problem.parameters, found, strict=True):
            if gradient is not None:
                square = (count * gradient).square()
                total[name] = total[name].add_(square) if name in total else square
    return total


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Buffers that the model wrote to inside the block (BatchNorm in train mode) get their contents back."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in saved:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
