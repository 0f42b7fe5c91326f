"""Sums of gates' derivatives over samples: what `gates` adds up, in its three forms.

What passes a place is (samples, …), with the units of a group along one dimension. The derivative of a sample by a gate
is a ⊙ ∂/∂a there, summed over the positions and over the entries that the unit owns, and over the places of its group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apoptosis.curvature.activations import Place, Seen, Watched, gradients_at
from apoptosis.errors import DataError, NonFiniteError

__all__ = ["Gate", "GateCurvature", "GateSums"]


@dataclass(frozen=True, eq=False)
class Gate:
    """Gates on the units of a group at one place; a group may have several, which move together.

    Attributes:
        group: its name.
        place: where they stand.
        dim: the dimension of what passes there that holds the units.
        indices: (units, entries), what each unit owns along `dim`, sorted.
        factor: what the derivative counts: ½ where two places hold the two factors of one product.
    """

    group: str
    place: Place
    dim: int
    indices: NDArray[np.int64]
    factor: float = 1.0


@dataclass(frozen=True)
class GateCurvature:
    """Means over `count` predictions, float64 on the CPU.

    Attributes:
        diagonal: (units,) of G, by group.
        blocks: symmetric parts of G by the groups whose units they are over, one group after the other.
        gradient: (units,) of g, by group; None where some data had no labels.
        loss: the mean; None likewise.
        count: how many predictions.
        unreached: groups that the outputs do not depend on, and that are in none of the above.
    """

    diagonal: dict[str, Tensor]
    blocks: dict[tuple[str, ...], Tensor]
    gradient: dict[str, Tensor] | None
    loss: float | None
    count: int
    unreached: tuple[str, ...]


class GateSums:
    """Σ f fᵀ in the form asked for, and the gradient."""

    def __init__(self, gates: Sequence[Gate], form: str) -> None:
        self._gates = gates
        self.places = {gate.place for gate in gates}
        sizes = {gate.group: len(gate.indices) for gate in gates}
        ends = np.cumsum(list(sizes.values())).tolist()
        self._spans = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._num_units = sum(sizes.values())
        names = tuple(sizes)
        self._partition = {"dense": [names], "block": [(name,) for name in names]}.get(form, [])
        self._blocks: dict[tuple[str, ...], Tensor] = {}
        self._diagonal: Tensor | None = None
        self._gradient: Tensor | None = None
        self._loss, self._count, self._labelled = 0.0, 0, True
        self._reached: set[str] = set()

    def flow(self, seen: Seen, num: int) -> Tensor:
        """(samples, units) in float64: the derivative of each sample by each gate."""
        device = next(iter(seen.values()))[0].device
        found = torch.zeros(num, self._num_units, dtype=torch.float64, device=device)
        for gate in self._gates:
            activation, gradient = seen[gate.place]
            if gradient is not None:
                self._reached.add(gate.group)
                part = _by_unit(_by_sample(activation, gradient, gate.dim, num), gate.indices)
                found[:, self._spans[gate.group]] += part.to(device) * gate.factor
        return found

    def add(self, flow: Tensor) -> None:
        """One factor of every sample of a piece."""
        diagonal = flow.square().sum(0)
        self._diagonal = diagonal if self._diagonal is None else self._diagonal + diagonal
        for names in self._partition:
            part = flow[:, self._spans[names[0]].start : self._spans[names[-1]].stop]
            if names in self._blocks:
                self._blocks[names].addmm_(part.T, part)
            else:
                self._blocks[names] = part.T @ part

    def add_gradient(self, gradient: Tensor, loss: float) -> None:
        """Sums over a piece."""
        self._gradient = gradient if self._gradient is None else self._gradient + gradient
        self._loss += loss

    def count(self, num: int, *, labelled: bool) -> None:
        """So many predictions were added."""
        self._count += num
        self._labelled = self._labelled and labelled

    def shows(self, seen: Watched, num: int) -> bool:
        """Whether what passes can be cut into samples along its first dimension."""
        return all(
            tensor.dim() > 1 and len(tensor) % num == 0 and gate.dim % tensor.dim() != 0
            for gate in self._gates
            for tensor, _ in [seen[gate.place]]
        )

    def tells_apart(self, seen: Watched, outputs: Tensor, num: int) -> bool:
        """Whether a backward of the first sample comes back to the first sample alone."""
        if not self.shows(seen, num) or len(outputs) % num:
            return False
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
        probe[len(outputs) // num :] = 0
        found = gradients_at(seen, outputs, probe, again=True)
        return not any(
            bool(gradient[len(gradient) // num :].any())
            for _, gradient in found.values()
            if gradient is not None
        )

    def mean(self) -> GateCurvature:
        """Over all that was added."""
        if not self._count or self._diagonal is None:
            raise DataError(
                "Asked for the curvature of gates and found no samples: the batches are empty or were used up by an "
                "earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
            )
        if not bool(self._diagonal.isfinite().all()):
            raise NonFiniteError(
                "The curvature by gates is not finite: a derivative overflowed, or an operation has none at this point "
                "(sqrt or norm at 0). Try float32 instead of half precision, and look for NaN in weights and data."
            )
        known = self._gradient is not None and self._labelled
        return GateCurvature(
            self._by_group(self._diagonal),
            dict(self._reached_blocks()),
            self._by_group(self._gradient) if known and self._gradient is not None else None,
            self._loss / self._count if known else None,
            self._count,
            tuple(name for name in self._spans if name not in self._reached),
        )

    def _by_group(self, total: Tensor) -> dict[str, Tensor]:
        mean = (total / self._count).cpu()
        reached = {name: span for name, span in self._spans.items() if name in self._reached}
        return {name: mean[span].clone() for name, span in reached.items()}

    def _reached_blocks(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for names, block in self._blocks.items():
            start = self._spans[names[0]].start
            reached = tuple(name for name in names if name in self._reached)
            if len(reached) < len(names):
                spans = [self._spans[name] for name in reached]
                at = torch.cat([torch.arange(s.start - start, s.stop - start) for s in spans])
                block = block[at.to(block.device)][:, at.to(block.device)]
            if reached:
                yield reached, block.cpu().div_(self._count)


def _by_sample(activation: Tensor, gradient: Tensor, dim: int, num: int) -> Tensor:
    """(samples, entries): a ⊙ ∂/∂a along `dim`, summed over positions."""
    wide = torch.promote_types(activation.dtype, torch.float32)
    flow = (activation.to(wide) * gradient.to(wide)).movedim(dim, -1)
    return flow.reshape(num, -1, flow.shape[-1]).sum(1).double()


def _by_unit(lines: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """(samples, units): sums over each unit's entries, every entry once."""
    found = lines[:, torch.as_tensor(indices, device=lines.device)]
    repeated = np.zeros(indices.shape, dtype=bool)
    repeated[:, 1:] = indices[:, 1:] == indices[:, :-1]
    return found.masked_fill(torch.as_tensor(repeated, device=lines.device), 0).sum(-1)
