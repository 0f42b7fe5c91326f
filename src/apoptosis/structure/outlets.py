"""What becomes of a layer's outputs before anything else reads them.

Between a layer and whatever comes next there is often a map of each output by itself, and then a sum or a ReLU:

    y ─ norm with fixed statistics, factors ─ a ⊙ y + c ─ ( + another tensor ) ─ ( relu )

Whoever wants to replace the layer has to care for what comes out at the end of this road, not for y. `find_outlets`
reads it off a recorded run. It follows a tensor only as long as one operation alone reads it, and only operations that
are known here: a road that ends early is right, and merely short.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from apoptosis.structure.program import Call, ModuleCall, Program, Value, values_in
from apoptosis.structure.recording import Example, model_tensors, record
from apoptosis.turns import one_at_a_time

__all__ = ["Outlet", "Spot", "find_outlets"]

aten = torch.ops.aten
_PASSING = {aten.dropout.default, aten.contiguous.default, aten.clone.default, aten.alias.default}
_SUMS = {aten.add.Tensor, aten.add_.Tensor}
_FACTORS = {aten.mul.Tensor, aten.mul_.Tensor}
_RECTIFIERS = {
    aten.relu.default: None,
    aten.relu_.default: None,
    aten.relu6.default: 6.0,
    aten.relu6_.default: 6.0,
}
_CLAMPS = {aten.hardtanh.default, aten.hardtanh_.default}


@dataclass(frozen=True)
class Spot:
    """Where a run shows a tensor: the first input or output of a module that is called once."""

    module: str
    side: str


@dataclass(frozen=True)
class Norm:
    """(y − mean) / √(variance + eps) · weight + bias, of tensors by their names."""

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    eps: float

    def affine(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """a and c."""
        a = (tensors[self.variance].double() + self.eps).rsqrt()
        if self.weight is not None:
            a = a * tensors[self.weight].double()
        c = -a * tensors[self.mean].double()
        return a, c if self.bias is None else c + tensors[self.bias].double()


@dataclass(frozen=True)
class Factor:
    """A tensor that outputs are multiplied with, one number for each or one for all."""

    name: str

    def affine(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """a and c."""
        own = tensors[self.name].double().flatten()
        return own, torch.zeros_like(own)


Affine: TypeAlias = Norm | Factor


@dataclass(frozen=True)
class Outlet:
    """The road of a layer's outputs.

    Attributes:
        maps: of each output by itself, in their order.
        other: where the tensor that is then added can be seen, before the layer runs; None if nothing is added.
        rectified: whether what comes of it passes a ReLU next.
        most: where that ReLU has an upper end.
    """

    maps: tuple[Affine, ...] = ()
    other: Spot | None = None
    rectified: bool = False
    most: float | None = None

    def affine(self, model: nn.Module, num: int) -> tuple[Tensor, Tensor]:
        """a and c, (outputs,) each in float64, with the numbers that `model` holds now and where it holds them."""
        tensors = model_tensors(model) if self.maps else {}
        a = torch.ones(num, dtype=torch.float64)
        c = torch.zeros_like(a)
        for own in self.maps:
            factor, shift = (t.detach() for t in own.affine(tensors))
            a, c = a.to(factor.device) * factor, c.to(factor.device) * factor + shift
        return a, c


@one_at_a_time
def find_outlets(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Mapping[str, int]
) -> dict[str, Outlet]:
    """Roads of layers that are called once, where one is worth telling; `layers` gives their outputs' dimension."""
    program = record(model, Example(args, kwargs))
    calls: dict[str, list[ModuleCall]] = {}
    for own in program.modules:
        calls.setdefault(own.path, []).append(own)
    reading = _Reading(program, {path: own[0] for path, own in calls.items() if len(own) == 1})
    found: dict[str, Outlet] = {}
    for path, dim in layers.items():
        if path in reading.once and (outlet := reading.follow(path, dim)) is not None:
            found[path] = outlet
    return found


