"""Files of a journal, told from everything else by name and content: nothing else is ever written over or removed.

Every file begins with a mark, or has a name that nobody else gives: a lock, a temporary file. Links, folders and pipes
are none of a journal's, whatever they are called.
"""

import json
import os
from pathlib import Path

from apoptosis.checkpoint.files import TEMPORARY
from apoptosis.errors import CheckpointError

__all__ = [
    "DIGEST",
    "ENDING",
    "FACTS",
    "LOCK",
    "MARK",
    "SETTINGS",
    "TOML_MARK",
    "check_is_journal",
    "has_notes",
    "is_ours",
    "notes_in",
]

SETTINGS, LOCK, ENDING = "settings.json", "apoptosis.lock", ".note"
MARK = "apoptosis journal"
SETTINGS_MARK = f'{{\n  "{MARK}":'.encode()
TOML_MARK = f"# {MARK}\n"
FACTS, DIGEST = "facts", "sha256"
"""What the header of a note has besides tensors."""
MOST_HEADER = 2**28


def has_notes(folder: str | os.PathLike[str]) -> bool:
    """True if a folder holds notes of a run to go on from.

    Raises:
        CheckpointError: it holds something else.
    """
    place = Path(folder).expanduser()
    check_is_journal(place)
    return bool(notes_in(place))


def notes_in(folder: Path) -> list[Path]:
    """Notes, without those in the writing."""
    return [path for path in folder.glob(f"*{ENDING}") if not path.name.startswith(".")]


def check_is_journal(folder: Path) -> None:
    """Refuse a folder that holds what no run has written.

    Raises:
        CheckpointError: it does, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; notes need a folder. Give another name.")
    files = sorted(folder.iterdir()) if folder.exists() else []
    foreign = [path.name for path in files if not is_ours(path)]
    if not foreign:
        return
    if foreign == [SETTINGS] and notes_in(folder):
        raise CheckpointError(
            f"{folder / SETTINGS} is damaged, or no run has written it, so nobody knows what run the notes beside it "
            "are of: it is no folder of notes to go on from. Take another copy of the folder, or give another place."
        )
    raise CheckpointError(
        f"{folder} holds {foreign[0]!r}, which no run has written (or it is damaged), so it is no folder of notes. "
        "Give another place."
    )


def is_ours(path: Path) -> bool:
    """True if a journal has written this file."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == LOCK or path.name.startswith(TEMPORARY):
        return True
    if path.suffix == ENDING:
        return not path.name.startswith(".") and _is_note(path)
    if path.name == SETTINGS:
        return _begins_with(path, SETTINGS_MARK)
    return path.suffix == ".toml" and _begins_with(path, TOML_MARK.encode())


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(mark)) == mark


def _is_note(path: Path) -> bool:
    """By the header of a safetensors file, which only a note has facts and a digest in."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > min(MOST_HEADER, path.stat().st_size):
            return False
        try:
            about = json.loads(stream.read(size))["__metadata__"]
            return {FACTS, DIGEST} <= about.keys()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
