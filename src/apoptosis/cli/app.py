"""The command `apoptosis`: its sub-commands, and what happens when one fails.

Exit codes: 0 done, 1 refused (an `ApoptosisError` or a file that cannot be written; cause and remedy are shown),
2 typed wrongly, 130 stopped by Ctrl-C. Anything else is a bug and shows its traceback.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from apoptosis import __version__
from apoptosis.cli.compare_command import compare
from apoptosis.cli.evaluate_command import evaluate
from apoptosis.cli.kinds import TwoKinds
from apoptosis.cli.option_groups import spread
from apoptosis.cli.options import (
    LARGEST_SEED,
    AggregationOption,
    DenseOption,
    ModelArgument,
    plain_place,
)
from apoptosis.cli.prune_command import prune
from apoptosis.cli.refusals import INTERRUPTED, errors_shown, say_interrupted
from apoptosis.cli.subject_options import SubjectOptions
from apoptosis.cli.train_command import finetune, train

__all__ = ["app", "main"]

app = typer.Typer(
    name="apoptosis",
    help="""Make a trained PyTorch network smaller by knowing, exactly, what each weight is worth.

Start here:

  apoptosis demo            train a small network, prune it by every criterion: who keeps most?

  apoptosis demo --seed 1   other data, other weights: how much was luck?

  apoptosis criteria        the criteria there are, one line each

  apoptosis inspect MODEL   what in a model can shrink, and what cannot and why

  apoptosis train digits_cnn --data digits --out runs/dense

  apoptosis score runs/dense --data digits      what each unit is worth

  apoptosis prune runs/dense --data digits --keep-flops 0.5 --out runs/half

  apoptosis finetune runs/half --data digits --epochs 5

  apoptosis evaluate runs/dense runs/half --data digits      side by side

  apoptosis compare digits_cnn --data digits --keep-flops 0.5 --epochs 3

Every command but criteria takes its options from a file too: --config run.toml.

Exit codes: 0 done, 1 refused, 2 typed wrongly, 130 stopped by Ctrl-C.
""",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script and of `python -m apoptosis`."""
    try:
        app(prog_name="apoptosis")
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(INTERRUPTED)


@app.callback()
def options(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - acts through its callback
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            is_eager=True,
            callback=lambda asked: _show_version(asked=asked),
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors as well.")
    ] = False,
) -> None:
    """Options of every command."""
    context.obj = {"debug": debug}


@app.command()
@spread
def demo(
    context: typer.Context,
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for all tables and plots.", callback=plain_place, file_okay=False
        ),
    ] = Path("demo"),
    seed: Annotated[
        int,
        typer.Option(help="Draws the split, the weights and the order.", min=0, max=LARGEST_SEED),
    ] = 0,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training images, for the dense network.", min=1)
    ] = 6,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON and nothing else.")
    ] = False,
) -> None:
    """Train a small CNN on digits, prune it by every criterion, fine-tune, and compare. About a minute on two cores.

    Then a closer look: every channel is removed in turn, and the change of the loss compared with the scores. Examples:

      apoptosis demo --out runs/first

      apoptosis demo --epochs 20 --json > demo.json
    """
    with errors_shown(context):
        from apoptosis.cli.demo import DemoOptions, run_demo

        run_demo(DemoOptions(out=out, seed=seed, epochs=epochs, as_json=as_json))


@app.command()
def criteria(context: typer.Context) -> None:
    """List the criteria that score a network, one line each."""
    with errors_shown(context):
        from rich.table import Table

        from apoptosis.criteria import CRITERIA

        table = Table("criterion", "what it scores", box=None, pad_edge=False)
        for name, criterion in CRITERIA.items():
            table.add_row(f"[bold]{name}[/]", Text(criterion.summary))
        Console().print(table)


@app.command()
@spread
def inspect(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    model: ModelArgument,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Shape of an input, 1x3x224x224; int:1x16 for token ids. Again for further arguments.",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Show only groups of this kind; may be repeated.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Show only groups whose name fits, as 'layer1.*'; '!…' leaves out."),
    ] = None,
    dense: DenseOption = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="Build the model without memory: shapes alone.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the structure as JSON and nothing else.")
    ] = False,
) -> None:
    """Show what in a model can shrink: groups of units, what one costs, and what is pinned and why.

    MACs are multiply-accumulates of one forward pass over the example inputs (papers often call them FLOPs). Examples:

      apoptosis inspect torchvision:resnet50

      apoptosis inspect timm:vit_base_patch16_224 --kind head --meta

      apoptosis inspect my_nets.py:make --input 1x3x32x32 --json > structure.json
    """
    with errors_shown(context):
        from apoptosis.cli.inspect import InspectOptions, run_inspect

        run_inspect(
            InspectOptions(
                model=model,
                inputs=inputs or [],
                kinds=kind or [],
                names=name or [],
                dense=dense or [],
                meta=meta,
                as_json=as_json,
            )
        )


@app.command()
@spread
def score(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    *,
    subject: SubjectOptions,
    criterion: Annotated[
        str, typer.Option(help="What scores; `apoptosis criteria` lists them.")
    ] = "oba",
    aggregation: AggregationOption = None,
    top: Annotated[int, typer.Option(help="Show so many of the least valuable units.", min=0)] = 10,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.json for scores of units, FILE.safetensors for those of parameters.",
            callback=plain_place,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the scores of units as JSON and nothing else.")
    ] = False,
) -> None:
    """Score every unit of a model: what it is worth, group by group. Nothing is removed.

    The lower a score, the sooner `prune` removes the unit. Examples:

      apoptosis score digits_cnn --data digits

      apoptosis score my_nets.py:make --data my_data.py:batches --criterion taylor --top 20

      apoptosis score resnet20 --weights dense.safetensors --data my_data.py:batches --out scores.safetensors
    """
    with errors_shown(context):
        from apoptosis.cli.score import ScoreOptions, run_score

        run_score(
            ScoreOptions(
                subject=subject,
                criterion=criterion,
                aggregation=aggregation,
                top=top,
                out=out,
                as_json=as_json,
            )
        )


app.command(cls=TwoKinds)(prune)
app.command()(train)
app.command()(finetune)
app.command()(evaluate)
app.command()(compare)


def _show_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"apoptosis {__version__}")
        raise typer.Exit
