"""All tiny cases: one list for the tests to run over."""

from oracles.case import Case
from oracles.cases_architectures import ARCHITECTURE_CASES
from oracles.cases_operations import OPERATION_CASES
from oracles.cases_programs import PROGRAM_CASES

__all__ = ["SMALL_CASES", "Case"]

SMALL_CASES: list[Case] = [*ARCHITECTURE_CASES, *PROGRAM_CASES, *OPERATION_CASES]
