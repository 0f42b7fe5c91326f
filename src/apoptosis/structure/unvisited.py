"""Axes that parameters may read which the recorded run has not visited: those stay whole.

Two cases. Of modules in one `ModuleList` or `ModuleDict` (experts, heads by task) some were called: the others are
called in the same way for other inputs, so what those called share with the rest of the model, the others read as well.
And where values decided the way (`steering`), parameters below the module that decided may read what goes in and out of
its parts, as far as sizes agree. Parameters that neither concerns (a head that nobody calls) hold nothing back.
"""

from collections.abc import Iterator

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import Axis, Expr
from apoptosis.structure.facts import PinReason
from apoptosis.structure.program import Call, Program, Value, values_in
from apoptosis.structure.steering import Steering, steerings

__all__ = ["pin_for_unvisited"]


def pin_for_unvisited(runs: list[Program], axes: dict[Value, list[Expr]]) -> None:
    """Pin what parameters that no run has visited may read."""
    program = runs[0]
    used = {v for run in runs for call in run.calls for v in values_in(call.arguments)}
    used |= {value for run in runs for value in run.results}
    tensors = {name: v for name, v in program.tensors.items() if v.is_parameter}
    missed = {name: value for name, value in tensors.items() if value not in used}
    if not missed:
        return
    for value, own in axes.items():
        axes[value] = [algebra.resolve(expr) for expr in own]
    for container in program.containers:
        told = _pin_for_siblings(container, tensors, missed, axes)
        missed = {name: value for name, value in missed.items() if name not in told}
    for steering in steerings(program, axes) if missed else ():
        _pin_for_other_ways(steering, missed, program, axes)


def _pin_for_siblings(
    container: str,
    tensors: dict[str, Value],
    missed: dict[str, Value],
    axes: dict[Value, list[Expr]],
) -> set[str]:
    """Pin what the visited members of a container share with other modules; names of what the others hold."""
    members: dict[str, dict[str, str]] = {}
    for name in tensors:
        if name.startswith(f"{container}."):
            member, _, rest = name.removeprefix(f"{container}.").partition(".")
            members.setdefault(member, {})[rest] = name
    unvisited = [own for own in members.values() if all(name in missed for name in own.values())]
    if not unvisited or len(unvisited) == len(members):
        return set()
    holders: dict[Axis, set[str]] = {}
    for name, value in tensors.items():
        for axis in (axis for expr in axes[value] for axis in expr.axes()):
            holders.setdefault(axis, set()).add(name)
    for own in (own for own in members.values() if own not in unvisited):
        names = set(own.values())
        for other in unvisited:
            for rest in (rest for rest in own if rest in other):
                exprs = _of_equal_size(axes[tensors[own[rest]]], tensors[other[rest]])
                shared = {a for expr in exprs for a in expr.axes() if holders[a] - names}
                _pin(shared, own[rest], other[rest], container)
    return {name for other in unvisited for name in other.values()}


def _pin(shared: set[Axis], visited: str, other: str, container: str) -> None:
    why = f"{other} was not reached by the example, and may read this as {visited} does"
    for axis in shared:
        algebra.pin(Expr.of(axis), PinReason("not visited", why, container))


def _of_equal_size(own: list[Expr], other: Value) -> Iterator[Expr]:
    if len(own) == other.ndim:
        yield from (e for e, n in zip(own, other.shape, strict=True) if algebra.size_of(e) == n)


def _pin_for_other_ways(
    steering: Steering, missed: dict[str, Value], program: Program, axes: dict[Value, list[Expr]]
) -> None:
    """Pin what goes in and out of the parts of the module where values decided, if unvisited parameters fit it."""
    visited = {call.path for call in program.modules}
    place = steering.module
    while place and not any(name.startswith(f"{place}.") for name in missed):
        place = _above(place, visited)  # a gate tells the module that called it
    below = [name for name in missed if not place or name.startswith(f"{place}.")]
    sizes = {size for name in below for size in missed[name].shape}
    reason = PinReason(
        "not visited",
        f"{below[0]} was not reached by the example, and may read this where values decide the way ({steering.how})",
        place,
        steering.line,
    )
    crossing = [v for call in program.calls if call.module == place for v in _values(call)]
    for call in program.modules:
        if call.path == place or (call.path and _above(call.path, visited) == place):
            crossing += [v for v in (call.input, call.output) if v is not None]
    for value in dict.fromkeys(v for v in crossing if not v.fixed):
        for expr in axes.get(value, []):
            if algebra.size_of(expr) in sizes:
                algebra.pin(expr, reason)


def _values(call: Call) -> list[Value]:
    return [*values_in(call.arguments), *call.outputs]


def _above(path: str, visited: set[str]) -> str:
    """The module that called another one, by their names."""
    while path:
        path = path.rpartition(".")[0]
        if path in visited:
            return path
    return ""
