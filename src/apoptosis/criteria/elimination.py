"""Units go one after the other, and whoever reads them is refitted each time: what does each cost then?

A layer y = W x with inputs of second moment A = E[x xᵀ] and outputs whose errors e cost ½ eᵀ S e loses the inputs of a
set Q and has its other weights refitted (baselines: Optimal Brain Surgeon, Kronecker-factored). With P = A⁻¹,

    cost(Q) = ½ tr(S W_Q (P_QQ)⁻¹ W_Qᵀ),        W' = W − W_Q (P_QQ)⁻¹ P_Q:,        P' = P − P_:Q (P_QQ)⁻¹ P_Q: .

Taken one unit at a time these add up to the same for whole sets, so a greedy path costs no more than one inverse: at
each step the cheapest unit goes, and P and T = S^½ W are updated. A unit may be read by several layers, and be several
columns of each (the places of a kernel); its cost is the sum over layers.

Groups do not know of each other, so those of one shape go together, each operation for all of them: on a GPU the time
is that of launches. Where P is large the time is that of memory: what rounds take from it is kept as V with
P' = P − Vᵀ V, and taken off once there are `WINDOW` rows of it, from the columns that are left by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

__all__ = ["Alone", "Path", "Reader", "eliminate", "eliminate_alike", "eliminated_cost", "shape_of"]

ROUNDS, CANDIDATES = 64, 4
"""In how many rounds all units go, and among how many times those that go they are chosen."""
WINDOW, PART = 256, 16
"""Rows of V that are worth a walk through P, and in parts of P's own, whichever is more."""
TIE = 1e-12
"""Of the largest cost: what tells units apart whose costs do not rise."""


@dataclass(frozen=True, eq=False)
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

    @property
    def num_bytes(self) -> int:
        """Of what `eliminate` makes of it."""
        num = self.columns.numel()
        return 8 * num * (num + len(self.weights))


@dataclass(frozen=True, eq=False)
class Alone:
    """A layer that reads units one by one, as a depthwise convolution does: `costs`, (u,), of its `units`, (u,)."""

    units: Tensor
    costs: Tensor

    @property
    def num_bytes(self) -> int:
        """Of what is held."""
        return 16 * len(self.units)


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


def eliminate(readers: Sequence[Reader | Alone], num_units: int) -> Path:
    """Let all units go, the cheapest first."""
    return eliminate_alike([readers], num_units)[0]


def shape_of(readers: Sequence[Reader | Alone], num_units: int) -> tuple[object, ...]:
    """What groups have in common that can go together."""
    own = ((*reader.columns.shape, len(reader.weights)) for reader in _crowded(readers))
    return (num_units, readers[0].units.device, *own)


def eliminate_alike(groups: Sequence[Sequence[Reader | Alone]], num_units: int) -> list[Path]:
    """The path of each group by itself; all have the same `shape_of`.

    Of more than `ROUNDS` units several go in a round, one after the other among the few that are cheapest when it
    begins: the large matrices are then updated once for all of them, and costs along the path stay exact.
    """
    layers = [_Layers.of(own, num_units) for own in zip(*map(_crowded, groups), strict=True)]
    at_once = ceil(num_units / ROUNDS)
    device = groups[0][0].units.device
    alone = torch.stack([_alone(own, num_units) for own in groups])
    gone = torch.zeros(len(groups), num_units, dtype=torch.bool, device=device)
    num_left = num_units
    order: list[Tensor] = []
    paid: list[Tensor] = []
    while num_left:
        total = alone.clone()
        for own in layers:
            own.add_costs_to_(total)
        num = min(at_once, num_left)
        among = min(CANDIDATES * num, num_left)
        few = total.masked_fill_(gone, torch.inf).topk(among, largest=False).indices
        places, costs = _one_by_one([own.among(few) for own in layers], alone.gather(1, few), num)
        units = few.gather(1, places)
        order.append(units)
        paid.append(costs)
        gone.scatter_(1, units, value=True)
        num_left -= num
        for own in layers if num_left else ():
            own.without_(units)
    orders, costs = torch.cat(order, 1).cpu(), torch.cat(paid, 1).cpu()
    return [Path(*own) for own in zip(orders, costs, strict=True)]


def eliminated_cost(inverse: Tensor, moments: Tensor) -> Tensor:
    """½ Σ (P_uu)⁻¹ ⊙ (Tᵀ T)_uu, not below zero by rounding; of both the blocks of units, (…, u, k, k)."""
    if inverse.shape[-1] == 1:
        costs = (moments / inverse)[..., 0, 0]
    else:
        costs = (torch.linalg.inv_ex(inverse).inverse * moments).sum((-2, -1))
    return costs.mul_(0.5).clamp_min_(0)


def _crowded(readers: Sequence[Reader | Alone]) -> list[Reader]:
    """Those in which units can take over from each other."""
    return [own for own in readers if isinstance(own, Reader)]


def _alone(readers: Sequence[Reader | Alone], num_units: int) -> Tensor:
    """What units cost, (units,), in layers that read them one by one."""
    found = torch.zeros(num_units, dtype=torch.float64, device=readers[0].units.device)
    for own in readers:
        if isinstance(own, Alone):
            found.index_add_(0, own.units, own.costs)
    return found


