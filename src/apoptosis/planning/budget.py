"""`Budget`: how much of the network may stay, in exact costs.

A share is one of the network that the structure describes: `flops=0.5` keeps at most half of its multiply-accumulates
for one forward pass over the example inputs (papers say FLOPs and nearly always count these), `params=0.3` at most 30 %
of its parameters, `units=0.7` at most 70 % of the units of all groups that may shrink. Several may be asked for at
once; all of them are met.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apoptosis.errors import ConfigError
from apoptosis.planning.selection import Selection
from apoptosis.records import Spending
from apoptosis.structure import Plan, Polynomial, Structure

__all__ = ["MEASURES", "Budget", "Costing", "spending"]

MEASURES: Mapping[str, str] = {
    "flops": "MACs (multiply-accumulates)",
    "params": "parameters",
    "units": "units",
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Shares that may stay, each in (0, 1]; at least one.

    >>> Budget(flops=0.5, params=0.6).shares()
    {'flops': 0.5, 'params': 0.6}

    Raises:
        ConfigError: a share is none, or nothing is asked for.
    """

    flops: float | None = None
    params: float | None = None
    units: float | None = None

    def __post_init__(self) -> None:
        for name in MEASURES:
            share = getattr(self, name)
            if share is not None and not _is_share(share):
                raise ConfigError(
                    f"{name}={share!r} was asked for. It is the share that stays, a number above 0 and at most 1: "
                    f"{name}=0.5 keeps half.{_percent_hint(name, share)}"
                )
        if not self.shares():
            raise ConfigError(
                f"The budget asks for nothing. Say what may stay: {', '.join(f'{n}=0.5' for n in MEASURES)}."
            )

    def shares(self) -> dict[str, float]:
        """What is asked for."""
        return {n: float(s) for n in MEASURES if (s := getattr(self, n)) is not None}


def spending(
    structure: Structure, plan: Plan, budget: Budget, selection: Selection | None = None
) -> tuple[Spending, ...]:
    """Asked and got, side by side, for every measure; `asked` is 1 where the budget says nothing of it.

    Units are those of the groups that `selection` lets shrink.
    """
    sizes = {g.name: g.size for g in (selection or Selection()).groups(structure)}
    left = {n: len(plan.kept[n]) if n in plan.kept else size for n, size in sizes.items()}
    asked = budget.shares()
    pairs = {
        "flops": (structure.macs(), structure.macs(plan)),
        "params": (structure.params(), structure.params(plan)),
        "units": (sum(sizes.values()), sum(left.values())),
    }
    return tuple(
        Spending(name, asked.get(name, 1.0), now / dense if dense else 1.0, dense, now)
        for name, (dense, now) in pairs.items()
    )


class Costing:
    """What numbers of units cost, in each measure that a budget names, and how much is allowed."""

    def __init__(
        self, structure: Structure, names: Sequence[str], allowed: Mapping[str, int]
    ) -> None:
        """Costs as functions of the numbers of units of the groups `names`; the others stay as they are."""
        macs, params = structure.polynomials(names)
        self._measures: dict[str, Callable[[NDArray[np.int64]], int]] = {
            "flops": macs,
            "params": params,
            "units": _total,
        }
        self._parts: dict[tuple[int, ...], dict[str, Polynomial]] = {}
        self.allowed = allowed

    def costs(self, counts: NDArray[np.int64]) -> dict[str, int]:
        """In every measure that is limited."""
        return {name: self._measures[name](counts) for name in self.allowed}

    def excess(self, counts: NDArray[np.int64]) -> float:
        """How far the worst measure is above what is allowed, relative to that; met at 0 and below."""
        costs = self.costs(counts)
        return max((costs[n] - most) / max(most, 1) for n, most in self.allowed.items())

    def still_too_much(self, counts: NDArray[np.int64]) -> dict[str, int]:
        """By how much each measure is exceeded; all that there is in each, once none is."""
        costs = self.costs(counts)
        excess = {n: costs[n] - most for n, most in self.allowed.items() if costs[n] > most}
        return excess or {name: cost for name, cost in costs.items() if cost}

    def saved(
        self,
        before: NDArray[np.int64],
        after: NDArray[np.int64],
        changed: tuple[int, ...],
        too_much: Mapping[str, int],
    ) -> float:
        """What a change of the groups at some places saves, each measure as a share of what is still too much."""
        if changed not in self._parts:
            polynomials = {n: m for n, m in self._measures.items() if isinstance(m, Polynomial)}
            self._parts[changed] = {n: p.part(changed) for n, p in polynomials.items()}
        measures = self._measures | self._parts[changed]
        return sum(
            (measures[n](before) - measures[n](after)) / most for n, most in too_much.items()
        )


def _total(counts: NDArray[np.int64]) -> int:
    return int(counts.sum())


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    return is_number and isfinite(value) and bool(0 < value <= 1)


def _percent_hint(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value <= 100:
        return f" For {value:g} % write {name}={value / 100:g}."
    return ""
