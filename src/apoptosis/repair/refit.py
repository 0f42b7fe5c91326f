"""`Refit`: layers get new weights by least squares, one after the other, so that they give what the dense ones gave.

For each layer, in the order they run: what the dense network has there (the rows that are left; after norms and sums,
before the activation: `targets`) is the target; what the small network, mended up to here, sends into the layer is the
input. Over all positions of all samples

    least  Σ ‖y_dense[rows] − W' x_small − b'‖²  +  λ ‖W' − W‖²

by the normal equations (`normal_equations`), streamed. With all layers before it unchanged and λ → 0, a layer that lost
the inputs C gets  W'_K = W_K + W_C A_CK A_KK⁻¹,  A = Σ x xᵀ of the dense network: the best that K can do for C. Going
on through the layers after it, each mends what is left of the error of those before, the head last.

No labels, no gradients. Where what is alive at one layer fits in memory for all data, both networks run over them
once, in step (`lockstep`). Else there is a pass for each stage (layers that read the same tensor), in which both run as
far as the layer: for L stages about L/2 forwards of both, and the memory of one batch of activations. Either way n²
numbers, and positions · n² multiplications in float64, for a layer of n inputs (a kernel's places counted).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.curvature.linear_maps import as_matrix, is_product
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.masks import MaskPlan, masks_of
from apoptosis.progress import track
from apoptosis.repair.fits import Fit, LayerFit
from apoptosis.repair.lockstep import OutOfStepError, march
from apoptosis.repair.reaching import Passed, quietly, reach, shadow
from apoptosis.repair.survey import Layer, check_are_modules, check_fits, look_around
from apoptosis.repair.targets import Target
from apoptosis.structure import Plan, copy_with
from apoptosis.task import Batch, Task

__all__ = ["LayerFit", "Refit", "Refitted"]

SCOPES = ("every", "consumers")
SAME = 1e-3
"""How far two runs may end from each other, relative: kernels of a GPU may differ so; mixed batches end elsewhere."""
Stages: TypeAlias = list[tuple[Layer, ...]]
Both: TypeAlias = tuple[Passed, Passed]
"""What passes a layer of the small network, and of the dense one."""
Seen: TypeAlias = Mapping[str, Both]
"""What a batch shows of layers, by path."""


@dataclass(frozen=True, eq=False)
class Refitted:
    """The mended network, its layers in the order they were fitted, and why others were left alone."""

    model: nn.Module
    layers: tuple[LayerFit, ...]
    left_alone: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Refit:
    """A repair: new weights by least squares, layer by layer. See the module's docstring.

    Attributes:
        scope: `every` layer whose outputs are not the dense ones any more, or only `consumers`, which read removed
            units.
        ridge: λ, in parts of the mean square of what a layer reads; unless given, for each layer what half of the data
            says of the other half.
        rounds: how often a layer ahead of a ReLU is fitted again with regard to what that will show.
    """

    scope: Literal["every", "consumers"] = "every"
    ridge: float | None = None
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError(f"scope={self.scope!r} was asked for; there are {', '.join(SCOPES)}.")
        if self.ridge is not None and not 0 <= self.ridge < float("inf"):
            raise ConfigError(f"ridge={self.ridge!r} was asked for; it is a number from 0 on.")
        if not isinstance(self.rounds, int) or self.rounds < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"rounds={self.rounds!r} was asked for; it is a whole number from 0 on."
            )

    def __call__(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task | None = None,
    ) -> nn.Module:
        """A copy of `small` with fitted layers; raises what `fitted` raises."""
        return self.fitted(dense, small, plan, batches, task).model

    def check(self, dense: nn.Module, small: nn.Module) -> None:
        """Refuse networks without layers, as `fitted` would; `prune` asks as soon as it has a network."""
        check_are_modules(dense, small)

    def fitted(
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task | None = None,
    ) -> Refitted:
        """The same, and how well each layer could be fitted.

        Raises:
            DataError: there are no samples.
            ModelError: the network is a program, or no layer that should be fitted can be.
            NonFiniteError: NaN or infinity passes a layer.
            PlanMismatchError: the plan does not lead from `dense` to `small`.
        """
        check_are_modules(dense, small)
        check_fits(dense, small, plan)
        task = task or Task.classification()
        dense = shadow(dense)
        try:
            return self._fitted(dense, small, plan, batches, task, self._in_step)
        except OutOfStepError:
            return self._fitted(dense, small, plan, batches, task, self._by_stages)

    def _fitted(  # noqa: PLR0913 - what a repair is given, and the way to go
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task,
        way: "Callable[[_Networks, Stages, Iterable[Batch]], list[LayerFit]]",
    ) -> Refitted:
        mended = copy_with(small, {})
        with quietly(dense, mended):
            around = look_around(dense, mended, plan, _first(batches), task)
            stages = [self._asked(stage) for stage in around.stages]
            left_alone = dict(around.left_alone)
            if not any(stages):
                _refuse_if_needed(plan, left_alone)
            networks = _Networks(dense, mended, task, left_alone)
            layers = way(networks, [own for own in stages if own], batches)
        return Refitted(mended, tuple(layers), left_alone)

    def _in_step(
        self, networks: "_Networks", stages: Stages, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """All layers in one pass (`lockstep`)."""
        layers = [layer for stage in stages for layer in stage]
        found: list[LayerFit] = []
        with march(networks.dense, networks.mended, layers, batches, networks.task) as going:
            for stop in track(going.stops(), "refitting layers", len(layers)):
                seen = [{stop.layer.path: both} for both in stop.batches]
                sizes = [own.made.numel() for own, _ in stop.batches if own.made.numel()]
                num = sum(sizes) / sizes[0] if sizes else None
                reading = _Reading(lambda seen=seen: seen, num, alike=True)
                if fits := self._fit_(networks, (stop.layer,), reading):
                    found += fits
                    going.renew()
            ends = going.ends()
        networks.check(*ends)
        return found

    def _by_stages(
        self, networks: "_Networks", stages: Stages, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """A pass for each stage, and for each round, up to its layers: bounded memory, whatever the data."""
        found: list[LayerFit] = []
        num = length_hint(batches) or None
        for stage in track(stages, "refitting layers"):
            reading = _Reading(partial(networks.passing, stage, batches), num, alike=False)
            found += self._fit_(networks, stage, reading)
        return found

    def _fit_(
        self, networks: "_Networks", stage: tuple[Layer, ...], reading: "_Reading"
    ) -> list[LayerFit]:
        """Solve for the layers of a stage, and change them."""
        fits = networks.gathered(stage, reading)
        self._solve(networks, fits.values())
        for _ in range(self.rounds):
            again = {path: fit for path, fit in fits.items() if fit.target.outlet.rectified}
            if not again:
                break
            for fit in again.values():
                fit.begin_again(alike=reading.alike)
            for path, both in _each(reading.seen(), again):
                again[path].add(*both)
            self._solve(networks, again.values())
        return [fit.apply_() for fit in fits.values()]

    def _solve(self, networks: "_Networks", fits: Iterable[Fit]) -> None:
        for fit in fits:
            fit.solve(self.ridge, _kept(networks.mended, fit.target.layer.path))

    def _asked(self, stage: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Layers within the scope; without rounds as if no ReLU came after them."""
        own = [layer for layer in stage if self.scope == "every" or layer.reads_removed]
        return tuple(own if self.rounds else (layer.without_relu() for layer in own))


