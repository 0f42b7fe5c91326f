"""Names that a person typed, looked up in the tables that hold them."""

from collections.abc import Iterable
from difflib import get_close_matches

from apoptosis.errors import ConfigError

__all__ = ["check_name", "nearest"]


def check_name(what: str, asked: str, known: Iterable[str]) -> None:
    """Refuse a name that a table has not, with the nearest that it has.

    Raises:
        ConfigError: it is not there.
    """
    names = list(known)
    if asked not in names:
        raise ConfigError(
            f"There is no {what} {asked!r}.{nearest(asked, names)} There are {', '.join(names)}."
        )


def nearest(asked: str, known: Iterable[str]) -> str:
    """A question with the nearest name, to stand in an error message; empty where none is near.

    >>> nearest("obaa", ["oba", "taylor"])
    " Did you mean 'oba'?"
    """
    near = get_close_matches(asked, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
