import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _path_as_before(tmp_path_factory):
    """Commands leave the folders of a person's files on the path, which ends with the process; tests share one."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name, module in list(sys.modules.items()):  # many tests have files of one name
        file = getattr(module, "__file__", None)
        if name.isidentifier() and file and tmp_path_factory.getbasetemp() in Path(file).parents:
            del sys.modules[name]
