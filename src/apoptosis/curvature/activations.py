"""Activations and the gradient of the loss by them, at chosen places of an unmodified model.

A place is the first tensor that goes into, or comes out of, one call of a module; keywords come after the rest. Each
place is differentiated by itself: where one activation is read by two modules, the gradient at the input of one is that
through this module alone. So Σ a ⊙ ∂L/∂a over a place is the derivative of the loss by a factor on what passes there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from apoptosis.curvature.containment import contained
from apoptosis.curvature.gradient import buffers_restored
from apoptosis.curvature.problem import check_devices, constant, pieces, start_backward
from apoptosis.curvature.switches import Kind, Switches
from apoptosis.errors import DataError, ModelError
from apoptosis.progress import track
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["Place", "Seen", "Watched", "gradients_at", "visit_activations", "watched"]

_GRADIENT = Kind("gradient", Switches(), starts_value=False, starts_tangent=True)


@dataclass(frozen=True)
class Place:
    """The input or output of the call number `call` of a module."""

    module: str
    call: int
    side: str


Seen: TypeAlias = Mapping[Place, tuple[Tensor, Tensor | None]]
"""Activation and gradient of the mean loss of a piece of a batch; None where no gradient comes back."""

Watched: TypeAlias = dict[Place, tuple[Tensor, int]]
"""What passed each place, in the graph, and the version it had then."""


def visit_activations(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    places: Iterable[Place],
    visit: Callable[[Seen, Batch], object],
    *,
    micro_batch: int | None = None,
) -> tuple[float, int]:
    """Run all data, in the mode the model is in, and show each piece's activations and gradients to `visit`.

    Returns:
        The mean loss, and the number of samples it is a mean over.

    Raises:
        DataError: there are no samples.
        ModelError: a place is not passed, or what passes is overwritten afterwards.
    """
    wanted = set(places)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    total, count = 0.0, 0
    with contained(model), buffers_restored(model):
        for batch in track(batches, "activations"):
            for piece in pieces(batch, task, micro_batch):
                check_devices(piece, devices)
                if not (size := task.count(piece)):
                    continue
                piece = constant(piece)
                with watched(model, wanted) as seen:
                    args, kwargs = task.inputs(piece)
                    outputs = task.outputs(model(*args, **kwargs))
                start = start_backward(task, piece, outputs, None, _GRADIENT)
                total, count = total + float(start.loss) * size, count + size
                visit(gradients_at(seen, outputs, start.slope), piece)
    if not count:
        raise DataError(
            "Asked for activations and found no samples: the batches are empty or were used up by an earlier loop. "
            "Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return total / count, count


def gradients_at(seen: Watched, outputs: Tensor, slope: Tensor, *, again: bool = False) -> Seen:
    """What passed each place, and the derivative of ⟨outputs, slope⟩ by it; with `again` the graph is kept."""
    tensors = [tensor for tensor, _ in seen.values()]
    found: list[Tensor | None] = list(
        torch.autograd.grad(outputs, tensors, slope, retain_graph=again, allow_unused=True)
    )
    for place, (tensor, version) in seen.items():
        if tensor._version != version:
            raise ModelError(
                f"What passes the {place.side} of module {place.module!r} is overwritten afterwards, so its value is "
                "gone when its gradient is known. Write that operation without in-place."
            )
    return {
        place: (tensor.detach(), gradient)
        for (place, (tensor, _)), gradient in zip(seen.items(), found, strict=True)
    }


@contextmanager
def watched(model: nn.Module, wanted: set[Place]) -> Iterator[Watched]:
    """Tensors at the places, each a node of its own in the graph; all of them must be passed inside the block."""
    seen: Watched = {}
    modules = dict(model.named_modules())
    handles: list[Any] = []
    for path in {place.module for place in wanted}:
        if path not in modules:
            raise ModelError(f"Activations of module {path!r} were asked for; the model has none.")
        before, after = _hooks(path, wanted, seen)
        handles.append(modules[path].register_forward_pre_hook(before, with_kwargs=True))
        handles.append(modules[path].register_forward_hook(after))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    if absent := sorted(wanted - seen.keys(), key=str):
        raise ModelError(
            f"The {absent[0].side} of call {absent[0].call} of module {absent[0].module!r} was to be seen, and nothing "
            "passed there. The model must run here as it did when it was traced, and as modules: a network delivered "
            "as a program has none."
        )


def _hooks(path: str, wanted: set[Place], seen: Watched) -> tuple[Any, Any]:
    """For before and after a module's call."""
    call = 0

    def passed(side: str, value: Any) -> Any:
        place = Place(path, call, side)
        return _with_first(value, lambda t: _noted(t, place, seen)) if place in wanted else None

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if Place(path, call, "input") not in wanted:
            return None
        named = [] if _has_tensor(args) else [n for n, own in kwargs.items() if _has_tensor(own)]
        if not named:
            return passed("input", args), kwargs
        return args, kwargs | {named[0]: passed("input", kwargs[named[0]])}

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal call
        changed = passed("output", output)
        call += 1
        return changed

    return before, after


def _noted(tensor: Tensor, place: Place, seen: Watched) -> Tensor:
    """The tensor to go on with."""
    own = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
    seen[place] = (own, own._version)
    # What comes out may be written to in place (ReLU): a copy goes on, and the place keeps its value.
    return own.clone() if place.side == "output" else own


def _has_tensor(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _with_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with the first tensor of continuous numbers in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        items: list[Any] = list(value)
        for number, item in enumerate(items):
            if isinstance(item, (Tensor, tuple, list)):
                items[number] = _with_first(item, change)
                break
        return type(value)(items)
    return value
