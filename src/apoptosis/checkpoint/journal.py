"""Notes of a run in a folder, so that a run that was stopped at any moment goes on from the last of them.

A note has a name, facts (plain JSON) and tensors, and is one safetensors file that vouches for itself. It is written
under a temporary name, brought to the disk and renamed: whoever is killed leaves the old note or the new one. The
folder also holds the settings of the run, which must be the same when it goes on, and a lock that its process keeps: a
second one is refused, and the system opens the lock when the first ends, however it ends. Files that no run has written
are refused before work begins, and never touched (`journal_files`).

Notes say where a run stands; they are no results. A finished run removes them, and nothing else does.
"""

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor

from apoptosis.checkpoint.files import write_file, write_json
from apoptosis.checkpoint.folders import sync_file
from apoptosis.checkpoint.journal_files import (
    DIGEST,
    ENDING,
    FACTS,
    LOCK,
    MARK,
    SETTINGS,
    TEMPORARY,
    TOML_MARK,
    check_is_journal,
    is_ours,
    notes_in,
)
from apoptosis.errors import CheckpointError, ConfigError
from apoptosis.reading import RECORD, UnfitFileError, open_file, read_file
from apoptosis.structure import sha256_of

try:
    import fcntl
except ImportError:  # Windows has no such locks: there nobody is refused
    fcntl = None

__all__ = ["Journal", "Note", "open_journal"]

FORMAT, MADE = 1, "made the folder"
NAME = "name"
"""Of the file, in the header of a note: one that was put in the place of another says so."""
NOTES_SHARE = 0.05
"""Notes that may be left out are left out where they would take more than this share of a run's time."""


@dataclass(frozen=True)
class Note:
    """Plain JSON values, and tensors on the CPU."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class Journal:
    """The notes of one run; `part` gives those of one of its parts. Made by `open_journal`."""

    def __init__(self, folder: Path, prefix: str = "", *, made_folder: bool = False) -> None:
        self.folder, self._prefix, self._made_folder = folder, prefix, made_folder
        self.is_on_the_way = False
        """The network that a run begins with here is one that the same run has made before."""
        self._last_written, self._seconds = -float("inf"), 0.0

    def part(self, name: str, *, on_the_way: bool = False) -> "Journal":
        """The same journal, where all names begin with that of a part.

        A part `on_the_way` begins with a network that an earlier part has made. It need not be the same to the bit in
        every process (a GPU adds in any order), so it is not looked at again.
        """
        made = Journal(self.folder, f"{self._prefix}{name}.", made_folder=self._made_folder)
        made.is_on_the_way = on_the_way or self.is_on_the_way
        return made

    def read(self, name: str) -> Note | None:
        """The last note of that name; None where there is none yet.

        Raises:
            CheckpointError: the file was changed or damaged.
        """
        path = self._path(name)
        try:
            with open_file(path) as stream:
                data = stream.read()
        except FileNotFoundError:
            return None
        except UnfitFileError as error:
            raise CheckpointError(
                f"{error}: it is no note. Take another copy of the folder."
            ) from error
        try:
            return _read(data, path.name)
        except (
            SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"The note {path} is damaged ({str(error)[:60] or type(error).__name__}). Take another copy of the "
                "folder, or remove the folder and begin again."
            ) from error

    def write(
        self, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put a note in the place of the last of that name.

        Raises:
            CheckpointError: it cannot be written; the last one, if there was one, is as it was.
        """
        start = time.monotonic()
        if os.path.lexists(path := self._path(name)) and not is_ours(path):
            raise CheckpointError(
                f"{path} was not written by this run, and a note was to take its place. Move it away."
            )
        data = _as_bytes(path.name, facts, tensors or {})
        try:
            write_file(path, lambda file: _write(file, data))
        except OSError as error:
            raise CheckpointError(_why_not_written(self.folder, len(data), error)) from error
        self._last_written = time.monotonic()
        self._seconds = self._last_written - start

    def is_due(self) -> bool:
        """Whether a note that may be left out should be written: it would take little of the time since the last."""
        return self._seconds < NOTES_SHARE * (time.monotonic() - self._last_written)

    def write_toml(self, name: str, text: str) -> None:
        """Put a file beside the notes that tells a person what the run is; it goes with them."""
        text = f"{TOML_MARK}{text}"
        write_file(self.folder / name, lambda file: file.write_text(text, encoding="utf-8"))

    @property
    def has_notes(self) -> bool:
        """True if there is something to go on from."""
        return bool(notes_in(self.folder))

    def remove(self) -> None:
        """Remove what runs have written there, and the folder if a run made it: the run has its result."""
        order = (SETTINGS, LOCK)
        with suppress(OSError):
            # Notes first: killed on the way, what is left is a run that has not begun, or notes with their settings.
            for path in sorted(
                self.folder.iterdir(),
                key=lambda p: (not p.name.endswith(ENDING), p.name in order, p.name == LOCK),
            ):
                if is_ours(path):
                    path.unlink(missing_ok=True)
            if self._made_folder:
                self.folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{name}{ENDING}"


