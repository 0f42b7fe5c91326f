"""What both paths share: the question, checked, and the mean over the data.

A `Problem` is a model with the parameters that count and a direction δ for them. A *pass* answers it for one piece of
data; the answer for all data is the mean weighted by `task.count`, so it does not depend on how the data are cut.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.curvature.switches import Kind
from apoptosis.errors import (
    ConfigError,
    DataError,
    DirectionError,
    LossError,
    ModelError,
    NonFiniteError,
)
from apoptosis.progress import track
from apoptosis.task import Batch, Task, tensors_in

__all__ = [
    "Curvature",
    "Pass",
    "Problem",
    "check_devices",
    "constant",
    "mean_over",
    "pieces",
    "pose",
    "start_backward",
]

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Curvature:
    """A curvature product and what came with it, all means over `count` samples, by parameter name."""

    product: Tensors
    gradient: Tensors | None
    loss: float
    count: int
    kind: str
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    """Operations without a rule and how often each took the generic path: exact, but slower."""
    unreached: tuple[str, ...] = ()
    """Parameters that the outputs do not depend on; their product is 0."""


@dataclass(frozen=True)
class Problem:
    """A model, its trainable parameters, and the direction."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    direction: dict[str, Tensor | None]
    kind: Kind
    wants_gradient: bool
    tensors: tuple[Tensor, ...]
    """All that belongs to the model: parameters, frozen ones too, and buffers."""

    @property
    def devices(self) -> set[torch.device]:
        """Where the model is."""
        return {tensor.device for tensor in self.tensors}


@dataclass(frozen=True)
class Pass:
    """The answer for one piece of data. None: the outputs do not depend on that parameter."""

    loss: float
    product: dict[str, Tensor | None]
    gradient: dict[str, Tensor | None] | None = None
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])


def pose(
    model: nn.Module,
    direction: Mapping[str, Tensor] | None,
    kind: Kind,
    *,
    wants_gradient: bool = False,
) -> Problem:
    """Check model and direction and put them together."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(
            f"Curvature of a {type(model).__name__} was asked for; only an nn.Module has parameters to score."
        )
    named = dict(model.named_parameters())
    parameters = {n: p for n, p in named.items() if p.requires_grad}
    if not parameters:
        found = len(named)
        raise ModelError(
            f"Curvature was asked for, but none of the model's {found} parameters requires grad, so there is nothing "
            "to score. Unfreeze what should be scored: parameter.requires_grad_(True) (integer and quantised weights "
            "cannot be)."
        )
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ModelError(
                f"Parameter {name!r} has dtype {parameter.dtype}; only real floating-point parameters have a "
                "curvature. Score the model before it is quantised, or freeze that parameter."
            )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in named.values()):
        raise ModelError(
            "The model has lazy parameters without shapes. Run it once on a batch, then score it."
        )
    delta = _check_direction(parameters, direction)
    tensors = (*named.values(), *model.buffers())
    return Problem(model, parameters, delta, kind, wants_gradient, tensors)


def _check_direction(
    parameters: dict[str, nn.Parameter], direction: Mapping[str, Tensor] | None
) -> dict[str, Tensor | None]:
    if direction is None:
        return {name: parameter.detach() for name, parameter in parameters.items()}
    if not isinstance(direction, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DirectionError(
            f"The direction is a {type(direction).__name__}; it must map names of parameters to tensors."
        )
    unknown = sorted(set(direction) - set(parameters))
    if unknown:
        known = ", ".join(list(parameters)[:4])
        raise DirectionError(
            f"The direction names {', '.join(map(repr, unknown[:4]))}, which the model has not among its trainable "
            f"parameters ({known}, ...). Use the names of model.named_parameters(); a name left out means 0 there."
        )
    for name, delta in direction.items():
        if not isinstance(delta, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DirectionError(
                f"The direction for {name!r} is a {type(delta).__name__}; it must be a tensor."
            )
        if delta.shape != parameters[name].shape:
            raise DirectionError(
                f"The direction for {name!r} has shape {tuple(delta.shape)}, the parameter "
                f"{tuple(parameters[name].shape)}. Both must be equal."
            )
        if delta.is_complex():
            raise DirectionError(f"The direction for {name!r} is complex; parameters are real.")
    given = {name: delta.to(parameters[name].dtype) for name, delta in direction.items()}
    given = {name: delta for name, delta in given.items() if delta.numel()}
    for name, value in zip(given, _largest(list(given.values())), strict=True):
        if not math.isfinite(value):
            raise DirectionError(
                f"The direction for {name!r} holds NaN or infinity. Its entries must be finite."
            )
    return {
        name: direction[name].detach().to(p.device, p.dtype) if name in direction else None
        for name, p in parameters.items()
    }


def _largest(tensors: list[Tensor]) -> list[float]:
    """The largest magnitude of each, NaN if it holds one; one transfer from the device for all."""
    if not tensors:
        return []
    found = [t.detach() for t in tensors]
    norms = torch._foreach_norm(found, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.double().cpu() for norm in norms]
    return torch.stack(list(norms)).tolist()


def mean_over(
    problem: Problem,
    batches: Iterable[Batch],
    task: Task,
    one_pass: Callable[[Batch], Pass],
    micro_batch: int | None = None,
) -> Curvature:
    """Run `one_pass` over all data in pieces and average."""
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise DataError(
            f"The batches are a {type(batches).__name__}; pass a list or a loader, anything that gives batches."
        )
    total = _Total(problem)
    devices = problem.devices
    for batch in track(batches, problem.kind.name):
        for piece in pieces(batch, task, micro_batch):
            check_devices(piece, devices)
            count = task.count(piece)
            if count == 0:
                continue
            total.add(one_pass(constant(piece)), count)
    return total.mean()


def pieces(batch: Batch, task: Task, micro_batch: int | None) -> Iterable[Batch]:
    """The batch in pieces of at most `micro_batch` samples."""
    if micro_batch is None:
        return [batch]
    if not isinstance(micro_batch, int) or micro_batch < 1:  # pyright: ignore
        raise ConfigError(
            f"micro_batch={micro_batch!r} was asked for; it is a number of samples, at least 1."
        )
    return task.split(batch, micro_batch)


def constant(batch: Batch) -> Batch:
    """A copy of the batch as data, without a graph of its own: forward may write to it, and gradients be recorded."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone().detach(), batch)