@dataclass(frozen=True)
class _Reading:
    """Data to be read again and again: how often as much as the first batch, if that is known.

    `alike` if they come the same each time. Those of a caller may not: a loader may shuffle, and augment.
    """

    seen: Callable[[], Iterable[Seen]]
    num_batches: float | None
    alike: bool


@dataclass(frozen=True)
class _Networks:
    """Both networks, and why layers are left alone."""

    dense: nn.Module
    mended: nn.Module
    task: Task
    left_alone: dict[str, str]

    def passing(self, stage: tuple[Layer, ...], batches: Iterable[Batch]) -> Iterator[Seen]:
        """Run both as far as a stage, batch by batch; layers that a batch does not reach are not there."""
        targets = [Target.of(own, self.dense, self.mended) for own in stage]
        there = {own.layer.path: own.watched(self.dense, own.layer.target) for own in targets}
        here = {own.layer.path: own.watched(self.mended, own.layer.path) for own in targets}
        for batch in batches:
            theirs = reach(self.dense, there, batch, self.task)
            ours = reach(self.mended, here, batch, self.task)
            yield {path: (ours[path], theirs[path]) for path in ours if path in theirs}

    def gathered(self, stage: tuple[Layer, ...], reading: _Reading) -> dict[str, Fit]:
        """What data show of layers that need fitting and can be fitted; why others cannot is noted."""
        targets = [Target.of(own, self.dense, self.mended) for own in stage]
        fits = {own.layer.path: Fit(own, reading.num_batches) for own in targets}
        for path, both in _each(reading.seen(), fits):
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

    def _is_to_be_fitted(self, fit: Fit, ours: Passed, theirs: Passed) -> bool:
        is_first = not fit.sums.count
        if why := _why_not(fit.target, ours, theirs, is_first=is_first):
            self.left_alone[fit.target.layer.path] = why
            return False
        return not (is_first and _is_same(fit.target, ours, theirs))

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


def _each(reading: Iterable[Seen], fits: Mapping[str, Fit]) -> Iterator[tuple[str, Both]]:
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
    """Up to the rounding of sums in another order: nothing ahead of the layer has changed."""
    views = target.views(ours, theirs)
    room = 64 * torch.finfo(ours.made.dtype).eps
    return all(
        bool((wanted - own).abs().max() <= room * wanted.abs().max())
        for own, wanted in zip(views[::2], views[1::2], strict=True)
    )


def _kept(mended: nn.Module, path: str) -> Tensor | None:
    """Which weights of a layer are not masked, as (g, m, n); None where all stay."""
    masks, name = masks_of(mended), f"{path}.weight".removeprefix(".")
    own = masks.masks.get(name) if masks is not None else None
    module: Any = mended.get_submodule(path)
    return None if own is None else as_matrix(module, own.kept().to(module.weight.device))


def _first(batches: Iterable[Batch]) -> Batch:
    if iter(batches) is batches:
        raise DataError(
            "Layers were to be fitted anew on batches that can be read only once. Give batches that can be iterated "
            "again, such as a list or a DataLoader."
        )
    for batch in batches:
        return batch
    raise DataError(
        "Layers were to be fitted anew and there are no batches. Give some of the data, labelled or not."
    )


def _refuse_if_needed(plan: Plan | MaskPlan, left_alone: dict[str, str]) -> None:
    removes = bool(plan.tensors) if isinstance(plan, Plan) else bool(plan.masks)
    if removes:
        listed: Iterator[str] = (f"{path!r}: {why}" for path, why in left_alone.items())
        raise ModelError(
            "Layers were to be fitted anew, and none that should be can be. "
            f"{'; '.join(listed) or 'The plan takes no inputs from any layer'}. Use the repair 'distil' instead."
        )
