"""From parameters to units: gather the scores of every entry that goes when a unit goes.

A unit u of a group owns slices: rows of the tensors that make it (producers), entries of those that act on it on the
way (carriers: norms), columns of those that read it (consumers). With s the signed scores and e over the entries of
one slice, the choices are

    absolute   none    Σ_slices  Σ_e s_e              signed: where scores are predicted changes of the loss
               unit   |Σ_slices  Σ_e s_e|             contributions cancel over the whole unit
               slice   Σ_slices |Σ_e s_e|             they cancel within a layer: the paper's
               entry   Σ_slices  Σ_e |s_e|            nothing cancels

with a sum or a mean over slices, over chosen roles, of all parameters or of weights alone (tensors of two and more
dimensions). Afterwards a normaliser may make groups comparable: v / max|v|, (v − min)/(max − min), v / ‖v‖₂ or
v / mean|v|.

A tensor may hold one group along two dimensions (a weight from a residual stream into the same stream): row u and
column u then share an entry. The first two forms are about sets of entries, and count it once; the other two are about
slices, and count it in both.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apoptosis.criteria.interactions import checked_interactions
from apoptosis.criteria.scores import Scores
from apoptosis.errors import ConfigError, PlanMismatchError
from apoptosis.structure import Indices, Slice, Structure

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "UnitScores",
    "find_aggregation",
    "gathered_sum",
    "normalised",
    "unit_scores",
]

ROLES = ("producer", "carrier", "consumer")


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How entries become units; see the module's docstring.

    Defaults are those with which OBA, ranked per cost and in many steps, pruned a public ResNet best of all that was
    tried (experiments/results/narrow_criteria.md): nothing cancels, norms do not count, no normaliser.
    """

    absolute: str = "entry"
    over_slices: str = "sum"
    roles: tuple[str, ...] = ("producer", "consumer")
    parameters: str = "all"
    normalise: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.roles, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"roles={self.roles!r} was asked for; it is a tuple of some of {', '.join(ROLES)}."
            )
        for option, allowed in _ALLOWED.items():
            asked = getattr(self, option)
            for value in asked if option == "roles" else (asked,):
                if value not in allowed:
                    raise ConfigError(
                        f"{option}={value!r} was asked for; there are {', '.join(allowed)}."
                    )
        if not self.roles:
            raise ConfigError(f"No role is to count; name some of {', '.join(ROLES)}.")


@dataclass(frozen=True)
class UnitScores:
    """One number per unit of each group: the lower, the sooner it goes.

    Attributes:
        values: float64 `(units,)` on the CPU, by the name of the group.
        criterion: the name of what made them.
        options: how it was asked.
        count: samples the scores are a mean over; 0 where no data were read.
        missing: groups of which nothing was scored: frozen parameters, or such that no gradient reaches. Planning
            leaves them alone, for nothing is known of them.
        loss: mean loss of the network over the same samples; None where no data were read.
        interactions: what units cost together beyond the sum of their scores, where a criterion knows: symmetric
            matrices over the units of some groups, one group after the other, keyed by the names of these groups.
            Removing u and v costs s_u + s_v + I_uv; the diagonal is not read. A group stands in one matrix at most.
    """

    values: dict[str, Tensor]
    criterion: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    count: int = 0
    missing: tuple[str, ...] = ()
    loss: float | None = None
    interactions: Mapping[tuple[str, ...], Tensor] = field(
        default_factory=dict[tuple[str, ...], Tensor], repr=False
    )

    def __post_init__(self) -> None:
        """Whatever numbers a criterion of one's own gives, planning gets float64 on the CPU."""
        object.__setattr__(self, "values", {n: _plain(n, own) for n, own in self.values.items()})
        object.__setattr__(
            self, "interactions", checked_interactions(self.interactions, self.values)
        )


def _plain(name: str, values: Any) -> Tensor:
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.is_complex():
        raise ConfigError(
            f"The scores of group {name!r} are a {type(values).__name__} of other things than real numbers; they are a "
            "tensor with one number per unit."
        )
    return found.detach().to("cpu", torch.float64)


