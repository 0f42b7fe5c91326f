"""The command `apoptosis`: its sub-commands, and what happens when one fails.

Exit codes: 0 done, 1 refused (an `ApoptosisError` or a file that cannot be written; cause and remedy are shown),
2 typed wrongly, 130 stopped by Ctrl-C. Anything else is a bug and shows its traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from apoptosis import __version__
from apoptosis.errors import ApoptosisError

__all__ = ["app", "main"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count

app = typer.Typer(
    name="apoptosis",
    help="""Make a trained PyTorch network smaller by knowing, exactly, what each weight is worth.

Start here:

  apoptosis demo            train a small network; which criterion ranks best?

  apoptosis demo --seed 1   other data, other weights: how much was luck?

  apoptosis criteria        the criteria there are, one line each

  apoptosis inspect MODEL   what in a model can shrink, and what cannot and why
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
        _say_interrupted()
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
def demo(
    context: typer.Context,
    *,
    out: Annotated[
        Path, typer.Option(help="Folder for ranking.png and ranking.json.", file_okay=False)
    ] = Path("demo"),
    seed: Annotated[
        int, typer.Option(help="Draws the split, the weights and the order.", min=0)
    ] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", min=1)] = 6,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON and nothing else.")
    ] = False,
) -> None:
    """Train a small CNN on digits, score it by every criterion, and check the ranking of its channels.

    The truth is measured: every channel is removed in turn and the change of the loss noted. Examples:

      apoptosis demo --out runs/first

      apoptosis demo --epochs 20 --json > ranking.json
    """
    with _errors_shown(context):
        from apoptosis.cli.demo import DemoOptions, run_demo

        run_demo(DemoOptions(out=out, seed=seed, epochs=epochs, as_json=as_json))


@app.command()
def criteria(context: typer.Context) -> None:
    """List the criteria that score a network, one line each."""
    with _errors_shown(context):
        from rich.table import Table

        from apoptosis.criteria import CRITERIA

        table = Table("criterion", "what it scores", box=None, pad_edge=False)
        for name, criterion in CRITERIA.items():
            table.add_row(f"[bold]{name}[/]", Text(criterion.summary))
        Console().print(table)


@app.command()
def inspect(  # noqa: PLR0913 - one parameter per option is how typer reads a command
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="digits_cnn, timm:NAME, torchvision:NAME, transformers:FOLDER, module:function or file.py:function.",
            show_default=False,
        ),
    ],
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
    with _errors_shown(context):
        from apoptosis.cli.inspect import InspectOptions, run_inspect

        run_inspect(
            InspectOptions(
                model=model,
                inputs=inputs or [],
                kinds=kind or [],
                names=name or [],
                meta=meta,
                as_json=as_json,
            )
        )


@contextmanager
def _errors_shown(context: typer.Context) -> Iterator[None]:
    """Turn refusals into one screen of text and an exit code."""
    try:
        yield
    except (ApoptosisError, OSError) as error:
        console = Console(stderr=True)
        if context.obj["debug"]:
            console.print_exception()
        console.print(
            Panel(
                Text(str(error)), title=type(error).__name__, title_align="left", border_style="red"
            )
        )
        if not context.obj["debug"]:
            console.print("Where it came from: apoptosis --debug " + str(context.info_name) + " …")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _say_interrupted()
        raise typer.Exit(INTERRUPTED) from None


def _say_interrupted() -> None:
    Console(stderr=True).print(
        "Stopped. Files are written whole or not at all, so none is half done."
    )


def _show_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"apoptosis {__version__}")
        raise typer.Exit
