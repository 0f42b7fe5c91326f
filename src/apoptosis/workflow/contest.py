"""Who takes part in a comparison, on which data, and what is the same for all."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from apoptosis.criteria import find_criterion
from apoptosis.errors import ConfigError
from apoptosis.planning import Selection
from apoptosis.task import Batch, Task
from apoptosis.training import FitOptions

__all__ = [
    "BASELINES",
    "CompareOptions",
    "ContestData",
    "Contestant",
    "LaterPasses",
    "Repeatable",
    "contestants_of",
]


@dataclass(frozen=True)
class Contestant:
    """A criterion, and how groups share what goes: `global` or `uniform`, as in `Selection`."""

    criterion: str
    widths: str = "global"

    @property
    def name(self) -> str:
        """Under which it stands in tables."""
        return self.criterion if self.widths == "global" else f"{self.criterion}-{self.widths}"


BASELINES = (Contestant("magnitude-l2", "uniform"), Contestant("random"))
"""In every comparison: the plainest thing people do, and chance."""

Training = Iterable[Batch] | Callable[[int], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True)
class ContestData:
    """Batches for each purpose; each can be read again and again.

    Attributes:
        scoring: what criteria read.
        test: what figures are taken on; nothing is chosen by it.
        training: for fine-tuning. All networks of a seed see the same order: a function of the seed is called anew for
            each, batches with `start_at` start again, and what shuffles by torch's random numbers, as a DataLoader
            does, finds them set by `fit_`.
        validation: what decides which epoch of fine-tuning is kept, and who comes first.
        task: what a batch is; classification unless said.
    """

    scoring: Iterable[Batch]
    test: Iterable[Batch]
    training: Training | None = None
    validation: Iterable[Batch] | None = None
    task: Task | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is the same for all contestants. With `fit.epochs` of 0 nothing is fine-tuned.

    With `align` all start from the network with its attention heads in their principal axes.
    """

    seeds: tuple[int, ...] = (0,)
    steps: int = 20
    align: bool = True
    repair: tuple[str, ...] = ()
    fit: FitOptions = FitOptions(epochs=0, learning_rate=0.02, schedule="cosine")

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={self.seeds} was asked for; name one or more, each once.")


@runtime_checkable
class Repeatable(Protocol):
    """Batches of which any pass can be had again, as `data.Batches` are."""

    def __iter__(self) -> Iterator[Batch]:
        """The next pass."""
        ...

    def __len__(self) -> int:
        """Batches of one pass."""
        ...

    def start_at(self, number: int, /) -> object:
        """Let the next pass be that one."""


class LaterPasses:
    """The same batches, counted from a later pass on: another order for another seed."""

    def __init__(self, batches: Repeatable, first: int) -> None:
        self._batches, self._first = batches, first

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def start_at(self, number: int, /) -> None:
        """Let the next pass be that one."""
        self._batches.start_at(self._first + number)


def contestants_of(asked: Iterable[Contestant | str]) -> tuple[Contestant, ...]:
    """Each once, and the baselines behind those that were asked for.

    Raises:
        ConfigError: a name that no criterion has.

    >>> [one.name for one in contestants_of(["oba", "random"])]
    ['oba', 'random', 'magnitude-l2-uniform']
    """
    found = [one if isinstance(one, Contestant) else Contestant(one) for one in asked]
    for one in found:
        find_criterion(one.criterion)
        Selection(widths=one.widths)
    return tuple(dict.fromkeys([*found, *BASELINES]))