def unit_scores(
    scores: Scores, structure: Structure, aggregation: "Aggregation | str" = "default"
) -> UnitScores:
    """Gather parameter scores into units.

    Args:
        scores: of the network that `structure` describes.
        structure: which entries belong to which unit.
        aggregation: choices, or the name of some in `AGGREGATIONS`.

    Raises:
        PlanMismatchError: the scores are of another network.
        ConfigError: no such aggregation.

    >>> from torch import nn
    >>> from apoptosis.criteria import magnitude
    >>> from apoptosis.structure import trace
    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 1.0]]))
    >>> _ = net[2].weight.data.copy_(torch.tensor([[1.0, 0.0, 3.0]]))
    >>> unit_scores(magnitude(net), trace(net, torch.zeros(1, 2)), Aggregation()).values["0"]
    tensor([3., 4., 4.], dtype=torch.float64)
    """
    how = find_aggregation(aggregation)
    _check_fits(scores, structure)
    values: dict[str, Tensor] = {}
    missing: list[str] = []
    for group in structure.groups:
        slices = [s for s in group.slices if _counts(s, scores, how)]
        if slices:
            values[group.name] = normalised(_gathered(slices, scores, how), how.normalise)
        else:
            missing.append(group.name)
    options = {**scores.options, "aggregation": asdict(how)}
    return UnitScores(values, scores.criterion, options, scores.count, tuple(missing), scores.loss)


def normalised(values: Tensor, normaliser: str) -> Tensor:
    """The values of one group on a common scale; constants and zeros stay finite.

    >>> normalised(torch.tensor([1.0, 3.0, 5.0]), "minmax")
    tensor([0.0000, 0.5000, 1.0000])
    """
    shifted, scale = NORMALISERS[normaliser](values)
    return shifted / scale if scale > 0 else shifted


def find_aggregation(asked: "Aggregation | str") -> Aggregation:
    """The aggregation itself, or the one of that name."""
    if isinstance(asked, Aggregation):
        return asked
    if not isinstance(asked, str) or asked not in AGGREGATIONS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"The aggregation {asked!r} was asked for; there are {', '.join(AGGREGATIONS)}, or an `Aggregation`."
        )
    return AGGREGATIONS[asked]


def _check_fits(scores: Scores, structure: Structure) -> None:
    for name, value in scores.values.items():
        shape = structure.shapes.get(name)
        if shape is not None and shape != tuple(value.shape):
            raise PlanMismatchError(
                f"The scores of {name!r} have shape {tuple(value.shape)}, the structure's tensor {shape}: they are of "
                "another network. Score the network that was traced; after a cut, use `structure.after(plan)`."
            )
    held = {s.tensor for group in structure.groups for s in group.slices}
    if structure.groups and not held & scores.values.keys():
        raise PlanMismatchError(
            f"None of the {len(scores.values)} scored parameters belongs to a group of this structure. Score the "
            "network that was traced, with its parameters not frozen."
        )


def _counts(part: Slice, scores: Scores, how: Aggregation) -> bool:
    value = scores.values.get(part.tensor)
    if value is None or part.role not in how.roles or part.tensor in scores.unreached:
        return False
    return how.parameters == "all" or value.dim() > 1


def _gathered(slices: list[Slice], scores: Scores, how: Aggregation) -> Tensor:
    sums = [_slice_sum(s, scores.values[s.tensor], how.absolute) for s in slices]
    # One transfer per group: on a GPU each costs more than the sums.
    total = torch.stack([own.to(sums[0].device) for own in sums]).sum(0).cpu()
    if how.absolute in ("none", "unit"):
        total -= _counted_twice(slices, scores)
    if how.absolute == "unit":
        total = total.abs()
    return total / len(slices) if how.over_slices == "mean" else total


