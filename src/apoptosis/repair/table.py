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
from apoptosis.repair.refit_blocks import RefitBlocks
from apoptosis.structure import Plan
from apoptosis.task import Batch, Task

__all__ = ["REPAIRS", "Repair", "find_repair", "find_repairs"]

Repair: TypeAlias = Callable[
    [nn.Module, nn.Module, Plan | MaskPlan, Iterable[Batch], Task | None], nn.Module
]

REPAIRS: Mapping[str, Repair] = MappingProxyType(
    {
        "batch_norm": batch_norm,
        "refit": Refit(),
        "refit_blocks": RefitBlocks(),
        "distil": Distil(),
    }
)


def find_repair(asked: "Repair | str") -> Repair:
    """The repair itself, or the one of that name."""
    if callable(asked):
        return asked
    if not isinstance(asked, str) or asked not in REPAIRS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"The repair {asked!r} was asked for; there are {', '.join(REPAIRS)}.")
    return REPAIRS[asked]


def find_repairs(asked: "Iterable[Repair | str]") -> list[Repair]:
    """Several, to follow each other.

    Raises:
        ConfigError: batch norms are to be measured anew after a refit, which has fitted layers to what they are: that
            takes back most of what it brought (docs/repair.md).
    """
    found = [find_repair(one) for one in asked]
    refits = [place for place, own in enumerate(found) if isinstance(own, (Refit, RefitBlocks))]
    if refits and batch_norm in found[refits[0] :]:
        raise ConfigError(
            "The repair 'batch_norm' was asked for after 'refit', which fits layers to the statistics that are there: "
            "measured anew after it, they undo most of it. Put 'batch_norm' before 'refit', or leave it out."
        )
    return found
