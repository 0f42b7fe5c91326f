"""Libraries that networks come from, and what to do where they are not installed."""

import importlib
from typing import Any

import torch

from apoptosis.cli.names import sentence
from apoptosis.errors import ConfigError

__all__ = ["library"]


def library(name: str) -> Any:
    """The library itself.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # Naming the torch that is there keeps pip from putting another in its place.
        raise ConfigError(
            f"{name} cannot be imported: {sentence(str(error))} Install it: pip install {name} "
            f"'torch=={torch.__version__}'"
        ) from error
    except RuntimeError as error:  # torchvision's compiled operations were built for another torch
        raise ConfigError(
            f"{name} cannot be imported: {sentence(str(error))} torchvision's compiled part does not fit the installed "
            f"torch {torch.__version__}: install the torchvision that was built for it, from the index that torch came "
            "from."
        ) from error
