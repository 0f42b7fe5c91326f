"""Names of repairs, as settings and journals have them: the same in every process, with the options they have.

One of the table is `batch_norm`, or `refit(scope='every', ridge=None, rounds=3)`: its name there and every option, for
defaults may change. One of your own is known by the name of its function, by the fields of its dataclass, or by its own
text.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from apoptosis.repair.table import REPAIRS, Repair

__all__ = ["repair_name"]

PLAIN = (str, int, float, bool, type(None))
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def repair_name(repair: Repair) -> str:
    """What a record calls a repair.

    >>> from apoptosis.repair import Refit
    >>> repair_name(Refit(scope="consumers"))
    "refit(scope='consumers', ridge=None, rounds=3)"
    """
    called = getattr(repair, "__name__", None)
    if isinstance(called, str):
        return called
    if isinstance(repair, partial):
        given = [*map(_text, repair.args), *(f"{k}={_text(v)}" for k, v in repair.keywords.items())]
        return f"partial({', '.join([repair_name(repair.func), *given])})"
    if not is_dataclass(repair):
        return _text(repair)
    ours = (name for name, own in REPAIRS.items() if type(own) is type(repair))
    options = ", ".join(f"{f.name}={_text(getattr(repair, f.name))}" for f in fields(repair))
    return f"{next(ours, type(repair).__qualname__)}({options})"


def _text(value: Any) -> str:
    """The same in every process: sets in order, and objects without a text of their own by their type."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(own)}' for key, own in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(called := getattr(value, "__qualname__", None), str):
        return called
    if type(value).__repr__ is object.__repr__:
        return type(value).__qualname__
    return ADDRESS.sub("", repr(value))
