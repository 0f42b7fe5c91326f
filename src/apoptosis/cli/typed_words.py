"""Refusals of the library in the words of the command line: who follows the advice types options, not Python."""

import ast
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from apoptosis.errors import BudgetError, ConfigError

__all__ = ["in_typed_words", "name_options"]

_TEXT = r"""(?:'[^']*'|"[^"]*")"""


@contextmanager
def in_typed_words() -> Iterator[None]:
    """Inside the block, `flops=0.5` of a refusal is shown as `--keep-flops 0.5`."""
    try:
        yield
    except BudgetError as error:
        told = BudgetError(f"{_typed(str(error))}{_nearest_reachable(error)}")
        told.reachable = error.reachable
        raise told from error
    except ConfigError as error:
        raise ConfigError(_typed(str(error))) from error


def name_options(patterns: Iterable[str]) -> str:
    """Patterns of names as they are typed.

    >>> name_options(["!conv1.weight", "fc.weight"])
    "--name '!conv1.weight' --name fc.weight"
    """
    return " ".join(f"--name {shlex.quote(pattern)}" for pattern in patterns)


def _typed(message: str) -> str:
    message = re.sub(
        r"^FitOptions: (\w+)=", lambda found: f"--{found[1].replace('_', '-')} ", message
    )
    message = re.sub(r"\b(flops|params|units)=", r"--keep-\1 ", message)
    message = re.sub(r"\ballow_empty=True", "--allow-empty", message)
    message = re.sub(r"\bSparsity\(keep=([\d.]+)\)", r"--unstructured --keep \1", message)
    message = re.sub(r"\bThe pattern (\d+:\d+) takes", r"--pattern \1 takes", message)
    message = re.sub(
        r" keep a share of these \(shares=\{.*?\}\);", "", message
    )  # typed, there are no shares
    message = re.sub(r"\bscope='(\w+)'", r"--scope \1", message)
    message = re.sub(
        rf"\bnames=(\[{_TEXT}(?:, {_TEXT})*\])",
        lambda found: name_options(ast.literal_eval(found[1])),
        message,
    )
    message = re.sub(
        r"\b(floor|cap|round_to|widths|per|steps|stages|keep)=",
        lambda found: f"--{found[1].replace('_', '-')} ",
        message,
    )
    message = message.replace("--scope layer, ", "--scope layer ")
    return message.replace("`structure.pinned` has", "`apoptosis inspect` shows")


def _nearest_reachable(error: BudgetError) -> str:
    """Rounded up to what is still reached; empty where the library does not know."""
    shares = [f"--keep-{n} {math.ceil(s * 1e4) / 1e4:g}" for n, s in error.reachable.items()]
    return f" The nearest that can be reached: {' '.join(shares)}." if shares else ""
