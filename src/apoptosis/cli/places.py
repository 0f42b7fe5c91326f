"""Places that results are to be written to, looked at before the work is done."""

import os
import re
from itertools import chain, count
from pathlib import Path

from apoptosis.checkpoint.folders import MEMBERS
from apoptosis.errors import CheckpointError, ConfigError

__all__ = ["check_comparison", "check_file", "check_folder", "free_place"]


def free_place(model: str, *parts: str) -> Path:
    """A folder in `runs/` that says what it holds, under a name that nothing has yet."""
    name = Path(model).name if Path(model).expanduser().is_dir() else model
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    first = Path("runs") / "-".join([name, *parts])
    others = (first.with_name(f"{first.name}-{num}") for num in count(2))
    return next(place for place in chain([first], others) if not os.path.lexists(place))


def check_folder(path: Path) -> None:
    """Refuse what could not be saved to as a checkpoint.

    Raises:
        CheckpointError: something else is there, or it may not be written to.
    """
    path = path.expanduser()
    if path.is_dir():
        names = {item.name for item in path.iterdir()}
        foreign = sorted(names - set(MEMBERS)) or sorted(names if "run.json" not in names else ())
        if foreign:
            raise CheckpointError(
                f"--out {path} holds {foreign[0]!r}: it is no checkpoint, and saving would remove what it holds. Give "
                "a folder that does not exist yet, or a checkpoint to replace."
            )
    elif path.exists():
        raise CheckpointError(
            f"--out {path} is a file; a checkpoint is a folder. Give another name."
        )
    if because := _why_not_there(path):
        raise CheckpointError(f"--out {path} cannot be made: {because}. Give another place.")


def check_comparison(path: Path) -> None:
    """Refuse what tables and plots should not be put among.

    Raises:
        ConfigError: a file is there, or a folder of other things, or it may not be written to.
    """
    if path.is_dir():
        names = sorted(item.name for item in path.iterdir())
        is_earlier = any(name.startswith("comparison.") for name in names)
        if names and (not is_earlier or "run.json" in names):
            what = "a checkpoint" if "run.json" in names else f"a folder with {names[0]!r}"
            raise ConfigError(
                f"--out {path} is {what}, and tables and plots would lie among its files. Give a folder that does not "
                "exist yet, or an earlier comparison to replace."
            )
    elif path.exists():
        raise ConfigError(f"--out {path} is a file; tables and plots need a folder.")
    if because := _why_not_there(path):
        raise ConfigError(f"--out {path} cannot be made: {because}. Give another place.")


def check_file(path: Path) -> None:
    """Refuse what could not be written as a file.

    Raises:
        ConfigError: a folder is there, or it may not be written to.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder. Give the name of a file in it.")
    if because := _why_not_there(path):
        raise ConfigError(f"--out {path} cannot be written: {because}. Give another place.")


def _why_not_there(path: Path) -> str:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is a file"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} may not be written to"
