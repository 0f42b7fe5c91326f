"""Models that checkpoints say they were made from: which are made at once, and which a person has to name.

Whoever hands on a checkpoint writes its record, so a name in it is a stranger's word. It is followed where it can only
lead to code that is installed here: a network of our own table, a plain name of timm or torchvision (neither a path
nor the hub), another checkpoint. A function of a person's own, and a folder of transformers, are made only if they were
typed: `--dense my_nets.py:make`. Then the typed name is called, not the recorded one, and it must be the same function
of a file of the same name.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from apoptosis.checkpoint import read_run
from apoptosis.errors import CheckpointError
from apoptosis.models import MODELS

__all__ = ["UntypedNameError", "is_checkpoint", "origin_of"]

LONGEST = 1000
"""Letters of a name; no path is longer than a few hundred."""


class UntypedNameError(CheckpointError):
    """A checkpoint names code that the person before the screen has not named; `to_type` says with which words."""

    def __init__(self, message: str, to_type: Mapping[str, list[str]]) -> None:
        super().__init__(message)
        self.to_type = to_type


def is_checkpoint(name: str | Path) -> bool:
    """True if a folder of that name holds a checkpoint."""
    try:
        return (Path(name).expanduser() / "run.json").is_file()
    except (OSError, ValueError, RuntimeError):  # no name of a file at all
        return False


def origin_of(folder: str, dense: Iterable[str]) -> str:
    """The name of the model that a checkpoint was made from, as it may be made here.

    Args:
        folder: of the checkpoint.
        dense: names that were typed with --dense.

    Raises:
        CheckpointError: it says none.
        UntypedNameError: it says one that nobody typed.
    """
    origin = _recorded(folder)
    if is_checkpoint(origin) or _is_installed(origin):
        return origin
    typed = [name for name in dense if name == origin or _has_moved(origin, name)]
    if typed:
        return typed[0]
    others = ", ".join(dense)
    raise UntypedNameError(
        f"The checkpoint {folder} says that its network is made by {origin}{f', and not {others}' if others else ''}. "
        "What a checkpoint names is not run unless it is typed: who wrote the checkpoint chose the name. If you know "
        f"this code, which runs with all your rights, add: --dense {origin}. Where yours lies elsewhere, give its "
        "path.",
        {"dense": [origin]},
    )


def _recorded(folder: str) -> str:
    subject: Any = read_run(folder).settings.get("subject")
    found = subject.get("model") if isinstance(subject, dict) else None
    if not isinstance(found, str) or not found:
        raise CheckpointError(
            f"The checkpoint {folder} does not say which model it was made from: it was not saved by a command. Let a "
            f"function load it and name that: my_nets.py:small with `def small(): return ap.load({folder!r}, dense=…)`."
        )
    if not found.isprintable() or len(found) > LONGEST:
        raise CheckpointError(
            f"The checkpoint {folder} names its model in letters that no name has: {ascii(found[:60])}. Let a function "
            "of yours load it, and name that function."
        )
    return found


def _is_installed(origin: str) -> bool:
    """True if the name leads to a network that is installed here, wherever it comes from."""
    return origin in MODELS or bool(re.fullmatch(r"(timm|torchvision):\w+(\.\w+)?", origin, re.A))


def _has_moved(origin: str, name: str) -> bool:
    """True if both are one function of files of one name, in different folders."""
    here, there = name.rpartition(":"), origin.rpartition(":")
    is_file = here[0].endswith(".py") and there[0].endswith(".py")
    is_file = is_file and re.split(r"[\\/]", here[0])[-1] == re.split(r"[\\/]", there[0])[-1]
    return is_file and here[2] == there[2]
