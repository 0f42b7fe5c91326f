"""Plans: which units stay, and the resolved recipe of what to slice and what to set.

The recipe is complete: tensors with kept indices, attributes with new values, how the result is delivered. Cutting,
loading and repairing need no trace. A plan is plain data, JSON both ways; index sets are written as ranges.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from apoptosis.errors import PlanMismatchError
from apoptosis.reading import INDICES
from apoptosis.structure.attributes import Attribute
from apoptosis.structure.axes import Indices
from apoptosis.structure.basis import Basis
from apoptosis.structure.multihead import AttentionShape

__all__ = [
    "FORMAT",
    "AttributeChange",
    "Plan",
    "Scaling",
    "TensorCut",
    "fingerprint_of",
    "moved_scalings",
]

FORMAT = 1
MOST_ROWS = 2**24
"""Of a scaled tensor; a plan from a file may name more than memory holds."""


@dataclass(frozen=True, eq=False)
class TensorCut:
    """What stays of one tensor: for each dimension that shrinks, the kept indices. Tied names are cut once."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kept: dict[int, Indices] = field(repr=False)
    spared: tuple[int, ...] = ()
    """Dimensions along which the zeroed twin keeps its numbers: they are divided by their own length."""

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape afterwards."""
        return tuple(len(self.kept[d]) if d in self.kept else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class AttributeChange:
    """An integer attribute of a module and its new value."""

    attribute: Attribute
    old: int
    new: int


@dataclass(frozen=True, eq=False)
class Scaling:
    """Entries of a tensor along its first dimension, after the cut, that are multiplied by a factor.

    Attention without a scale of its own divides by the square root of its width; what the cut changes there is made
    good in the rows that make the queries.
    """

    names: tuple[str, ...]
    rows: Indices = field(repr=False)
    factor: float


@dataclass(frozen=True, eq=False)
class Plan:
    """Kept units per group, and what follows from them.

    `fingerprint` names the structure the plan was made for, `fingerprint_after` the one it leads to. `delivery` is
    "module" where the model's own code runs at the new sizes, else "program", and `delivery_because` says why.
    """

    kept: dict[str, Indices]
    sizes: dict[str, int]
    tensors: tuple[TensorCut, ...]
    attributes: tuple[AttributeChange, ...]
    scalings: tuple[Scaling, ...]
    attentions: tuple[AttentionShape, ...]
    delivery: str
    delivery_because: str
    fingerprint: str
    fingerprint_after: str
    basis: Basis | None = None
    """Tensors of the network it was made for that had been turned; with other numbers there it means nothing."""
    source: Any = field(default=None, repr=False)
    """The structure it came from; gone in what is read back or copied: it holds the model and the example."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"source": None}

    def __repr__(self) -> str:
        total = sum(self.sizes.values())
        left = total - sum(self.sizes[name] - len(own) for name, own in self.kept.items())
        return f"Plan({len(self.kept)} groups, {left} of {total} units, as {self.delivery})"

    def counts(self) -> dict[str, tuple[int, int]]:
        """Kept and original number of units, for each group that shrinks."""
        return {name: (len(own), self.sizes[name]) for name, own in self.kept.items()}

    def then(self, later: "Plan") -> "Plan":
        """This plan and one made for the cut network, as a single plan for the original one."""
        if later.fingerprint != self.fingerprint_after:
            raise PlanMismatchError(
                "The second plan was made for another network than the first one leads to "
                f"(it expects {later.fingerprint}, the first gives {self.fingerprint_after}). Make it with "
                "`structure.after(first).plan(…)`."
            )
        kept = dict(self.kept)
        for name, own in later.kept.items():
            kept[name] = self.kept[name][own] if name in self.kept else own
        by_name = {cut.names: cut for cut in self.tensors}
        for cut in later.tensors:
            by_name[cut.names] = _composed(by_name[cut.names], cut) if cut.names in by_name else cut
        changes = {change.attribute: change for change in self.attributes}
        for change in later.attributes:
            old = changes[change.attribute].old if change.attribute in changes else change.old
            changes[change.attribute] = AttributeChange(change.attribute, old, change.new)
        return Plan(
            kept,
            self.sizes | {k: v for k, v in later.sizes.items() if k not in self.sizes},
            tuple(by_name.values()),
            tuple(change for change in changes.values() if change.old != change.new),
            (*moved_scalings(self.scalings, later.tensors), *later.scalings),
            tuple(
                (
                    {a.module: a for a in self.attentions} | {a.module: a for a in later.attentions}
                ).values()
            ),
            later.delivery if later.delivery == "program" else self.delivery,
            self.delivery_because or later.delivery_because,
            self.fingerprint,
            later.fingerprint_after,
            _joint_basis(self, later),
            self.source,
        )

    def to_json(self) -> str:
        """The plan as text; `Plan.from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "fingerprint_after": self.fingerprint_after,
                "delivery": self.delivery,
                "delivery_because": self.delivery_because,
                "groups": {
                    name: {
                        "size": size,
                        "kept": _ranges(self.kept[name]) if name in self.kept else None,
                    }
                    for name, size in self.sizes.items()
                },
                "tensors": [
                    {
                        "names": cut.names,
                        "shape": cut.shape,
                        "kept": {str(dim): _ranges(own) for dim, own in cut.kept.items()},
                        "spared": cut.spared,
                    }
                    for cut in sorted(self.tensors, key=lambda own: own.names)
                ],
                "attributes": [
                    {
                        "module": change.attribute.module,
                        "name": change.attribute.name,
                        "place": change.attribute.place,
                        "old": change.old,
                        "new": change.new,
                    }
                    for change in self.attributes
                ],
                "attentions": [asdict(shape) for shape in self.attentions],
                "scalings": [
                    {"names": s.names, "rows": _ranges(s.rows), "factor": s.factor}
                    for s in self.scalings
                ],
            }
            | ({} if self.basis is None else {"basis": asdict(self.basis)})
        )

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan back; anything that is not one is refused with what is wrong."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise PlanMismatchError(
                    f"The plan has format {data['format']}; this version reads format {FORMAT}. "
                    "Make the plan again, or use the version that wrote it."
                )
            _check_total(data)
            return _read(data)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, PlanMismatchError):
                raise
            raise PlanMismatchError(
                f"This is no plan: {type(error).__name__}: {error}. A plan is the text of `Plan.to_json()`, unchanged."
            ) from error


def _check_total(data: Mapping[str, Any]) -> None:
    """A run of units takes a few letters, however many they are; counted before they are written out."""
    kept = [group["kept"] for group in data["groups"].values() if group["kept"] is not None]
    kept += [own for cut in data["tensors"] for own in cut["kept"].values()]
    kept += [scaling["rows"] for scaling in data["scalings"]]
    total = sum(_whole(last) - _whole(first) + 1 for own in kept for first, last in own)
    if total > INDICES:
        raise ValueError(f"it names {total:,} units, and at most {INDICES:,} are read")


def _read(data: Mapping[str, Any]) -> Plan:
    groups = data["groups"]
    return Plan(
        kept={
            name: _indices(group["kept"], _whole(group["size"]))
            for name, group in groups.items()
            if group["kept"] is not None
        },
        sizes={name: _whole(group["size"]) for name, group in groups.items()},
        tensors=tuple(_read_cut(cut) for cut in data["tensors"]),
        attributes=tuple(
            AttributeChange(
                Attribute(
                    _text(c["module"]),
                    _attribute(c["name"]),
                    None if c["place"] is None else _whole(c["place"]),
                ),
                _whole(c["old"]),
                _whole(c["new"]),
            )
            for c in data["attributes"]
        ),
        scalings=tuple(
            Scaling(_names(s["names"]), _indices(s["rows"], MOST_ROWS), _finite(s["factor"]))
            for s in data["scalings"]
        ),
        attentions=tuple(
            AttentionShape(
                _text(a["module"]),
                _whole(a["heads"]),
                _whole(a["qk_dim"]),
                _whole(a["v_dim"]),
                _finite(a["scale"]),
            )
            for a in data["attentions"]
        ),
        delivery=_one_of(data["delivery"], ("module", "program")),
        delivery_because=_text(data["delivery_because"]),
        fingerprint=_text(data["fingerprint"]),
        fingerprint_after=_text(data["fingerprint_after"]),
        basis=_read_basis(data.get("basis")),
    )


def _read_basis(data: Any) -> Basis | None:
    """Only plans of a network with turned heads have one."""
    return None if data is None else Basis(_names(data["names"]), _text(data["digest"]))


def _read_cut(data: Mapping[str, Any]) -> TensorCut:
    shape = tuple(_whole(n) for n in data["shape"])
    dims = {int(d): own for d, own in data["kept"].items()}
    outside = [d for d in (*dims, *data["spared"]) if not 0 <= _whole(d, least=-99) < len(shape)]
    if outside:
        raise ValueError(f"dimension {outside[0]} of a tensor of shape {shape}")
    kept = {d: _indices(own, shape[d]) for d, own in dims.items()}
    return TensorCut(_names(data["names"]), shape, kept, tuple(data["spared"]))


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r} is no list of names")
    return tuple(_text(name) for name in value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _attribute(value: Any) -> str:
    """An attribute that a network may hold a size in; what Python keeps of its own is out of reach."""
    if any(not part.isidentifier() or part.startswith("__") for part in _text(value).split(".")):
        raise ValueError(f"{value!r} is no name of a size")
    return value


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least} on")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
    return value


def _ranges(indices: Indices) -> list[list[int]]:
    """Sorted indices as [first, last] runs."""
    if not len(indices):
        return []
    breaks = np.flatnonzero(np.diff(indices) != 1)
    firsts = indices[np.concatenate([[0], breaks + 1])]
    lasts = indices[np.concatenate([breaks, [len(indices) - 1]])]
    return [[int(a), int(b)] for a, b in zip(firsts, lasts, strict=True)]


def _indices(ranges: Any, size: int) -> Indices:
    """The indices of [first, last] runs; checked before they are written out, for a file may say anything."""
    ends = [(_whole(first), _whole(last)) for first, last in ranges]
    flat = [-1, *(end for run in ends for end in run)]
    apart = all(a < b for a, b in zip(flat[::2], flat[1::2], strict=False))
    if not ends or not apart or any(a > b for a, b in ends) or flat[-1] >= size:
        raise ValueError(
            f"kept indices {str(ranges)[:60]} are not increasing within 0 … {size - 1}"
        )
    return np.concatenate([np.arange(first, last + 1, dtype=np.int64) for first, last in ends])


def _joint_basis(one: Plan, other: Plan) -> Basis | None:
    """Of two plans as one. What was turned after a cut is in no single network, so nothing has such a digest."""
    first, second = one.basis, other.basis
    if second is None or not one.tensors:
        return second or first
    names = {*(first.names if first else ()), *second.names}
    return Basis(tuple(sorted(names)), f"{first.digest if first else ''}>{second.digest}")


def _composed(first: TensorCut, second: TensorCut) -> TensorCut:
    kept = dict(first.kept)
    for dim, own in second.kept.items():
        kept[dim] = first.kept[dim][own] if dim in first.kept else own
    return TensorCut(first.names, first.shape, kept, tuple({*first.spared, *second.spared}))


def moved_scalings(
    scalings: tuple[Scaling, ...], tensors: tuple[TensorCut, ...]
) -> tuple[Scaling, ...]:
    """The scalings with their rows as numbered after the tensors have been cut."""
    cuts = {cut.names: cut for cut in tensors}
    moved: list[Scaling] = []
    for scaling in scalings:
        cut = cuts.get(scaling.names)
        rows = scaling.rows
        if cut is not None and 0 in cut.kept:
            rows = np.flatnonzero(np.isin(cut.kept[0], rows))
        moved.append(Scaling(scaling.names, rows, scaling.factor))
    return tuple(moved)


def fingerprint_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Names a network whose state dict has tensors of these names and shapes."""
    text = ";".join(f"{name}:{tuple(shape)}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
