"""Folders that are either the old one or the new one, never a mixture and never half of one.

A new folder is filled under a temporary name beside the old one, brought to the disk, and then the two exchange their
names in one step (`renameat2` with RENAME_EXCHANGE, Linux). Where a file system cannot do that, the old folder steps
aside to `.NAME.previous`, the new one takes its name, and the old one is removed: whoever reads between the first two
steps finds the whole old folder there (`find_folder`), and the next write puts it back.

A folder in the making is locked by who makes it. What lies about unlocked belongs to a process that was killed, and
the next write removes it. Only files of a checkpoint's own names are ever removed, from a folder whose record is one.
"""

import ctypes
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any

from apoptosis.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no such locks; leftovers stay there
    fcntl = None

__all__ = [
    "MEMBERS",
    "RECORD",
    "find_folder",
    "holds_checkpoint",
    "other_content",
    "real_folder",
    "replace_folder",
    "sync_file",
]

RECORD = "run.json"
MEMBERS = ("model.safetensors", "plan.json", "masks.safetensors", RECORD)
"""What a checkpoint may consist of, with one of the two in the middle; nothing else is ever removed."""

MARKS = {"checksum", "format", "files", "tensors"}
"""What every record of a checkpoint has, and those of other programs do not have together."""
PLAN_MARKS = {"fingerprint", "fingerprint_after", "groups"}
MASKS_MARK = b'{"__metadata__":{"format":"np","masks":'
MOST_RECORD = 2**28

RENAME_EXCHANGE = 2
AT_FDCWD = -100
CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def replace_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` make the files of a new folder, then give it the name `target` at once.

    Raises:
        OSError: the disk is full, or may not be written to; `target` is as it was, and nothing is left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _heal(target)
    with _locked_folder(target) as folder:
        try:
            fill(folder)
            _sync_folder(folder)
            _take_name(folder, target)
            _sync_folder(target.parent)
        finally:
            _remove(folder)


def real_folder(path: str | os.PathLike[str]) -> Path:
    """Where a path leads: `~` is the home folder, links are followed.

    Raises:
        CheckpointError: it is no path, or there is no such home.
    """
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"The place {path!r:.60} is a {type(path).__name__}. Give a path: a text, or a pathlib.Path."
        )
    try:
        return Path(os.path.realpath(Path(path).expanduser()))
    except (RuntimeError, ValueError) as error:  # no such home; no letter of a name
        raise CheckpointError(f"{str(path)!r:.60}: {error} Give the whole path.") from error


def find_folder(target: Path) -> Path:
    """`target`, or where its predecessor waits if a write was interrupted between its two steps."""
    aside = _aside(target)
    return aside if not target.exists() and holds_checkpoint(aside) else target


def holds_checkpoint(folder: Path) -> bool:
    """True if a folder holds a checkpoint, intact or not: its record is one, or what stands beside a damaged record."""
    if not (folder / RECORD).is_file():
        return False
    if _keys(folder / RECORD) >= MARKS or _keys(folder / "plan.json") >= PLAN_MARKS:
        return True
    masks = folder / "masks.safetensors"
    return masks.is_file() and _first(masks, 8 + len(MASKS_MARK))[8:] == MASKS_MARK


def _keys(path: Path) -> set[str]:
    """Of a JSON object in a file; nothing where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_RECORD:
            return set()
        return set(json.loads(path.read_bytes()).keys())
    except (OSError, ValueError, AttributeError, RecursionError):
        return set()


def _first(path: Path, num: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(num)


def other_content(folder: Path) -> str:
    """What a folder holds that no checkpoint does, in words; nothing where it is empty or a checkpoint."""
    names = {item.name for item in folder.iterdir()}
    if foreign := sorted(names - set(MEMBERS)):
        return f"holds {foreign[0]!r}"
    if names and RECORD not in names:
        return f"has {sorted(names)[0]!r} and no {RECORD}"
    if names and not holds_checkpoint(folder):
        return f"holds a {RECORD} that is no record of a checkpoint, or is damaged"
    return ""


def sync_file(stream: Any) -> None:
    """Wait until what was written to an open file is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that nobody takes for a leftover."""
    while True:
        folder = target.with_name(f".{target.name}.saving-{token_hex(6)}")
        folder.mkdir()
        if fcntl is None:
            yield folder
            return
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # taken for a leftover before it was locked
            continue
        try:
            with suppress(OSError):  # file systems without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                yield folder
                return
        finally:
            os.close(handle)


def _heal(target: Path) -> None:
    """Put back or remove what an interrupted write has left."""
    aside = _aside(target)
    if holds_checkpoint(aside):
        if target.exists():
            _remove(aside)
        else:
            aside.rename(target)
    if fcntl is None:
        return
    for folder in target.parent.glob(f".{_escaped(target.name)}.saving-*"):
        with suppress(OSError):  # somebody else's, or gone already
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(handle)


def _take_name(folder: Path, target: Path) -> None:
    """The new folder under the name of the old one; the old one, if any, is left under the name of the new."""
    try:
        folder.rename(target)  # also onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM):
            raise
        if not target.is_dir():
            raise
    else:
        return
    if _exchange(folder, target):
        return
    aside = _aside(target)
    target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        aside.rename(target)
        raise
    _sync_folder(target.parent)
    _remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap names in one step; false where the system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


@cache
def _renameat2() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    return call


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files and its folder; what somebody else has put there stays, and the folder with it."""
    with suppress(OSError):
        for name in MEMBERS:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _escaped(name: str) -> str:
    """A name as a pattern that fits only itself."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
