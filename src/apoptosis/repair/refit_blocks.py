"""`RefitBlocks`: blocks get new weights, one after the other, so that they give what the dense ones gave.

`Refit` fits layers one by one, each as well as a linear map can. What is left is more than that: a block of several
layers, changed together, comes nearer to the dense block than each of them alone. So, after `Refit`, block by block
(`blocks`) and in the order they run, all weights inside are fitted to the block's dense sum by a few hundred steps on
small batches (`block_fits`); layers in no block, the head above all, by least squares as before. Every block sees what
the mended ones before it send, and takes back what is left of their errors.

No labels, and no gradient through more than a block. Both networks run over the data once, in step (`lockstep`); a
block's steps cost about three forwards of it each. Where runs cannot be kept in step, there is a pass for each block,
on as much of the data as memory has room for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import nn

from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import MaskPlan
from apoptosis.modes import outside_inference_mode
from apoptosis.progress import track
from apoptosis.repair.block_fits import Descent, fit_block_
from apoptosis.repair.blocks import Block, find_blocks
from apoptosis.repair.fits import LayerFit
from apoptosis.repair.lockstep import OutOfStepError, Stop, march, num_bytes
from apoptosis.repair.memory import Pieces, in_smaller_batches, room_on
from apoptosis.repair.networks import Both, Networks, first_batch
from apoptosis.repair.reaching import quietly, shadow
from apoptosis.repair.refit import Refit, Refitted
from apoptosis.repair.survey import Layer, check_are_modules, check_fits, look_around
from apoptosis.structure import Plan, copy_with
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["RefitBlocks"]

Stages: TypeAlias = list[Block | tuple[Layer]]


@dataclass(frozen=True, kw_only=True)
class RefitBlocks:
    """A repair: new weights by steps on each block's own error. See the module's docstring.

    Attributes:
        epochs: of each block, how often its steps go through the data.
        batch_size: samples of one step; batches that are given smaller stay so.
        learning_rate: of the longest steps, in parts of a layer's root mean square weight.
        seed: of the order of the steps.
    """

    epochs: int = 10
    batch_size: int = 50
    learning_rate: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if not isinstance(number := getattr(self, name), int) or number < 1:
                raise ConfigError(
                    f"{name}={number!r} was asked for; it is a whole number from 1 on."
                )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(
                f"learning_rate={self.learning_rate!r} was asked for; it is a number above 0."
            )

    @one_at_a_time
    def __call__(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task | None = None,
    ) -> nn.Module:
        """A copy of `small` with fitted blocks; raises what `fitted` raises."""
        return self.fitted(dense, small, plan, batches, task).model

    def check(self, dense: nn.Module, small: nn.Module) -> None:
        """Refuse networks without layers, as `fitted` would; `prune` asks as soon as it has a network."""
        check_are_modules(dense, small)

    @outside_inference_mode
    def fitted(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task | None = None,
    ) -> Refitted:
        """The same, and how well each block, or layer in no block, could be fitted.

        Raises:
            DataError: there are no samples.
            ModelError: the network is a program, or nothing in it is a block.
            NonFiniteError: NaN or infinity passes a block.
            PlanMismatchError: the plan does not lead from `dense` to `small`.
        """
        check_are_modules(dense, small)
        check_fits(dense, small, plan)
        task = task or Task.classification()
        dense = shadow(dense)

        def go(pieces: Iterable[Batch]) -> Refitted:
            assert isinstance(pieces, Pieces), "smaller batches are pieces too"
            try:
                return self._fitted(dense, small, plan, pieces, self._in_step)
            except OutOfStepError:
                return self._fitted(dense, small, plan, pieces, self._by_passes)

        pieces = Pieces(batches, task, self.batch_size)
        return in_smaller_batches(go, pieces, task, "Blocks were to be fitted anew")

    def _fitted(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        pieces: Pieces,
        way: Callable[[Networks, Stages, Pieces], list[LayerFit]],
    ) -> Refitted:
        mended = copy_with(small, {})
        with quietly(dense, mended):
            around = look_around(
                dense, mended, plan, first_batch(pieces, of=pieces.batches), pieces.task
            )
            stages = find_blocks(around.layers, around.repeatable.__contains__)
            if not any(isinstance(own, Block) for own in stages):
                _refuse(around.left_alone)
            networks = Networks(dense, mended, pieces.task, dict(around.left_alone))
            found = way(networks, stages, pieces)
        return Refitted(mended, tuple(found), networks.left_alone)

    def _in_step(self, networks: Networks, stages: Stages, pieces: Pieces) -> list[LayerFit]:
        """All in one pass (`lockstep`)."""
        found: list[LayerFit] = []
        known = {own.station.path: own for stage in stages for own in _each(stage)}
        stations = [own.station for own in known.values()]
        with march(networks.dense, networks.mended, stations, pieces, networks.task) as going:
            for stop in track(going.stops(), "refitting blocks", len(stations)):
                own = known[stop.station.path]
                if isinstance(own, Block):
                    fit = partial(self._fit_at_, own, networks)
                    found += going.with_room(stop, fit)
                elif fits := going.with_room(
                    stop, partial(Refit().fit_at_, layer=own, networks=networks)
                ):
                    found += fits
                    going.renew()
            ends = going.ends()
        networks.check(*ends)
        return found

    def _by_passes(self, networks: Networks, stages: Stages, pieces: Pieces) -> list[LayerFit]:
        """A pass for each."""
        found: list[LayerFit] = []
        for own in track(stages, "refitting blocks"):
            if isinstance(own, Block):
                found += self._fit_(own, networks, _as_many_as_fit(own, networks, pieces))
            else:
                found += Refit().fit_by_passes_(own, networks, pieces)
        return found

    def _fit_at_(self, block: Block, networks: Networks, stop: Stop) -> list[LayerFit]:
        return self._fit_(block, networks, stop.batches)

    def _fit_(self, block: Block, networks: Networks, pieces: Iterable[Both]) -> list[LayerFit]:
        descent = Descent(self.epochs, self.learning_rate, self.seed)
        fit = fit_block_(block, networks, list(pieces), descent)
        return [] if fit is None else [fit]


def _each(stage: Block | tuple[Layer]) -> Iterable[Block | Layer]:
    return (stage,) if isinstance(stage, Block) else stage


def _as_many_as_fit(block: Block, networks: Networks, pieces: Pieces) -> Iterator[Both]:
    """What passes a block in a run over the data, until memory is full."""
    room = room_on(next(networks.mended.parameters()).device)
    for seen in networks.passing([block.station], pieces):
        if block.path in seen:
            yield (both := seen[block.path])
            room -= sum(num_bytes(own) for own in both)
            if room < 0:
                return


def _refuse(left_alone: dict[str, str]) -> None:
    listed = "; ".join(f"{path!r}: {why}" for path, why in left_alone.items())
    raise ModelError(
        "Blocks were to be fitted anew, and the network has none: modules that are called once and hold several layers "
        f"that can be fitted. {listed or 'It has one layer'}. Use the repairs 'refit' or 'distil' instead."
    )