def check_devices(batch: Batch, devices: set[torch.device]) -> None:
    """Refuse a batch that is not where the model is."""
    for tensor in tensors_in(batch):
        if tensor.device not in devices:
            raise DataError(
                f"A batch holds a tensor on {tensor.device}, but the model is on "
                f"{', '.join(sorted(map(str, devices)))}. Move one to the other: batch.to(device) or model.to(device)."
            )


class _Total:
    """Running means over pieces, in float32 or better."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.product: Tensors = {}
        self.gradient: Tensors = {}
        self.loss = 0.0
        self.count = 0
        self.fallbacks: Counter[str] = Counter()

    def add(self, one: Pass, count: int) -> None:
        self.count += count
        self.loss += count * one.loss
        self.fallbacks.update(one.fallbacks)
        self._accumulate(self.product, one.product, count)
        if one.gradient is not None:
            self._accumulate(self.gradient, one.gradient, count)

    @torch.no_grad()
    def _accumulate(self, totals: Tensors, parts: Mapping[str, Tensor | None], count: int) -> None:
        share = count / self.count
        for name, part in parts.items():
            if part is None:
                if name in totals:
                    totals[name] = totals[name] * (1 - share)
            elif name in totals:
                totals[name] = totals[name].lerp(part.to(totals[name].dtype), share)
            else:
                wide = part.to(torch.promote_types(part.dtype, torch.float32))
                # The first part is kept as it is: results are as large as the model, a copy would be too.
                totals[name] = wide if share == 1 else wide * share

    def mean(self) -> Curvature:
        if self.count == 0:
            raise DataError(
                "There was no sample in the batches. Pass at least one batch; an iterator that was used before is "
                "empty, so give a list or a loader that can be run again."
            )
        self._check_finite()
        unreached = tuple(n for n in self.problem.parameters if n not in self.product)
        return Curvature(
            product=self._complete(self.product),
            gradient=self._complete(self.gradient) if self.problem.wants_gradient else None,
            loss=self.loss / self.count,
            count=self.count,
            kind=self.problem.kind.name,
            fallbacks=dict(self.fallbacks),
            unreached=unreached,
        )

    def _complete(self, totals: Tensors) -> Tensors:
        made: Tensors = {}
        seen: set[int] = set()
        for name, p in self.problem.parameters.items():
            total = totals.pop(name, None)
            if total is None:
                dtype = torch.promote_types(p.dtype, torch.float32)
                total = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            storage = total.untyped_storage()
            size = total.numel() * total.element_size()
            if storage.data_ptr() in seen or storage.nbytes() != size:
                # Autograd may hand one tensor, or a view, to several parameters.
                total = total.clone()
            seen.add(total.untyped_storage().data_ptr())
            made[name] = total
        return made

    def _check_finite(self) -> None:
        names = [name for name, tensor in self.product.items() if tensor.numel()]
        if not names:
            return
        largest = _largest([self.product[name] for name in names])
        if not all(map(math.isfinite, largest)):
            bad = [n for n, value in zip(names, largest, strict=True) if not math.isfinite(value)]
            raise NonFiniteError(
                f"The loss is finite ({self.loss / self.count:.4g}) but the curvature product of {bad[0]!r} (and "
                f"{len(bad) - 1} more) is not: a derivative overflowed, or an operation has none at this point (sqrt "
                "or norm at 0). Try float32 or float64 instead of half precision, and look at that layer's inputs."
            )


@dataclass(frozen=True)
class Start:
    """The loss and its derivatives by the outputs z: `slope` ∂loss/∂z, `on_value` (∇²loss) ẑ or 0, as the kind asks."""

    loss: float
    slope: Tensor
    on_value: Tensor


def start_backward(
    task: Task, batch: Batch, outputs: Tensor, tangent: Tensor | None, kind: Kind
) -> Start:
    """How the backward starts: the derivatives of the loss by the outputs."""
    leaf = outputs.detach().requires_grad_()
    loss = task.loss(leaf, batch)
    value = _check_loss(loss)
    if _depends_on_more(loss, leaf):
        raise LossError(
            "The task's loss depends on tensors that require grad other than the model's outputs: a penalty on the "
            "parameters, or a loss with parameters of its own? Only what goes through the outputs has a product here. "
            "Leave the penalty out and add its (diagonal) curvature to the result, or let the model compute it."
        )
    slope = torch.autograd.grad(loss, leaf, create_graph=kind.starts_value)[0]
    on_value = None
    if kind.starts_value and tangent is not None and slope.requires_grad:
        try:
            on_value = torch.autograd.grad(slope, leaf, tangent.detach(), allow_unused=True)[0]
        except RuntimeError as error:
            raise LossError(
                f"Kind {kind.name!r} needs the second derivative of the loss, and torch has none for it: {error}. "
                "Use kind='functional' or 'connectivity', which need only the first, or write the loss with other "
                "operations."
            ) from error
    if on_value is None:
        # An adjoint all the same: what the outputs depend on is then told apart from what has curvature 0.
        on_value = torch.zeros_like(leaf)
    return Start(value, slope.detach(), on_value)


def _depends_on_more(loss: Tensor, leaf: Tensor) -> bool:
    """Whether the graph of `loss` ends anywhere else than at `leaf`."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", leaf) is not leaf:
            return True
        todo += [parent for parent, _ in node.next_functions]
    return False


def _check_loss(loss: Tensor) -> float:
    if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LossError(
            f"The task's loss is a {type(loss).__name__}; it must be a scalar tensor that depends on the outputs. "
            "Return the tensor itself, not loss.item()."
        )
    if loss.numel() != 1:
        raise LossError(
            f"The task's loss is no scalar but has shape {tuple(loss.shape)}. It must be the mean over the batch: use "
            "reduction='mean'."
        )
    if not loss.requires_grad:
        raise LossError(
            "The task's loss does not depend on the model's outputs in a differentiable way (detached, rounded, or "
            "an argmax?). Use a differentiable loss."
        )
    value = loss.item()
    if not math.isfinite(value):
        raise NonFiniteError(
            f"The loss of a batch is {value}. Scores of such a batch mean nothing: check its inputs and labels for "
            "NaN, and the model's weights; in half precision try float32."
        )
    return value
