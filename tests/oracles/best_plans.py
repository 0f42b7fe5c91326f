"""What a planner may do and what is best, by enumeration: every allowed number of kept units of every group.

Limits are applied one by one as they are worded: floors, caps, multiples, ties. Costs are asked of the structure for
each choice anew; the search knows nothing of rankings, steps or thresholds.
"""

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from apoptosis.structure import Group, Plan, Structure

__all__ = [
    "all_choices",
    "assert_promises",
    "best_subset",
    "largest_moves",
    "lowest",
    "removed_score",
    "shares_of",
    "smallest_choice",
    "smallest_shares",
    "together",
]

HEADS = ("head", "kv_head", "query_head")
MEASURES = ("flops", "params", "units")


def shares_of(
    structure: Structure, counts: Mapping[str, int], selection: Any = None
) -> dict[str, float]:
    """What stays of each measure with so many units per group; groups that are not named stay whole.

    Units are those of the groups that the selection chooses.
    """
    kinds, names = (None, ("*",)) if selection is None else (selection.kinds, selection.names)
    chosen = structure.choose(kinds=kinds, names=names)
    units = sum(group.size for group in chosen)
    left = sum(counts.get(group.name, group.size) for group in chosen)
    return {
        "flops": structure.macs(counts) / structure.macs() if structure.macs() else 1.0,
        "params": structure.params(counts) / structure.params(),
        "units": left / units,
    }


def asked_of(budget: Any) -> dict[str, float]:
    """The shares that a budget names."""
    found = {what: getattr(budget, what) for what in MEASURES}
    return {what: share for what, share in found.items() if share is not None}


def free_groups(structure: Structure, missing: tuple[str, ...], selection: Any) -> list[Group]:
    """Chosen, scored, and tied to none that is not."""
    chosen = structure.choose(kinds=selection.kinds, names=selection.names)
    names = {group.name for group in chosen} - set(missing)
    changed = True
    while changed:
        changed = False
        for tie in structure.ties:
            members = {name for name, _ in tie.members}
            if members & names and not members <= names:
                names -= members
                changed = True
    return [group for group in structure.groups if group.name in names]


def allowed_counts(group: Group, selection: Any) -> list[int]:
    """How many units a group may keep, by its own limits, all of them first."""
    found = [group.size]
    for count in range(group.size - 1, 0, -1):
        enough = count >= max(selection.floor, group.smallest)
        within = group.size - count <= selection.cap * group.size + 1e-9
        even = group.kind in HEADS or count % selection.round_to == 0
        if enough and within and even:
            found.append(count)
    return found


def together(structure: Structure, free: list[Group]) -> list[list[Group]]:
    """Free groups in sets that ties connect."""
    sets = [[group] for group in free]
    for tie in structure.ties:
        members = {name for name, _ in tie.members}
        touched = [own for own in sets if members & {group.name for group in own}]
        if len(touched) > 1:
            sets = [own for own in sets if own not in touched]
            sets.append([group for own in touched for group in own])
    return sets


def choices(structure: Structure, groups: list[Group], selection: Any) -> list[dict[str, int]]:
    """What tied groups may keep, each by its own limits and all by their ties; most first."""
    names = [group.name for group in groups]
    found = []
    for counts in product(*(allowed_counts(group, selection) for group in groups)):
        choice = dict(zip(names, counts, strict=True))
        if all(_keeps(tie.members, choice) for tie in structure.ties):
            found.append(choice)
    return found


def all_choices(
    structure: Structure, missing: tuple[str, ...], selection: Any
) -> Iterator[dict[str, int]]:
    """Every allowed choice of numbers of kept units."""
    sets = together(structure, free_groups(structure, missing, selection))
    for parts in product(*(choices(structure, own, selection) for own in sets)):
        yield {name: count for part in parts for name, count in part.items()}


def smallest_choice(
    structure: Structure, missing: tuple[str, ...], selection: Any
) -> dict[str, int]:
    """Everything gone that may go. Tied groups shrink together, so there is one smallest choice."""
    found: dict[str, int] = {}
    for own in together(structure, free_groups(structure, missing, selection)):
        found |= min(choices(structure, own, selection), key=lambda c: sum(c.values()))
    return found


def smallest_shares(
    structure: Structure, missing: tuple[str, ...], selection: Any
) -> dict[str, float]:
    """The least of each measure that can be reached."""
    return shares_of(structure, smallest_choice(structure, missing, selection), selection)


def largest_moves(
    structure: Structure, missing: tuple[str, ...], selection: Any
) -> dict[str, list[float]]:
    """For each measure, the largest share that one move of each set of tied groups saves, the rest whole."""
    found: dict[str, list[float]] = {what: [] for what in MEASURES}
    for own in together(structure, free_groups(structure, missing, selection)):
        chain = [
            shares_of(structure, choice, selection) for choice in choices(structure, own, selection)
        ]
        for what in MEASURES:
            steps = [a[what] - b[what] for a, b in zip(chain, chain[1:], strict=False)]
            found[what].append(max(steps, default=0.0))
    return found


