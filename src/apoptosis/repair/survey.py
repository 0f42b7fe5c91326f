"""Which layers can be fitted to the dense network, in the order they run, and which are left alone and why.

One run of both networks tells. A layer is fitted if it is a linear map, is called once, holds its weight by itself, and
the dense network shows what its outputs should be: rows of the dense layer's that the plan has kept. The dense
`nn.MultiheadAttention` does not call its output projection; what comes out of the attention is the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from apoptosis.curvature.linear_maps import (
    MOST_SIDE,
    as_matrix,
    input_dim,
    is_linear_map,
    output_dim,
)
from apoptosis.errors import ModelError, PlanMismatchError
from apoptosis.masks import MaskPlan
from apoptosis.repair.reaching import Station, run
from apoptosis.structure import (
    CutProgram,
    Indices,
    Outlet,
    Plan,
    check_basis,
    find_outlets,
    model_tensors,
)
from apoptosis.task import Batch, Task

__all__ = ["Layer", "Survey", "check_are_modules", "check_fits", "look_around"]

_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device)
_NO_LAYERS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer to be fitted. Its outputs are to be `rows` of what the dense network's module `target` gives."""

    path: str
    target: str
    rows: Indices | None
    factors: Tensor | None
    """Of each output, where the cut has scaled it; (outputs, 1)."""
    reads_removed: bool
    """Whether some of its weights are gone: those of removed inputs, or masked ones."""
    attention: nn.MultiheadAttention | None = None
    """The dense attention around it, where that is the target."""
    outlet: Outlet | None = None
    """What becomes of its outputs, where that is known and the dense network shows the same."""

    @property
    def station(self) -> Station:
        """Where to look at it."""
        return Station(self.path, self.target, self.outlet and self.outlet.other)

    def wanted(self, given: Any) -> Tensor:
        """What the dense module gave, as the layer would give it, all rows."""
        if self.attention is None:
            return given
        mixed: Tensor = given[0]
        if mixed.ndim == 2:
            return mixed[None]
        return mixed if self.attention.batch_first else mixed.transpose(0, 1)

    def without_relu(self) -> "Layer":
        """The same, but for what comes after the sum."""
        kept = self.outlet and replace(self.outlet, rectified=False, most=None)
        return replace(self, outlet=kept)


