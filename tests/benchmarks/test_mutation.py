"""The changes that `benchmarks/mutation.py` draws from: what they are, and what they leave alone."""

import ast

from benchmarks.mutation_changes import changes_of

CODE = '''"""About x < 1."""
__all__ = ["one"]
import math
from typing import cast


def one(x: int, y: int = 2, *names: "dict[str, int]") -> bool:
    """True if 3 < 4."""
    assert x > 0, "x + 1"
    if x > y and not names:
        raise ValueError(f"{x + 1} > 5")
    values = sorted(names)[1:]
    values.sort(key=len)
    cast("int", x)
    return min(x, y) + 6 == 7


ABOVE = [lambda n: n < 8]
'''


def test_each_change_parses_and_changes_the_code_alone() -> None:
    changes = [change for change in changes_of("x.py", CODE) if change.is_code(CODE)]
    told = {(change.before, change.after) for change in changes}
    assert ("x > y", "(x >= y)") in told
    assert ("x > y and not names", "(x > y or not names)") in told
    assert ("not names", "(names)") in told
    assert ("2", "3") in told
    assert ("1", "None") in told
    assert ("values.sort(key=len)", "pass") in told
    assert ("min(x, y)", "max(x, y)") in told
    assert ("min(x, y)", "min(y, x)") in told
    assert ("min(x, y) + 6", "(min(x, y) - 6)") in told
    assert ("return min(x, y) + 6 == 7", "return True") in told
    assert ("n < 8", "(n <= 8)") in told
    for change in changes:
        ast.parse(change.apply(CODE))
        assert change.line not in {1, 2, 3, 4, 8, 9, 11, 14}, change


def test_a_change_says_when_its_line_runs() -> None:
    by_text = {(change.before, change.after): change for change in changes_of("x.py", CODE)}
    assert by_text["x > y", "(x >= y)"].runs_at == 10
    assert by_text["x > y", "(x >= y)"].where == "one"
    assert by_text["2", "3"].runs_at is None, "a default is made when the file is imported"
    assert by_text["n < 8", "(n <= 8)"].runs_at == 18


def test_a_change_is_known_by_its_lines() -> None:
    change = next(c for c in changes_of("x.py", CODE) if c.after == "(x >= y)")
    assert change.lines(CODE) == ("if x > y and not names:", "if (x >= y) and not names:")
