"""`apoptosis inspect`: what in a model can shrink, what one unit of it costs, and what cannot shrink and why."""

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apoptosis.cli.figures import number
from apoptosis.cli.names import check_name
from apoptosis.cli.sources import find_model
from apoptosis.structure import KINDS, Group, PinnedAxis, Structure, trace

__all__ = ["InspectOptions", "run_inspect"]

ROOM_FOR_OTHERS = 48
"""Characters for the other columns of a table, their headers broken at blanks."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What to look at."""

    model: str
    inputs: list[str]
    kinds: list[str]
    names: list[str]
    dense: list[str]
    meta: bool
    as_json: bool


def run_inspect(options: InspectOptions) -> None:
    """Trace the model and show its structure."""
    for kind in options.kinds:
        check_name("kind", kind, KINDS)
    named = find_model(options.model, options.inputs, dense=options.dense, meta=options.meta)
    structure = trace(named.model, named.example_inputs)
    groups = structure.groups
    if options.kinds or options.names:
        groups = tuple(
            structure.choose(
                kinds=options.kinds or None, names=options.names or ["*"], inexact=True
            )
        )
    if options.as_json:
        print(json.dumps(as_data(options.model, structure, groups), indent=1))
    else:
        show(options.model, structure, groups, Console())


def as_data(model: str, structure: Structure, groups: tuple[Group, ...]) -> dict[str, Any]:
    """Everything the tables show, as plain data."""
    return {
        "model": model,
        "fingerprint": structure.fingerprint,
        "macs": structure.macs(),
        "params": structure.params(),
        "groups": [
            {
                "name": group.name,
                "kind": group.kind,
                "units": group.size,
                "exact": group.exact,
                "inexact_because": group.inexact_because,
                "macs_per_unit": structure.unit_cost(group.name)[0],
                "params_per_unit": structure.unit_cost(group.name)[1],
                "slices": [
                    {"tensor": s.tensor, "dim": s.dim, "role": s.role} for s in group.slices
                ],
            }
            for group in groups
        ],
        "ties": [{"members": tie.members, "because": tie.because} for tie in structure.ties],
        "pinned": [vars(pin) for pin in structure.pinned],
        "unused": structure.unused,
        "without_rule": structure.without_rule,
    }


def show(model: str, structure: Structure, groups: tuple[Group, ...], console: Console) -> None:
    """The tables."""
    units = sum(group.size for group in structure.groups)
    console.print(
        f"[bold]{model}[/]: {number(structure.macs())} MACs for the example inputs, "
        f"{number(structure.params())} parameters, {len(structure.groups)} groups with {units} units"
    )
    console.print(_groups_table(structure, groups, console.width))
    inexact = [group for group in groups if not group.exact]
    if inexact:
        console.print(
            Text(
                f"* inexact: cutting is not the same as zeroing ({inexact[0].inexact_because}). Cut only on request."
            )
        )
    used = dict.fromkeys(group.kind for group in groups)
    for kind in used:
        console.print(f"  [bold]{kind}[/]: {KINDS[kind]}")
    for tie in structure.ties[:5]:
        members = " = ".join(
            name if factor == 1 else f"{factor}·{name}" for name, factor in tie.members
        )
        console.print(Text(f"  tied in number: {members}", style="dim"))
    if len(structure.ties) > 5:
        console.print(
            Text(f"  … and {len(structure.ties) - 5} more ties (--json shows all)", style="dim")
        )
    if structure.pinned:
        console.print(_pinned_table(structure.pinned, console.width))
    for op, line in structure.without_rule[:5]:
        console.print(
            Text(
                f"no rule for {op} ({line}): what it touches stays whole, its cost is not counted"
            ),
            soft_wrap=True,
        )
    if structure.unused:
        some = ", ".join(structure.unused[:4]) + (", …" if len(structure.unused) > 4 else "")
        console.print(
            Text(f"{len(structure.unused)} parameters were not used by the example: {some}")
        )


def _groups_table(structure: Structure, groups: tuple[Group, ...], width: int) -> Table:
    names = [group.name for group in groups]
    table = Table(title="What can shrink", box=None, title_justify="left", pad_edge=False)
    table.add_column("group", overflow="fold", no_wrap=_fits(names, width))
    for name, justify in (
        ("kind", "left"),
        ("units", "right"),
        ("MACs / unit", "right"),
        ("parameters / unit", "right"),
        ("tensors", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for group in groups:
        macs, params = structure.unit_cost(group.name)
        kind = group.kind if group.exact else f"{group.kind} *"
        tensors = len({place[0] for place in group.places})
        row = (kind, str(group.size), number(macs), number(params), str(tensors))
        table.add_row(Text(group.name), *row)
    return table


def _pinned_table(pinned: tuple[PinnedAxis, ...], width: int) -> Table:
    """One line per reason, with the tensors it holds for."""
    table = Table(title="What stays whole", box=None, title_justify="left", pad_edge=False)
    for name in ("tensor", "size", "operation", "reason"):
        table.add_column(name, overflow="fold")
    lines = [pin.line.rpartition("/")[2].partition(" ")[0] for pin in pinned]
    table.add_column("where", overflow="fold", no_wrap=_fits(lines, width))
    by_reason: dict[tuple[str, str, str], list[PinnedAxis]] = {}
    for pin in pinned:
        by_reason.setdefault((pin.op, pin.reason, pin.line), []).append(pin)
    for (op, reason, line), pins in by_reason.items():
        first = pins[0]
        more = f" and {len(pins) - 1} more" if len(pins) > 1 else ""
        where = line.rpartition("/")[2].replace(" in ", "\nin ", 1)
        table.add_row(
            Text(f"{first.tensor}[{first.dim}]{more}"),
            str(first.size),
            op,
            Text(reason),
            Text(where),
        )
    return table


def _fits(texts: list[str], width: int) -> bool:
    """Whether a column of them can stand on single lines, so that they can be copied, beside the others."""
    return max(map(len, texts), default=0) <= width - ROOM_FOR_OTHERS
