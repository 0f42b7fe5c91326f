"""What a test case is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from apoptosis.task import Task
from oracles.building import built

__all__ = ["Case", "case"]


@dataclass(frozen=True)
class Case:
    """A model and a batch, made anew at every call, and what may be used to check them."""

    id: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    task: Task | None = None
    brute_force: bool = True  # torch's own double backward is right here
    differences: bool = (
        True  # no detach, round or kink that finite differences see otherwise than autograd
    )
    make_plain: Callable[[], nn.Module] | None = (
        None  # the same network in a form that the oracles can run
    )
    any_direction: bool = True  # not only δ = θ makes sense
    splits: bool = True  # samples do not see each other, so that batches may be cut

    def oracle_model(self) -> nn.Module:
        """The model for brute force and differences."""
        return (self.make_plain or self.make_model)()


def case(
    id: str,
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    *,
    train: bool = False,
    plain: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> Case:
    """A case whose model is `built` from a factory."""
    return Case(
        id,
        partial(built, make, train=train),
        batch,
        make_plain=None if plain is None else partial(built, plain, train=train),
        **options,
    )
