"""Progress as events: whoever works says how far it is, whoever shows it listens.

Nothing below the command line prints. A long loop wraps its iterable in `track`; a caller who wants to see something
opens `listen` around the call and receives one `Progress` per step. Listeners are kept in a context variable, so
threads and nested runs do not hear each other.

>>> events = []
>>> with listen(events.append):
...     doubled = [2 * x for x in track([1, 2], "doubling")]
>>> [(e.done, e.total, e.finished) for e in events]
[(0, 2, False), (1, 2, False), (2, 2, False), (2, 2, True)]
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

__all__ = ["Progress", "listen", "track"]

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far one loop is. `total` is None where it cannot be known."""

    loop: int
    what: str
    done: int
    total: int | None
    finished: bool = False


_listener: ContextVar[Callable[[Progress], object] | None] = ContextVar("listener", default=None)
_loops = count()


@contextmanager
def listen(listener: Callable[[Progress], object]) -> Iterator[None]:
    """Send the events of everything run inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(iterable: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield from `iterable`, saying before the first item and after each how far it is."""
    listener = _listener.get()
    if listener is None:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    loop, done = next(_loops), 0
    try:
        listener(Progress(loop, what, done, total))
        for item in iterable:
            yield item
            done += 1
            listener(Progress(loop, what, done, total))
    finally:
        listener(Progress(loop, what, done, total, finished=True))
