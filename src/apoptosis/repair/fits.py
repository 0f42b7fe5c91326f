"""One layer on its way to new weights: what batches show of it, the equations they make, and what these ask for.

Sums are taken of two halves of the samples (`normal_equations`), and of no more places than make a difference. A layer
may see samples in any dimension, or flattened. No sample is in both halves: its tokens say much the same, and a penalty
that some of them choose for the others is too small. At first the target is what the dense network has there; then,
where a ReLU follows, as much of it as that shows (`targets`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.linear_maps import add_, as_inputs, as_matrix, enough_places, pairs
from apoptosis.errors import NonFiniteError
from apoptosis.repair.normal_equations import NormalEquations
from apoptosis.repair.reaching import Passed
from apoptosis.repair.targets import Target

__all__ = ["Fit", "LayerFit", "samples_of_rows"]

ENOUGH, FEWEST_PLACES = 128, 8
"""Equations for each unknown of an output, and places of each sample: more change a fit by less than it misses by far.
All samples count where there is room for them: places of one say much the same."""


@dataclass(frozen=True)
class LayerFit:
    """How much of what the dense network has there was missed, before and after: Σ‖missing‖² / Σ‖wanted‖².

    Of what becomes of the outputs (`targets`), as far as a ReLU shows it; `after` is then a bound from above.
    """

    path: str
    before: float
    after: float


class Fit:
    """A layer on its way to new weights: sums, the change of z that they ask for, and with which penalty."""

    def __init__(self, target: Target, num_batches: float | None) -> None:
        """`num_batches`: how often as much as the first batch will come, where that is known."""
        self.target = target
        self._num_batches = num_batches
        self._most_places: int | None = None
        self.sums = NormalEquations()
        self.change: Tensor | None = None
        self.ridge: float | None = None
        self._before = self._wanted = 0.0
        self._count_anew()

    def begin_again(self, *, alike: bool) -> None:
        """Data come once more, the same in the same order if `alike`."""
        self.sums.begin_again(alike=alike)
        self._count_anew()

    def _count_anew(self) -> None:
        """No samples so far; a batch whose samples cannot be told apart will be counted as one."""
        self._num_owners = 0
        # A batch alone has no other to be held against, so it is worth a guess: in most networks samples come first.
        # What later batches show is forgotten as well: the same data are to make the same halves.
        is_alone = self._num_batches is not None and self._num_batches < 2
        self._sample_dim = 0 if is_alone else None

    def add(self, ours: Passed, theirs: Passed) -> None:
        """What a batch shows; the first time to come as near as can be, then as far as it is seen."""
        module, views = self.target.module, self.target.views(ours, theirs)
        given = as_inputs(module, ours.given)
        num_samples = ours.num_samples or len(given)
        if self._most_places is None and self._num_batches is not None:
            self._most_places = self._places_of_each(self._num_batches * num_samples)
        each = max(1, len(given) // num_samples)  # rows, which share the places of their sample
        most = None if self._most_places is None else ceil(self._most_places / each)
        for half, rows in self._halves(tuple(ours.given.shape[: 1 - given.ndim]), ours.num_samples):
            some = (own[rows] for own in (given, *views))
            for inputs, *own in pairs(module, *some, generator=self.sums.generator, most=most):
                self._add(half, inputs, *self.target.sums(*own))

    def _add(self, half: int, inputs: Tensor, now: Tensor, wanted: Tensor) -> None:
        if self.change is None:
            self.sums.add(inputs, wanted - now, half)
            self._before += _squares(self.target.as_far_as_seen(wanted, now) - now)
            self._wanted += _squares(self.target.seen(wanted))
        else:
            there = now + self.change @ inputs
            self.sums.add(inputs, self.target.as_far_as_seen(wanted, there) - now, half)

    def _places_of_each(self, num_samples: float) -> int:
        """Of each sample, so that there are equations enough for each unknown of an output."""
        module: Any = self.target.module
        wanted = ENOUGH * (as_matrix(module, module.weight).shape[2] + 1) / num_samples
        return max(FEWEST_PLACES, min(ceil(wanted), enough_places(module)))

    def _halves(
        self, leading: tuple[int, ...], num_samples: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows of every second sample, however data are cut into batches; of every second batch if need be."""
        rows = torch.arange(prod(leading))
        if not len(rows):
            return
        if leading.count(num_samples) == 1:
            self._sample_dim = leading.index(num_samples)
        owners = samples_of_rows(leading, num_samples, self._sample_dim)
        before, num = self._num_owners, 1 if owners is None else int(owners.max()) + 1
        self._num_owners += num
        if owners is None:
            yield before % 2, rows
            return
        step = 1 if self._most_places is None else max(1, len(rows) // num // self._most_places)
        # Sample by sample: every so many rows as they lie might be all of some samples, and none of the others.
        counted = owners.argsort(stable=True)[::step]
        for half in (0, 1):
            own = counted[(owners[counted] + before) % 2 == half]
            if len(own):
                yield half, own

    def solve(self, ridge: float | None, kept: Tensor | None) -> None:
        """Set the change."""
        if not self.sums.is_finite:
            raise NonFiniteError(
                f"Layer {self.target.layer.path!r} was to be fitted, and NaN or infinity passes it in the dense or the "
                "small network. Look for bad values in the data, or for a network that overflows its number type."
            )
        module: Any = self.target.module
        has_bias = module.bias is not None
        if self.ridge is None:
            self.ridge = self.sums.best_ridge(kept, has_bias=has_bias) if ridge is None else ridge
        self.change = self.sums.solve(self.ridge, kept, has_bias=has_bias)

    def apply_(self) -> LayerFit:
        """Change the layer, and tell how well it went."""
        assert self.change is not None, "it was solved"
        add_(self.target.module, self.target.as_weights(self.change))
        wanted = self._wanted or 1.0
        after = self.sums.left(self.change) / wanted
        return LayerFit(self.target.layer.path, self._before / wanted, after)


def samples_of_rows(
    leading: Sequence[int], num_samples: int | None, sample_dim: int | None = None
) -> Tensor | None:
    """Of each row of what a layer is given the number of its sample in the batch; None where that cannot be told.

    A dimension of just as many is that of the samples. Where there is none, they may be flattened into the first, each
    in one piece.

    Args:
        leading: the dimensions that count rows, all but those of one row.
        num_samples: of the batch.
        sample_dim: where samples are if several dimensions are of just as many.

    >>> samples_of_rows((2, 3), 3).tolist()  # tokens first
    [0, 1, 2, 0, 1, 2]
    """
    rows = torch.arange(prod(leading))
    if num_samples == 1:
        return torch.zeros_like(rows)
    if not leading or not num_samples:
        return None
    dims = [dim for dim, size in enumerate(leading) if size == num_samples]
    if len(dims) > 1:
        dims = [dim for dim in dims if dim == sample_dim]
    elif not dims and not leading[0] % num_samples:
        return rows // (len(rows) // num_samples)
    return rows // prod(leading[dims[0] + 1 :]) % num_samples if dims else None


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum())