@dataclass(frozen=True)
class Survey:
    """Stages of layers that read the same tensor, so that none depends on another; and why others are left alone.

    A layer that is added to something begins a stage of its own: that may come from one that reads the same.
    """

    stages: tuple[tuple[Layer, ...], ...]
    left_alone: dict[str, str]
    repeatable: frozenset[str]
    """Modules that both networks call once, with tensors and plain values: a call with the same ones is the same."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """In the order of their calls."""
        return tuple(layer for stage in self.stages for layer in stage)


def look_around(
    dense: nn.Module, small: nn.Module, plan: Plan | MaskPlan, batch: Batch, task: Task
) -> Survey:
    """Run both on a batch."""
    opaque: set[str] = set()
    there, here = (_calls(model, batch, task, opaque) for model in (dense, small))
    found: list[tuple[int, Layer]] = []
    left_alone: dict[str, str] = {}
    cuts = _Cuts(plan, dict(dense.named_modules()), small)
    for path, module in small.named_modules():
        if not _has_matrix(path, module):
            continue
        target, attention = _target(path, there, cuts.dense)
        why = cuts.why_not(path, module) or _why_not_called(here.get(path, []), target)
        if why:
            left_alone[path] = why
        else:
            assert target is not None, "there is a reason otherwise"
            place = here[path][0]
            found.append((place, cuts.layer(path, module, target, attention)))
    outlets = _outlets(small, batch, task, [layer for _, layer in found], there)
    found = [(place, replace(own, outlet=outlets.get(own.path))) for place, own in found]
    order = {path: number for number, path in enumerate(here)}
    found.sort(key=lambda item: order[item[1].path])
    once = {path for path in here if len(here[path]) == 1 == len(there.get(path, []))}
    return Survey(tuple(map(tuple, _staged(found))), left_alone, frozenset(once - opaque))


def _staged(found: list[tuple[int, Layer]]) -> list[list[Layer]]:
    """Layers with the number of the tensor that they read, in the order of their calls."""
    stages: list[list[Layer]] = []
    before: int | None = None
    for place, layer in found:
        is_added = layer.outlet is not None and layer.outlet.other is not None
        if place != before or is_added:
            stages.append([])
        stages[-1].append(layer)
        before = place
    return stages


def _outlets(
    small: nn.Module, batch: Batch, task: Task, layers: list[Layer], there: dict[str, list[int]]
) -> dict[str, Outlet]:
    """Roads of outputs that both networks have alike; what cannot be recorded has none that are known."""
    sample = next(iter(task.split(batch, 1)), None)
    plain = [layer for layer in layers if layer.attention is None and layer.factors is None]
    dims = {own.path: _output_axis(small.get_submodule(own.path)) for own in plain}
    if sample is None or not dims:
        return {}
    try:
        found = find_outlets(small, *task.inputs(sample), dims)
    except Exception:  # noqa: BLE001 - whatever the model's own code may raise when it is looked at
        return {}
    return {
        path: outlet
        for path, outlet in found.items()
        if outlet.other is None or len(there.get(outlet.other.module, [])) == 1
    }


def _output_axis(module: Any) -> int:
    """The dimension of what a layer gives that its outputs run along."""
    return -1 - len(getattr(module, "kernel_size", ()))


def check_are_modules(dense: nn.Module, small: nn.Module) -> None:
    """Refuse programs.

    Raises:
        ModelError: one of them is a program.
    """
    if isinstance(dense, CutProgram) or isinstance(small, CutProgram):
        raise ModelError(
            "Layers were to be fitted anew, and the network was delivered as a program, which has no layers but "
            "operations. Use the repair 'distil', which needs none, or let the code read its sizes from attributes: "
            "`plan.delivery_because` names the line in the way."
        )


def check_fits(dense: nn.Module, small: nn.Module, plan: Plan | MaskPlan) -> None:
    """Whether the plan leads from one to the other.

    Raises:
        PlanMismatchError: it does not.
    """
    if isinstance(plan, Plan):
        check_basis(model_tensors(dense), plan)
    theirs, ours = (dict(m.named_parameters(remove_duplicate=False)) for m in (dense, small))
    shapes = {name: (cut.shape, cut.new_shape) for cut in _tensor_cuts(plan) for name in cut.names}
    for name, tensor in theirs.items():
        before, after = shapes.get(name, (tuple(tensor.shape), tuple(tensor.shape)))
        found = tuple(ours[name].shape) if name in ours else None
        if tuple(tensor.shape) != before or found != after:
            raise PlanMismatchError(
                f"{name!r} has shape {tuple(tensor.shape)} in the dense network and {found or 'no place'} in the small "
                f"one; the plan makes {after} of {before}. Pass the network that was cut, what `cut(dense, plan)` "
                "gave, and the same plan."
            )


class _Cuts:
    """What a plan has taken from layers."""

    def __init__(
        self, plan: Plan | MaskPlan, dense: dict[str, nn.Module], small: nn.Module
    ) -> None:
        self.dense = dense
        self._cuts = {name: cut for cut in _tensor_cuts(plan) for name in cut.names}
        scalings = plan.scalings if isinstance(plan, Plan) else ()
        self._scalings = [(name, scaling) for scaling in scalings for name in scaling.names]
        self._masked = set(plan.masks) if isinstance(plan, MaskPlan) else set[str]()
        self._names: dict[int, list[str]] = {}
        for name, parameter in small.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    def why_not(self, path: str, module: nn.Module) -> str | None:
        """Why the layer's weights are not to be changed."""
        if not is_linear_map(module):
            return f"{type(module).__name__} holds weights in a form that cannot be fitted"
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed from other tensors"
        if not weight.is_floating_point():
            return f"its weight is of type {weight.dtype}"
        if (num := as_matrix(module, weight).shape[2]) > MOST_SIDE:
            return (
                f"it reads {num:,} numbers at once, whose products take {8 * num**2 / 1e9:.0f} GB"
            )
        for own in module.parameters(recurse=False):
            others = [n for n in self._names[id(own)] if n.rpartition(".")[0] != path]
            if others:
                return f"it shares a tensor with {others[0]}"
        turned = output_dim(module) == 1
        if turned and any(name == _joined(path, "weight") for name, _ in self._scalings):
            return "the cut has scaled its inputs"
        return None

    def layer(
        self, path: str, module: Any, target: str, attention: nn.MultiheadAttention | None
    ) -> Layer:
        """With what is kept of its outputs."""
        name = _joined(path, "weight")
        kept = self._cuts[name].kept if name in self._cuts else {}
        factors = None
        for scaled, scaling in self._scalings:
            if scaled == name:
                if factors is None:
                    factors = torch.ones(module.weight.shape[0], 1, dtype=torch.float64)
                factors[torch.as_tensor(scaling.rows)] *= scaling.factor
        reads_removed = input_dim(module) in kept or name in self._masked
        return Layer(path, target, kept.get(output_dim(module)), factors, reads_removed, attention)


def _tensor_cuts(plan: Plan | MaskPlan) -> Iterator[Any]:
    yield from plan.tensors if isinstance(plan, Plan) else ()


def _why_not_called(places: list[int], target: str | None) -> str | None:
    if not places:
        return "it is not called as a module"
    if len(places) > 1:
        return f"it is called {len(places)} times in a run"
    return "the dense network does not call it, or not once" if target is None else None


def _target(
    path: str, there: dict[str, list[int]], dense: dict[str, nn.Module]
) -> tuple[str | None, nn.MultiheadAttention | None]:
    """The dense module that shows what is wanted."""
    if len(there.get(path, [])) == 1:
        return path, None
    around, _, name = path.rpartition(".")
    attention = dense.get(around)
    if name != "out_proj" or not isinstance(attention, nn.MultiheadAttention):
        return None, None
    is_shown = not there.get(path) and len(there.get(around, [])) == 1
    return (around, attention) if is_shown else (None, None)


def _calls(model: nn.Module, batch: Batch, task: Task, opaque: set[str]) -> dict[str, list[int]]:
    """By module, in the order of first calls: for every call, the number of the tensor it read.

    Calls that follow each other may read the same. Modules that are given objects go to `opaque`: a cache grows
    whenever it is handed over.
    """
    found: dict[str, list[int]] = {}
    last: list[Any] = [None, None, 0]

    def watching(path: str, counted: bool) -> Callable[..., None]:  # noqa: FBT001
        def watch(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if counted:
                given = args[0] if args else next(iter(kwargs.values()), None)
                version = given._version if isinstance(given, Tensor) else None
                if given is not last[0] or version != last[1]:
                    last[:] = given, version, last[2] + 1
            found.setdefault(path, []).append(last[2])
            if not _is_plain((args, kwargs)):
                opaque.add(path)

        return watch

    handles = [
        module.register_forward_pre_hook(watching(path, is_linear_map(module)), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        run(model, batch, task)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, _PLAIN)


def _has_matrix(path: str, module: nn.Module) -> bool:
    if isinstance(module, _NO_LAYERS) or "parametrizations" in path.split("."):
        return False
    return is_linear_map(module) or any(p.ndim > 1 for p in module.parameters(recurse=False))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
