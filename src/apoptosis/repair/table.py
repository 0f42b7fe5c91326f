"""The table of repairs: what the command line and the tests know them by, each with the options it has by itself."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from torch import nn

from apoptosis.errors import ConfigError
from apoptosis.masks import MaskPlan
from apoptosis.repair.batch_norm import batch_norm
from apoptosis.repair.distil import Distil
from apoptosis.repair.refit import Refit
from apoptosis.structure import Plan
from apoptosis.task import Batch, Task

__all__ = ["REPAIRS", "Repair", "find_repair"]

Repair: TypeAlias = Callable[
    [nn.Module, nn.Module, Plan | MaskPlan, Iterable[Batch], Task | None], nn.Module
]

REPAIRS: Mapping[str, Repair] = MappingProxyType(
    {"batch_norm": batch_norm, "refit": Refit(), "distil": Distil()}
)


def find_repair(asked: "Repair | str") -> Repair:
    """The repair itself, or the one of that name."""
    if callable(asked):
        return asked
    if not isinstance(asked, str) or asked not in REPAIRS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"The repair {asked!r} was asked for; there are {', '.join(REPAIRS)}.")
    return REPAIRS[asked]
