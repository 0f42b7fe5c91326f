"""What is shown when a command does not get to its end: cause and remedy on one screen, and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from apoptosis.errors import ApoptosisError

__all__ = ["INTERRUPTED", "Stopped", "errors_shown", "say", "say_interrupted", "show_refusal"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Stopped(KeyboardInterrupt):
    """By Ctrl-C, in a run that can go on; `go_on` is what to type."""

    def __init__(self, go_on: str) -> None:
        super().__init__(go_on)
        self.go_on = go_on


@contextmanager
def errors_shown(context: typer.Context) -> Iterator[None]:
    """Turn refusals into one screen of text and an exit code."""
    try:
        yield
    except (ApoptosisError, OSError) as error:
        show_refusal(error, context)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        say_interrupted(stop.go_on if isinstance(stop, Stopped) else "")
        raise typer.Exit(INTERRUPTED) from None


def show_refusal(error: Exception, context: typer.Context) -> None:
    """Cause and remedy on stderr; with --debug, where it came from as well."""
    console, debug = Console(stderr=True), context.obj["debug"]
    if debug:
        console.print_exception()
    console.print(
        Panel(Text(str(error)), title=type(error).__name__, title_align="left", border_style="red")
    )
    if not debug:
        console.print("Where it came from: apoptosis --debug " + str(context.info_name) + " …")


def say(text: str) -> None:
    """Something that a person should know, on stderr."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def say_interrupted(go_on: str = "") -> None:
    """On stderr, where it disturbs nobody's JSON; with the command that goes on, where there is one."""
    console = Console(stderr=True)
    console.print("Stopped. Files are written whole or not at all, so none is half done.")
    if go_on:
        console.print(Text(f"Go on: {go_on}"), soft_wrap=True)
