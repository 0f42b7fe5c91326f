"""Places that results are to be written to, looked at before the work is done: nothing that is read is written over."""

import json
import os
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from apoptosis.checkpoint.files import TEMPORARY
from apoptosis.checkpoint.folders import RECORD, holds_checkpoint, other_content
from apoptosis.errors import CheckpointError, ConfigError

__all__ = ["check_comparison", "check_file", "check_folder", "free_place"]


def free_place(model: str, *parts: str) -> Path:
    """A folder in `runs/` that says what it holds, under a name that nothing has yet."""
    name = Path(model).name if Path(model).expanduser().is_dir() else model
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    first = Path("runs") / "-".join([name, *parts])
    others = (first.with_name(f"{first.name}-{num}") for num in count(2))
    return next(place for place in chain([first], others) if not os.path.lexists(place))


def check_folder(path: Path, inputs: Mapping[str, Any]) -> None:
    """Refuse what could not be saved to as a checkpoint.

    Args:
        path: where the result is to be saved.
        inputs: what the command reads, by the option that names it.

    Raises:
        CheckpointError: something else is there, or it may not be written to.
        ConfigError: an input is there.
    """
    path = path.expanduser()
    _check_is_no_input(path, inputs)
    if path.is_dir():
        if what := other_content(path):
            raise CheckpointError(
                f"--out {path} {what}: it is no checkpoint, and saving would remove what it holds. Give a folder that "
                "does not exist yet, or a checkpoint to replace."
            )
    elif path.exists():
        raise CheckpointError(
            f"--out {path} is a file; a checkpoint is a folder. Give another name."
        )
    if because := _why_not_there(path):
        raise CheckpointError(f"--out {path} cannot be made: {because}. Give another place.")


def check_comparison(path: Path, inputs: Mapping[str, Any]) -> None:
    """Refuse what tables and plots should not be put among.

    Raises:
        ConfigError: a file is there, or a folder of other things, or an input; or it may not be written to.
    """
    _check_is_no_input(path, inputs)
    if path.is_dir():
        found = (item.name for item in path.iterdir())
        names = sorted(name for name in found if not name.startswith(TEMPORARY))
        if names and (not _is_comparison(path) or RECORD in names):
            what = "a checkpoint" if RECORD in names else f"a folder with {names[0]!r}"
            raise ConfigError(
                f"--out {path} is {what}, and tables and plots would lie among its files. Give a folder that does not "
                "exist yet, or an earlier comparison to replace."
            )
    elif path.exists():
        raise ConfigError(f"--out {path} is a file; tables and plots need a folder.")
    if because := _why_not_there(path):
        raise ConfigError(f"--out {path} cannot be made: {because}. Give another place.")


def check_file(path: Path, inputs: Mapping[str, Any]) -> None:
    """Refuse what could not be written as a file.

    Raises:
        ConfigError: a folder is there, or an input, or a checkpoint around it; or it may not be written to.
    """
    _check_is_no_input(path, inputs)
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder. Give the name of a file in it.")
    if holds_checkpoint(path.parent):
        raise ConfigError(
            f"--out {path} would lie in the checkpoint {path.parent}, or take the place of one of its files. Give "
            "another place."
        )
    if because := _why_not_there(path):
        raise ConfigError(f"--out {path} cannot be written: {because}. Give another place.")


def _check_is_no_input(out: Path, inputs: Mapping[str, Any]) -> None:
    """By the files themselves: links, other spellings and relative paths lead to the same ones."""
    for option, value in inputs.items():
        for source in _paths_in(value):
            if _is_within(source, out):
                does = "is" if _is_within(out, source) else "holds"
                raise ConfigError(
                    f"--out {out} {does} what {option} names ({value}), and the result would take its place. Give "
                    "another --out; what is read stays as it is."
                )
            if source.is_dir() and _is_within(out, source) and not _is_within(Path.cwd(), source):
                raise ConfigError(
                    f"--out {out} lies within what {option} names ({value}), and the result would be among its files. "
                    "Give another --out."
                )


def _paths_in(value: Any) -> list[Path]:
    """Files and folders that an option names: `nets.py:make`, `cifar10:data` and plain paths.

    A network or data set of the library, or of another one, is no path, whatever lies here under that name.
    """
    from apoptosis.data import NAMES
    from apoptosis.models import MODELS

    text = str(value or "")
    word, _, place = text.partition(":")
    if text in MODELS or text in NAMES or word in ("timm", "torchvision"):
        return []
    parts = (text, place) if word in NAMES else (text, place, text.rpartition(":")[0])
    return [path for part in parts if part and (path := _there(part)) is not None]


def _there(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # no name of a file at all
        return None


def _is_within(inner: Path, outer: Path) -> bool:
    """True if one is the other or lies in it, whatever they are called."""
    if not outer.exists():
        return False
    real = Path(os.path.realpath(inner.expanduser()))
    above = (real, *real.parents) if outer.is_dir() else (real,)
    return any(path.exists() and Path(path).samefile(outer) for path in above)


def _is_comparison(folder: Path) -> bool:
    """True if an earlier comparison lies there, by its own record."""
    try:
        found = json.loads((folder / "comparison.json").read_bytes())
        return found.keys() >= {"contestants", "baselines", "trials"}
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _why_not_there(path: Path) -> str:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is a file"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} may not be written to"
