"""One operation as a model whose every axis may be cut, and the comparisons that an axis rule has to pass on it.

The oracle is the operation itself: run on smaller tensors, and on tensors of the old size with zeros in them. All its
tensors are tensors of the model and its results may have any shape, so nothing is pinned but by the rule.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from apoptosis.structure.analysis import Analysis, analyse
from apoptosis.structure.arrangement import tensors_in
from apoptosis.structure.axes import Axis, Expr, Indices, kept_indices, size_of
from apoptosis.structure.facts import Facts
from apoptosis.structure.program import Call, Value, map_values
from apoptosis.structure.recording import Example, model_tensors, record
from apoptosis.structure.rewriting import expected_arguments
from apoptosis.structure.samples import Sample
from apoptosis.structure.zero_flow import flow_zeros, inexact_axes

__all__ = [
    "Trial",
    "assert_costs_are_counted",
    "assert_cut_is_right",
    "assert_cuts_are_right",
    "assert_free_axes_are_expected",
    "assert_rule_holds",
    "assert_sums_are_declared",
    "assert_zeros_are_zero",
    "overload",
]

ROUNDING = 1e-12  # float64, sums of at most a few hundred terms of order one
UNDEFINED = ("empty", "new_empty")
UNCOUNTED = {"mv", "dot", "outer", "ger", "bilinear", "linalg_vecdot", "addbmm", "addmv", "addr"}
"""Products that torch's counter does not know; nor does it vectors and what sums over nothing, or over one index."""

Kept = dict[Axis, Indices]


@dataclass(frozen=True)
class Trial:
    """An operation on a sample, recorded and analysed."""

    name: str
    sample: Sample

    @cached_property
    def module(self) -> "Operation":
        """The operation as a model."""
        return Operation(overload(self.name), self.sample)

    @cached_property
    def analysis(self) -> Analysis:
        """What the rule says, with results that nobody outside depends on."""
        program = record(self.module, Example())
        assert [call.name for call in program.calls] == [self.name], "recorded as something else"
        program.results = list(program.calls[0].outputs[: self.sample.read])
        return analyse(program, pin_outputs=False)

    @property
    def call(self) -> Call:
        """The only call."""
        return self.analysis.program.calls[0]

    @property
    def facts(self) -> Facts:
        """What the rule states besides equations."""
        return self.analysis.facts[self.call]

    @cached_property
    def tensors(self) -> dict[Value, Tensor]:
        """The operation's tensors."""
        held = model_tensors(self.module)
        values = self.analysis.program.tensors
        return {values[name]: tensor.detach() for name, tensor in held.items()}

    @property
    def results(self) -> list[list[Expr]]:
        """The axes of the results that are read."""
        return self.facts.axes[: self.sample.read]

    @cached_property
    def free(self) -> list[Axis]:
        """Every axis that may be cut."""
        exprs = chain(*(self.analysis.axes[value] for value in self.tensors), *self.results)
        return list(dict.fromkeys(a for expr in exprs for a in expr.axes() if a.pin is None))

    @cached_property
    def inexact(self) -> dict[Axis, str]:
        """Axes whose cut differs from zeroing."""
        return inexact_axes(self.analysis)

    @cached_property
    def is_determined(self) -> bool:
        """Whether two runs agree: random numbers and memory as it is found cannot be compared."""
        runs = zip(self.run(self.tensors), self.run(self.tensors), strict=True)
        same = [((a == b) | ((a != a) & (b != b))).all() for a, b in runs]
        return all(same) and not self.name.startswith(UNDEFINED)

    def run(self, tensors: Mapping[Value, Tensor]) -> list[Tensor]:
        """The results that are read, on other tensors of the same shapes."""
        result = self.call.op(**map_values(self.call.arguments, lambda v: tensors[v].clone()))
        return tensors_in(result)[: self.sample.read]

    def cut(self, kept: Kept) -> tuple[Any, dict[str, Any]]:
        """The operation and its arguments after the cut, as a rewritten program would have them."""
        sizes = {axis: len(indices) for axis, indices in kept.items()}
        smaller = {v: _taken(t, self.analysis.axes[v], kept) for v, t in self.tensors.items()}

        def size(expr: Expr) -> int:
            return size_of(expr, sizes)

        if self.facts.replacement is not None:
            op, arguments = self.facts.replacement(size)
        else:
            op = self.call.op
            arguments = expected_arguments(self.call, self.analysis, size) | self.facts.frozen
        return op, map_values(arguments, smaller.__getitem__)

    def choices(self, seed: int = 0, *, num_joint: int = 3) -> Iterator[Kept]:
        """What may be kept: random parts of each axis by itself, then of all of them at once."""
        random = np.random.default_rng(seed)
        bundles = self._bundles()
        for bundle in [*([b] for b in bundles), *[bundles] * num_joint]:
            kept: Kept = {}
            for axes, floor in bundle:
                number = int(random.integers(floor, axes[0].size))
                for axis in axes:
                    kept[axis] = np.sort(random.permutation(axis.size)[:number])
            if kept:
                yield kept

    def _bundles(self) -> list[tuple[list[Axis], int]]:
        """Axes that are cut equally short, with the fewest indices they may keep."""
        floors = {axis for expr in self.facts.floors for axis in expr.axes()}
        bundles = {axis: [axis] for axis in self.free}
        for tie in self.facts.ties if self.facts.replacement is None else []:
            tied = list(dict.fromkeys(a for expr in tie if (a := expr.axis) is not None))
            whole = all(axis in bundles for axis in tied)
            for axis in tied:
                bundles.pop(axis, None)
            if whole:
                bundles[tied[0]] = tied
        found = [(axes, 2 if floors & set(axes) else 1) for axes in bundles.values()]
        return [(axes, floor) for axes, floor in found if axes[0].size > floor]


