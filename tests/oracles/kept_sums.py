"""The twin of a cut that is not exact: full size, removed units zero, and every statistic sees the kept entries alone.

The recorded program is run call by call at full size with the zeroed tensors. A call with a statistic or a sum over an
inexact axis is run on the kept entries only, and its results are put back among zeros. Everything else sees the full
tensors, so a wrong index anywhere shows.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apoptosis.structure import Plan, Structure, zero
from apoptosis.structure.arrangement import leaves_in
from apoptosis.structure.axes import Axis, Expr, kept_indices, size_of
from apoptosis.structure.program import Call, Value, map_values
from apoptosis.structure.recording import Example, model_tensors
from apoptosis.structure.rewriting import expected_arguments

__all__ = ["outputs_with_kept_sums"]


def outputs_with_kept_sums(
    structure: Structure, model: nn.Module, plan: Plan, example: Example
) -> list[Tensor]:
    """What the model gives when its removed units are zero and no statistic sees them.

    The structure must be that of the plan, as traced; `example` has the sizes of the run.
    """
    return _Twin(structure, model, plan, example).outputs


class _Twin:
    def __init__(
        self, structure: Structure, model: nn.Module, plan: Plan, example: Example
    ) -> None:
        self.analysis = structure._network.run.analysis
        self.kept = {structure[name].axis: own for name, own in plan.kept.items()}
        self.sizes = {axis: len(own) for axis, own in self.kept.items()}
        self.inexact = {structure[name].axis for name in plan.kept if not structure[name].exact}
        held = model_tensors(zero(model, plan))
        program = self.analysis.program
        self.tensors: dict[Value, Tensor] = {v: held[name] for name, v in program.tensors.items()}
        self.tensors |= dict(zip(program.inputs, example.tensors(), strict=True))
        with torch.no_grad():
            for call in program.calls:
                self._run(call)
        self.outputs = [self._tensor(value) for value in leaves_in(program.outputs, Value)]

    def _run(self, call: Call) -> None:
        if not call.outputs:
            return
        facts = self.analysis.facts[call]
        over = {a for expr, _ in (*facts.statistics, *facts.contractions) for a in expr.axes()}
        if over & self.inexact:
            results = [
                self._scattered(t, v) for t, v in zip(self._small(call), call.outputs, strict=True)
            ]
        else:
            results = _flat(call.op(**map_values(call.arguments, self._tensor)))
        self.tensors |= dict(zip(call.outputs, results, strict=True))

    def _small(self, call: Call) -> list[Tensor]:
        arguments = expected_arguments(call, self.analysis, lambda e: size_of(e, self.sizes))
        arguments |= self.analysis.facts[call].frozen
        return _flat(call.op(**map_values(arguments, self._gathered)))

    def _tensor(self, value: Value) -> Tensor:
        return value.constant if value.source == "constant" else self.tensors[value]

    def _places(self, axes: tuple[Expr, ...]) -> list[np.ndarray]:
        none: dict[Axis, int] = {}
        return [kept_indices(expr, self.kept, none) for expr in axes]

    def _gathered(self, value: Value) -> Tensor:
        tensor = self._tensor(value)
        for dim, places in enumerate(self._places(self.analysis.axes[value])):
            tensor = tensor.index_select(dim, torch.from_numpy(places))
        return tensor

    def _scattered(self, small: Tensor, value: Value) -> Tensor:
        full = small.new_zeros(value.shape)
        if not value.shape:
            return small
        places = np.ix_(*self._places(self.analysis.axes[value]))
        full[tuple(torch.from_numpy(p) for p in places)] = small
        return full


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in _flat(part)]