class _Reading:
    """A recorded run, asked who reads what."""

    def __init__(self, program: Program, once: dict[str, ModuleCall]) -> None:
        self.once = once
        self._users: dict[Value, list[Call]] = {}
        self._made: dict[Value, int] = {}
        self._overwritten: set[Value] = set()
        for number, call in enumerate(program.calls):
            for value in {*values_in(call.arguments), *call.overwrites}:
                self._users.setdefault(value, []).append(call)
            self._made |= dict.fromkeys(call.outputs, number)
            self._overwritten.update(call.overwrites)
        self._results = set(program.results)

    def follow(self, path: str, dim: int) -> Outlet | None:
        """The road from a layer; None where there is nothing on it."""
        layer = self.once[path]
        here, outlet = layer.output, Outlet()
        if here is None:
            return None
        while (call := self._sole_user(here)) is not None:
            step = self._step(outlet, call, here, dim % here.ndim, layer)
            if step is None:
                break
            outlet, here = step, call.outputs[0]
            if outlet.rectified:
                break
        return outlet if outlet.other is not None or outlet.rectified else None

    def _sole_user(self, value: Value) -> Call | None:
        users = self._users.get(value, [])
        return users[0] if len(users) == 1 and value not in self._results else None

    def _step(
        self, outlet: Outlet, call: Call, here: Value, dim: int, layer: ModuleCall
    ) -> Outlet | None:
        """The road with one more operation, or None where it ends."""
        if call.op in _PASSING:
            return outlet if not call.arguments.get("train") else None
        if (most := _rectifier(call)) is not None:
            return replace(outlet, rectified=True, most=most if most < float("inf") else None)
        if call.op in _SUMS:
            spot = self._spot(_partner(call, here), here, layer)
            can_add = outlet.other is None and spot is not None
            return replace(outlet, other=spot) if can_add else None
        known = _affine(call, here, dim) if outlet.other is None else None
        return None if known is None else replace(outlet, maps=(*outlet.maps, known))

    def _spot(self, other: Value | None, here: Value, layer: ModuleCall) -> Spot | None:
        """Where the other term of a sum is seen, as it will be added, before the layer is called."""
        if other is None or other.fixed or other.shape != here.shape:
            return None
        # What a module was given is noted when it is left, and may have been written to until then.
        if self._made.get(other, -1) >= layer.entered or other in self._overwritten:
            return None
        for path, call in self.once.items():
            if call.output is other and call.left <= layer.entered:
                return Spot(path, "output")
            if call.input is other and call.entered <= layer.entered:
                return Spot(path, "input")
        return None


def _rectifier(call: Call) -> float | None:
    """The upper end of a ReLU, infinity if it has none; None for other operations."""
    if call.op in _RECTIFIERS:
        return _RECTIFIERS[call.op] or float("inf")
    ends = (call.arguments.get("min_val"), call.arguments.get("max_val"))
    return float(ends[1]) if call.op in _CLAMPS and ends[0] == 0 and ends[1] else None


def _partner(call: Call, here: Value) -> Value | None:
    """The other term, if there is one and both count once."""
    terms = [call.arguments["self"], call.arguments["other"]]
    others = [term for term in terms if term is not here]
    is_plain = call.arguments.get("alpha", 1) == 1 and len(others) == 1
    return others[0] if is_plain and isinstance(others[0], Value) else None


def _affine(call: Call, here: Value, dim: int) -> Affine | None:
    if call.op is aten.batch_norm.default and dim == 1:
        return _norm(call.arguments)
    if call.op not in _FACTORS:
        return None
    factor = _partner(call, here)
    if factor is None or not factor.names:
        return None
    sizes = (*(1,) * (here.ndim - factor.ndim), *factor.shape)
    along = prod(sizes) in (1, here.shape[dim]) and sizes[dim] == prod(sizes)
    return Factor(factor.names[0]) if along and len(sizes) == here.ndim else None


def _norm(arguments: Mapping[str, Any]) -> Norm | None:
    held = [arguments[name] for name in ("weight", "bias", "running_mean", "running_var")]
    if arguments["training"] or not all(_names(own) for own in held[2:]):
        return None
    if any(own is not None and not _names(own) for own in held):
        return None
    weight, bias, mean, variance = (next(iter(_names(own)), None) for own in held)
    assert mean is not None, "there are statistics"
    assert variance is not None, "there are statistics"
    return Norm(weight, bias, mean, variance, float(arguments["eps"]))


def _names(value: Any) -> Iterable[str]:
    return value.names if isinstance(value, Value) else ()
