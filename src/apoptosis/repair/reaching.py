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
from apoptosis.passing import passing
from apoptosis.structure import Spot, copy_with, model_tensors
from apoptosis.task import Batch, Task, tensors_in

__all__ = [
    "Passed",
    "Station",
    "Watched",
    "first_of",
    "noting",
    "num_samples_of",
    "quietly",
    "reach",
    "run",
    "shadow",
]


@dataclass(frozen=True, eq=False)
class Passed:
    """The first argument of a call, what came out, and the tensor that is added to that later, if one is.

    Ahead of a call: all of its arguments, and nothing that came out.
    """

    given: Any
    made: Any = None
    other: Any = None
    num_samples: int | None = None
    """Of the batch: what a layer is given may have them in any dimension, or be flattened."""


@dataclass(frozen=True, eq=False)
class Watched:
    """A module, and where the tensor is seen that its outputs are added to; `ahead` of its call or after it."""

    module: nn.Module
    spot: tuple[nn.Module, str] | None = None
    ahead: bool = False


@dataclass(frozen=True)
class Station:
    """A module of the small network, `target` in the dense one, where runs of both are stopped and looked at."""

    path: str
    target: str
    other: Spot | None
    ahead: bool = False

    def watched(self, model: nn.Module, path: str) -> Watched:
        """In one of the two."""
        spot = self.other and (model.get_submodule(self.other.module), self.other.side)
        return Watched(model.get_submodule(path), spot, self.ahead)


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


def num_samples_of(batch: Batch, task: Task) -> int:
    """As many as the task can split it into; its `count` may be of tokens."""
    return sum(1 for _ in task.split(batch, 1))


def reach(go: Callable[[], object], watched: Mapping[str, Watched]) -> dict[str, Passed]:
    """What passed at the first call of each module once `go` runs; none for those that were not called."""
    seen: dict[str, Passed] = {}
    others: dict[str, Any] = {}
    alone = len(watched) == 1  # else the run goes on, and may write to what it has been given

    def as_it_is(tensors: Any) -> Any:
        return tensors if alone else tree_map_only(Tensor, Tensor.clone, tensors)

    def see(name: str, given: Any, made: Any) -> None:
        if name not in seen:
            given = as_it_is(given) if watched[name].ahead else given
            seen[name] = Passed(given, as_it_is(made), as_it_is(others.pop(name, None)))
        if len(seen) == len(watched):
            raise _AllSeenError

    with ExitStack() as stack:
        for name, own in watched.items():
            if own.spot is not None:
                stack.enter_context(noting(*own.spot, partial(others.setdefault, name)))
            stack.enter_context(stopping(own.module, partial(see, name), ahead=own.ahead))
        with suppress(_AllSeenError):
            go()
    return seen


@contextmanager
def stopping(module: nn.Module, see: Callable[[Any, Any], None], *, ahead: bool) -> Iterator[None]:
    """Have a function called with what a module is given, and unless that is `ahead` of the call, what it has made."""

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        see((args, kwargs), None)

    def after(_: nn.Module, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        see(first_of(args, kwargs), made)

    if ahead:
        hook = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = module.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def noting(module: nn.Module, side: str, note: Callable[[Any], object]) -> Iterator[None]:
    """Have the first tensor that goes into a module, or comes out of it, noted at every call."""

    def see(passed: Any) -> None:
        note(next(tensors_in(passed), None))

    with passing(module, side, see):
        yield


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)


class _AllSeenError(BaseException):
    """Ends a run from within. No `Exception`, so that models that catch those let it pass."""