def _one_by_one(layers: Sequence["_Few"], alone: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The first `num` units of each greedy path, (b, num), and what each costs."""
    order: list[Tensor] = []
    paid: list[Tensor] = []
    for number in range(num):
        total = alone.clone()
        for own in layers:
            total += own.costs()
        if number:
            total.scatter_(1, torch.cat(order, 1), torch.inf)
        cost, unit = total.min(1, keepdim=True)
        order.append(unit)
        paid.append(cost)
        if number + 1 < num:
            for own in layers:
                own.without_(unit)
    return torch.cat(order, 1), torch.cat(paid, 1)


@dataclass(eq=False)
class _Layers:
    """One layer of each of b groups, of u units and k columns for each, which stand next to each other.

    Attributes:
        inverse: P when V was empty, (b, u·k, u·k).
        spent: V, (b, rows, u·k), made as rows come.
        blocks: those of P' on the diagonal, (b, u, k, k).
        weights: Tᵀ, (b, u·k, m).
        units: (b, u).
        places: where each unit of the group is, (b, units); −1 where it is not.
    """

    inverse: Tensor
    spent: list[Tensor]
    blocks: Tensor
    weights: Tensor
    units: Tensor
    places: Tensor
    reads_all: bool

    @classmethod
    def of(cls, readers: Sequence[Reader], num_units: int) -> "_Layers":
        """Copies of the columns of units: what becomes of them depends on no others."""
        inverses: list[Tensor] = []
        weights: list[Tensor] = []
        for own in readers:
            flat = own.columns.flatten()
            inverses.append(own.inverse[flat][:, flat])
            weights.append(own.weights.T[flat])
        inverse = torch.stack(inverses)
        units = torch.stack([own.units for own in readers])
        k = readers[0].columns.shape[1]
        made = cls(
            inverse,
            [],
            _on_diagonal(inverse, k),
            torch.stack(weights),
            units,
            units.new_full((len(readers), num_units), -1),
            reads_all=units.shape[1] == num_units,
        )
        made._number_()
        return made

    @property
    def k(self) -> int:
        """Columns of a unit."""
        return self.blocks.shape[-1]

    def add_costs_to_(self, total: Tensor) -> None:
        """½ ‖T_u P_uu^-½‖² of every unit that it reads: ½ Σ (P_uu)⁻¹ ⊙ T_uᵀ T_u, of (k, k) each."""
        own = self.weights.unflatten(1, (-1, self.k))
        costs = (
            eliminated_cost(self.blocks, own @ own.mT) if self.k > 1 else own.square().sum((2, 3))
        )
        if self.k == 1:
            costs = 0.5 * costs / self.blocks[..., 0, 0]
        total.scatter_add_(1, self.units, costs)

    def among(self, units: Tensor) -> "_Few":
        """The same for some of the units, (b, f), those that it does not read among them."""
        columns, there = self._columns(units)
        inverse = _entries(self.inverse, columns, columns)
        if self.spent:
            spent = _columns(self._spent(), columns)
            inverse.baddbmm_(spent.mT, spent, alpha=-1)
        weights = _rows(self.weights, columns)
        moment = weights @ weights.mT
        if there is not None:
            both = there[:, :, None] * there[:, None, :]
            inverse, moment = inverse * both, moment * both
            inverse.diagonal(dim1=1, dim2=2).add_(1 - there)
        return _Few(inverse, moment, self.k)

    def without_(self, units: Tensor) -> None:
        """Refit without these units, (b, q). What stands in their columns from now on is nobody's."""
        columns, there = self._columns(units)
        rows = _rows(self.inverse, columns)  # P_Q:
        if self.spent:
            spent = self._spent()
            rows.baddbmm_(_columns(spent, columns).mT, spent, alpha=-1)
        own = _columns(rows, columns)
        weights = _rows(self.weights, columns)
        if there is not None:
            rows, weights = rows * there[:, :, None], weights * there[:, :, None]
            own = own * there[:, :, None] * there[:, None, :]
            own.diagonal(dim1=1, dim2=2).add_(1 - there)
        root = _root(own)
        rows, weights = (
            torch.linalg.solve_triangular(root, t, upper=False) for t in (rows, weights)
        )
        self.weights.baddbmm_(rows.mT, weights, alpha=-1)
        by_unit = rows.unflatten(2, (-1, self.k)).permute(0, 2, 3, 1)  # (b, u, k, q)
        self.blocks = self.blocks - by_unit @ by_unit.mT
        self._forget_(units, there)
        self.spent.append(rows)
        if sum(own.shape[1] for own in self.spent) >= max(WINDOW, self.inverse.shape[1] // PART):
            self.compact_()

    def compact_(self) -> None:
        """Keep the columns of units that are left, and take off P what rounds have taken from it."""
        left = self.places.gather(1, self.units) >= 0
        num = max(1, int(left.sum(1).amax()))  # a layer whose units have all gone keeps one of them
        kept = left.int().argsort(dim=1, descending=True, stable=True)[:, :num]
        columns = _of_units(kept, self.k)
        spent = _columns(self._spent(), columns)
        self.inverse = _entries(self.inverse, columns, columns).baddbmm_(spent.mT, spent, alpha=-1)
        self.weights = _rows(self.weights, columns)
        self.blocks = _rows(self.blocks.flatten(2), kept).unflatten(2, (self.k, self.k))
        self.units, is_left = self.units.gather(1, kept), left.gather(1, kept)
        self.spent = []
        self._number_(is_left)

    def _number_(self, is_left: Tensor | None = None) -> None:
        """Note where units are."""
        places = torch.arange(self.units.shape[1], device=self.units.device)
        places = places.expand_as(self.units)
        if is_left is not None:
            places = torch.where(is_left, places, -1)
        self.places.fill_(-1).scatter_(1, self.units, places)

    def _forget_(self, units: Tensor, there: Tensor | None) -> None:
        """Their blocks may be no longer positive: others are not to hear of it."""
        places = self.places.gather(1, units)
        unit = torch.eye(self.k, dtype=self.blocks.dtype, device=self.blocks.device).flatten()
        flat = self.blocks.flatten(2)
        where = places.clamp_min(0)[:, :, None].expand(-1, -1, flat.shape[2])
        new = unit.expand(where.shape)
        if there is not None:
            new = torch.where((places >= 0)[:, :, None], new, flat.gather(1, where))
        self.blocks = flat.scatter(1, where, new).unflatten(2, (self.k, self.k))
        self.places.scatter_(1, units, -1)

    def _columns(self, units: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where units have theirs, (b, f·k), and 1 where they have some, 0 elsewhere; None where all have."""
        places = self.places.gather(1, units)
        if self.reads_all:
            return _of_units(places, self.k), None
        there = (places >= 0).to(self.inverse.dtype).repeat_interleave(self.k, 1)
        return _of_units(places.clamp_min(0), self.k), there

    def _spent(self) -> Tensor:
        if len(self.spent) > 1:
            self.spent = [torch.cat(self.spent, 1)]
        return self.spent[0]


@dataclass(eq=False)
class _Few:
    """P and Tᵀ T of few units, (b, f·k, f·k) each."""

    inverse: Tensor
    moment: Tensor
    k: int

    def costs(self) -> Tensor:
        """Of every unit, (b, f)."""
        return eliminated_cost(
            _on_diagonal(self.inverse, self.k), _on_diagonal(self.moment, self.k)
        )

    def without_(self, unit: Tensor) -> None:
        """Refit without one, (b, 1): of P and of Tᵀ T = M comes M − hᵀ w − wᵀ h with w = P_uu⁻¹ P_u: ."""
        columns = _of_units(unit, self.k)
        rows, moments = _rows(self.inverse, columns), _rows(self.moment, columns)
        own = _columns(rows, columns)
        spread = rows / own if self.k == 1 else torch.linalg.solve_ex(own, rows).result
        half = moments.baddbmm(_columns(moments, columns), spread, alpha=-0.5)
        self.inverse.baddbmm_(rows.mT, spread, alpha=-1)
        self.moment.baddbmm_(half.mT, spread, alpha=-1).baddbmm_(spread.mT, half, alpha=-1)


def _root(matrices: Tensor) -> Tensor:
    """L with L Lᵀ = P_QQ, positive definite but for rounding."""
    roots, failed = torch.linalg.cholesky_ex(matrices)
    if not bool(failed.any()):
        return roots
    values, vectors = torch.linalg.eigh(matrices)
    least = torch.finfo(matrices.dtype).eps * values[:, -1:]
    mended = vectors * values.clamp_min(least)[:, None, :] @ vectors.mT
    return torch.linalg.cholesky((mended + mended.mT) / 2)


def _of_units(places: Tensor, k: int) -> Tensor:
    """Columns of units that stand next to each other: (b, f) becomes (b, f·k)."""
    if k == 1:
        return places
    return (places[:, :, None] * k + torch.arange(k, device=places.device)).flatten(1)


def _on_diagonal(matrices: Tensor, k: int) -> Tensor:
    """(b, u·k, u·k) becomes (b, u, k, k)."""
    if k == 1:
        return matrices.diagonal(dim1=1, dim2=2)[:, :, None, None]
    by_unit = matrices.unflatten(1, (-1, k)).unflatten(3, (-1, k))
    return by_unit.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _rows(matrices: Tensor, places: Tensor) -> Tensor:
    """Those of each, copied: (b, r, c) and (b, f) make (b, f, c)."""
    if len(matrices) == 1:
        return matrices[0].index_select(0, places[0])[None]
    return matrices.gather(1, places[:, :, None].expand(-1, -1, matrices.shape[2]))


def _columns(matrices: Tensor, places: Tensor) -> Tensor:
    """(b, r, c) and (b, f) make (b, r, f)."""
    if len(matrices) == 1:
        return matrices[0].index_select(1, places[0])[None]
    return matrices.gather(2, places[:, None, :].expand(-1, matrices.shape[1], -1))


def _entries(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(b, r, c) become (b, f, g)."""
    return _columns(_rows(matrices, rows), columns)
