"""How much memory a repair may fill, and how it goes on where that was too much.

A quarter of what is free may hold activations, up to a bound, rounded down to a power of two. How many batches a layer
is fitted on depends on it, so a repeated run gives the same result wherever four times the bound is free.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from operator import length_hint
from pathlib import Path
from typing import TypeVar

import torch

from apoptosis.errors import ModelError
from apoptosis.repair.reaching import num_samples_of
from apoptosis.task import Batch, Task

__all__ = ["Pieces", "in_smaller_batches", "is_full", "room_on"]

SHARE = 4
"""Of free memory one part may hold what passes layers: two or three times as much is alive in all."""
LEAST_BYTES = 2**28
"""Taken however little is free."""
MOST_BYTES = {"cpu": 2**31, "cuda": 2**33}
"""Taken however much is free: more batches at a time save passes, and hardly change a fit."""
UNKNOWN_BYTES = 8 * 2**30
"""Taken as free where nobody says."""
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Where a container says what it may have and what it has."""

T = TypeVar("T")


@dataclass(frozen=True)
class Pieces:
    """Batches in pieces of so many samples at most."""

    batches: Iterable[Batch]
    task: Task
    size: int

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from self.task.split(batch, self.size)

    def __length_hint__(self) -> int:
        """As `Refit` wants it: how often as much as the first piece will come, about."""
        first = next(iter(self.batches), None)
        each = 0 if first is None else sum(1 for _ in self.task.split(first, self.size))
        return each * length_hint(self.batches)


def room_on(device: torch.device) -> int:
    """Bytes that may pass layers at once on a device."""
    most = MOST_BYTES.get(device.type, LEAST_BYTES)
    room = min(max(LEAST_BYTES, free_bytes(device) // SHARE), most)
    return 1 << (room.bit_length() - 1)


def free_bytes(device: torch.device) -> int:
    """What is free, as far as the device or the operating system says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return _free_on_the_machine() if device.type == "cpu" else UNKNOWN_BYTES


def is_full(error: BaseException) -> bool:
    """True if an error says that memory is full. On a CPU torch has no type of its own for that."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def in_smaller_batches(
    go: Callable[[Iterable[Batch]], T], batches: Iterable[Batch], task: Task, what: str
) -> T:
    """What a function makes of the batches, or of pieces of half their size again and again while memory is full.

    Raises:
        ModelError: there is no room for one sample.
    """
    size: int | None = None
    while True:
        try:
            return go(batches if size is None else _pieces(batches, task, size))
        except Exception as error:
            if not is_full(error):
                raise
            said = str(error).strip().partition("\n")[0]
        gc.collect()  # what the traceback held
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        largest = size or max((num_samples_of(batch, task) for batch in batches), default=1)
        if largest <= 1:
            raise ModelError(
                f"{what}, and memory has no room for a single sample ({said}). Free some of it, use smaller samples or "
                "a device with more, or leave out this repair: `repair=[]`."
            )
        size = ceil(largest / 2)


def _pieces(batches: Iterable[Batch], task: Task, size: int) -> Pieces:
    whole = batches.batches if isinstance(batches, Pieces) else batches
    return Pieces(whole, task, size)


def _free_on_the_machine() -> int:
    found = [_available()]
    for most, used in LIMITS:
        limits = [_number_in(Path(path)) for path in (most, used)]
        if limits[0] is not None and limits[1] is not None:
            found.append(max(0, limits[0] - limits[1]))
    return min((own for own in found if own is not None), default=UNKNOWN_BYTES)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    own = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(own[0]) if own else None


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