def lowest(values: Tensor, num: int) -> list[int]:
    """The units of the lowest scores; of equals those that come first."""
    ranked = sorted(range(len(values)), key=lambda unit: (float(values[unit]), unit))
    return sorted(ranked[:num])


def removed_score(structure: Structure, values: Mapping[str, Tensor], plan: Plan) -> float:
    """The sum of the scores of all units that go."""
    total = []
    for name, kept in plan.kept.items():
        gone = sorted(set(range(structure[name].size)) - set(kept.tolist()))
        total += [float(values[name][unit]) for unit in gone]
    return math.fsum(total)


def best_subset(structure: Structure, values: Mapping[str, Tensor], budget: Any) -> float:
    """The least total score of any set of units whose removal meets the budget; no group is emptied."""
    scores = np.concatenate([own.numpy() for own in values.values()])
    assert len(scores) <= 12, "there are 2ⁿ sets to try"
    stays = np.array(list(product((True, False), repeat=len(scores))))
    ends = np.cumsum([len(own) for own in values.values()])[:-1]
    counts = np.stack([own.sum(1) for own in np.split(stays, ends, axis=1)], axis=1)
    lost = (~stays) @ scores
    best = math.inf
    for own in {tuple(row) for row in counts.tolist()}:
        if 0 in own:
            continue
        got = shares_of(structure, dict(zip(values, own, strict=True)))
        if all(got[what] <= share for what, share in asked_of(budget).items()):
            best = min(best, float(lost[(counts == own).all(1)].min()))
    return best


def assert_promises(
    structure: Structure, units: Any, budget: Any, selection: Any, plan: Plan
) -> dict[str, float]:
    """Raise unless a plan keeps to its budget and to every limit; what it keeps of each measure."""
    counts = {group.name: group.size for group in structure.groups}
    counts |= {name: len(kept) for name, kept in plan.kept.items()}
    got, asked = shares_of(structure, counts, selection), asked_of(budget)
    over = {what: (got[what], share) for what, share in asked.items() if got[what] > share}
    assert not over, f"over budget (got, asked): {over}"
    free = free_groups(structure, units.missing, selection)
    touched = {name for name, (kept, size) in plan.counts().items() if kept < size}
    assert touched == set(plan.kept), "groups that stay whole are not listed"
    assert touched <= {group.name for group in free}, "a group was touched that must stay whole"
    _assert_limits(structure, free, selection, counts)
    for name, kept in plan.kept.items():
        gone = sorted(set(range(structure[name].size)) - set(kept.tolist()))
        assert gone == lowest(units.values[name], len(gone)), f"{name}: not the lowest go"
    _assert_tight(structure, units, selection, asked, got)
    return got


def _assert_limits(
    structure: Structure, free: list[Group], selection: Any, counts: Mapping[str, int]
) -> None:
    for group in free:
        share = shared(group.name, selection)
        if share is None:
            assert counts[group.name] in allowed_counts(group, selection), (
                f"{group.name} keeps {counts[group.name]} of {group.size}"
            )
        else:
            assert abs(counts[group.name] - share * group.size) <= 0.5 + 1e-9 or counts[
                group.name
            ] == max(selection.floor, group.smallest), f"{group.name}: not the share asked for"
    for tie in structure.ties:
        assert _keeps(tie.members, counts), f"a tie is broken: {tie}"


def shared(name: str, selection: Any) -> float | None:
    """The share that a selection sets for a group."""
    found = [share for pattern, share in selection.shares.items() if fnmatchcase(name, pattern)]
    return found[0] if found else None


def _assert_tight(
    structure: Structure,
    units: Any,
    selection: Any,
    asked: Mapping[str, float],
    got: Mapping[str, float],
) -> None:
    """No more goes than one move beyond what a budget asks; with equal widths, one move of each group."""
    if all(share >= 1 for share in asked.values()) and not selection.shares:
        assert got == dict.fromkeys(got, 1.0), "nothing had to go"
    if selection.shares:
        return
    moves = largest_moves(structure, units.missing, selection)
    bound = max if selection.widths == "global" else math.fsum
    gaps = {what: share - got[what] for what, share in asked.items()}
    slack = {what: (gap, bound([*moves[what], 0.0])) for what, gap in gaps.items()}
    assert any(gap <= move + 1e-12 for gap, move in slack.values()), (
        f"too much is gone (gap, largest move): {slack}"
    )


def _keeps(members: tuple[tuple[str, int], ...], counts: Mapping[str, int]) -> bool:
    return len({counts[name] * factor for name, factor in members if name in counts}) <= 1
