"""Run a network up to some of its modules and see what passes there.

The run is stopped as soon as all of them have been called: what comes after would be computed for nobody. Inputs are
copied first, for a forward may write to them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.modes import in_eval_mode
from apoptosis.structure import copy_with, model_tensors
from apoptosis.task import Batch, Task

__all__ = ["Passed", "quietly", "reach", "run", "shadow"]

Passed = tuple[Any, Any]
"""The first argument of a call and what came out."""


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
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch, task: Task
) -> dict[str, Passed]:
    """What passed at the first call of each module, by the given names; none for those that were not called."""
    seen: dict[str, Passed] = {}
    alone = len(modules) == 1  # else the run goes on, and may write to what it has been given

    def watching(name: str) -> Callable[..., None]:
        def watch(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if name not in seen:
                seen[name] = (
                    given,
                    (output if alone else tree_map_only(Tensor, Tensor.clone, output)),
                )
            if len(seen) == len(modules):
                raise _AllSeenError

        return watch

    handles = [
        module.register_forward_hook(watching(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        run(model, batch, task)
    except _AllSeenError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen


class _AllSeenError(BaseException):
    """Ends a run from within. No `Exception`, so that models that catch those let it pass."""
