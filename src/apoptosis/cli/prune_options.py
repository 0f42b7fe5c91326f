"""What `apoptosis prune` can be told where whole units go."""

from dataclasses import dataclass
from pathlib import Path

from apoptosis.cli.options import Shares
from apoptosis.cli.places import free_place
from apoptosis.cli.resuming import Asked
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import PruneTuning
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.errors import ConfigError
from apoptosis.planning import Budget, Selection

__all__ = ["NOTHING", "PruneOptions"]

NOTHING = "none"


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What `apoptosis prune` can be told; `round_to` is the library's choice where it is None."""

    subject: SubjectOptions
    keep_flops: Shares | None = None
    keep_params: Shares | None = None
    keep_units: Shares | None = None
    asked_criterion: str | None = None
    asked_steps: int | None = None
    aggregation: str | None = None
    align: bool | None = None
    asked_repair: tuple[str, ...] | None = None
    repair_between: bool = False
    widths: str = "global"
    per: str = "cost"
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    round_to: int | None = None
    floor: int = 1
    cap: float = 1.0
    tuning: PruneTuning = PruneTuning()
    asked: Asked = Asked("prune")
    out: Path | None = None
    dry_run: bool = False
    as_json: bool = False

    @property
    def repair(self) -> tuple[str, ...] | None:
        """What was asked for, `none` being nothing; None where the library may choose.

        Raises:
            ConfigError: nothing and something are asked for at once.
        """
        if self.asked_repair is None or NOTHING not in self.asked_repair:
            return self.asked_repair
        if len(self.asked_repair) > 1:
            raise ConfigError(
                f"--repair {NOTHING} was asked for beside others; it is the word for no repair at all."
            )
        return ()

    @property
    def place(self) -> Path:
        """Where the result is saved: as asked, or a name that says what it is and that nothing has yet."""
        if self.out is not None:
            return self.out
        shares = [f"{name}{share:g}" for name, share in self.budget.shares().items()]
        tuned = [f"tuned{self.tuning.epochs}"] if self.tuning.epochs else []
        by = [self.asked_criterion] if self.asked_criterion else []
        return free_place(self.subject.model, *by, *shares, *tuned)

    def earlier_places(self, place: Path) -> tuple[Path, ...]:
        """Rounds before the last are saved beside it, under its name and their budget."""
        names = [
            "-".join(f"{what}{share}" for what, share in budget.shares().items())
            for budget in self.budgets()[:-1]
        ]
        return tuple(place.with_name(f"{place.name}-{name}") for name in names)

    @property
    def budget(self) -> Budget:
        """What may stay in the end."""
        return self.budgets()[-1]

    def budgets(self) -> tuple[Budget, ...]:
        """What may stay, round by round.

        Raises:
            ConfigError: a share is none, nothing is asked for, or lists do not fit each other.
        """
        told = {"flops": self.keep_flops, "params": self.keep_params, "units": self.keep_units}
        asked = {what: own for what, own in told.items() if own is not None}
        if not asked:
            raise ConfigError(
                "Nothing was asked for. Say what may stay: --keep-flops 0.5, --keep-params 0.5 or --keep-units 0.5; "
                "or, of single weights, --unstructured --keep 0.1."
            )
        words = " and ".join(f"--keep-{what} {own}" for what, own in asked.items())
        num = max(map(len, asked.values()))
        if any(len(own) != num for own in asked.values()):
            raise ConfigError(f"{words} were asked for. Lists of rounds have as many shares each.")
        if num > 1 and not self.tuning.epochs:
            raise ConfigError(
                f"{words}: a list is pruned round by round, with training after each. Say how long: --epochs 5; or "
                "give the last share alone."
            )
        for what, own in asked.items():
            if list(own) != sorted(own, reverse=True):
                raise ConfigError(
                    f"--keep-{what} {own}: each round keeps less than the one before it."
                )
        with in_typed_words():
            return tuple(
                Budget(**{what: own[number] for what, own in asked.items()})
                for number in range(num)
            )

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
