"""What `apoptosis prune` can be told, and refusals of the library in the words that were typed."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from apoptosis.cli.subject import SubjectOptions
from apoptosis.errors import BudgetError, ConfigError
from apoptosis.planning import Budget, Selection
from apoptosis.workflow import DEFAULT_CRITERION, DEFAULT_STEPS

__all__ = ["PruneOptions", "in_typed_words"]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What `apoptosis prune` can be told; `round_to` is the library's choice where it is None."""

    subject: SubjectOptions
    keep_flops: float | None = None
    keep_params: float | None = None
    keep_units: float | None = None
    criterion: str = DEFAULT_CRITERION
    steps: int = DEFAULT_STEPS
    aggregation: str | None = None
    repair: tuple[str, ...] = ()
    widths: str = "global"
    per: str = "cost"
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    round_to: int | None = None
    floor: int = 1
    cap: float = 1.0
    out: Path | None = None
    dry_run: bool = False
    as_json: bool = False

    @property
    def place(self) -> Path:
        """Where the result is saved: as asked, or a name that says what it is and that nothing has yet."""
        if self.out is not None:
            return self.out
        model = re.sub(r"[^\w.-]+", "-", self.subject.model).strip("-.")
        shares = [f"{name}{share:g}" for name, share in self.budget().shares().items()]
        first = Path("runs") / "-".join([model, self.criterion, *shares])
        others = (first.with_name(f"{first.name}-{num}") for num in count(2))
        return next(place for place in chain([first], others) if not os.path.lexists(place))

    def budget(self) -> Budget:
        """What may stay."""
        with in_typed_words():
            return Budget(flops=self.keep_flops, params=self.keep_params, units=self.keep_units)

    def selection(self, default: Selection) -> Selection:
        """How units are chosen."""
        with in_typed_words():
            return Selection(
                widths=self.widths,
                per=self.per,
                kinds=self.kinds or None,
                names=self.names or ("*",),
                round_to=default.round_to if self.round_to is None else self.round_to,
                floor=self.floor,
                cap=self.cap,
            )


@contextmanager
def in_typed_words() -> Iterator[None]:
    """Refusals of the library in the words of the command line: `flops=0.5` is typed `--keep-flops 0.5`."""
    try:
        yield
    except BudgetError as error:
        told = BudgetError(f"{_typed(str(error))}{_nearest_reachable(error)}")
        told.reachable = error.reachable
        raise told from error
    except ConfigError as error:
        raise ConfigError(_typed(str(error))) from error


def _typed(message: str) -> str:
    message = re.sub(r"\b(flops|params|units)=", r"--keep-\1 ", message)
    message = re.sub(
        r"\b(floor|cap|round_to|widths|per|steps)=",
        lambda found: f"--{found[1].replace('_', '-')} ",
        message,
    )
    return message.replace("`structure.pinned` has", "`apoptosis inspect` shows")


def _nearest_reachable(error: BudgetError) -> str:
    """Rounded up to what is still reached."""
    shares = [f"--keep-{n} {math.ceil(s * 1e4) / 1e4:g}" for n, s in error.reachable.items()]
    return f" The nearest that can be reached: {' '.join(shares)}."
