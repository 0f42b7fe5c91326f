"""How to train, for every command that does: declared here alone. No torch here: help answers at once.

Defaults stand here as they are shown; a test compares names and defaults with those of the library.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apoptosis.cli.names import counted

if TYPE_CHECKING:
    from apoptosis.training import FitOptions

__all__ = ["CompareTuning", "FineTuning", "PruneTuning", "Training"]


def one_of(*names: str) -> Callable[[str], str]:
    """A parser that takes these words alone."""

    def word(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
        return text

    return word


def _choice(what: str, *names: str) -> Any:
    return typer.Option(help=f"{what}: {', '.join(names)}.", parser=one_of(*names), metavar="<str>")


OptimizerOption = Annotated[str, _choice("What moves the weights", "sgd", "adamw")]
RateOption = Annotated[float, typer.Option(help="Top of the schedule.")]
ScheduleOption = Annotated[
    str,
    _choice("How the rate runs", "constant", "step", "cosine", "one-cycle"),
]
DecayOption = Annotated[float, typer.Option(help="Of all weights.", min=0)]
MomentumOption = Annotated[float, typer.Option(help="Of sgd.", min=0, max=0.9999)]
SmoothingOption = Annotated[
    float, typer.Option(help="Part of a label that is spread over all classes.", min=0, max=0.9999)
]
PrecisionOption = Annotated[str, _choice("Numbers to compute in", "float32", "bfloat16")]
ChannelsOption = Annotated[
    bool,
    typer.Option("--channels-last", help="Images lie channels last in memory: faster on GPUs."),
]
KeepOption = Annotated[
    str,
    typer.Option(
        help="Which epoch's weights stay: best (on the validation data, where there are any) or last.",
        parser=one_of("best", "last"),
        metavar="<str>",
    ),
]


def _batch_size(name: str) -> Any:
    return typer.Option(
        name,
        help="Samples of one step, of data that are known by name; your own come in batches.",
        min=1,
        show_default=False,
    )


def _epochs(more: str = "", least: int = 1) -> Any:
    return typer.Option(help=f"Passes over the training data.{more}", min=least)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train a network from the start."""

    epochs: Annotated[int, _epochs()] = 10
    optimizer: OptimizerOption = "sgd"
    learning_rate: RateOption = 0.1
    schedule: ScheduleOption = "one-cycle"
    weight_decay: DecayOption = 5e-4
    momentum: MomentumOption = 0.9
    label_smoothing: SmoothingOption = 0.0
    precision: PrecisionOption = "float32"
    channels_last: ChannelsOption = False
    training_batch_size: Annotated[int | None, _batch_size("--batch-size")] = None
    keep_epoch: KeepOption = "best"

    def fit(self, seed: int) -> "FitOptions":
        """The same, as the library takes it.

        Raises:
            ConfigError: a number that nobody can mean.
        """
        from apoptosis.cli.typed_words import in_typed_words
        from apoptosis.training import FitOptions

        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        own["keep"], own["seed"] = own.pop("keep_epoch"), seed
        del own["training_batch_size"]
        with in_typed_words():
            return FitOptions(**own)


@dataclass(frozen=True, kw_only=True)
class FineTuning(Training):
    """How to train a network that was trained before: more gently, and after a teacher if there is one."""

    epochs: Annotated[int, _epochs()] = 20
    learning_rate: RateOption = 0.02
    schedule: ScheduleOption = "cosine"
    distil: Annotated[
        float,
        typer.Option(
            help="Part of the loss that follows a teacher instead of the labels.", min=0, max=1
        ),
    ] = 0.0
    temperature: Annotated[
        float, typer.Option(help="Of both softmaxes that --distil compares.", min=1e-6)
    ] = 2.0


@dataclass(frozen=True, kw_only=True)
class PruneTuning(FineTuning):
    """Fine-tuning as a part of pruning, which is done only if it is asked for."""

    epochs: Annotated[
        int,
        _epochs(" After each budget of a list, after each stage of single weights; 0 is none.", 0),
    ] = 0
    training_batch_size: Annotated[int | None, _batch_size("--training-batch-size")] = None

    def cost(self, times: int) -> str:
        """What it would take, in words; empty where nothing is trained."""
        if not self.epochs:
            return ""
        each = f" after each of {times}" if times > 1 else ""
        told = counted(self.epochs * times, "epoch")
        return f" Training: {told}{f', {self.epochs}{each}' if each else ''}."


@dataclass(frozen=True, kw_only=True)
class CompareTuning(PruneTuning):
    """Fine-tuning of every network that a comparison prunes."""

    epochs: Annotated[
        int,
        _epochs(" Every pruned network is judged before them and after them; 0 is none.", 0),
    ] = 0
