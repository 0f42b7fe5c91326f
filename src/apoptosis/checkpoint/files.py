"""Files that are either the old one or the new one, never half of it: written under a temporary name, then renamed."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["TEMPORARY", "write_file", "write_json"]

TEMPORARY = ".apoptosis-"
"""How names of files in the writing begin; what a killed process has left is known by it."""


def write_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, then give it its name; on failure nothing is left behind.

    Raises:
        OSError: it cannot be written; `filename` is `path`, not the temporary file, of which nobody knows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _written(path, write)
    except OSError as error:
        error.filename = str(path)  # a full disk comes with no name at all
        raise


def write_json(path: Path, value: Any) -> Path:
    """`value` as JSON. NaN is refused: it is no JSON, and a reader would stumble over it."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    return write_file(path, lambda file: file.write_text(text, encoding="utf-8"))


def _written(path: Path, write: Callable[[Path], object]) -> Path:
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f"{TEMPORARY}{path.stem}-", suffix=path.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(
            0o644
        )  # mkstemp's files are their owner's alone; a result is for everyone to read
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
