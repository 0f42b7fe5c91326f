"""Whether a cut module does what the algebra predicts: its recorded calls against the program at the new sizes.

Compared are the operations, the shapes of their results, every argument, and the wiring: which value feeds which, the
model's tensors by name, constants by their numbers. Two runs without a difference compute the same. Left out are calls
that come and go with strides and devices and change nothing, and what happens inside modules that were replaced by
ones that do the same.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any, Literal

import torch

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.arrangement import leaves_in
from apoptosis.structure.axes import Axis, size_of
from apoptosis.structure.program import Call, Program, Value, map_values, values_in
from apoptosis.structure.rewriting import expected_arguments, flags_of_mode

__all__ = ["Difference", "difference", "telling_calls"]


@dataclass(frozen=True)
class Difference:
    """What a cut module does otherwise than predicted.

    `fails`: it does not run. `way`: it goes another way (other operations, other wiring), perhaps to the same result.
    `number`: an operation gets another number, which changes what is computed. `scale`: attention without a scale
    divides by the square root of its new width.
    """

    kind: Literal["fails", "way", "number", "scale"]
    because: str


def difference(
    analysis: Analysis,
    sizes: Mapping[Axis, int],
    found: Program,
    *,
    scaled: bool = False,
    replaced: tuple[str, ...] = (),
    training: bool = False,
) -> Difference | None:
    """The first call that is not as predicted; None if all are. With `training`, `found` is a run in train mode."""
    expected, other = _Names(analysis.program, replaced), _Names(found, replaced)
    for call, its in zip(expected.calls, other.calls, strict=False):
        where = f"{call.name} ({call.line})"
        if call.op is not its.op:
            return Difference("way", f"another operation is called: {its.name} instead of {where}")
        shapes = [tuple(size_of(e, sizes) for e in own) for own in analysis.facts[call].axes]
        got = [value.shape for value in its.outputs]
        if shapes != got:
            return Difference("way", f"{where} gives {_listed(got)} instead of {_listed(shapes)}")
        arguments = expected_arguments(call, analysis, lambda expr: size_of(expr, sizes))
        if training:
            arguments |= {flag: its.arguments[flag] for flag in flags_of_mode(call)}
        if wrong := _different_argument(arguments, its, (expected, other)):
            return Difference(wrong.kind, f"{where} is called with {wrong.because}")
        if not scaled and _scale_changed(call, analysis, sizes):
            return Difference(
                "scale", "attention without a scale divides by the square root of its width"
            )
    if len(expected.calls) != len(other.calls):
        text = f"{len(other.calls)} operations are called instead of {len(expected.calls)}"
        return Difference("way", text)
    results = [
        [names.of(v) for v in leaves_in(program.outputs, Value)]
        for names, program in ((expected, analysis.program), (other, found))
    ]
    return None if results[0] == results[1] else Difference("way", "other values are returned")


def telling_calls(program: Program) -> list[Call]:
    """The calls without those that come and go with strides and devices."""
    return [call for call in program.calls if not _is_neutral(call)]


class _Names:
    """Calls that tell something, and names for values that are the same in two runs of one model."""

    def __init__(self, program: Program, replaced: tuple[str, ...]) -> None:
        self.calls: list[Call] = []
        self._names: dict[Value, Hashable] = {v: ("input", n) for n, v in enumerate(program.inputs)}
        self._same_as: dict[Value, Value] = {}
        for value in program.tensors.values():
            self._names[value] = ("tensor", value.names[0])
        for call in program.calls:
            if any(call.module == path or call.module.startswith(f"{path}.") for path in replaced):
                continue
            if _is_neutral(call):
                for value in call.outputs:
                    self._same_as[value] = next(values_in(call.arguments))
                continue
            for number, value in enumerate(call.outputs):
                self._names[value] = ("call", len(self.calls), number)
            self.calls.append(call)
        for call in program.modules:
            if call.path in replaced and call.output is not None:
                self._names[call.output] = ("module", call.path, call.index)

    def of(self, value: Value) -> Hashable:
        """The name; constants are named by their numbers."""
        while value in self._same_as and value not in self._names:
            value = self._same_as[value]
        return self._names.get(value) or _digest(value)


def _digest(value: Value) -> Hashable:
    """A constant's numbers; one without numbers equals none but itself."""
    tensor = value.constant
    if tensor is None or tensor.is_meta or tensor.numel() > 1_000_000:
        return ("unknown", id(value))
    return ("constant", value.shape, str(value.dtype), hash(tuple(tensor.flatten().tolist())))


_NEUTRAL = {"contiguous", "alias", "detach", "lift_fresh", "resolve_conj", "resolve_neg"}
_CASTS = {"to", "_to_copy", "type_as"}
_NUMBERS = {"item", "is_nonzero", "_local_scalar_dense", "equal"}


def _is_neutral(call: Call) -> bool:
    name = call.name.split(".")[0]
    if name == "add_" and all(
        n.endswith("num_batches_tracked") for n in call.arguments["self"].names
    ):
        return bool(call.arguments["self"].names)  # a norm in train mode counts
    if name in _CASTS:
        return call.outputs[0].dtype == next(values_in(call.arguments)).dtype
    return name in _NEUTRAL or (name in _NUMBERS and not call.outputs)


def _different_argument(
    expected: dict[str, Any], call: Call, names: tuple[_Names, _Names]
) -> Difference | None:
    for name, value in expected.items():
        if call.name.startswith("slice") and name == "end":
            continue  # beyond the end is the end; the shape tells
        before, after = (
            _plain(map_values(x, lambda v, n=own: _Named(n.of(v))))
            for x, own in ((value, names[0]), (call.arguments[name], names[1]))
        )
        if not _same(before, after):
            kind = "way" if _is_wiring(before) and _is_wiring(after) else "number"
            return Difference(kind, f"{name} = {after} instead of {before}")
    return None


@dataclass(frozen=True)
class _Named:
    """A tensor among plain arguments."""

    name: Hashable

    def __repr__(self) -> str:
        return "another tensor" if isinstance(self.name, tuple) else str(self.name)


def _is_wiring(argument: Any) -> bool:
    """Tensors that are not constants: another one of them is another way, another constant another number."""
    items = argument if isinstance(argument, (tuple, list)) else [argument]
    return all(
        isinstance(x, _Named)
        and isinstance(x.name, tuple)
        and x.name[0] not in ("constant", "unknown")
        for x in items
    )


def _plain(argument: Any) -> Any:
    """Without devices and profiling handles: those of a meta run differ and do not matter."""
    beside = (torch.device, torch.layout, torch.memory_format, torch.ScriptObject)
    return None if isinstance(argument, beside) else argument


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is float and type(b) is float:
        return a == b or isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")


def _scale_changed(call: Call, analysis: Analysis, sizes: Mapping[Axis, int]) -> bool:
    scale = analysis.facts[call].frozen.get("scale")
    if scale is None:
        return False
    width = size_of(analysis.axes[call.arguments["query"]][-1], sizes)
    return not isclose(scale, 1 / sqrt(width))
