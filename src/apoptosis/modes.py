"""Train and eval flags, set for a while and put back.

Flags are per module: a network in train mode may hold norms that someone froze in eval mode. So what is put back is
every module's own flag, not `model.train()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_eval_mode", "in_train_mode"]


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
    found = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in found:
            module.training = flag
