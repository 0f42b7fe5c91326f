"""`Refit`: layers get new weights by least squares, one after the other, so that they give what the dense ones gave.

For each layer, in the order they run: what the dense layer gives (the rows that are left, before the activation) is the
target; what the small network, mended up to here, sends into the layer is the input. Over all positions of all samples

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
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.curvature.linear_maps import add_, as_matrix, as_outputs, is_product, pairs
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.masks import MaskPlan, masks_of
from apoptosis.progress import track
from apoptosis.repair.lockstep import OutOfStepError, march
from apoptosis.repair.normal_equations import NormalEquations
from apoptosis.repair.reaching import Passed, quietly, reach, shadow
from apoptosis.repair.survey import Layer, check_are_modules, check_fits, look_around
from apoptosis.structure import Plan, copy_with
from apoptosis.task import Batch, Task

__all__ = ["LayerFit", "Refit", "Refitted"]

SCOPES = ("every", "consumers")
SAME = 1e-3
"""How far two runs may end from each other, relative: kernels of a GPU may differ so; mixed batches end elsewhere."""
Stages: TypeAlias = list[tuple[Layer, ...]]


@dataclass(frozen=True)
class LayerFit:
    """How much of the dense layer's outputs was missed, before and after: Σ‖missing‖² / Σ‖wanted‖²."""

    path: str
    before: float
    after: float


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
        ridge: λ, in parts of the mean square of what a layer reads.
    """

    scope: Literal["every", "consumers"] = "every"
    ridge: float = 1e-4

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError(f"scope={self.scope!r} was asked for; there are {', '.join(SCOPES)}.")
        if not 0 <= self.ridge < float("inf"):
            raise ConfigError(f"ridge={self.ridge!r} was asked for; it is a number from 0 on.")

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
            stages = [self._within_scope(stage) for stage in around.stages]
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
                sums = {stop.layer: NormalEquations()}
                for given, made, theirs in stop.batches:
                    networks.add(sums, stop.layer, (given, made), theirs)
                if own := networks.gathered(sums):
                    found.append(self._fit_(networks.mended, stop.layer, own[stop.layer]))
                    going.renew()
            ends = going.ends()
        networks.check(*ends)
        return found

    def _by_stages(
        self, networks: "_Networks", stages: Stages, batches: Iterable[Batch]
    ) -> list[LayerFit]:
        """A pass for each stage, up to its layers: bounded memory, whatever the data."""
        found: list[LayerFit] = []
        for stage in track(stages, "refitting layers"):
            sums = networks.gathered_at(stage, batches)
            found += [self._fit_(networks.mended, layer, own) for layer, own in sums.items()]
        return found

    def _within_scope(self, stage: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(own for own in stage if self.scope == "every" or own.reads_removed)

    def _fit_(self, mended: nn.Module, layer: Layer, sums: NormalEquations) -> LayerFit:
        """Solve, and change the layer."""
        module: Any = mended.get_submodule(layer.path)
        if not sums.is_finite:
            raise NonFiniteError(
                f"Layer {layer.path!r} was to be fitted, and NaN or infinity passes it in the dense or the small "
                "network. Look for bad values in the data, or for a network that overflows its number type."
            )
        change = sums.solve(self.ridge, _kept(mended, layer), has_bias=module.bias is not None)
        add_(module, change)
        wanted = sums.wanted or 1.0
        return LayerFit(layer.path, sums.squares / wanted, sums.left(change) / wanted)


@dataclass(frozen=True)
class _Networks:
    """Both networks, and why layers are left alone."""

    dense: nn.Module
    mended: nn.Module
    task: Task
    left_alone: dict[str, str]

    def gathered_at(
        self, stage: tuple[Layer, ...], batches: Iterable[Batch]
    ) -> dict[Layer, NormalEquations]:
        """The sums of a stage over all data."""
        there = {own.path: self.dense.get_submodule(own.target) for own in stage}
        here = {own.path: self.mended.get_submodule(own.path) for own in stage}
        sums = {own: NormalEquations() for own in stage}
        for batch in batches:
            theirs = reach(self.dense, there, batch, self.task)
            ours = reach(self.mended, here, batch, self.task)
            for layer in [own for own in sums if own.path in theirs and own.path in ours]:
                self.add(sums, layer, ours[layer.path], theirs[layer.path][1])
            if not sums:
                return sums
        return self.gathered(sums)

    def add(
        self, sums: dict[Layer, NormalEquations], layer: Layer, ours: Passed, theirs: Any
    ) -> None:
        """What a batch shows of a layer; one that needs no fitting, or cannot be compared, is taken out of the sums."""
        module: Any = self.mended.get_submodule(layer.path)
        given, made = ours
        if layer not in sums or not made.numel():
            return
        wanted, is_first = _wanted(layer, module, theirs), not sums[layer].count
        if why := _why_not(module, given, made, wanted, is_first=is_first):
            self.left_alone[layer.path] = why
            del sums[layer]
        elif is_first and _is_same(module, made, wanted):
            del sums[layer]
        else:
            _add(sums[layer], module, given, made, wanted)

    def gathered(self, sums: dict[Layer, NormalEquations]) -> dict[Layer, NormalEquations]:
        """Those that have seen something."""
        if sums and not any(own.count for own in sums.values()):
            raise DataError(
                "Layers were to be fitted anew and saw no samples: the batches are empty or were used up by an earlier "
                "loop. Give batches that can be iterated again, such as a list or a DataLoader."
            )
        return {layer: own for layer, own in sums.items() if own.count}

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


def _wanted(layer: Layer, module: nn.Module, given: Any) -> Tensor:
    """What the layer should give, (samples, outputs, positions), in float64."""
    outputs = as_outputs(module, layer.wanted(given)).double()
    if layer.rows is not None:
        outputs = outputs.index_select(1, torch.as_tensor(layer.rows, device=outputs.device))
    return outputs if layer.factors is None else outputs * layer.factors.to(outputs.device)


def _why_not(
    module: nn.Module, given: Tensor, made: Tensor, wanted: Tensor, *, is_first: bool
) -> str | None:
    """Why what passed cannot be fitted."""
    if is_first and made.isfinite().all() and not is_product(module, given, made):
        return f"what {type(module).__name__} gives is not its weight times what it reads"
    found = as_outputs(module, made).shape
    if wanted.shape != found:
        return f"the dense layer gives {tuple(wanted.shape)} where this one gives {tuple(found)}"
    return None


def _is_same(module: nn.Module, made: Tensor, wanted: Tensor) -> bool:
    """Up to the rounding of sums in another order: nothing ahead of the layer has changed."""
    room = 64 * torch.finfo(made.dtype).eps
    return bool((wanted - as_outputs(module, made)).abs().max() <= room * wanted.abs().max())


def _add(
    sums: NormalEquations, module: nn.Module, given: Tensor, made: Tensor, wanted: Tensor
) -> None:
    before = sums.count
    missing = wanted - as_outputs(module, made)
    for inputs, own in pairs(module, given, missing, sums.generator):
        sums.add(inputs, own)
    seen = (sums.count - before) / (len(wanted) * wanted.shape[2])
    sums.wanted += seen * float(wanted.square().sum())


def _kept(mended: nn.Module, layer: Layer) -> Tensor | None:
    """Which weights of the layer are not masked, as (g, m, n); None where all stay."""
    masks, name = masks_of(mended), f"{layer.path}.weight".removeprefix(".")
    own = masks.masks.get(name) if masks is not None else None
    module: Any = mended.get_submodule(layer.path)
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
