"""Train and eval flags, set for a while and put back; and calls from within `torch.inference_mode()`.

Flags are per module: a network in train mode may hold norms that someone froze in eval mode. So what is put back is
every module's own flag, not `model.train()`. Inside the block no other thread works on the network.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from apoptosis.errors import ModelError
from apoptosis.turns import alone

__all__ = ["in_eval_mode", "in_train_mode", "check_not_of_inference", "outside_inference_mode"]

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function work as under `no_grad` where it is called under `torch.inference_mode()`.

    What is made there takes part in no derivative afterwards: neither scores nor training could use it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def check_not_of_inference(model: nn.Module) -> None:
    """Refuse a network that was made under `torch.inference_mode()`: it has no derivatives.

    Raises:
        ModelError: it was.
    """
    made_there = [name for name, own in model.named_parameters() if own.is_inference()]
    if made_there:
        raise ModelError(
            f"{made_there[0]!r} of {type(model).__name__} was made under torch.inference_mode(), where tensors take "
            "part in no derivative. Make or copy the model outside of it: `copy.deepcopy(model)`."
        )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the block, as it was afterwards.

    >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout().eval())
    >>> with in_eval_mode(model):
    ...     [module.training for module in model]
    [False, False]
    >>> [module.training for module in model]
    [True, False]
    """
    with _mode(model, training=False):
        yield


@contextmanager
def in_train_mode(model: nn.Module) -> Iterator[None]:
    """Every module in train mode inside the block, as it was afterwards."""
    with _mode(model, training=True):
        yield


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    with alone(model):
        found = [(module, module.training) for module in model.modules()]
        try:
            model.train(training)
            yield
        finally:
            for module, flag in found:
                module.training = flag