class Operation(nn.Module):
    """One operation; the tensors of its sample are parameters, or buffers where they are no numbers to learn."""

    def __init__(self, op: Any, sample: Sample) -> None:
        super().__init__()
        self.op = op
        self._names: dict[int, str] = {}
        self._arguments = self._keep(list(sample.args)), self._keep(sample.kwargs)
        self._sample = sample  # its tensors must live as long as their identities are used

    def forward(self) -> Any:
        args, kwargs = (self._find(part) for part in self._arguments)
        return self.op(*args, **kwargs)

    def _keep(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._keep(part) for part in item]
        if isinstance(item, dict):
            return {key: self._keep(part) for key, part in item.items()}
        if not isinstance(item, Tensor):
            return item
        name = self._names.setdefault(id(item), f"tensor_{len(self._names)}")
        if item.is_floating_point() or item.is_complex():
            self.register_parameter(name, nn.Parameter(item.clone()))
        else:
            self.register_buffer(name, item.clone())
        return _Held(name)

    def _find(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._find(part) for part in item]
        if isinstance(item, dict):
            return {key: self._find(part) for key, part in item.items()}
        return getattr(self, item.name) if isinstance(item, _Held) else item


@dataclass(frozen=True)
class _Held:
    name: str


def overload(name: str) -> Any:
    """The operation of an entry of the table, such as `conv2d.default`."""
    base, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), variant)


def assert_rule_holds(trial: Trial) -> None:
    """Everything there is to ask."""
    assert_free_axes_are_expected(trial)
    assert_cuts_are_right(trial)
    assert_sums_are_declared(trial)
    assert_zeros_are_zero(trial)
    assert_costs_are_counted(trial)


def assert_free_axes_are_expected(trial: Trial) -> None:
    """As many axes are free, and inexact, as the sample says: a rule that pins too much is wrong as well."""
    assert not trial.facts.refused or "refused" in trial.sample.free, trial.facts.refused
    found = [f"{axis.size}{'~' if axis in trial.inexact else ''}" for axis in trial.free]
    expected = [size for size in trial.sample.free.split() if size != "refused"]
    assert sorted(found) == sorted(expected), f"free axes {found}, expected {expected}"


def assert_cuts_are_right(trial: Trial) -> None:
    """As `assert_cut_is_right`, for random parts of the axes one by one and together."""
    for kept in trial.choices():
        assert_cut_is_right(trial, kept)


def assert_cut_is_right(trial: Trial, kept: Kept, *, rounding: float = ROUNDING) -> None:
    """The operation on kept parts gives the kept parts of what it gives on zeroed tensors.

    Where a statistic runs over an axis, or the results are random, at least their shapes are those of the kept parts.
    """
    found = _cut_results(trial, kept)
    sizes = {axis: len(indices) for axis, indices in kept.items()}
    shapes = [tuple(size_of(expr, sizes) for expr in axes) for axes in trial.results]
    assert [tuple(t.shape) for t in found] == shapes, "cut results have other shapes than said"
    if not trial.is_determined or any(axis in trial.inexact for axis in kept):
        return
    zeroed = {v: _zeroed(t, trial.analysis.axes[v], kept) for v, t in trial.tensors.items()}
    _assert_kept_part(trial, found, trial.run(zeroed), kept, rounding)


def assert_sums_are_declared(trial: Trial) -> None:
    """Cutting equals zeroing even if only those tensors are zeroed that the rule's contractions need.

    So elementwise operations need nothing to be zero; a product that sums over an axis needs one factor to be.
    """
    known, contractions = trial.analysis.axes, trial.facts.contractions
    for kept in trial.choices(seed=2, num_joint=0):
        if not trial.is_determined or any(axis in trial.inexact for axis in kept):
            continue
        found = _cut_results(trial, kept)
        for chosen in _subsets(_places(trial, set(kept))):
            summed = [
                operands
                for expr, operands in contractions
                if not kept.keys().isdisjoint(expr.axes())
            ]
            if not all(any(place in chosen for place in operands) for operands in summed):
                continue
            tensors = {
                value: _zeroed(
                    tensor,
                    [e if (value, d) in chosen else None for d, e in enumerate(known[value])],
                    kept,
                )
                for value, tensor in trial.tensors.items()
            }
            _assert_kept_part(trial, found, trial.run(tensors), kept, ROUNDING)


