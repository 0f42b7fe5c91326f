"""What is shown when a command does not get to its end: cause and remedy on one screen, and an exit code."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from apoptosis.cli.names import sentence
from apoptosis.cli.typed_line import typed_line
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
        Panel(
            Text(_told(error)), title=type(error).__name__, title_align="left", border_style="red"
        )
    )
    if not debug:
        console.print("Where it came from: apoptosis --debug " + str(context.info_name) + " …")
    if words := getattr(error, "to_type", None):
        console.print(Text(f"With it: {typed_line(context, words)}"), soft_wrap=True)
    for note in getattr(error, "__notes__", ()):  # such as the command that goes on
        console.print(Text(note), soft_wrap=True)


def say(text: str) -> None:
    """Something that a person should know, on stderr."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def say_interrupted(go_on: str = "") -> None:
    """On stderr, where it disturbs nobody's JSON; with the command that goes on, where there is one."""
    console = Console(stderr=True)
    console.print("Stopped. Files are written whole or not at all, so none is half done.")
    if go_on:
        console.print(Text(f"Go on: {go_on}"), soft_wrap=True)


def _told(error: Exception) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{sentence(error.strerror)} {REMEDIES.get(error.errno or 0, OTHER_REMEDY)}"


_ROOM = "Make room on that disk, or give a place on another."
_RIGHTS = "Give a place that you may use, or have its rights changed."
REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOENT: "Look whether the name is right.",
    errno.ENAMETOOLONG: "Give a shorter name.",
}
"""What can be done, by what the system says."""
OTHER_REMEDY = "Look at that place and its disk, or give another."
