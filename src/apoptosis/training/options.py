"""How to train: one frozen object, looked at before anything begins."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from apoptosis.errors import ConfigError
from apoptosis.training.schedules import SCHEDULES, stepwise

__all__ = ["FitOptions"]

OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("float32", "bfloat16")
KEEPS = ("best", "last")
NUMBERS = (
    "learning_rate",
    "momentum",
    "weight_decay",
    "label_smoothing",
    "distil",
    "temperature",
)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How to train. `momentum` is SGD's; `learning_rate` is the schedule's top."""

    epochs: int = 10
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    schedule: Literal["constant", "step", "cosine", "one-cycle"] = "one-cycle"
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Parts of the run after which `step` divides the rate by ten."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    distil: float = 0.0
    """Part of the loss that follows a teacher instead of the labels."""
    temperature: float = 2.0
    """Of both softmaxes in that part."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes by autocast; weights stay as they are."""
    channels_last: bool = False
    """Images and filters lie channels last in memory while it trains: faster on GPUs in 16 bits."""
    keep: Literal["best", "last"] = "best"
    """Which epoch's weights stay, where there are validation batches to tell."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "seed"):
            value = getattr(self, name)
            _require(_is(Integral, value), f"{name}={value!r} is no whole number")
        for name in NUMBERS:
            value = getattr(self, name)
            _require(_is(Real, value), f"{name}={value!r} is no number")
        is_list = isinstance(self.milestones, (tuple, list))  # pyright: ignore[reportUnnecessaryIsInstance]
        _require(
            is_list and all(_is(Real, own) for own in self.milestones),
            f"milestones={self.milestones!r} is no tuple of numbers",
        )
        _require(_is(bool, self.channels_last), f"channels_last={self.channels_last!r} is no bool")
        _require(-(2**63) <= self.seed < 2**63, f"seed={self.seed} has more than 64 bits")
        _require(self.epochs >= 0, f"epochs={self.epochs} is negative")
        _require(self.learning_rate > 0, f"learning_rate={self.learning_rate} is not above zero")
        _require(0 <= self.momentum < 1, f"momentum={self.momentum} is not in [0, 1)")
        _require(self.weight_decay >= 0, f"weight_decay={self.weight_decay} is negative")
        _require(
            0 <= self.label_smoothing < 1,
            f"label_smoothing={self.label_smoothing} is not in [0, 1)",
        )
        _require(0 <= self.distil <= 1, f"distil={self.distil} is not in [0, 1]")
        _require(self.temperature > 0, f"temperature={self.temperature} is not above zero")
        _require(
            all(0 < m < 1 for m in self.milestones),
            f"milestones={self.milestones} are not all in (0, 1)",
        )
        _require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _require_one_of("schedule", self.schedule, SCHEDULES)
        _require_one_of("precision", self.precision, PRECISIONS)
        _require_one_of("keep", self.keep, KEEPS)

    @property
    def curve(self) -> Callable[[float], float]:
        """Part of the top rate after a part of all steps."""
        return stepwise(self.milestones) if self.schedule == "step" else SCHEDULES[self.schedule]


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _require(holds: bool, found: str) -> None:  # noqa: FBT001 - reads as a sentence where it is used
    if not holds:
        raise ConfigError(f"FitOptions: {found}.")


def _require_one_of(option: str, value: Any, allowed: Collection[str]) -> None:
    _require(
        isinstance(value, str) and value in allowed,
        f"{option}={value!r} is not one of {', '.join(allowed)}",
    )
