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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from apoptosis.curvature.linear_maps import as_matrix
from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import MaskPlan, masks_of
from apoptosis.modes import outside_inference_mode
from apoptosis.progress import track
from apoptosis.repair.fits import Fit, LayerFit
from apoptosis.repair.lockstep import OutOfStepError, Stop, march
from apoptosis.repair.memory import in_smaller_batches
from apoptosis.repair.networks import Networks, Reading, each_of, first_batch
from apoptosis.repair.reaching import quietly, shadow
from apoptosis.repair.survey import Layer, check_are_modules, check_fits, look_around
from apoptosis.structure import Plan, copy_with
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["LayerFit", "Refit", "Refitted"]

SCOPES = ("every", "consumers")
Stages: TypeAlias = list[tuple[Layer, ...]]


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

    @one_at_a_time
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

    @outside_inference_mode
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

        def go(batches: Iterable[Batch]) -> Refitted:
            try:
                return self._fitted(dense, small, plan, batches, task, self._in_step)
            except OutOfStepError:
                return self._fitted(dense, small, plan, batches, task, self._by_stages)

        return in_smaller_batches(go, batches, task, "Layers were to be fitted anew")

    def _fitted(  # noqa: PLR0913 - what a repair is given, and the way to go
        self,
        dense: nn.Module,
        small: nn.Module,
        plan: Plan | MaskPlan,
        batches: Iterable[Batch],
        task: Task,
        way: "Callable[[Networks, Stages, Iterable[Batch]], list[LayerFit]]",
    ) -> Refitted:
        mended = copy_with(small, {})
        with quietly(dense, mended):
            around = look_around(dense, mended, plan, first_batch(batches), task)
            stages = [self._asked(stage) for stage in around.stages]
            left_alone = dict(around.left_alone)
            if not any(stages):
                _refuse_if_needed(plan, left_alone)
            networks = Networks(dense, mended, task, left_alone)
            layers = way(networks, [own for own in stages if own], batches)
        return Refitted(mended, tuple(layers), left_alone)

    def _in_step(
        self, networks: "Networks", stages: Stages, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """All layers in one pass (`lockstep`)."""
        layers = {layer.path: layer for stage in stages for layer in stage}
        stations = [layer.station for layer in layers.values()]
        found: list[LayerFit] = []
        with march(networks.dense, networks.mended, stations, batches, networks.task) as going:
            for stop in track(going.stops(), "refitting layers", len(stations)):
                layer = layers[stop.station.path]
                fit = partial(self.fit_at_, layer=layer, networks=networks)
                if fits := going.with_room(stop, fit):
                    found += fits
                    going.renew()
            ends = going.ends()
        networks.check(*ends)
        return found

    def _by_stages(
        self, networks: "Networks", stages: Stages, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """A pass for each stage, and for each round, up to its layers: bounded memory, whatever the data."""
        found: list[LayerFit] = []
        for stage in track(stages, "refitting layers"):
            found += self.fit_by_passes_(stage, networks, batches)
        return found

    def fit_at_(self, stop: Stop, layer: Layer, networks: Networks) -> list[LayerFit]:
        """Fit a layer where all runs have come to it; none if it is left alone."""
        seen = [{layer.path: both} for both in stop.batches]
        sizes = [own.made.numel() for own, _ in stop.batches if own.made.numel()]
        num = sum(sizes) / sizes[0] if sizes else None
        return self._fit_(networks, (layer,), Reading(lambda: seen, num, alike=True))

    def fit_by_passes_(
        self, stage: tuple[Layer, ...], networks: Networks, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """Fit layers that read the same, running both networks as far as these as often as it takes."""
        passing = partial(networks.passing, [layer.station for layer in stage], batches)
        reading = Reading(passing, length_hint(batches) or None, alike=False)
        return self._fit_(networks, stage, reading)

    def _fit_(
        self, networks: "Networks", stage: tuple[Layer, ...], reading: "Reading"
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
            for path, both in each_of(reading.seen(), again):
                if both[0].made.numel():
                    again[path].add(*both)
            self._solve(networks, again.values())
        return [fit.apply_() for fit in fits.values()]

    def _solve(self, networks: "Networks", fits: Iterable[Fit]) -> None:
        for fit in fits:
            fit.solve(self.ridge, _kept(networks.mended, fit.target.layer.path))

    def _asked(self, stage: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Layers within the scope; without rounds as if no ReLU came after them."""
        own = [layer for layer in stage if self.scope == "every" or layer.reads_removed]
        return tuple(own if self.rounds else (layer.without_relu() for layer in own))


def _kept(mended: nn.Module, path: str) -> Tensor | None:
    """Which weights of a layer are not masked, as (g, m, n); None where all stay."""
    masks, name = masks_of(mended), f"{path}.weight".removeprefix(".")
    own = masks.masks.get(name) if masks is not None else None
    module: Any = mended.get_submodule(path)
    return None if own is None else as_matrix(module, own.kept().to(module.weight.device))


def _refuse_if_needed(plan: Plan | MaskPlan, left_alone: dict[str, str]) -> None:
    removes = bool(plan.tensors) if isinstance(plan, Plan) else bool(plan.masks)
    if removes:
        listed: Iterator[str] = (f"{path!r}: {why}" for path, why in left_alone.items())
        raise ModelError(
            "Layers were to be fitted anew, and none that should be can be. "
            f"{'; '.join(listed) or 'The plan takes no inputs from any layer'}. Use the repair 'distil' instead."
        )
