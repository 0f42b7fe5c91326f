"""The sub-commands `train` and `finetune`: their options. No torch here: help answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from apoptosis.cli.option_groups import Group, spread
from apoptosis.cli.options import JsonOption, ResumeOption, plain_place
from apoptosis.cli.refusals import errors_shown
from apoptosis.cli.resuming import asked_of
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.training_options import FineTuning, Training

__all__ = ["finetune", "train"]

Trained = Annotated[SubjectOptions, Group(without=("samples", "batch_size"))]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the result; runs/ and a free name of what was asked for unless said.",
        callback=plain_place,
        show_default=False,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say how many steps and about how long, from one step; write nothing."
    ),
]


@spread
def train(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    *,
    training: Annotated[Training, Group(panel="Training")],
    subject: Trained,
    out: OutOption = None,
    resume: ResumeOption = False,  # noqa: ARG001 - `asked_of` reads it
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on data, keep the epoch that does best on the validation data, and save it as a checkpoint.

    Figures are then taken on the test data, which decide nothing. Stopped runs go on with --resume. Examples:

      apoptosis train digits_cnn --data digits --epochs 6 --out runs/dense

      apoptosis train resnet20 --data cifar10:data/cifar-10 --epochs 100 --batch-size 128 --device cuda

      apoptosis train my_nets.py:make --data my_data.py:batches --optimizer adamw --learning-rate 0.001
    """
    with errors_shown(context):
        from apoptosis.cli.train import TrainOptions, run_train

        run_train(
            TrainOptions(
                subject=subject,
                training=training,
                out=out,
                asked=asked_of(context),
                dry_run=dry_run,
                as_json=as_json,
            )
        )


@spread
def finetune(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    *,
    training: Annotated[FineTuning, Group(panel="Fine-tuning")],
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The model that --distil follows: a checkpoint, or any other name of a trained model.",
            rich_help_panel="Fine-tuning",
            show_default=False,
        ),
    ] = None,
    subject: Trained,
    out: OutOption = None,
    resume: ResumeOption = False,  # noqa: ARG001 - `asked_of` reads it
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a pruned network on: units that are gone stay gone, and masks stay masks.

    The epoch that does best on the validation data is kept; figures are taken on the test data. Examples:

      apoptosis finetune runs/half --data digits --epochs 5 --out runs/half-tuned

      apoptosis finetune runs/half --data digits --distil 0.5 --teacher runs/dense

      apoptosis finetune my_nets.py:make --weights dense.safetensors --data my_data.py:batches --learning-rate 0.001
    """
    with errors_shown(context):
        from apoptosis.cli.train import TrainOptions, run_train

        run_train(
            TrainOptions(
                subject=subject,
                training=training,
                teacher=teacher,
                out=out,
                asked=asked_of(context),
                dry_run=dry_run,
                as_json=as_json,
            )
        )
