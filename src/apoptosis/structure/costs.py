"""What a network costs, at any sizes: polynomials in the sizes of its axes.

A product of tensors costs as many multiply-accumulates (MACs) as its axes have combinations; a convolution's are output
positions × kernel × input channels of a group × output channels. Everything else (norms, activations, biases) is not
counted, as is the custom. What papers call FLOPs of a network are nearly always these MACs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Expr, size_of

__all__ = ["Costs"]


@dataclass(frozen=True, eq=False)
class Costs:
    """Products of expressions whose sum is a cost, and where each axis stands in them."""

    macs: tuple[tuple[Expr, ...], ...]
    params: tuple[tuple[Expr, ...], ...]
    modules: tuple[str, ...]
    """Of each product in `macs` the path of the module that computes it; empty for the model itself."""

    @staticmethod
    def of(analysis: Analysis, parameters: set[str]) -> "Costs":
        """Of a traced network; tied parameters count once."""
        values = dict.fromkeys(analysis.program.tensors.values())
        products = [
            (c, call) for call in analysis.program.calls for c in analysis.facts[call].costs
        ]
        return Costs(
            tuple(product for product, _ in products),
            tuple(analysis.axes[value] for value in values if value.names[0] in parameters),
            tuple(call.module for _, call in products),
        )

    def total_macs(self, sizes: Mapping[Axis, int]) -> int:
        """Of one run of the example."""
        return _total(self.macs, sizes)

    def macs_by_module(self, sizes: Mapping[Axis, int]) -> dict[str, int]:
        """The same by module, in the order in which they first compute one."""
        found = dict.fromkeys(self.modules, 0)
        for module, product in zip(self.modules, self.macs, strict=True):
            found[module] += _total([product], sizes)
        return found

    def total_params(self, sizes: Mapping[Axis, int]) -> int:
        """Number of parameters."""
        return _total(self.params, sizes)

    def saved(self, axis: Axis, sizes: Mapping[Axis, int]) -> tuple[int, int]:
        """MACs and parameters that one unit less of an axis saves."""
        fewer = {**sizes, axis: sizes.get(axis, axis.size) - 1}
        return tuple(  # type: ignore[return-value]
            _total(own, sizes) - _total(own, fewer)
            for own in (_with(axis, self.macs), _with(axis, self.params))
        )


def _with(axis: Axis, costs: Iterable[tuple[Expr, ...]]) -> list[tuple[Expr, ...]]:
    return [cost for cost in costs if any(axis in expr.axes() for expr in cost)]


def _total(costs: Iterable[tuple[Expr, ...]], sizes: Mapping[Axis, int]) -> int:
    return sum(prod(size_of(expr, sizes) for expr in cost) for cost in costs)
