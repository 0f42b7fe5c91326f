"""Whether N:M fits the layers, and how those it does not fit are left out in few words."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from apoptosis.errors import ConfigError
from apoptosis.masks import Layer, Pattern

__all__ = ["check_divides"]

FEW = 4
"""So many layers are named one by one; more are gathered under patterns."""

_NUMBER = r"(?<![^.])\d+(?![^.])"


def check_divides(pattern: Pattern, layers: Mapping[str, Layer]) -> None:
    """Refuse layers whose inputs M does not divide, with what to write so that they are left whole.

    Raises:
        ConfigError: there are such layers.
    """
    odd = {name: own for name, own in layers.items() if own.shape[own.dim] % pattern.m}
    if not odd:
        return
    some = [f"{name} ({_inputs(own)})" for name, own in list(odd.items())[:FEW]]
    more = f" and {len(odd) - FEW} more" if len(odd) > FEW else ""
    remedy = f"Leave them whole: names={_left_out(odd, layers)!r}."
    if len(odd) == len(layers):
        share = f"Sparsity(keep={pattern.density:g})"
        remedy = f"No layer is left so: take another M, or a share without a pattern, {share}."
    raise ConfigError(
        f"The pattern {pattern} takes weights {pattern.m} at a time along a layer's inputs, and {pattern.m} does not "
        f"divide those of {', '.join(some)}{more}. {remedy}"
    )


def _inputs(layer: Layer) -> str:
    num = layer.shape[layer.dim]
    return f"{num} input{'s' if num != 1 else ''}"


def _left_out(odd: Mapping[str, Layer], layers: Mapping[str, Layer]) -> list[str]:
    """Patterns that fit the odd layers and no others: names, or where there are many, names with `*` for a number."""
    if len(odd) <= FEW:
        return [f"!{name}" for name in odd]
    patterns: list[str] = []
    for name in odd:
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            patterns.append(max(_wider(name, odd, layers), key=lambda one: _num_fitting(one, odd)))
    return [f"!{pattern}" for pattern in patterns]


def _wider(name: str, odd: Mapping[str, Layer], layers: Mapping[str, Layer]) -> list[str]:
    """The name itself, and with `*` for one of its numbers or for all, where that fits odd layers alone."""
    numbers = list(re.finditer(_NUMBER, name))
    wide = [f"{name[: found.start()]}*{name[found.end() :]}" for found in numbers]
    wide.append(re.sub(_NUMBER, "*", name))
    return [name, *(one for one in wide if _num_fitting(one, odd) == _num_fitting(one, layers))]


def _num_fitting(pattern: str, names: Mapping[str, Layer]) -> int:
    return sum(fnmatchcase(name, pattern) for name in names)
