"""Run a network up to some of its modules and see what passes there.

The run is stopped as soon as all of them have been called: what comes after would be computed for nobody. Inputs are
copied first, for a forward may write to them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.modes import in_eval_mode
from apoptosis.structure import copy_with, model_tensors
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["Passed", "Watched", "first_of", "noting", "quietly", "reach", "run", "shadow"]


@dataclass(frozen=True, eq=False)
class Passed:
    """The first argument of a call, what came out, and the tensor that is added to that later, if one is."""

    given: Any
    made: Any
    other: Any = None


@dataclass(frozen=True, eq=False)
class Watched:
    """A module, and where the tensor is seen that its outputs are added to."""

    module: nn.Module
    spot: tuple[nn.Module, str] | None = None


def shadow(model: nn.Module) -> nn.Module:
    """The same network in modules of its own: hooks and flags set there are not the caller's. Parameters are shared."""
    return copy_with(model, {id(p): p for p in model.parameters()})


@contextmanager
def quietly(*models: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients or compiled parts; afterwards random numbers go on as if none had been drawn."""
    tensors = [t for model in models for t in model_tensors(model).values()]
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(in_eval_mode(model))
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        yield


def run(model: nn.Module, batch: Batch, task: Task) -> None:
    """One forward on copies of the batch's inputs."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, task.inputs(batch))
    model(*args, **kwargs)


def reach(
    model: nn.Module, watched: Mapping[str, Watched], batch: Batch, task: Task
) -> dict[str, Passed]:
    """What passed at the first call of each module, by the given names; none for those that were not called."""
    seen: dict[str, Passed] = {}
    others: dict[str, Any] = {}
    alone = len(watched) == 1  # else the run goes on, and may write to what it has been given

    def as_it_is(tensors: Any) -> Any:
        return tensors if alone else tree_map_only(Tensor, Tensor.clone, tensors)

    def watching(name: str) -> Callable[..., None]:
        def watch(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if name not in seen:
                other = as_it_is(others.pop(name, None))
                seen[name] = Passed(first_of(args, kwargs), as_it_is(output), other)
            if len(seen) == len(watched):
                raise _AllSeenError

        return watch

    with ExitStack() as stack:
        for name, own in watched.items():
            if own.spot is not None:
                stack.enter_context(noting(*own.spot, partial(others.setdefault, name)))
            hook = own.module.register_forward_hook(watching(name), with_kwargs=True)
            stack.callback(hook.remove)
        with suppress(_AllSeenError):
            run(model, batch, task)
    return seen


@contextmanager
def noting(module: nn.Module, side: str, note: Callable[[Any], object]) -> Iterator[None]:
    """Have the first tensor that goes into a module, or comes out of it, noted at every call."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        note(next(tensors_in((args, kwargs)), None))

    def after(_: nn.Module, _args: Any, output: Any) -> None:
        note(next(tensors_in(output), None))

    if side == "input":
        hook = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = module.register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)


class _AllSeenError(BaseException):
    """Ends a run from within. No `Exception`, so that models that catch those let it pass."""
