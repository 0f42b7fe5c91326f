"""Configurations that nobody wrote by hand: those in a checkpoint or in a folder of notes, which are handed around.

A file that a person names with --config is a command line written down, and may name code as that does. One that lies
in a folder that a command has made is taken for data by whoever gets the folder. So code that it names is not run:
the names have to be typed.
"""

import re
from pathlib import Path

import typer

from apoptosis.cli.typed_line import key_of, typed_line
from apoptosis.errors import ConfigError

__all__ = ["MAKERS", "check_code_is_typed", "names_code"]

MAKERS = ("model", "data", "teacher", "dense")
"""Options whose values may be names of functions."""
LIBRARY_MODEL = re.compile(r"(timm|torchvision):\w+(\.\w+)?", re.ASCII)
DATA_SETS = ("cifar10", "cifar100", "whole")
"""Words before the colon of a data set and its place."""
OURS = ("run.json", "settings.json", "*.lock", "*.note")
"""By which a folder is known as one that a command has made."""


def check_code_is_typed(context: typer.Context, config: Path | None) -> None:
    """Refuse names of functions in a file that came with a folder of ours, unless they were typed as well.

    Raises:
        ConfigError: there is one.
    """
    if config is None or not _is_ours(config):
        return
    found: dict[str, list[str]] = {}
    for own in context.command.params:
        source = context.get_parameter_source(str(own.name))
        if key_of(own) in MAKERS and source is not None and source.name == "DEFAULT_MAP":
            value = context.params.get(str(own.name))
            texts = [str(text) for text in (value if isinstance(value, list) else [value])]
            if any(names_code(text, key_of(own)) for text in texts):
                found[key_of(own)] = texts
    if found:
        told = ", ".join(f"{key} = {text!a}" for key, texts in found.items() for text in texts)
        error = ConfigError(
            f"--config {config} lies in a folder that a command has made, and names code: {told}. Code that comes with "
            "such a folder is not run unless its name is typed. If you know it, type it."
        )
        error.add_note(f"As here: {typed_line(context, found)}")
        raise error


def _is_ours(config: Path) -> bool:
    folders = {config.parent, config.resolve().parent}
    return any(any(folder.glob(name)) for folder in folders for name in OURS)


def names_code(text: str, option: str = "model") -> bool:
    """True if the value of an option may be a person's own function: each reads names in its own way.

    >>> names_code("nets.py:make"), names_code("timm:resnet18"), names_code("runs/half")
    (True, False, False)
    >>> names_code("timm:make", "data"), names_code("cifar10:here", "data"), names_code("whole:make")
    (True, False, True)
    """
    if option == "data":
        word, colon, place = text.partition(":")
        return bool(colon) and not (word in DATA_SETS and place)
    return ":" in text and not LIBRARY_MODEL.fullmatch(text)
