"""What `apoptosis prune` can be told where whole units go."""

from dataclasses import dataclass
from pathlib import Path

from apoptosis.cli.places import free_place
from apoptosis.cli.subject import SubjectOptions
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.errors import ConfigError
from apoptosis.planning import Budget, Selection
from apoptosis.workflow import DEFAULT_CRITERION, DEFAULT_STEPS

__all__ = ["PruneOptions"]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What `apoptosis prune` can be told; `round_to` is the library's choice where it is None."""

    subject: SubjectOptions
    keep_flops: float | None = None
    keep_params: float | None = None
    keep_units: float | None = None
    asked_criterion: str | None = None
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
    def criterion(self) -> str:
        """What was asked for, or the library's choice."""
        return self.asked_criterion or DEFAULT_CRITERION

    @property
    def place(self) -> Path:
        """Where the result is saved: as asked, or a name that says what it is and that nothing has yet."""
        if self.out is not None:
            return self.out
        shares = [f"{name}{share:g}" for name, share in self.budget().shares().items()]
        return free_place(self.subject.model, self.criterion, *shares)

    def budget(self) -> Budget:
        """What may stay.

        Raises:
            ConfigError: a share is none, or nothing is asked for.
        """
        if all(kept is None for kept in (self.keep_flops, self.keep_params, self.keep_units)):
            raise ConfigError(
                "Nothing was asked for. Say what may stay: --keep-flops 0.5, --keep-params 0.5 or --keep-units 0.5; "
                "or, of single weights, --unstructured --keep 0.1."
            )
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
