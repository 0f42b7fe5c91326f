"""Runs that were stopped and go on: notes in OUT.progress, beside the place that the result is saved to.

The folder also has run.toml, every option of the run, so that one line goes on with it:
`apoptosis prune --config OUT.progress/run.toml --resume`. It is removed when the result is saved, and not before: an
error of any kind leaves notes that are there.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from apoptosis.cli.config_files import OWN, as_toml, key_of, was_given
from apoptosis.cli.config_trust import MAKERS, names_code
from apoptosis.cli.options import Shares
from apoptosis.cli.refusals import Stopped, say
from apoptosis.errors import BudgetError, CheckpointError, ConfigError, NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from apoptosis.checkpoint import Journal

__all__ = ["Asked", "asked_of", "check_may_begin", "noted"]

NOT_OF_THE_RUN = (*OWN, "resume", "dry-run", "json")
"""Options that change how a run is shown and not what it does."""


FAILS_AGAIN = (BudgetError, ConfigError, NonFiniteError)
"""What a run that goes on from its last note meets again, unless something else has changed."""


@dataclass(frozen=True)
class Asked:
    """A command, and all that it was told, by the keys of a file."""

    command: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All of them, as plain values."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that were typed or stood in a file, as texts; the argument MODEL first."""
    resume: bool = False

    def line(self, **changes: Any) -> str:
        """The same command with other options, as it is typed; `keep_flops` is --keep-flops, None leaves one out."""
        words = ["apoptosis", self.command]
        told = {key.replace("_", "-"): _texts(value) for key, value in changes.items()}
        for key, texts in {**self.given, **told}.items():
            word = [] if key == "model" else [f"--{key}"]
            if texts is True:
                words += word
            for text in texts if isinstance(texts, list) else []:
                words += [*word, text]
        return shlex.join(words)


def asked_of(context: typer.Context) -> Asked:
    """What was typed, and what stood in a file, and defaults."""
    options: dict[str, Any] = {}
    given: dict[str, Any] = {}
    resume = False
    for own in context.command.params:
        key, value = key_of(own), context.params.get(own.name)
        resume = resume or (key == "resume" and bool(value))
        if key in NOT_OF_THE_RUN:
            continue
        options[key] = _plain(value)
        if was_given(context, own):
            given[key] = _texts(value)
    first = {key: given[key] for key in ("model", "data") if key in given}
    return Asked(str(context.info_name), options, first | given, resume)


def check_may_begin(asked: Asked, place: Path) -> None:
    """Refuse to begin anew where there is something to go on with, and to go on with what is finished.

    Raises:
        CheckpointError: nobody asked to go on, or there is nothing to go on with, or other files are there.
    """
    from apoptosis.checkpoint import has_notes

    folder = _folder(place)
    is_begun = has_notes(folder)
    if asked.resume and not is_begun and place.expanduser().exists():
        raise CheckpointError(
            f"{place} is there and {folder} has no notes: that run is finished. Leave out --resume to do it again, or "
            "give another --out."
        )
    if not asked.resume and is_begun:
        raise CheckpointError(
            f"{folder} has notes of a run that was stopped. Go on with it: {_line(asked, folder)}. Or remove it and "
            f"begin again: {_removal(folder)}"
        )


@contextmanager
def noted(
    asked: Asked, place: Path, network: "Mapping[str, Tensor] | None" = None
) -> "Iterator[Journal]":
    """Keep notes while the block runs; whoever stops it, or runs out of room, is told how to go on.

    Args:
        asked: the command.
        place: of the result.
        network: the weights that notes are about without holding them; with others nobody can go on.

    Raises:
        CheckpointError: there are notes of a run that was stopped, and nobody asked to go on with it; or of another.
        Stopped: by Ctrl-C.
    """  # noqa: DOC501 - refusals of the block come through
    from apoptosis.checkpoint import open_journal
    from apoptosis.structure import digest_of

    check_may_begin(asked, place)
    folder = _folder(place)
    options = {**asked.options, "out": str(place)}
    settings = {"command": asked.command, **options}
    if network is not None:
        settings["weights at the start"] = digest_of(network)
    with open_journal(folder, settings, resume=asked.resume) as journal:
        if asked.resume and not journal.has_notes:
            say(f"Note: there are no notes in {folder}; this run begins anew.")
        journal.write_toml("run.toml", as_toml(options))
        try:
            yield journal
        except BaseException as error:
            if not journal.has_notes:  # nothing to go on from
                journal.remove()
            elif isinstance(error, KeyboardInterrupt):
                raise Stopped(_line(asked, folder)) from error
            elif isinstance(error, FAILS_AGAIN):
                error.add_note(f"Notes up to there stay. To begin again: {_removal(folder)}")
            elif _can_be_mended(error):
                error.add_note(f"Go on: {_line(asked, folder)}")
            raise
        journal.remove()


def _can_be_mended(error: BaseException) -> bool:
    """Whether notes are of use after it: a full disk, data that could not be read; not notes that are damaged."""
    return not isinstance(error, CheckpointError) or isinstance(error.__cause__, OSError)


def _folder(place: Path) -> Path:
    place = place.expanduser()
    return place.with_name(f"{place.name}.progress")


def _line(asked: Asked, folder: Path) -> str:
    """What goes on with the run; code is named anew, for none is run that stands in a folder alone."""
    config = str(folder / "run.toml")
    code: list[str] = []
    for key, texts in asked.given.items():
        for text in texts if key in MAKERS else ():
            if not names_code(text, key):
                continue
            code += [text] if key == "model" else [f"--{key}", text]
    return shlex.join(["apoptosis", asked.command, *code, "--config", config, "--resume"])


def _removal(folder: Path) -> str:
    return shlex.join(["rm", "-r", str(folder)])


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value] or None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _texts(value: Any) -> Any:
    """What is typed after an option, again for each item of a list; True where its word alone is typed."""
    if value is None or value is False:
        return []
    if value is True:
        return True
    if isinstance(value, Shares) or not isinstance(value, (tuple, list)):
        return [str(value)]
    return [str(item) for item in value]
