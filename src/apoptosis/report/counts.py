"""Numbers of things in words."""

from typing import Any

__all__ = ["counted"]


def counted(num: Any, one: str) -> str:
    """A number of things; of a number that is not known, many.

    >>> counted(1, "step"), counted(2, "step"), counted("?", "step")
    ('1 step', '2 steps', '? steps')
    """
    return f"{num} {one if num == 1 else one + 's'}"
