"""Options that come together, declared once: a frozen dataclass whose fields are what typer reads.

    @dataclass(frozen=True, kw_only=True)
    class Colours:
        ink: Annotated[str, typer.Option(help="Of the lines.")] = "black"

    @spread
    def draw(context: typer.Context, *, colours: Colours) -> None: ...

`draw` has the option --ink, and gets a `Colours`. Every command that is spread reads --config as well. No torch here:
help answers at once.
"""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from apoptosis.cli.config_files import config_option
from apoptosis.cli.config_trust import check_code_is_typed
from apoptosis.cli.refusals import show_refusal
from apoptosis.errors import ConfigError

__all__ = ["Group", "spread"]


@dataclass(frozen=True)
class Group:
    """How a group stands in one command: `Annotated[Colours, Group(panel="Colours")]`."""

    panel: str | None = None
    """Of the help."""
    without: tuple[str, ...] = ()
    """Fields that this command has not; they keep their defaults."""


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field of its groups, and with --config."""
    parameters: list[inspect.Parameter] = []
    made: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group, how = _group(parameter.annotation)
        own = [parameter] if group is None else _parameters(group, how)
        if group is not None:
            made[parameter.name] = (group, [one.name for one in own])
        parameters += own
    parameters.append(config_option({one.name: one.annotation for one in parameters}))

    @wraps(command)
    def gathered(**values: Any) -> None:
        _check_config(values["context"], values.pop("config"))
        # A group may have the name of one of its options, so all are taken out first.
        own = {name: {one: values.pop(one) for one in names} for name, (_, names) in made.items()}
        command(**values, **{name: made[name][0](**of) for name, of in own.items()})

    gathered.__signature__ = inspect.Signature(_positional_first(parameters))  # type: ignore[attr-defined]
    return gathered


def _check_config(context: typer.Context, config: Path | None) -> None:
    try:
        check_code_is_typed(context, config)
    except ConfigError as error:
        show_refusal(error, context)
        raise typer.Exit(2) from error


def _group(annotation: Any) -> tuple[type | None, Group]:
    how = Group()
    if get_origin(annotation) is Annotated:
        annotation, *notes = get_args(annotation)
        how = next((note for note in notes if isinstance(note, Group)), how)
    is_group = isinstance(annotation, type) and is_dataclass(annotation)
    is_group = is_group and any(_is_option(hint) for hint in _hints(annotation).values())
    return (annotation if is_group else None), how


def _parameters(group: type, how: Group) -> list[inspect.Parameter]:
    hints = _hints(group)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=_in_panel(hints[field.name], how.panel),
        )
        for field in fields(group)
        if field.name not in how.without and _is_option(hints[field.name])
    ]


def _hints(group: type) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)


def _is_option(hint: Any) -> bool:
    return any(isinstance(note, ParameterInfo) for note in getattr(hint, "__metadata__", ()))


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _in_panel(hint: Any, panel: str | None) -> Any:
    if panel is None:
        return hint
    kind, *notes = get_args(hint)
    for place, note in enumerate(notes):
        if isinstance(note, ParameterInfo):
            notes[place] = copy(note)
            notes[place].rich_help_panel = panel
    return Annotated[(kind, *notes)]


def _positional_first(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return sorted(parameters, key=lambda one: one.kind)
