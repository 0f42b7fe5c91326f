"""Notes of a run in a folder, so that a run that was stopped at any moment goes on from the last of them.

A note has a name, facts (plain JSON) and tensors, and is one safetensors file that vouches for itself. It is written
under a temporary name, brought to the disk and renamed: whoever is killed leaves the old note or the new one. The
folder also holds the settings of the run, which must be the same when it goes on, and a lock that its process keeps: a
second one is refused, and the system opens the lock when the first ends, however it ends.

Notes say where a run stands; they are no results. Who has finished removes them.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor

from apoptosis.checkpoint.files import write_file, write_json
from apoptosis.checkpoint.folders import sync_file
from apoptosis.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no such locks: there nobody is refused
    fcntl = None

__all__ = ["Journal", "Note", "digest_of", "open_journal"]

SETTINGS, LOCK, ENDING = "settings.json", "lock", ".note"
ABOUT = (".json", ".toml")
"""Files of these kinds say what the run is; who runs it may add some of their own."""
FACTS, DIGEST = "facts", "sha256"
NOTES_SHARE = 0.05
"""Notes that may be left out are left out where they would take more than this share of a run's time."""


@dataclass(frozen=True)
class Note:
    """Plain JSON values, and tensors on the CPU."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class Journal:
    """The notes of one run; `part` gives those of one of its parts. Made by `open_journal`."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self._prefix = folder, prefix
        self._last_written, self._seconds = -float("inf"), 0.0

    def part(self, name: str) -> "Journal":
        """The same journal, where all names begin with that of a part."""
        return Journal(self.folder, f"{self._prefix}{name}.")

    def read(self, name: str) -> Note | None:
        """The last note of that name; None where there is none yet.

        Raises:
            CheckpointError: the file was changed or damaged.
        """
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _read(data)
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"The note {path} is damaged ({type(error).__name__}). Take another copy of the folder, or remove the "
                "folder and begin again."
            ) from error

    def write(
        self, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put a note in the place of the last of that name.

        Raises:
            CheckpointError: it cannot be written; the last one, if there was one, is as it was.
        """
        start = time.monotonic()
        data = _as_bytes(facts, tensors or {})
        try:
            write_file(self._path(name), lambda file: _write(file, data))
        except OSError as error:
            raise CheckpointError(_why_not_written(self.folder, len(data), error)) from error
        self._last_written = time.monotonic()
        self._seconds = self._last_written - start

    def is_due(self) -> bool:
        """Whether a note that may be left out should be written: it would take little of the time since the last."""
        return self._seconds < NOTES_SHARE * (time.monotonic() - self._last_written)

    def remove(self) -> None:
        """Remove all notes and, if nothing else is in it, the folder: the run has its result."""
        with suppress(OSError):
            # Notes first: killed on the way, what is left is a run that has not begun, or notes with their settings.
            for path in sorted(self.folder.iterdir(), key=lambda p: not p.name.endswith(ENDING)):
                if _is_ours(path.name):
                    path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{name}{ENDING}"


@contextmanager
def open_journal(
    folder: str | os.PathLike[str], settings: Mapping[str, Any], *, resume: bool = False
) -> Iterator[Journal]:
    """Keep notes in a folder while the block runs; nobody else can meanwhile.

    Args:
        folder: made if it is not there.
        settings: plain JSON values: all that decides how the run goes.
        resume: go on from notes that are there.

    Raises:
        CheckpointError: another process has it; there are notes and `resume` was not asked for; they are of a run with
            other settings; or the folder cannot be used.

    >>> import tempfile
    >>> place = f"{tempfile.mkdtemp()}/run"
    >>> with open_journal(place, {"seed": 0}) as journal:
    ...     journal.write("step", {"number": 3})
    >>> with open_journal(place, {"seed": 0}, resume=True) as journal:
    ...     print(journal.read("step").facts, journal.read("other"))
    {'number': 3} None
    """
    place = Path(folder).expanduser()
    wanted = json.loads(json.dumps(dict(settings), allow_nan=False))
    with ExitStack() as held:
        try:
            _check_is_journal(place)
            place.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(place))
            journal = Journal(place)
            _check_settings(journal, wanted, resume=resume)
            write_json(place / SETTINGS, wanted)
            for leftover in place.glob(f".*{ENDING}"):  # of a process that was killed while writing
                leftover.unlink()
        except OSError as error:
            raise CheckpointError(
                f"The notes of a run cannot be kept in {place}: {error}. Give a place that may be written to."
            ) from error
        yield journal


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a+") as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                stream.seek(0)
                raise CheckpointError(
                    f"Process {stream.read().strip() or 'unknown'} is working on {folder}. Wait for it or stop it; or "
                    "give this run another place."
                ) from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def _check_is_journal(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; notes need a folder. Give another name.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    foreign = sorted(name for name in names if not _is_ours(name))
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0]!r}, so it is no folder of notes. Give another place."
        )


def _is_ours(name: str) -> bool:
    return name == LOCK or name.endswith((ENDING, *ABOUT))


def _check_settings(journal: Journal, wanted: Mapping[str, Any], *, resume: bool) -> None:
    path = journal.folder / SETTINGS
    if not any(journal.folder.glob(f"*{ENDING}")):
        path.unlink(missing_ok=True)  # it had not begun
        return
    if not resume:
        raise CheckpointError(
            f"{journal.folder} has notes of a run that was stopped. Go on with it (resume), or remove the folder to "
            "begin again."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so nobody knows what run these notes are of. Remove {journal.folder} "
            "and begin again."
        ) from error
    other = [
        f"{name} {_shown(found, name)} (now {_shown(wanted, name)})"
        for name in sorted(found.keys() | wanted.keys())
        if _shown(found, name) != _shown(wanted, name)
    ]
    if other:
        raise CheckpointError(
            f"{journal.folder} has notes of a run with other settings: {', '.join(other[:6])}. Go on with the same, or "
            "give this run another place."
        )


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not said"


def _as_bytes(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    text = json.dumps(dict(facts), allow_nan=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Two names of one storage are refused by safetensors; here each has its own numbers.
    own = {
        name: t.clone() if t.data_ptr() == tensors[name].data_ptr() else t
        for name, t in held.items()
    }
    return tensors_as_bytes(own, {FACTS: text, DIGEST: _digest(text, own)})


def _read(data: bytes) -> Note:
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    tensors = load_tensors(data)
    if _digest(about[FACTS], tensors) != about[DIGEST]:
        raise ValueError("its checksum differs")
    return Note(json.loads(about[FACTS]), tensors)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Sixteen letters that tell these numbers from others."""
    return _digest("", {name: own.detach().cpu().contiguous() for name, own in tensors.items()})[
        :16
    ]


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        own = tensors[name]
        digest.update(f"{name} {own.dtype} {tuple(own.shape)}".encode())
        digest.update(own.reshape(-1).view(torch.uint8).numpy().data if own.numel() else b"")
    return digest.hexdigest()


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        sync_file(stream)


def _why_not_written(folder: Path, needed: int, error: OSError) -> str:
    then = (
        "Notes before it are as they were: make room, and go on from there (resume)."
        if any(folder.glob(f"*{ENDING}"))
        else "There was none before it, so nothing to go on from: make room, and begin again."
    )
    return (
        f"A note of {needed:,} bytes could not be written to {folder}: {error.strerror or error}. "
        f"{then}"
    )
