import sys

import pytest


@pytest.fixture(autouse=True)
def _path_as_before():
    """Commands leave the folders of a person's files on the path, which ends with the process; tests share one."""
    before = list(sys.path)
    yield
    sys.path[:] = before