def _slice_sum(part: Slice, value: Tensor, absolute: str) -> Tensor:
    """(units,): the sum over all entries of a tensor that each unit owns along one dimension."""
    entries = value.detach().abs() if absolute == "entry" else value.detach()
    others = [dim for dim in range(value.dim()) if dim != part.dim]
    lines = entries.sum(others, dtype=torch.float64) if others else entries.double()
    found = _by_unit(lines, part)
    return found.abs() if absolute == "slice" else found


def _by_unit(lines: Tensor, part: Slice) -> Tensor:
    """(units,): sums of lines, one per entry along a dimension. Most slices have one entry per unit, in order."""
    indices = part.indices
    if indices.shape == (len(lines), 1) and (indices[:, 0] == np.arange(len(lines))).all():
        return lines
    return gathered_sum(lines, indices)


def gathered_sum(lines: Tensor, indices: Indices) -> Tensor:
    """(..., units): sums of `lines` (..., entries) over each unit's entries, every entry once.

    A unit may own an entry twice: of h ⊗ h, flattened, unit u has row u and column u.
    """
    found = lines[..., torch.as_tensor(indices, device=lines.device)]
    repeated = indices[:, 1:] == indices[:, :-1]  # sorted within a unit
    if repeated.any():
        found[..., 1:][..., torch.as_tensor(repeated, device=lines.device)] = 0
    return found.sum(-1)


def _counted_twice(slices: list[Slice], scores: Scores) -> Tensor:
    """(units,): what sums over slices count too often, by inclusion and exclusion over a tensor's dimensions."""
    units = len(slices[0].indices)
    excess = torch.zeros(units, dtype=torch.float64)
    by_tensor: dict[str, list[Slice]] = {}
    for part in slices:
        by_tensor.setdefault(part.tensor, []).append(part)
    for tensor, parts in by_tensor.items():
        for num in range(2, len(parts) + 1):
            for chosen in combinations(parts, num):
                excess -= (-1) ** (num + 1) * _shared_sum(chosen, scores.values[tensor])
    return excess


def _shared_sum(parts: tuple[Slice, ...], value: Tensor) -> Tensor:
    """(units,): the sum over entries that a unit owns along every one of some dimensions."""
    parts = tuple(sorted(parts, key=lambda part: part.dim))
    others = [dim for dim in range(value.dim()) if dim not in [part.dim for part in parts]]
    table = value.detach().double().cpu()
    table = table.sum(others) if others else table
    if all(part.indices.shape[1] == 1 for part in parts):
        return table[tuple(torch.as_tensor(part.indices[:, 0]) for part in parts)]
    owned = [_ownership(part, size) for part, size in zip(parts, table.shape, strict=True)]
    letters = "abcdefgh"[: len(parts)]
    return torch.einsum(
        f"{letters},{','.join(f'u{letter}' for letter in letters)}->u", table, *owned
    )


def _ownership(part: Slice, size: int) -> Tensor:
    """(units, entries): 1 where the unit owns the entry."""
    found = torch.zeros(len(part.indices), size, dtype=torch.float64)
    return found.scatter_(1, torch.as_tensor(part.indices), 1.0)


def _norm(values: Tensor) -> Tensor:
    """‖v‖₂ without squares that leave the range of numbers."""
    largest = values.abs().max()
    return largest * (values / largest).norm() if largest > 0 else largest


NORMALISERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "none": lambda v: (v, torch.ones(())),
    "max": lambda v: (v, v.abs().max()),
    "minmax": lambda v: (v - v.min(), v.max() - v.min()),
    "l2": lambda v: (v, _norm(v)),
    "mean": lambda v: (v, v.abs().mean()),
}

_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "absolute": ("none", "unit", "slice", "entry"),
    "over_slices": ("sum", "mean"),
    "roles": ROLES,
    "parameters": ("all", "weights"),
    "normalise": tuple(NORMALISERS),
}

AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        "default": Aggregation(),
        "paper": Aggregation(absolute="slice", over_slices="mean", normalise="max"),
        "layers": Aggregation(absolute="slice"),
        "units": Aggregation(absolute="unit"),
        "signed": Aggregation(absolute="none"),
    }
)
"""By name. `paper`: signed sums per layer, their sizes averaged, divided by the group's largest."""
