"""`--config run.toml`: the options of a command from a file. What is typed wins over it.

    model = "digits_cnn"       # as the argument MODEL
    data = "digits"
    seed = 1                   # at the top: for whichever command reads the file

    [prune]                    # for this one alone, and before what stands at the top
    keep-flops = 0.5           # as --keep-flops 0.5; keep_flops is the same
    repair = ["batch_norm"]    # options that may be repeated

Keys and kinds of values are checked before anything else is done; values go the way that typed ones go. Paths in the
file are relative to the current folder. No torch here.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from apoptosis.cli.names import nearest
from apoptosis.cli.refusals import show_refusal
from apoptosis.cli.typed_line import key_of
from apoptosis.errors import ConfigError
from apoptosis.reading import OPTIONS, read_file

__all__ = ["OWN", "as_toml", "config_option", "key_of", "read_config", "was_given"]

OWN = ("config", "help")
"""Options that no file can give."""


def config_option(annotations: Mapping[str, Any]) -> inspect.Parameter:
    """The parameter --config of a command whose other parameters are these."""

    def fill_defaults(context: typer.Context, value: Path | None) -> Path | None:
        """Before any other parameter is looked at: the option is eager."""
        if value is None or context.resilient_parsing:
            return value
        try:
            _fill(context, value, annotations)
        except ConfigError as error:
            show_refusal(error, context)
            raise typer.Exit(2) from error
        return value

    option = typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Options from a file: `keep-flops = 0.5`, `model = …`, at the top or below `[COMMAND]`. What is typed "
        "wins; paths are relative to the current folder.",
        is_eager=True,
        callback=fill_defaults,
        show_default=False,
    )
    return inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, option],
    )


def read_config(path: Path, command: str, commands: Iterable[str]) -> dict[str, Any]:
    """What a file says for a command: its table, and what stands at the top.

    Raises:
        ConfigError: there is no such file, it is no TOML, or one option stands twice in one place.
    """
    try:
        text = read_file(path, OPTIONS).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (
            (error.strerror or str(error))
            if isinstance(error, OSError)
            else "it is no text in UTF-8"
        )
        raise ConfigError(f"--config {path} cannot be read: {why}. Give a TOML file.") from error
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"--config {path} is no TOML: {why}. A line is `keep-flops = 0.5`; texts stand in quotes, "
            '`data = "digits"`.'
        ) from error
    others = {name for name in commands if isinstance(content.get(name), dict)}
    own = content.get(command, {})
    top = {name: value for name, value in content.items() if name not in others}
    below = own if command in others else {}
    taken = _written_by_key(path, below)
    left = {key: written for key, written in _written_by_key(path, top).items() if key not in taken}
    return {written: top[written] for written in left.values()} | below


def was_given(context: typer.Context, parameter: Any) -> bool:
    """Whether it was typed, or stands in the file with another value than it has anyway."""
    source = context.get_parameter_source(parameter.name)
    if source is None or source.name not in ("COMMANDLINE", "DEFAULT_MAP"):
        return False
    return source.name == "COMMANDLINE" or context.params[parameter.name] != parameter.default


def as_toml(values: Mapping[str, Any]) -> str:
    """Plain values as the text of a file, one line each; None is left out.

    >>> print(as_toml({"keep-flops": 0.5, "name": ["a", 'b"'], "out": None}), end="")
    keep-flops = 0.5
    name = ["a", "b\\""]
    """
    return "".join(
        f"{key} = {_toml(value)}\n" for key, value in values.items() if value is not None
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, (int, float)):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def _fill(context: typer.Context, path: Path, annotations: Mapping[str, Any]) -> None:
    command = context.command
    known = {key_of(own): own.name for own in command.params if own.name not in OWN}
    siblings: Mapping[str, Any] = getattr(context.parent and context.parent.command, "commands", {})
    found = read_config(path, str(command.name), siblings)
    filled: dict[str, Any] = {}
    for written, value in found.items():
        key = _as_key(written)
        if key not in known:
            is_table = isinstance(value, dict)
            why = _no_table(written, siblings, is_table=is_table)
            raise ConfigError(
                f"--config {path}: {why or _unknown(written, str(command.name), known, siblings)}"
            )
        filled[known[key]] = _as_typed(path, written, value, annotations[known[key]])
    context.default_map = filled


def _written_by_key(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for written in values:
        if (key := _as_key(written)) in found:
            raise ConfigError(
                f"--config {path}: {found[key]!r} and {written!r} are one option. Keep one of the two lines."
            )
        found[key] = written
    return found


def _as_key(written: str) -> str:
    return written.replace("_", "-").lower()


def _no_table(written: str, commands: Iterable[str], *, is_table: bool) -> str:
    """What is wrong with a table of no command, or with a command that is no table; empty where it is neither."""
    if written in commands and not is_table:
        return (
            f"{written} is a command, so a table is meant: write [{written}] on a line of its own, and its options "
            "below it."
        )
    if written not in commands and is_table:
        near = nearest(written, commands)
        return f"There is no command for the table [{written}].{near} Tables are {', '.join(commands)}."
    return ""


def _unknown(
    written: str, command: str, known: Mapping[str, str], siblings: Mapping[str, Any]
) -> str:
    key = _as_key(written)
    holders = [n for n, own in siblings.items() if key in [key_of(one) for one in own.params]]
    elsewhere = (
        f" It is one of {', '.join(holders)}: write it below [{holders[0]}]." if holders else ""
    )
    return (
        f"`apoptosis {command}` has no option {written!r}."
        f"{elsewhere or nearest(key, known)} It has {', '.join(known)}."
    )


def _as_typed(path: Path, key: str, value: Any, annotation: Any) -> Any:
    """The texts that a person would have typed, True and False for what is said by its word alone.

    Raises:
        ConfigError: the value is of another kind than the option takes.
    """
    kind, repeated = _kind(annotation)
    meant, fits, many = _KINDS.get(kind, _OTHER)
    wrong = ConfigError(
        f"--config {path}: {key} = {_shown(value)} is {_called(value)}, and {key} takes {meant}"
        f"{', or a list of these' if repeated or many else ''}."
    )
    if isinstance(value, list) and (repeated or many):
        if not value or not all(fits(item) for item in value):
            raise wrong
        texts = [str(item) for item in value]
        return texts if repeated else ",".join(texts)
    if not fits(value):
        raise wrong
    if kind is bool:
        return value
    return [str(value)] if repeated else str(value)


def _kind(annotation: Any) -> tuple[Any, bool]:
    """Of `Annotated[list[int] | None, …]` the int, and that it may be repeated."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not type(None))
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{…}"
    is_plain = isinstance(value, (str, bool, int, float, list))
    return _toml(value)[:60] if is_plain else str(value)


def _called(value: Any) -> str:
    return next((words for kind, words in _CALLED.items() if isinstance(value, kind)), "a date")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Fits = Callable[[Any], bool]
_TEXT: tuple[str, Fits, bool] = ("a text in quotes", _is_text, False)
_KINDS: dict[Any, tuple[str, Fits, bool]] = {
    int: ("a whole number", _is_int, False),
    float: ("a number", _is_number, False),
    bool: ("true or false", lambda value: isinstance(value, bool), False),
    str: _TEXT,
    Path: _TEXT,
}
_OTHER: tuple[str, Fits, bool] = ("a number", _is_number, True)
"""Kinds of our own are lists of numbers, typed with commas between."""
_CALLED: dict[type, str] = {
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a table",
}
