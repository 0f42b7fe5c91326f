"""`Selection`: by what rule units are chosen, and what must not be touched."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil, lcm
from typing import Any

from apoptosis.errors import ConfigError
from apoptosis.structure import Group, Structure

__all__ = ["Selection"]

WIDTHS = ("global", "uniform")
PRICES = ("unit", "cost")
INTERACTIONS = ("joint", "ignore")
WHOLE_HEADS = ("head", "kv_head", "query_head")
"""Kinds that rounding leaves alone: what reaches the hardware is their number times their width."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How to choose.

    Attributes:
        widths: `global` ranks the units of all groups together; `uniform` cuts every group by the same share, groups of
            one size to the same number, and ranks inside each.
        per: what a score is divided by in a global ranking: `unit` (nothing), or `cost` (what removing the unit saves
            of what the budget counts, MACs for `flops`, at the sizes that the others have by then).
        interactions: `joint` takes units one after the other, each at what it costs after those that went before it,
            where scores say what units cost each other; `ignore` ranks every unit as if it went alone.
        kinds: only groups of these kinds; unless given all but inexact ones and ranks of adapters.
        names: only groups whose names fit; `!pattern` protects. As `Structure.choose`.
        shares: share kept of each group that fits a pattern, rounded to whole units; the budget is then met by the
            others.
        round_to: widths become multiples of it, or stay whole. Number formats of 16 bits want 8 on a GPU.
        floor: fewest units that any group keeps.
        cap: largest share of any group that may go.
    """

    widths: str = "global"
    per: str = "cost"
    interactions: str = "joint"
    kinds: tuple[str, ...] | None = None
    names: tuple[str, ...] = ("*",)
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    round_to: int = 1
    floor: int = 1
    cap: float = 1.0

    def __post_init__(self) -> None:
        _one_of("widths", self.widths, WIDTHS)
        _one_of("per", self.per, PRICES)
        _one_of("interactions", self.interactions, INTERACTIONS)
        for option in ("round_to", "floor"):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{option}={value!r} was asked for; it is a whole number from 1 on."
                )
        if not _within(self.cap, 0, 1):
            raise ConfigError(
                f"cap={self.cap!r} was asked for; the largest share of a group that may go is above 0 and at most 1."
            )
        if self.kinds is not None:
            _check_texts("kinds", self.kinds)
        _check_texts("names", self.names)
        if not isinstance(self.shares, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"shares={self.shares!r} was asked for; it is a dictionary from patterns of names to shares."
            )
        for pattern, share in self.shares.items():
            if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"shares={{{pattern!r}: {share!r}}} was asked for; shares go by patterns of names, which are texts."
                )
            if not _within(share, 0, 1):
                raise ConfigError(
                    f"shares={{{pattern!r}: {share!r}}} was asked for; a share that stays is above 0 and at most 1."
                )

    def groups(self, structure: Structure) -> list[Group]:
        """Those that may shrink."""
        chosen = structure.choose(kinds=self.kinds, names=self.names)
        for pattern in self.shares:
            if not any(fnmatchcase(group.name, pattern) for group in chosen):
                known = any(fnmatchcase(group.name, pattern) for group in structure.groups)
                why = "only groups that kinds and names leave alone" if known else "no group"
                raise ConfigError(
                    f"shares names {pattern!r}, which fits {why}. Groups that may shrink: {_some_names(chosen)}."
                )
        return chosen

    def fewest(self, group: Group) -> int:
        """How many units must stay, before rounding."""
        most_gone = int(group.size * self.cap + 1e-9)
        return min(group.size, max(self.floor, group.smallest, group.size - most_gone, 1))

    def multiple(self, group: Group) -> int:
        """What the number of units must be a multiple of: as asked, and as the kernels take it."""
        asked = 1 if group.kind in WHOLE_HEADS else self.round_to
        return lcm(asked, group.multiple)

    def fixed(self, group: Group) -> int | None:
        """How many units are to stay whatever the budget says; the last pattern that fits counts."""
        shares = [s for pattern, s in self.shares.items() if fnmatchcase(group.name, pattern)]
        return max(1, ceil(group.size * shares[-1] - 0.5)) if shares else None


def _one_of(option: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{option}={value!r} was asked for; there are {', '.join(allowed)}.")


def _check_texts(option: str, value: Any) -> None:
    """One text would be read letter by letter."""
    if isinstance(value, str):
        raise ConfigError(
            f"{option}={value!r} is one text; several are meant: {option}=[{value!r}]."
        )
    is_several = isinstance(value, Collection) and not isinstance(value, (bytes, Mapping))
    if not is_several or not all(isinstance(own, str) for own in value):
        raise ConfigError(f"{option}={value!r} was asked for; it is a list or tuple of texts.")


def _within(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and low < value <= high


def _some_names(groups: list[Group]) -> str:
    names = [group.name for group in groups]
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
