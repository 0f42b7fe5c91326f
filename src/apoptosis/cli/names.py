"""Names that a person typed, looked up in the tables that hold them."""

import json
from collections.abc import Iterable
from difflib import get_close_matches

from apoptosis.errors import ConfigError

__all__ = ["check_name", "counted", "nearest", "quoted", "sentence"]


def check_name(what: str, asked: str, known: Iterable[str]) -> None:
    """Refuse a name that a table has not, with the nearest that it has.

    Raises:
        ConfigError: it is not there.
    """
    names = list(known)
    if asked not in names:
        there = "There is" if len(names) == 1 else "There are"
        raise ConfigError(
            f"There is no {what} {asked!r}.{nearest(asked, names)} {there} {', '.join(names)}."
        )


def nearest(asked: str, known: Iterable[str]) -> str:
    """A question with the nearest name, to stand in an error message; empty where none is near.

    >>> nearest("obaa", ["oba", "taylor"])
    " Did you mean 'oba'?"
    """
    near = get_close_matches(asked, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def counted(num: int, one: str, many: str = "") -> str:
    """A number of things.

    >>> counted(1, "step"), counted(2, "step"), counted(2, "batch", "batches")
    ('1 step', '2 steps', '2 batches')
    """
    return f"{num} {one if num == 1 else many or one + 's'}"


def quoted(text: str) -> str:
    """A text as Python writes it, whatever stands in it.

    >>> print(quoted('a "b"'))
    "a \\"b\\""
    """
    return json.dumps(text, ensure_ascii=False)


def sentence(text: str) -> str:
    """Another's words, to be continued by ours: they end with a full stop, and with one alone.

    >>> sentence("no such file"), sentence("Try again.")
    ('no such file.', 'Try again.')
    """
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
