"""Both networks side by side: what they show of layers, which of these are to be fitted, and why others are not."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.curvature.linear_maps import is_product
from apoptosis.errors import DataError
from apoptosis.repair.fits import Fit
from apoptosis.repair.lockstep import OutOfStepError
from apoptosis.repair.reaching import Passed, Station, num_samples_of, reach, run
from apoptosis.repair.survey import Layer
from apoptosis.repair.targets import Target
from apoptosis.task import Batch, Task, tensors_in

__all__ = ["Both", "Networks", "Reading", "Seen", "each_of", "first_batch"]

SAME = 1e-3
"""How far two runs may end from each other, relative: kernels of a GPU may differ so; mixed batches end elsewhere."""
Both: TypeAlias = tuple[Passed, Passed]
"""What passes a layer of the small network, and of the dense one."""
Seen: TypeAlias = Mapping[str, Both]
"""What a batch shows of layers, by path."""


@dataclass(frozen=True)
class Reading:
    """Data to be read again and again: how often as much as the first batch, if that is known.

    `alike` if they come the same each time. Those of a caller may not: a loader may shuffle, and augment.
    """

    seen: Callable[[], Iterable[Seen]]
    num_batches: float | None
    alike: bool


@dataclass(frozen=True)
class Networks:
    """Both networks, and why layers are left alone."""

    dense: nn.Module
    mended: nn.Module
    task: Task
    left_alone: dict[str, str]

    def passing(self, stations: Iterable[Station], batches: Iterable[Batch]) -> Iterator[Seen]:
        """Run both as far as some stations, batch by batch; those that a batch does not reach are not there."""
        there = {own.path: own.watched(self.dense, own.target) for own in stations}
        here = {own.path: own.watched(self.mended, own.path) for own in stations}
        for batch in batches:
            theirs = reach(partial(run, self.dense, batch, self.task), there)
            ours = reach(partial(run, self.mended, batch, self.task), here)
            num = num_samples_of(batch, self.task)
            yield {
                path: (replace(own, num_samples=num), theirs[path])
                for path, own in ours.items()
                if path in theirs
            }

    def gathered(self, stage: tuple[Layer, ...], reading: Reading) -> dict[str, Fit]:
        """What data show of layers that need fitting and can be fitted; why others cannot is noted."""
        targets = [Target.of(own, self.dense, self.mended) for own in stage]
        fits = {own.layer.path: Fit(own, reading.num_batches) for own in targets}
        for path in self._unchanged(fits, reading):
            del fits[path]
        for path, both in each_of(reading.seen(), fits):
            if both[0].made.numel() and not self._is_to_be_fitted(fits[path], *both):
                del fits[path]
            elif both[0].made.numel():
                fits[path].add(*both)
        if fits and not any(own.sums.count for own in fits.values()):
            raise DataError(
                "Layers were to be fitted anew and saw no samples: the batches are empty or were used up by an earlier "
                "loop. Give batches that can be iterated again, such as a list or a DataLoader."
            )
        return {path: own for path, own in fits.items() if own.sums.count}

    def _unchanged(self, fits: Mapping[str, Fit], reading: Reading) -> Iterable[str]:
        """Layers that show no difference in any batch: units that have gone may be silent in some."""
        same, seen = dict(fits), set[str]()
        for path, both in each_of(reading.seen(), same):
            if both[0].made.numel():
                seen.add(path)
                if not _is_same(fits[path].target, *both):
                    del same[path]
        return [path for path in same if path in seen]

    def _is_to_be_fitted(self, fit: Fit, ours: Passed, theirs: Passed) -> bool:
        is_first = not fit.sums.count
        if why := _why_not(fit.target, ours, theirs, is_first=is_first):
            self.left_alone[fit.target.layer.path] = why
            return False
        return True

    def check(self, batch: Batch, ours: Any, theirs: Any) -> None:
        """Whether runs in step came to what plain ones come to.

        Raises:
            OutOfStepError: they did not.
        """
        for model, found in ((self.mended, ours), (self.dense, theirs)):
            args, kwargs = tree_map_only(Tensor, Tensor.clone, self.task.inputs(batch))
            want = self.task.outputs(model(*args, **kwargs))
            if not want.numel():
                continue
            room = max(SAME, 1e3 * torch.finfo(want.dtype).eps) * float(want.abs().max())
            if found.shape != want.shape or float((found - want).abs().max()) > room:
                raise OutOfStepError("runs disturb each other")


def each_of(reading: Iterable[Seen], fits: Mapping[str, Fit]) -> Iterator[tuple[str, Both]]:
    """What batches show of layers, as long as some are to be fitted."""
    for batch in reading:
        yield from ((path, both) for path, both in batch.items() if path in fits)
        if not fits:
            return


def _why_not(target: Target, ours: Passed, theirs: Passed, *, is_first: bool) -> str | None:
    """Why what passed cannot be fitted."""
    module, made = target.module, ours.made
    if target.outlet.other is not None and not all(
        isinstance(own.other, Tensor) for own in (ours, theirs)
    ):
        return "what it is added to did not pass where it was to be seen"
    if is_first and made.isfinite().all() and not is_product(module, ours.given, made):
        return f"what {type(module).__name__} gives is not its weight times what it reads"
    found, *others = (tuple(own.shape) for own in target.views(ours, theirs))
    for other in others:
        if other != found:
            return f"the dense network has {other} where this one has {found}"
    return None


def _is_same(target: Target, ours: Passed, theirs: Passed) -> bool:
    """Up to the rounding of sums in another order: nothing ahead of the layer has changed, as far as a batch shows."""
    if _why_not(target, ours, theirs, is_first=False):
        return False
    views = target.views(ours, theirs)
    room = 64 * torch.finfo(ours.made.dtype).eps
    return all(
        bool((wanted - own).abs().max() <= room * wanted.abs().max())
        for own, wanted in zip(views[::2], views[1::2], strict=True)
    )


def first_batch(batches: Iterable[Batch], of: Iterable[Batch] | None = None) -> Batch:
    """To look around with: the first that holds anything, or the first of all; `of` is what they are pieces of.

    Raises:
        DataError: there is none, or the batches can be read only once.
    """
    whole = batches if of is None else of
    if iter(whole) is whole:
        raise DataError(
            "Layers were to be fitted anew on batches that can be read only once. Give batches that can be iterated "
            "again, such as a list or a DataLoader."
        )
    first: list[Batch] = []
    for batch in batches:
        if any(own.numel() for own in tensors_in(batch)):
            return batch
        first.append(batch)
    if first:
        return first[0]
    raise DataError(
        "Layers were to be fitted anew and there are no batches. Give some of the data, labelled or not."
    )
