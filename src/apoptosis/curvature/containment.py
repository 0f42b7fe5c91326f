"""A call leaves no trace: what is put back afterwards, and what is changed meanwhile.

Put back, whatever happens inside: random states, torch's checkpoint functions, and of the model every attribute, table
of parameters, buffers and hooks, and `requires_grad`. Meanwhile compiled parts run eagerly, checkpoints run as modes
can follow, and hooks on gradients are silent: what comes down in these backwards is curvature, and the product is that
of the loss alone.

All of this is global to the process, so threads take turns.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from apoptosis.turns import alone

__all__ = ["contained"]

_PLACE = object()
"""Held by the one thread that is in here."""
_GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


@contextmanager
def contained(model: nn.Module, *, checkpoints: bool = True) -> Iterator[None]:
    """Whatever happens inside leaves no trace; checkpoints run as modes can follow, or not at all."""
    tensors = (*model.parameters(), *model.buffers())
    cuda = sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(alone(model, _PLACE))
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_checkpoints(followed=checkpoints))
        stack.enter_context(_kept(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """The model's attributes and flags, put back afterwards; its hooks on gradients silent until then."""
    parameters = list(model.parameters())
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    attributes = [dict(vars(module)) for module in modules]
    tables = [
        (table, dict(table))
        for held in attributes
        for name, table in held.items()
        if name.startswith("_") and isinstance(table, dict)
    ]
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    flags = [parameter.requires_grad for parameter in parameters]
    try:
        for table, _ in hooks:
            table.clear()
        for held in attributes:
            for name in _GRADIENT_HOOKS:
                held[name].clear()
        yield
    finally:
        for table, content in (*tables, *hooks):
            if table or content:  # nearly all are empty, and there are fifteen in every module
                _put_back(table, content)
        for module, held in zip(modules, attributes, strict=True):
            _put_back(vars(module), held)
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)


def _put_back(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    same = len(table) == len(content) and all(
        key in table and table[key] is value for key, value in content.items()
    )
    if not same:
        table.clear()
        table.update(content)


class _FollowableCheckpoint:
    """Stands in for torch's reentrant checkpoint, whose forward runs where no derivative is recorded."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _NoCheckpoint:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001, ARG004
        return function(*args)


def _no_frame(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextmanager
def _checkpoints(*, followed: bool) -> Iterator[None]:
    """While inside: checkpoints that run again with the mode on, or none at all."""
    owner: Any = torch.utils.checkpoint
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    original = [getattr(owner, name) for name in names]
    owner.CheckpointFunction = _FollowableCheckpoint if followed else _NoCheckpoint
    if not followed:
        owner._checkpoint_without_reentrant_generator = _no_frame
    try:
        yield
    finally:
        for name, value in zip(names, original, strict=True):
            setattr(owner, name, value)
