"""One layer on its way to new weights: what batches show of it, the equations they make, and what these ask for.

Sums are taken of two halves of the samples (`normal_equations`), and of no more places than make a difference. At first
the target is what the dense network has there; then, where a ReLU follows, as much of it as that shows (`targets`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from apoptosis.curvature.linear_maps import add_, as_inputs, as_matrix, enough_places, pairs
from apoptosis.errors import NonFiniteError
from apoptosis.repair.normal_equations import NormalEquations
from apoptosis.repair.reaching import Passed
from apoptosis.repair.targets import Target

__all__ = ["Fit", "LayerFit"]

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
        self._num_samples = 0

    def begin_again(self, *, alike: bool) -> None:
        """Data come once more, the same in the same order if `alike`."""
        self.sums.begin_again(alike=alike)
        self._num_samples = 0

    def add(self, ours: Passed, theirs: Passed) -> None:
        """What a batch shows; the first time to come as near as can be, then as far as it is seen."""
        module, views = self.target.module, self.target.views(ours, theirs)
        given = as_inputs(module, ours.given)
        if self._most_places is None and self._num_batches is not None:
            self._most_places = self._places_of_each(self._num_batches * len(ours.given))
        for half, rows in self._halves(len(ours.given), len(given)):
            some = (own[rows] for own in (given, *views))
            for inputs, *own in pairs(
                module, *some, generator=self.sums.generator, most=self._most_places
            ):
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

    def _halves(self, num_samples: int, num_rows: int) -> Iterator[tuple[int, Tensor]]:
        """Rows of every second sample, however data are cut into batches; a sample may be several rows."""
        each = max(1, num_rows // max(1, num_samples))
        owners = torch.arange(num_rows) // each + self._num_samples
        self._num_samples += -(-num_rows // each)
        step = 1 if self._most_places is None else max(1, each // self._most_places)
        counted = torch.arange(num_rows) % step == 0
        for half in (0, 1):
            rows = ((owners % 2 == half) & counted).nonzero()[:, 0]
            if len(rows):
                yield half, rows

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


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum())