def _cut_results(trial: Trial, kept: Kept) -> list[Tensor]:
    op, arguments = trial.cut(kept)
    try:
        return tensors_in(op(**arguments))[: trial.sample.read]
    except (RuntimeError, ValueError, IndexError) as error:
        raise AssertionError(f"{trial.name} does not run on its cut tensors") from error


def _assert_kept_part(
    trial: Trial, found: list[Tensor], wholes: list[Tensor], kept: Kept, rounding: float
) -> None:
    for own, whole, axes in zip(found, wholes, trial.results, strict=True):
        torch.testing.assert_close(
            own, _taken(whole, axes, kept), rtol=rounding, atol=rounding, equal_nan=True
        )


def _places(trial: Trial, axes: set[Axis]) -> list[tuple[Value, int]]:
    """Where the tensors have any of the axes."""
    return [
        (value, dim)
        for value in trial.tensors
        for dim, expr in enumerate(trial.analysis.axes[value])
        if not axes.isdisjoint(expr.axes())
    ]


def assert_zeros_are_zero(trial: Trial) -> None:
    """Whatever tensors are zero at removed units, the results are zero where the rule's flow says so."""
    known = trial.analysis.axes
    for axis in trial.free:
        kept = {axis: np.arange(1, axis.size)}
        for chosen in _subsets(_places(trial, {axis})):
            zeros = {v: frozenset((d, axis) for w, d in chosen if w is v) for v in trial.tensors}
            claims = [
                flow_zeros(flow, axes, zeros, known)
                for flow, axes in zip(trial.facts.flows, trial.results, strict=False)
            ]
            if not any(claims):
                continue
            tensors = {
                value: _zeroed(
                    tensor,
                    [e if (value, d) in chosen else None for d, e in enumerate(known[value])],
                    kept,
                    integers=True,
                )
                for value, tensor in trial.tensors.items()
            }
            for result, claim, axes in zip(trial.run(tensors), claims, trial.results, strict=True):
                for dim, claimed in claim:
                    where = kept if claimed is axis else {claimed: np.arange(0)}
                    _assert_zero(result, axes[dim], dim, where)


def assert_costs_are_counted(trial: Trial) -> None:
    """The multiply-accumulates are those that torch counts, before and after a cut."""
    if trial.name.split(".")[0] in UNCOUNTED:
        assert trial.facts.costs, "a product costs something"
        return
    for chosen in [{}, *trial.choices(seed=1, num_joint=2)]:
        kept = {axis: indices for axis, indices in chosen.items() if len(indices) > 1}
        op, arguments = trial.cut(kept)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            op(**arguments)
        sizes = {axis: len(indices) for axis, indices in kept.items()}
        said = sum(prod(size_of(expr, sizes) for expr in cost) for cost in trial.facts.costs)
        counted = counter.get_total_flops() // 2
        known = trial.facts.contractions and all(value.ndim > 1 for value in trial.tensors)
        if not counted and not known:
            continue
        assert said == counted, f"{said} multiply-accumulates are stated, torch counts {counted}"


def _taken(tensor: Tensor, axes: Any, kept: Kept) -> Tensor:
    """The kept part of a tensor with those axes."""
    for dim, expr in enumerate(axes):
        tensor = tensor.index_select(dim, torch.from_numpy(kept_indices(expr, kept, {})))
    return tensor


def _zeroed(tensor: Tensor, axes: Any, kept: Kept, *, integers: bool = False) -> Tensor:
    """The tensor with zeros wherever something is removed along a dimension with an axis given."""
    if not (integers or tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    tensor = tensor.clone()
    for dim, expr in enumerate(axes):
        if expr is not None:
            tensor.index_fill_(dim, _removed(expr, kept), 0)
    return tensor


def _subsets(places: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Every subset of a few; of many those that lack one or two, or have no more."""
    few = range(len(places) + 1)
    sizes = few if len(places) <= 6 else sorted({*few[:3], *few[-3:]})
    return chain.from_iterable(combinations(places, n) for n in sizes)


def _removed(expr: Expr, kept: Kept) -> Tensor:
    return torch.from_numpy(np.setdiff1d(np.arange(size_of(expr)), kept_indices(expr, kept, {})))


def _assert_zero(result: Tensor, expr: Expr, dim: int, kept: Kept) -> None:
    part = result.index_select(dim, _removed(expr, kept))
    assert not part.any(), f"said to be zero along dimension {dim}: {part.flatten()[:4].tolist()}"
