"""The command line that a person typed, with other words in it: an advice that can be copied. No torch here."""

import shlex
from collections.abc import Mapping
from typing import Any

import typer

__all__ = ["key_of", "typed_line"]


def key_of(parameter: Any) -> str:
    """The name of a parameter in a file: of an option its longest word, without dashes before.

    >>> from types import SimpleNamespace
    >>> key_of(SimpleNamespace(opts=["--keep-flops"], name="keep_flops"))
    'keep-flops'
    """
    return max(parameter.opts, key=len).lstrip("-").replace("_", "-").lower()


def typed_line(context: typer.Context, more: Mapping[str, list[str]]) -> str:
    """What was typed, and more.

    Args:
        context: of the command.
        more: texts by the key of an option or argument (`data`, `model`), in place of what it has, or besides if it may
            be repeated.
    """
    arguments: list[str] = []
    options: list[str] = []
    for own in context.command.params:
        name, key = str(own.name), key_of(own)
        source = context.get_parameter_source(name)
        value = context.params.get(name) if source and source.name == "COMMANDLINE" else None
        texts = _texts(value)
        if key in more:
            texts = [*texts, *more[key]] if getattr(own, "multiple", False) else more[key]
        if own.param_type_name == "argument":
            arguments += texts
        elif getattr(own, "is_flag", False):
            options += _flag(own, value)
        else:
            options += [word for text in texts for word in (max(own.opts, key=len), text)]
    return shlex.join([*context.command_path.split(), *arguments, *options])


def _flag(option: Any, value: Any) -> list[str]:
    if value is None:
        return []
    words = option.opts if value else option.secondary_opts
    return [max(words, key=len)] if words else []


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    is_many = isinstance(value, (tuple, list)) and type(value) in (tuple, list)
    return [str(item) for item in value] if is_many else [str(value)]
