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
from math import ceil

import torch
from torch import Tensor

__all__ = ["Path", "Reader", "eliminate"]

ROUNDS, CANDIDATES = 64, 4
"""In how many rounds all units go, and among how many times those that go they are chosen."""
CROWDED = 0.8
"""Of a layer's columns: where fewer are those of units that are left, the others are dropped."""
TIE = 1e-12
"""Of the largest cost: what tells units apart whose costs do not rise."""


@dataclass(eq=False)
class Reader:
    """A layer that reads units; those that go leave it.

    Attributes:
        inverse: P, (n, n), symmetric and positive definite.
        weights: T = S^½ W, (m, n), or any other T with the same Tᵀ T.
        units: which units it reads, (u,).
        columns: where each of them is, (u, k).
    """

    inverse: Tensor
    weights: Tensor
    units: Tensor
    columns: Tensor

    def costs(self) -> Tensor:
        """½ ‖T_u P_uu^-½‖² of every unit that it reads, (u,): ½ Σ (P_uu)⁻¹ ⊙ T_uᵀ T_u, of (k, k) each."""
        own = self.inverse[self.columns[:, :, None], self.columns[:, None, :]]
        theirs = self.weights.T[self.columns]  # (u, k, m)
        if own.shape[1] == 1:
            return 0.5 * theirs.square().sum((1, 2)) / own[:, 0, 0]
        return 0.5 * (_inverses(own) * (theirs @ theirs.mT)).sum((1, 2))

    def without_(self, units: Tensor) -> None:
        """Refit without these units. What stands in their columns from now on is nobody's, and nobody looks at it."""
        are_gone = torch.isin(self.units, units)
        gone = self.columns[are_gone].flatten()
        if not len(gone):
            return
        rows = self.inverse[gone]
        spread = torch.linalg.solve(rows[:, gone], rows)  # P_QQ⁻¹ P_Q:
        self.weights.addmm_(self.weights[:, gone], spread, alpha=-1)
        self.inverse.addmm_(rows.T, spread, alpha=-1)
        self.units, self.columns = self.units[~are_gone], self.columns[~are_gone]
        if self.columns.numel() < CROWDED * len(self.inverse):
            self.compact_()

    def compact_(self) -> None:
        """Keep a copy of the columns of its units alone: what becomes of them depends on no others."""
        flat = self.columns.flatten()
        self.inverse = self.inverse[flat][:, flat]
        self.weights = self.weights.T[
            flat
        ].T  # a unit's weights next to each other, as `costs` reads them
        self.columns = torch.arange(len(flat), device=flat.device).reshape(self.columns.shape)

    def among(self, units: Tensor) -> "Reader":
        """The same for some of the units, numbered by their places there."""
        own = torch.isin(self.units, units)
        places = (units[None, :] == self.units[own][:, None]).int().argmax(1)
        few = Reader(self.inverse, self.weights, places, self.columns[own])
        few.compact_()
        return few


@dataclass(frozen=True, eq=False)
class Path:
    """The order in which units go, and what each costs when its turn comes; both (units,), first who goes first.

    On the CPU, wherever the readers were.
    """

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
    """Let all units go, the cheapest first. `readers` are used up; the tensors that they were made of are not.

    Of more than `ROUNDS` units several go in a round, one after the other among the few that are cheapest when it
    begins: the large matrices are then updated once for all of them, and costs along the path stay exact.
    """
    for reader in readers:
        reader.compact_()
    at_once = ceil(num_units / ROUNDS)
    left = torch.ones(num_units, dtype=torch.bool, device=readers[0].units.device)
    num_left = num_units
    order: list[Tensor] = []
    paid: list[Tensor] = []
    while num_left:
        total = torch.where(left, _total(readers, num_units), torch.inf)
        num = min(at_once, num_left)
        few = total.topk(min(CANDIDATES * num, num_left), largest=False).indices
        places, costs = _one_by_one([own.among(few) for own in readers], len(few), num)
        order.append(few[places])
        paid.append(costs)
        left[few[places]] = False
        num_left -= num
        for reader in readers:
            reader.without_(few[places])
    return Path(torch.cat(order).cpu(), torch.cat(paid).cpu())


def _one_by_one(readers: Sequence[Reader], num_units: int, num: int) -> tuple[Tensor, Tensor]:
    """The first `num` units of the greedy path, and what each costs."""
    left = torch.ones(num_units, dtype=torch.bool, device=readers[0].units.device)
    order: list[Tensor] = []
    paid: list[Tensor] = []
    for _ in range(num):
        total = torch.where(left, _total(readers, num_units), torch.inf)
        unit = total.argmin(keepdim=True)
        order.append(unit)
        paid.append(total[unit])
        left[unit] = False
        if len(order) < num:
            for reader in readers:
                reader.without_(unit)
    return torch.cat(order), torch.cat(paid)


def _total(readers: Sequence[Reader], num_units: int) -> Tensor:
    total = torch.zeros(num_units, dtype=torch.float64, device=readers[0].units.device)
    for reader in readers:
        total.index_add_(0, reader.units, reader.costs())
    return total


def _inverses(matrices: Tensor) -> Tensor:
    """Of (u, k, k), symmetric and positive definite but for rounding."""
    roots, failed = torch.linalg.cholesky_ex(matrices)
    return torch.linalg.inv(matrices) if bool(failed.any()) else torch.cholesky_inverse(roots)