@contextmanager
def open_journal(
    folder: str | os.PathLike[str], settings: Mapping[str, Any], *, resume: bool = False
) -> Iterator[Journal]:
    """Keep notes in a folder while the block runs; nobody else can meanwhile.

    Args:
        folder: made if it is not there. One that holds anything else than notes is refused.
        settings: plain JSON values: all that decides how the run goes.
        resume: go on from notes that are there.

    Raises:
        CheckpointError: another process has it; there are notes and `resume` was not asked for; they are of a run with
            other settings; the folder holds other files; or it cannot be used.
        ConfigError: settings that are no plain values.

    >>> import tempfile
    >>> place = f"{tempfile.mkdtemp()}/run"
    >>> with open_journal(place, {"seed": 0}) as journal:
    ...     journal.write("step", {"number": 3})
    >>> with open_journal(place, {"seed": 0}, resume=True) as journal:
    ...     print(journal.read("step").facts, journal.read("other"))
    {'number': 3} None
    """
    place = Path(folder).expanduser()
    wanted = _plain(settings)
    with ExitStack() as held:
        try:
            check_is_journal(place)
            made = not place.exists()
            place.mkdir(parents=True, exist_ok=True)
            made = held.enter_context(_locked(place, made_folder=made))
            journal = Journal(place, made_folder=made)
            _check_settings(journal, wanted, resume=resume)
            write_json(place / SETTINGS, {MARK: FORMAT, "settings": wanted})
            for leftover in place.glob(
                f"{TEMPORARY}*"
            ):  # of a process that was killed while writing
                leftover.unlink()
        except OSError as error:
            raise CheckpointError(
                f"The notes of a run cannot be kept in {place}: {error}. Give a place that may be written to."
            ) from error
        yield journal


def _plain(settings: Any) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The settings of a journal are plain JSON values by name, and {str(settings)[:60]!r} was given ({error}). "
            'Give what decides how the run goes: {"seed": 0}.'
        ) from error


@contextmanager
def _locked(folder: Path, *, made_folder: bool) -> Iterator[bool]:
    """Keep others out. True where this process made the folder, or an earlier one that says so in the lock."""
    with (folder / LOCK).open("a+", encoding="utf-8") as stream:
        stream.seek(0)
        process, _, rest = stream.read().partition("\n")
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise CheckpointError(
                    f"Process {process or 'unknown'} is working on {folder}. Wait for it or stop it; or "
                    "give this run another place."
                ) from error
        made_folder = made_folder or rest.strip() == MADE
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n{MADE if made_folder else ''}\n")
        stream.flush()
        yield made_folder


def _check_settings(journal: Journal, wanted: Mapping[str, Any], *, resume: bool) -> None:
    path = journal.folder / SETTINGS
    if not journal.has_notes:
        path.unlink(missing_ok=True)  # it had not begun
        return
    if not resume:
        raise CheckpointError(
            f"{journal.folder} has notes of a run that was stopped. Go on with it (resume), or remove the folder to "
            "begin again."
        )
    try:
        found: dict[str, Any] = dict(json.loads(read_file(path, RECORD))["settings"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
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


def _as_bytes(name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    text = json.dumps(dict(facts), allow_nan=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Two names of one storage are refused by safetensors; here each has its own numbers.
    own = {
        name: t.clone() if t.data_ptr() == tensors[name].data_ptr() else t
        for name, t in held.items()
    }
    return tensors_as_bytes(own, {FACTS: text, DIGEST: sha256_of(own, text), NAME: name})


def _read(data: bytes, name: str) -> Note:
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    tensors = load_tensors(data)
    if sha256_of(tensors, about[FACTS]) != about[DIGEST]:
        raise ValueError("its checksum differs")
    if about.get(NAME, name) != name:
        raise ValueError("it was written under another name")
    return Note(json.loads(about[FACTS]), tensors)


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        sync_file(stream)


def _why_not_written(folder: Path, needed: int, error: OSError) -> str:
    then = (
        "Notes before it are as they were: make room, and go on from there (resume)."
        if notes_in(folder)
        else "There was none before it, so nothing to go on from: make room, and begin again."
    )
    return (
        f"A note of {needed:,} bytes could not be written to {folder}: {error.strerror or error}. "
        f"{then}"
    )
