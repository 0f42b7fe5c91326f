"""Threads take turns at a network: whoever works on one has it to itself until the work is done.

Work on a network sets train and eval flags for a while, and hooks, and attributes, and puts them back. Two threads that
did so at once would put back what the other had set. So work waits until no other thread holds the network, or another
one that shares a module or a parameter with it. Networks that share nothing are worked on side by side.

A thread may hold what it holds again, and may hold several. Where two threads would wait for each other for ever, the
one that would begin to wait is refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import nn

from apoptosis.errors import ConfigError

__all__ = ["Holder", "acting_for", "alone", "holder", "one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")


class Holder:
    """A thread, and threads that it waits for while they work for it."""

    def __init__(self) -> None:
        self.wants: dict[int, object] = {}
        """Parts that it waits for."""


class _Own(threading.local):
    def __init__(self) -> None:
        self.holder = Holder()


_own = _Own()
_changed = threading.Condition()
_held: dict[int, tuple[Holder, int, object]] = {}
"""By identity of a module or parameter: whose it is, how often, and the thing, so that no other gets its number."""


def holder() -> Holder:
    """The one of this thread."""
    return _own.holder


@contextmanager
def acting_for(other: Holder) -> Iterator[None]:
    """Inside the block this thread may hold what another one holds, which must be waiting for it."""
    before, _own.holder = _own.holder, other
    try:
        yield
    finally:
        _own.holder = before


@contextmanager
def alone(*things: object) -> Iterator[None]:
    """Hold networks, or other things, until the end of the block.

    Raises:
        ConfigError: another thread holds one of them and waits for one that this thread holds.

    >>> from torch import nn
    >>> net = nn.Linear(2, 2)
    >>> with alone(net), alone(net.weight):
    ...     pass
    """
    parts = {id(part): part for thing in things for part in _parts(thing)}
    own = _own.holder
    with _changed:
        while _other_holder(parts, own) is not None:
            _wait_for(parts, own)
        for key, part in parts.items():
            _held[key] = (own, _held[key][1] + 1 if key in _held else 1, part)
    try:
        yield
    finally:
        with _changed:
            for key, part in parts.items():
                times = _held[key][1] - 1
                if times:
                    _held[key] = (own, times, part)
                else:
                    del _held[key]
            _changed.notify_all()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which holds the networks among its arguments while it runs."""

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        with alone(*(own for own in (*args, *kwargs.values()) if isinstance(own, nn.Module))):
            return function(*args, **kwargs)

    return held


def _parts(thing: object) -> list[object]:
    return [*thing.modules(), *thing.parameters()] if isinstance(thing, nn.Module) else [thing]


def _other_holder(parts: dict[int, object], own: Holder) -> Holder | None:
    return next((_held[k][0] for k in parts if k in _held and _held[k][0] is not own), None)


def _wait_for(parts: dict[int, object], own: Holder) -> None:
    """Wait until something is let go; the caller has the condition.

    Whether others wait is read off what they want and who holds it now: one that was notified and has not run yet waits
    no longer.

    Raises:
        ConfigError: each would wait for the other.
    """
    then = _other_holder(parts, own)
    while then is not None:
        if then is own:
            raise ConfigError(
                "Two threads work on networks that share modules or parameters, each waiting for one that the other "
                "holds. Give each thread networks of its own: copy.deepcopy(model)."
            )
        then = _other_holder(then.wants, then)
    own.wants = parts
    try:
        _changed.wait()
    finally:
        own.wants = {}
