"""Budgets, floors and caps in whole numbers, how low they let a network go, and what stands in the way."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from apoptosis.criteria import UnitScores
from apoptosis.errors import BudgetError
from apoptosis.planning.budget import MEASURES, Budget, Costing
from apoptosis.planning.bundles import Bundle, alike, find_bundles
from apoptosis.planning.moves import Levels, Moves
from apoptosis.planning.selection import Selection
from apoptosis.structure import KINDS, Structure

__all__ = [
    "Limits",
    "check_reachable",
    "limits_of",
    "refuse",
    "starting_point",
    "within_reach",
]


@dataclass(frozen=True)
class Limits:
    """What a network has, what may stay in all, and what must stay of each group.

    Of the network one began with, so that they hold through many steps.
    """

    whole: Mapping[str, int]
    asked: Mapping[str, float]
    allowed: Mapping[str, int]
    sizes: Mapping[str, int]
    fewest: Mapping[str, int]
    fixed: Mapping[str, int]


def limits_of(structure: Structure, shares: Mapping[str, float], selection: Selection) -> Limits:
    """Shares, floors and caps of a network as numbers."""
    groups = selection.groups(structure)
    whole = {
        "flops": structure.macs(),
        "params": structure.params(),
        "units": sum(group.size for group in groups),
    }
    fixed = {g.name: keep for g in groups if (keep := selection.fixed(g)) is not None}
    return Limits(
        {name: whole[name] for name in shares},
        shares,
        # The tiny term forgives 0.1 + 0.2.
        {name: int(whole[name] * share * (1 + 1e-12)) for name, share in shares.items()},
        {g.name: g.size for g in groups},
        {g.name: min(selection.fewest(g), fixed.get(g.name, g.size)) for g in groups},
        fixed,
    )


def check_reachable(
    structure: Structure, budget: Budget, selection: Selection, units: UnitScores | None = None
) -> None:
    """Refuse a budget that cannot be met, before anything is done for it.

    Args:
        structure: of the network.
        budget: what may stay.
        selection: what must stay.
        units: scores, if there are any yet: groups without are left alone.
    """
    limits = limits_of(structure, budget.shares(), selection)
    units = units or _unscored(structure)
    lowest = _lowest(structure, units, selection, limits)
    if any(lowest[name] > most for name, most in limits.allowed.items()):
        refuse(structure, units, selection, limits)


def within_reach(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> Limits:
    """The same limits, with what is allowed raised to what can be had: for steps on the way to a budget."""
    lowest = _lowest(structure, units, selection, limits)
    allowed = {name: max(most, lowest[name]) for name, most in limits.allowed.items()}
    return replace(limits, allowed=allowed)


def starting_point(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> tuple[Moves, Levels]:
    """What can move, and from where: bundles with a share of their own are there already and move no more.

    Where widths are to be uniform, those of one size move together.
    """
    chosen = selection.groups(structure)
    bundles: list[Bundle] = []
    fixed: list[Bundle] = []
    levels: list[int] = []
    for bundle in find_bundles(structure, units, selection, chosen, limits.fewest, limits.sizes):
        level = bundle.level_of(limits.fixed)
        if level is None:
            bundles.append(bundle)
        else:
            fixed.append(bundle.until(level))
            levels.append(level)
    if selection.widths == "uniform":
        bundles = alike(bundles)
    levels = [0] * len(bundles) + levels
    bundles += fixed
    sizes = np.array([group.size for group in chosen], dtype=np.int64)
    costing = Costing(structure, [group.name for group in chosen], limits.allowed)
    return Moves(bundles, costing, selection, sizes), np.array(levels, dtype=np.int64)


def refuse(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> NoReturn:
    """Say how far one gets, and what stands in the way.

    Raises:
        BudgetError: always.
    """
    lowest = _lowest(structure, units, selection, limits)
    reachable = {name: cost / max(limits.whole[name], 1) for name, cost in lowest.items()}
    missed = [name for name, most in limits.allowed.items() if lowest[name] > most]
    told = "; ".join(
        f"{name}={limits.asked[name]:.4g} was asked for, and with every group at its limit {reachable[name]:.4g} of "
        f"the {MEASURES[name]} stay ({lowest[name]:,} of {limits.whole[name]:,})"
        for name in missed
    )
    hindrances = list(_hindrances(structure, units, selection, limits, missed[0]))
    ways = " ".join(hindrances) or (
        "What is left belongs to inputs, outputs and layers that cannot shrink; `structure.pinned` has the reasons."
    )
    error = BudgetError(f"The budget cannot be met: {told}. {ways}")
    error.reachable = reachable
    raise error


def _lowest(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits
) -> dict[str, int]:
    """Costs with every bundle at its last level."""
    moves, _ = starting_point(structure, units, selection, limits)
    return moves.costs(moves.last)


def _hindrances(
    structure: Structure, units: UnitScores, selection: Selection, limits: Limits, measure: str
) -> Iterator[str]:
    """What each restriction costs: the share that could be reached without it."""
    now = _lowest(structure, units, selection, limits)[measure]
    everything = _unscored(structure)
    chosen = {group.name for group in selection.groups(structure)}
    missing = [name for name in everything.values if name in chosen and name not in units.values]
    scored = replace(
        everything, values={n: v for n, v in everything.values.items() if n not in missing}
    )
    inexact = [g.name for g in structure.groups if not g.exact]
    ranks = [g.name for g in structure.groups if g.exact and g.kind == "rank"]
    spared = {"inexact groups": inexact, "ranks of adapters": ranks}
    whole = [
        f"{what}, cut only if `kinds` names them ({_some(n)})" for what, n in spared.items() if n
    ]
    kinds = " and ".join(whole) if selection.kinds is None else f"kinds={selection.kinds}"
    every_kind = tuple(kind for kind in KINDS if any(g.kind == kind for g in structure.groups))
    by_kinds = f"`selection=Selection(kinds={every_kind})` opens them"
    by_criterion = 'a criterion of activations, such as `criterion="taylor-gate"`, scores them'
    relaxed = [
        (f"floor={selection.floor}", replace(selection, floor=1), units),
        (f"cap={selection.cap:g}", replace(selection, cap=1.0), units),
        (f"round_to={selection.round_to}", replace(selection, round_to=1), units),
        (f"shares of {', '.join(selection.shares)}", replace(selection, shares={}), units),
        (f"names={selection.names}", replace(selection, names=("*",)), scored),
        (f"groups without scores ({_some(missing)})", selection, everything),
        (kinds, replace(selection, kinds=every_kind or tuple(KINDS)), scored),
    ]
    for what, other, others_units in relaxed:
        if other == selection and (others_units is not everything or not missing):
            continue
        loosened = limits_of(structure, dict.fromkeys(limits.allowed, 1.0), other)
        cost = _lowest(structure, others_units, other, loosened)[measure]
        if cost < now and (measure != "units" or "kinds" not in what):
            share = cost / max(limits.whole[measure], 1)
            way = {kinds: by_kinds, relaxed[5][0]: by_criterion}.get(what)
            told = "" if way is None else f" ({way})"
            yield f"In the way: {what}; without, {measure}={share:.4g} can be reached{told}."


def _unscored(structure: Structure) -> UnitScores:
    """As if everything were worth nothing."""
    values = {g.name: torch.zeros(g.size, dtype=torch.float64) for g in structure.groups}
    return UnitScores(values, "none")


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
