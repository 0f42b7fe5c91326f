"""Arguments and options that several commands have, said once. No torch here: help answers at once."""

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AGGREGATION_HELP",
    "LARGEST_SEED",
    "REPAIR_HELP",
    "MODEL_HELP",
    "MODEL_NAMES",
    "AggregationOption",
    "BatchSizeOption",
    "DataOption",
    "DenseOption",
    "DeviceOption",
    "JsonOption",
    "ModelArgument",
    "ResumeOption",
    "SamplesOption",
    "SeedOption",
    "Shares",
    "plain_place",
    "share",
    "shares",
    "WeightsOption",
]

MODEL_NAMES = (
    "digits_cnn",
    "mlp",
    "vgg19_bn",
    "resnet20",
    "resnet32",
    "resnet56",
    "resnet20_narrow",
    "resnet32_narrow",
    "resnet56_narrow",
    "resnet50",
    "cifar_vit",
    "vit_tiny16",
    "vit_b16",
)
"""Of `apoptosis.models.MODELS`, which would bring torch: seconds for a page of help. A test compares the two."""


LARGEST_SEED = 2**32 - 1
"""torch takes 64 bits, and seeds of later epochs and repeats are counted on from the one that is typed."""


def share(text: str | float) -> float:
    """A part of a whole as a number; per cent are answered with how they are written.

    Raises:
        typer.BadParameter: it is none.

    >>> share("0.5")
    0.5
    """
    number, sign, _ = str(text).partition("%")
    try:
        value = float(number)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no number. Half is written 0.5") from error
    if sign:
        raise typer.BadParameter(f"{value:g} % is written {value / 100:g}")
    return value


class Shares(tuple[float, ...]):
    """One share or several, typed with commas between."""

    __slots__ = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The shares themselves."""
        return tuple(self)

    def __str__(self) -> str:
        return ",".join(f"{one:g}" for one in self)


def shares(text: str | Shares) -> Shares:
    """Parts of a whole as numbers.

    Raises:
        typer.BadParameter: one is none, or is there twice.

    >>> shares("0.5,0.25")
    (0.5, 0.25)
    """
    found = text if isinstance(text, Shares) else Shares(map(share, str(text).split(",")))
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text} has a share twice")
    return found


def plain_place(path: Path | None) -> Path | None:
    """A place to write to without detours: of `x/../y` nobody should find a new folder `x`.

    >>> str(plain_place(Path("x/../y"))), str(plain_place(Path("../y")))
    ('y', '../y')
    """
    if path is None:
        return None
    path = path.expanduser()
    steps = [part == ".." for part in path.parts]
    if not any(after and not before for before, after in zip(steps, steps[1:], strict=False)):
        return path
    # Where x is a link, the system goes to its target before it goes up.
    real, here = Path(os.path.realpath(path)), Path.cwd()
    return real.relative_to(here) if here in real.parents else real


REPAIR_HELP = (
    "batch_norm measures statistics anew, refit gives layers new weights by least squares, refit_blocks then whole "
    "blocks by small steps, distil follows the dense network for 300 steps; none needs labels. May be repeated: one "
    "after the other."
)
AGGREGATION_HELP = (
    "How scores of parameters become those of units: default, paper, layers, units, signed. The criterion's own unless "
    "said."
)

MODEL_HELP = (
    f"{', '.join(MODEL_NAMES)}; timm:NAME, torchvision:NAME, transformers:FOLDER; the folder of a checkpoint; or your "
    "own: module:function, file.py:function, which returns the model."
)
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="digits; cifar10, cifar100 (here or in ./data), cifar10:PATH; the path of a folder of images or of an "
        ".npz, .tar.gz or .zip, whole:FILE.zip; or your own: module:function or file.py:function, which returns "
        "batches (a list, a DataLoader), a tuple: batches to score on, batches to evaluate on if there are any, the "
        "Task if it is not classification, or a dict of batches: scoring, training, validation, evaluation, task.",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        help="Trained weights: FILE.safetensors, what torch.save wrote of a state_dict, or the folder of a checkpoint "
        "of the same shapes.",
        show_default=False,
    ),
]
DenseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dense",
        help="What makes the network that a checkpoint was made from, where that is a function of yours: "
        "my_nets.py:make. Checkpoints name it, and only what is typed is run. May be repeated.",
        show_default=False,
    ),
]
AggregationOption = Annotated[
    str | None,
    typer.Option(
        help=AGGREGATION_HELP,
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        help="Score on at most so many samples, the first ones; your own are read once and kept in memory.",
        min=1,
        show_default=False,
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        help="At most so many samples at once; does not change results.", min=1, show_default=False
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on with this run where it was stopped: from the notes in OUT.progress."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Draws splits of data sets (a checkpoint keeps its own), random weights and orders.",
        min=0,
        max=LARGEST_SEED,
    ),
]
