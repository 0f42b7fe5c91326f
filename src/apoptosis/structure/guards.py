"""Checks that a program makes while it runs: what Python saw when the run was recorded must be so again.

A program keeps the way that Python took. Where Python compared a size or made a number of one, or read a number that
depends on no input (a parameter's, or a mask's that is made of sizes), the program does the same again with the sizes
it has now, and stops in words where it comes out otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any, TypeAlias

from apoptosis.errors import TraceError
from apoptosis.structure.program import Formula, Reading, SizeOf, Worked
from apoptosis.structure.read_sizes import OPERATORS

__all__ = [
    "NUMBERS",
    "REMEDY",
    "Checks",
    "Guard",
    "GuardError",
    "SizeLimit",
    "Trip",
    "check",
    "check_number",
    "check_pieces",
    "guard_of",
]

NUMBERS = (
    *("item.", "is_nonzero.", "_local_scalar_dense.", "equal.", "allclose.", "sym_size."),
    "_assert",
)
"""Operations by which Python looks at numbers of tensors."""

REMEDY = (
    "A program knows only the way that was recorded: trace the model on inputs of the sizes it shall get "
    "(`example_inputs`)."
)


class GuardError(TraceError):
    """A program was called where the model's own code may go another way."""


@dataclass(frozen=True)
class SizeLimit:
    """Sizes that an input may have along a dimension; `number` counts tensors among the inputs."""

    number: int
    dim: int
    least: int
    most: int

    def __str__(self) -> str:
        if self.least == self.most:
            return f"size {self.least}"
        return f"a size from {self.least} to {self.most}"


@dataclass(frozen=True)
class Guard:
    """What came out when the run was recorded: `left operator right`, in the numbers of then."""

    operator: str
    left: str
    right: str
    outcome: bool
    line: str


Trip: TypeAlias = tuple[Guard, Any, Any]
"""A guard with the numbers that came out otherwise."""

_SYMBOLS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}


def guard_of(reading: Reading) -> Guard:
    """The check of a use of a size."""
    sides = _show(reading.left), _show(reading.right)
    return Guard(reading.operator, *sides, reading.outcome, _without_folder(reading.line))


class Checks:
    """The guards of a program, by their places in it."""

    def __init__(self) -> None:
        """None yet."""
        self.guards: list[Guard] = []
        self.harmless: frozenset[Trip] = frozenset()
        """What came out otherwise, and the program was seen to do what the model does all the same."""
        self.tripped: list[Trip] | None = None
        """While a program is tried: what came out otherwise, noted instead of raised."""

    def look(self, place: int, left: Any, right: Any) -> None:
        """Compare again.

        Raises:
            GuardError: it comes out otherwise.
        """
        guard = self.guards[place]
        same = bool(OPERATORS[guard.operator](left, right)) == guard.outcome
        if same or (guard, left, right) in self.harmless:
            return
        if self.tripped is None:
            raise GuardError(f"This program {_otherwise(guard, left, right)}. {REMEDY}")
        self.tripped.append((guard, left, right))


def check(checks: Checks, place: int, left: Any, right: Any) -> None:
    """As a program calls it."""
    checks.look(place, left, right)


def _otherwise(guard: Guard, left: Any, right: Any) -> str:
    where = f" ({guard.line})" if guard.line else ""
    if guard.operator == "eq" and guard.outcome:
        return f"needs a size in the model to be {guard.right}, as it was when it was recorded{where}, and it is {left}"
    symbol = _SYMBOLS[guard.operator]
    return (
        f"was recorded where {guard.left} {symbol} {guard.right} was {guard.outcome}{where}, and now it is "
        f"{left} {symbol} {right}"
    )


def check_number(line: str, recorded: Any, now: Any) -> None:
    """Compare a number that Python read when the run was recorded, and that depends on no input.

    Raises:
        GuardError: it is another one.
    """
    both = (recorded, now)
    if all(isinstance(number, float) for number in both):
        same = isclose(recorded, now, rel_tol=1e-6) or all(n != n for n in both)
    else:
        same = recorded == now
    if not same:
        raise GuardError(
            f"This program was recorded where Python read the number {recorded!r} ({_without_folder(line)}), and now "
            f"it is {now!r}. {REMEDY}"
        )


def check_pieces(pieces: Sequence[Any], num: int) -> None:
    """Count the pieces that Python goes through.

    Raises:
        GuardError: there are more or fewer than when the run was recorded.
    """
    if len(pieces) != num:
        raise GuardError(
            f"This program was recorded where a tensor came in {num} pieces, which Python goes through one by one, and "
            f"now there are {len(pieces)}. {REMEDY}"
        )


def _show(formula: Formula) -> str:
    if isinstance(formula, SizeOf):
        return str(formula.value.shape[formula.dim])
    if isinstance(formula, Worked):
        sides = (
            f"({_show(side)})" if isinstance(side, Worked) else _show(side)
            for side in (formula.left, formula.right)
        )
        return f" {_SYMBOLS[formula.operator]} ".join(sides)
    return str(formula)


def _without_folder(line: str) -> str:
    """File, line and function; others need not know where on a disk the code lay."""
    return line.replace("\\", "/").rpartition("/")[2]
