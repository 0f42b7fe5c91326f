"""The table of criteria: what the command line, the documentation and the tests know them by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from apoptosis.criteria.data_free import magnitude, random
from apoptosis.criteria.oba import oba
from apoptosis.criteria.obd import obd
from apoptosis.criteria.scores import Scores
from apoptosis.criteria.taylor import taylor
from apoptosis.errors import ConfigError
from apoptosis.task import Batch, Task

__all__ = ["CRITERIA", "Criterion", "find_criterion"]


@dataclass(frozen=True)
class Criterion:
    """A criterion with its options settled."""

    name: str
    summary: str
    score: Callable[[nn.Module, Iterable[Batch], Task | None], Scores]


_ENTRIES = (
    Criterion("oba", "θ ⊙ Hθ, the paper's products (connectivity)", oba),
    Criterion(
        "oba-functional", "θ ⊙ Hθ, curvature of the network alone", partial(oba, kind="functional")
    ),
    Criterion("oba-hessian", "θ ⊙ Hθ, the Hessian of the loss", partial(oba, kind="hessian")),
    Criterion("oba-ggn", "θ ⊙ Hθ, Gauss-Newton", partial(oba, kind="ggn")),
    Criterion("taylor", "θ ⊙ g", taylor),
    Criterion("obd-hessian", "½ θ² diag H, by Hutchinson", partial(obd, diagonal="hessian")),
    Criterion("obd-ggn", "½ θ² diag of Gauss-Newton, by Hutchinson", partial(obd, diagonal="ggn")),
    Criterion(
        "obd-fisher", "½ θ² mean squared gradient per sample", partial(obd, diagonal="fisher")
    ),
    Criterion("magnitude", "|θ|", magnitude),
    Criterion("random", "uniform on (0, 1)", random),
)

CRITERIA = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find_criterion(name: str) -> Criterion:
    """The criterion called `name`, or an error that lists all."""
    if name not in CRITERIA:
        raise ConfigError(f"The criterion {name!r} was asked for; there are {', '.join(CRITERIA)}.")
    return CRITERIA[name]
