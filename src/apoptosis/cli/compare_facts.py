"""Where something was measured: versions, and the commit of the library if it stands in a git work tree."""

import platform
import subprocess
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

import apoptosis

__all__ = ["commit", "versions"]


def versions() -> dict[str, str]:
    """Of everything that figures may depend on."""
    return {
        "apoptosis": apoptosis.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "matplotlib": mpl.__version__,
        "python": platform.python_version(),
    }


def commit(package: Path = Path(apoptosis.__file__).parent) -> str | None:
    """The commit that the library runs from, `+changes` where its files are others; None where git does not know it.

    An installed copy may lie inside somebody else's work tree, so git is asked whether it tracks these files.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(package, "rev-parse", "--short", "HEAD")
    return found if found is None or not _git(package, "status", "-s", ".") else f"{found}+changes"


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None
