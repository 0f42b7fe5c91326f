"""Units go one after the other, and whoever reads them is refitted each time: what does each cost then?

A layer y = W x with inputs of second moment A = E[x xᵀ] and outputs whose errors e cost ½ eᵀ S e loses the inputs of a
set Q and has its other weights refitted (baselines: Optimal Brain Surgeon, Kronecker-factored). With P = A⁻¹,

    cost(Q) = ½ tr(S W_Q (P_QQ)⁻¹ W_Qᵀ),        W' = W − W_Q (P_QQ)⁻¹ P_Q:,        P' = P − P_:Q (P_QQ)⁻¹ P_Q: .

Taken one unit at a time these add up to the same for whole sets, so a greedy path costs no more than one inverse: at
each step the cheapest unit goes, and P and T = S^½ W are updated. A unit may be read by several layers, and be several
columns of each (the places of a kernel); its cost is the sum over layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Path", "Reader", "eliminate"]

TIE = 1e-12
"""Of the largest cost: what tells units apart whose costs do not rise."""


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads units.

    Attributes:
        inverse: P, (n, n), symmetric and positive definite.
        weights: T = S^½ W, (m, n).
        units: which units it reads, (u,).
        columns: where each of them is, (u, k).
    """

    inverse: Tensor
    weights: Tensor
    units: Tensor
    columns: Tensor

    def costs(self) -> Tensor:
        """½ ‖T_u P_uu^-½‖² of every unit that it reads, (u,)."""
        own = self._own_blocks()
        theirs = self.weights[:, self.columns].permute(1, 2, 0)  # (u, k, m)
        return 0.5 * (theirs * torch.linalg.solve(own, theirs)).sum((1, 2))

    def without_(self, place: int) -> None:
        """Refit without the unit at a place of `units`; its columns become those of an input that is not there."""
        gone = self.columns[place]
        block = self.inverse[gone][:, gone]
        spread = torch.linalg.solve(block, self.inverse[gone])  # P_uu⁻¹ P_u:, (k, n)
        self.weights.sub_(self.weights[:, gone] @ spread)
        self.inverse.sub_(self.inverse[:, gone] @ spread)
        # Exactly, so that rounding does not come back through later steps.
        self.weights[:, gone] = 0
        self.inverse[gone] = 0
        self.inverse[:, gone] = 0
        self.inverse[gone, gone] = 1

    def _own_blocks(self) -> Tensor:
        """P_uu of every unit, (u, k, k)."""
        return self.inverse[self.columns[:, :, None], self.columns[:, None, :]]


@dataclass(frozen=True, eq=False)
class Path:
    """The order in which units go, and what each costs when its turn comes; both (units,), first who goes first."""

    order: Tensor
    costs: Tensor

    def scores(self) -> Tensor:
        """One number per unit, (units,), that grows along the path, so that a ranking by it is the path."""
        rising = torch.cummax(self.costs, 0).values
        steps = torch.arange(len(rising), dtype=rising.dtype) * (rising[-1:] * TIE)
        found = torch.empty_like(rising)
        found[self.order] = rising + steps
        return found


def eliminate(readers: Sequence[Reader], num_units: int) -> Path:
    """Let all units go, the cheapest first. The tensors of `readers` are used up."""
    places = [{int(unit): place for place, unit in enumerate(own.units)} for own in readers]
    costs = [own.costs() for own in readers]
    left = torch.ones(num_units, dtype=torch.bool)
    order: list[int] = []
    paid: list[float] = []
    for _ in range(num_units):
        total = torch.zeros(num_units, dtype=torch.float64)
        for reader, own in zip(readers, costs, strict=True):
            total.index_add_(0, reader.units, own)
        unit = int(torch.where(left, total, torch.inf).argmin())
        order.append(unit)
        paid.append(float(total[unit]))
        left[unit] = False
        for number, reader in enumerate(readers):
            if unit in places[number]:
                reader.without_(places[number][unit])
                costs[number] = reader.costs()
    return Path(torch.tensor(order), torch.tensor(paid, dtype=torch.float64))
