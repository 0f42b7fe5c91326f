"""Two kinds of pruning behind one command: which words belong to which, and what to type where they are mixed.

The panel of the help that an option stands in says which kind it belongs to, so help and refusals cannot disagree. No
torch here: help answers at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from apoptosis.cli.config_files import was_given
from apoptosis.errors import ConfigError

__all__ = ["BOTH", "TUNING", "UNITS", "WEIGHTS", "TwoKinds", "check_trains", "is_about_weights"]

UNITS = "Units (structured)"
WEIGHTS = "Single weights (unstructured)"
TUNING = "Fine-tuning"
BOTH = "Both"


class TwoKinds(TyperCommand):
    """A command whose options stand in the panel of their kind; what has no panel belongs to both."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for option in self.params:
            if isinstance(option, TyperOption) and option.rich_help_panel is None:
                option.rich_help_panel = BOTH


def is_about_weights(context: typer.Context) -> bool:
    """Whether single weights were asked for, by --unstructured or by a pattern.

    Raises:
        ConfigError: words exclude each other, or those of single weights stand alone.
    """
    weights, units = _given(context, WEIGHTS), _given(context, UNITS)
    asked = [word for word in ("unstructured", "pattern") if word in weights]
    if asked and units:
        raise ConfigError(_units_among_weights(asked[0], weights, units))
    if {"scope", "pattern"} <= set(weights):
        raise ConfigError(
            f"--scope {weights['scope']} says how layers share what stays, and --pattern {weights['pattern']} keeps "
            "the same of each: leave out --scope."
        )
    if weights and not asked:
        raise ConfigError(_weights_without_the_word(weights, units))
    return bool(asked)


def check_trains(context: typer.Context, epochs: int) -> None:
    """Refuse words of fine-tuning where there is none.

    Raises:
        ConfigError: there are some.
    """
    words = [word for word in _given(context, TUNING) if word != "epochs"]
    if words and not epochs:
        raise ConfigError(
            f"{_belong(words)} to fine-tuning, and none was asked for: add --epochs 5."
        )


def _units_among_weights(asked: str, weights: Mapping[str, Any], units: Mapping[str, Any]) -> str:
    change = _translated(units, weights, _TO_WEIGHTS)
    if {"keep", "pattern"}.isdisjoint({*weights, *change.written}):
        change.written["keep"] = 0.1
    if "pattern" in weights:
        change.drop("keep")
        change.drop("scope")
    is_enough = set(weights) == {asked} and not units.keys().isdisjoint(_SHARES)
    instead = f", or leave out --{asked} to prune units" if is_enough else ""
    return f"{_belong(units)} to pruning whole units, and --{asked} prunes single weights: {change.told()}{instead}."


def _weights_without_the_word(weights: Mapping[str, Any], units: Mapping[str, Any]) -> str:
    change = _translated(weights, units, _TO_UNITS)
    if {*units, *change.written}.isdisjoint(_SHARES):
        change.written["keep_flops"] = 0.5
    if units:
        return (
            f"{_belong(weights)} to pruning single weights, and {_listed(map(_option, units))} to whole units: for "
            f"units {change.told()}."
        )
    keep = "" if "keep" in weights else " --keep 0.1"
    return (
        f"{_belong(weights)} to pruning single weights: add --unstructured{keep}; or, to prune whole units, "
        f"{change.told()}."
    )


@dataclass(frozen=True)
class _Change:
    """What to write in the place of words, and which to leave out."""

    written: dict[str, Any]
    sources: dict[str, str]
    left_out: list[str]

    def drop(self, word: str) -> None:
        """Leave it out rather than translate it."""
        if self.written.pop(word, None) is not None:
            self.left_out.extend(source for source, own in self.sources.items() if own == word)

    def told(self) -> str:
        """As an advice."""
        old = {new: word for word, new in self.sources.items()}
        words = {word: f"{_option(word)} {_text(value)}" for word, value in self.written.items()}
        instead = [f"{words[word]} for {_option(old[word])}" for word in words if word in old]
        more = [words[word] for word in words if word not in old]
        advice = [f"write {', '.join(instead)}"] if instead else []
        if self.left_out:
            advice.append(f"leave out {_listed(map(_option, self.left_out))}")
        if more:
            advice.append(f"add {' '.join(more)}")
        return _listed(advice)


def _translated(
    words: Mapping[str, Any], beside: Mapping[str, Any], table: Mapping[str, tuple[str, Any]]
) -> _Change:
    """Each word by its counterpart of the other kind, where there is one that is not given already."""
    change = _Change({}, {}, [])
    for word, value in words.items():
        other, values = table.get(word, (None, None))
        new = _value(value, values)
        if other is None or new is None or other in beside or other in change.written:
            change.left_out.append(word)
        else:
            change.written[other] = new
            change.sources[word] = other
    return change


def _value(value: Any, values: Mapping[str, str] | None) -> Any:
    if values is None:
        return value
    found = [
        values[one] for one in (value if isinstance(value, list) else [value]) if one in values
    ]
    return found[0] if found else None


def _given(context: typer.Context, panel: str) -> dict[str, Any]:
    """The options of a panel that were typed or stand in a file, in the order of the help, with their values."""
    return {
        option.name: context.params[option.name]
        for option in context.command.params
        if isinstance(option, TyperOption)
        and option.rich_help_panel == panel
        and was_given(context, option)
    }


def _belong(words: Iterable[str]) -> str:
    names = [_option(word) for word in words]
    return f"{_listed(names)} {'belongs' if len(names) == 1 else 'belong'}"


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _option(word: str) -> str:
    return f"--{word.replace('_', '-')}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_SHARES = ("keep_flops", "keep_params", "keep_units")
_TO_WEIGHTS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    dict.fromkeys(_SHARES, ("keep", None))
    | {
        "steps": ("stages", None),
        "widths": ("scope", {"uniform": "layer", "global": "global"}),
        "repair": ("batch_norm", {"batch_norm": "re-estimate"}),
    }
)
_TO_UNITS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "keep": ("keep_flops", None),
        "stages": ("steps", None),
        "scope": ("widths", {"layer": "uniform", "global": "global"}),
        "batch_norm": ("repair", {"re-estimate": "batch_norm"}),
    }
)
