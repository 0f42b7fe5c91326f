"""What `apoptosis prune` can be told where single weights go."""

from dataclasses import dataclass
from pathlib import Path

from apoptosis.cli.places import free_place
from apoptosis.cli.resuming import Asked
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import PruneTuning
from apoptosis.cli.typed_words import in_typed_words
from apoptosis.criteria import find_criterion
from apoptosis.errors import ConfigError
from apoptosis.planning import Sparsity
from apoptosis.planning.sparsity import SCOPES
from apoptosis.workflow import BATCH_NORM_POLICIES, DEFAULT_WEIGHT_CRITERION, default_stages

__all__ = ["DEFAULT_POLICY", "DEFAULT_SCOPE", "SparsifyOptions"]

DEFAULT_SCOPE = SCOPES[0]
DEFAULT_POLICY = BATCH_NORM_POLICIES[0]


@dataclass(frozen=True, kw_only=True)
class SparsifyOptions:
    """What `apoptosis prune` can be told of single weights."""

    subject: SubjectOptions
    keep: float | None = None
    pattern: str | None = None
    asked_criterion: str | None = None
    asked_stages: int | None = None
    scope: str = DEFAULT_SCOPE
    saliency: str | None = None
    batch_norm: str = DEFAULT_POLICY
    allow_empty: bool = False
    names: tuple[str, ...] = ()
    tuning: PruneTuning = PruneTuning()
    asked: Asked = Asked("prune")
    out: Path | None = None
    dry_run: bool = False
    as_json: bool = False

    @property
    def criterion(self) -> str:
        """What was asked for, or the library's choice."""
        return self.asked_criterion or DEFAULT_WEIGHT_CRITERION

    @property
    def stages(self) -> int:
        """What was asked for, or what the criterion needs."""
        return self.asked_stages or default_stages(find_criterion(self.criterion))

    @property
    def place(self) -> Path:
        """Where the result is saved: as asked, or a name that says what it is and that nothing has yet."""
        if self.out is not None:
            return self.out
        asked = f"weights{self.keep:g}" if self.pattern is None else self.pattern.replace(":", "of")
        tuned = [f"tuned{self.tuning.epochs}"] if self.tuning.epochs else []
        return free_place(self.subject.model, self.criterion, asked, *tuned)

    def sparsity(self) -> Sparsity:
        """How many weights may stay, and where.

        Raises:
            ConfigError: nothing was asked for, or two things that exclude each other, or a share that is none.
        """
        self._check_asked()
        with in_typed_words():
            return Sparsity(
                keep=self.keep,
                pattern=self.pattern,
                scope=self.scope,
                names=self.names or ("*",),
                allow_empty=self.allow_empty,
            )

    def _check_asked(self) -> None:
        keep, pattern = self.keep, self.pattern
        if keep is None and pattern is None:
            raise ConfigError(
                "--unstructured was asked for, and not how many weights may stay. Say a share, --keep 0.1, or a "
                "pattern, --pattern 2:4."
            )
        if keep is not None and pattern is not None:
            raise ConfigError(
                f"--keep {keep:g} and --pattern {pattern} were asked for, and a pattern fixes the share that stays. "
                f"Leave out --keep; or, for a share without a pattern, type --unstructured --keep {keep:g} alone."
            )
        if keep is not None and not 0 < keep <= 1:
            percent = f" For {keep:g} % write --keep {keep / 100:g}." if 1 < keep <= 100 else ""
            raise ConfigError(
                f"--keep {keep:g} was asked for. It is the share of weights that stays, a number above 0 and at most "
                f"1: --keep 0.1 removes 90 % of them.{percent}"
            )
