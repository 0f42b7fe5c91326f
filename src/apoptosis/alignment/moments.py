"""Second moments of what passes the slots of heads, over all data: what decides which dimensions carry much.

Every position that passes counts, those of padding too: a layer in the middle of a network cannot be told which
positions its outputs will be read at, and `Task.rows` speaks of predictions, not of positions inside.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.alignment.bonds import Slot
from apoptosis.alignment.quiet import quietly
from apoptosis.errors import DataError, NonFiniteError
from apoptosis.passing import passing
from apoptosis.progress import track
from apoptosis.structure import Example
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["Moments", "moments_of"]

SAMPLES = 2
"""In an example of the data: code may squeeze a batch of one."""


class Moments:
    """Second moments of slots, (heads, units, units) in float64, summed over all that passes."""

    def __init__(self) -> None:
        self._sums: dict[Slot, Tensor] = {}

    def add(self, slot: Slot, passed: Tensor) -> None:
        """What one call shows."""
        entries = torch.from_numpy(slot.entries).to(passed.device)
        lines = passed.detach().movedim(slot.dim, -1).flatten(0, -2)[:, entries].double()
        products = torch.einsum("phu,phv->huv", lines, lines)
        self._sums[slot] = self._sums[slot] + products if slot in self._sums else products

    def __contains__(self, slot: Slot) -> bool:
        """Whether anything passed there."""
        return slot in self._sums

    def of(self, slot: Slot) -> Tensor:
        """The sum of a slot that saw something."""
        return self._sums[slot]

    def check_finite(self) -> None:
        """Refuse data or networks that make no numbers.

        Raises:
            NonFiniteError: NaN or infinity passes a slot.
        """
        for slot, own in self._sums.items():
            if not bool(own.isfinite().all()):
                raise NonFiniteError(
                    f"NaN or infinity passes layer {slot.module!r}. Look for bad values in the data, or for a network "
                    "that overflows its number type."
                )


def moments_of(
    model: nn.Module, slots: Iterable[Slot], batches: Iterable[Batch], task: Task
) -> tuple[Moments, Example]:
    """What passes the slots of a network, and a few of the longest samples there were.

    The longest, since a sequence of one position shows nothing of queries and keys; then it does not matter either in
    which order batches come.

    Raises:
        DataError: there are no samples.
        NonFiniteError: NaN or infinity passes a slot.
    """
    found, example, longest = Moments(), None, 0
    with quietly(model), ExitStack() as stack:
        for slot in slots:
            stack.enter_context(_seeing(model.get_submodule(slot.module), slot, found))
        for batch in track(batches, "what heads carry"):
            if not any(tensor.numel() for tensor in tensors_in(batch)):
                continue
            few = task.inputs(next(iter(task.split(batch, SAMPLES))))
            length = sum(tensor.numel() for tensor in tensors_in(few))
            if example is None or length > longest:
                example, longest = Example(*few).map(Tensor.clone), length
            args, kwargs = tree_map_only(Tensor, Tensor.clone, task.inputs(batch))
            model(*args, **kwargs)
    if example is None:
        raise DataError(
            "Attention heads were to be aligned and saw no samples: the batches are empty or were used up by an "
            "earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    found.check_finite()
    return found, example


def _seeing(module: nn.Module, slot: Slot, moments: Moments) -> AbstractContextManager[None]:
    """Add up what the first tensor of each call shows of a slot."""

    def see(passed: Any) -> None:
        moments.add(slot, next(tensors_in(passed)))

    return passing(module, slot.side, see)
