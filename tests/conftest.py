"""Options of the test run."""

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-coverage",
        action="store_true",
        help="write docs/coverage.md from this run's library models (use -n 0)",
    )
