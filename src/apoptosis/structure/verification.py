"""Check by running what the algebra says: every exact group, cut and compared with its zeroed twin.

The rules are proved on samples and the solution is sound by construction; this is the belt to those braces, for a model
with operations of its own or before a long run. The check uses random weights, since trained ones can hide a wrong cut
behind dead units, and float64, on two inputs. A group that fails is pinned, with that reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import nn

from apoptosis.errors import ModelError
from apoptosis.progress import track
from apoptosis.structure.cutting import cut
from apoptosis.structure.groups import Group, PinnedAxis
from apoptosis.structure.recording import Example
from apoptosis.structure.structure import Structure
from apoptosis.structure.surgery import zero
from apoptosis.structure.twins import TOLERANCE, as_double, compare, randomised, redrawn

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """What the check found: the structure without groups that failed, and each group's relative error."""

    structure: Structure
    errors: dict[str, float]

    @property
    def failed(self) -> dict[str, float]:
        """Groups that were not what they promised."""
        return {name: error for name, error in self.errors.items() if not error <= TOLERANCE}


def verify(
    structure: Structure, *, seed: int = 0, groups: Iterable[str] | None = None
) -> Verification:
    """Cut a random unit of each exact group (and of those tied to it), and compare with the zeroed twin.

    Args:
        structure: as `trace` gave it.
        seed: draws weights, inputs and units.
        groups: names of those to check; all exact ones unless given.

    Raises:
        ModelError: the model has no numbers (it is on the meta device).

    >>> from apoptosis.structure import trace
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> verify(trace(net, torch.zeros(1, 4))).failed
    {}
    """
    run = structure._network.run
    if run.is_meta:
        raise ModelError(
            "The model is on the meta device and has no numbers to check. Trace it with real weights."
        )
    generator = torch.Generator().manual_seed(seed)
    model = randomised(run.model, generator)
    examples = [as_double(run.example), redrawn(as_double(run.example), generator)]
    names = (
        list(groups)
        if groups is not None
        else [g.name for g in structure.groups if g.exact and g.size > 1]
    )
    errors = {
        name: _error(model, examples, structure, name, generator)
        for name in track(names, "checking cuts")
    }
    checked = Verification(structure, errors)
    pinned = tuple(_as_pinned(structure[name], error) for name, error in checked.failed.items())
    kept = tuple(group for group in structure.groups if group.name not in checked.failed)
    return Verification(
        replace(structure, groups=kept, pinned=(*structure.pinned, *pinned)), errors
    )


def _error(
    model: nn.Module,
    examples: list[Example],
    structure: Structure,
    name: str,
    generator: torch.Generator,
) -> float:
    kept = {
        other: np.sort(
            torch.randperm(size := structure[other].size, generator=generator)[: size - num].numpy()
        )
        for other, num in structure.step(name).items()
    }
    try:
        plan = replace(structure.plan(kept), basis=None)  # for other weights
        return compare(cut(model, plan), zero(model, plan), examples)
    except Exception:  # noqa: BLE001 - a cut that cannot be made or run is as wrong as one that differs
        return inf


def _as_pinned(group: Group, error: float) -> PinnedAxis:
    tensor, dim, *_ = group.places[0]
    reason = f"cut and zeroed twin of group {group.name!r} differ by {error:.1e}, relative"
    return PinnedAxis(tensor, dim, group.size, "verify", reason, "", "")
