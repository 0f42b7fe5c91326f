"""Kernels that take multiples of 16 bytes: widths stay on their grid, by the operation and the type of its numbers."""

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.errors import PlanMismatchError
from apoptosis.planning import Budget, Selection
from apoptosis.structure import Structure, cut, trace
from apoptosis.structure.axes import Axis, Expr, size_of, sum_of, times
from apoptosis.structure.groups import _needed
from apoptosis.structure.rules import RULES

GRIDS = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}


class Experts(nn.Module):
    """Gated experts in stacked weights, as libraries of language models fuse them."""

    def __init__(self, width: int, hidden: int, num: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.gate_up = nn.Parameter(torch.randn(num, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num, width, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        expert, order = self.router(rows).argmax(-1).sort()
        sizes = torch.stack([(expert == n).sum() for n in range(len(self.down))])
        ends = sizes.cumsum(0).to(torch.int32)
        up = torch._grouped_mm(rows[order], self.gate_up.transpose(1, 2), offs=ends)
        gate, value = up.chunk(2, dim=-1)
        mixed = torch._grouped_mm(gate.sigmoid() * value, self.down.transpose(1, 2), offs=ends)
        return torch.zeros_like(rows).index_add(0, order, mixed).view_as(x)


class Reader(nn.Module):
    """A stream with experts on it and a plain layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 32)
        self.experts = Experts(32, 48)
        self.wide = nn.Linear(32, 29)
        self.back = nn.Linear(29, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = x + self.experts(x)
        return self.head((x + self.back(self.wide(x).relu())).mean(1))


def reader(dtype: torch.dtype) -> Reader:
    torch.manual_seed(0)
    return Reader().to(dtype).eval()


def traced(dtype: torch.dtype) -> Structure:
    return trace(reader(dtype), torch.randn(2, 6, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", GRIDS)
def test_the_grid_is_that_of_the_operation_and_the_type_of_its_numbers(dtype: torch.dtype) -> None:
    structure = traced(dtype)
    assert {g.name: g.multiple for g in structure.groups} == {
        "up": GRIDS[dtype],
        "experts.gate_up": GRIDS[dtype],
        "wide": 1,
    }
    because = structure["up"].multiple_because
    assert "_grouped_mm.default takes rows of multiples of 16 bytes" in because
    assert f"{GRIDS[dtype]} numbers of {str(dtype).removeprefix('torch.')}" in because


@pytest.mark.parametrize("dtype", GRIDS)
@pytest.mark.parametrize("share", [0.8, 0.4])
@pytest.mark.parametrize("options", [{}, {"widths": "uniform"}, {"round_to": 3}], ids=str)
def test_what_is_delivered_runs(dtype: torch.dtype, share: float, options: dict) -> None:
    batches = [torch.randn(4, 6, 5, dtype=dtype)]
    outcome = ap.prune(
        *(reader(dtype), [(x, torch.zeros(4, dtype=torch.long)) for x in batches]),
        *(Budget(params=share),),
        criterion="magnitude",
        steps=2,
        selection=Selection(**options),
    )
    assert outcome.plan.delivery == "module"
    counts = outcome.plan.counts()
    assert all(
        counts[name][0] % GRIDS[dtype] == 0 for name in counts.keys() & {"up", "experts.gate_up"}
    )
    assert outcome.model(batches[0]).shape == (4, 3)


def test_a_plan_off_the_grid_is_refused_with_what_would_do() -> None:
    structure = traced(torch.bfloat16)
    with pytest.raises(
        PlanMismatchError,
        match=r"'experts\.gate_up' would keep 13 of 48 units, and only multiples of 8 can run: "
        r"_grouped_mm\.default takes .* Keep 8 or 16\.$",
    ):
        structure.plan({"experts.gate_up": range(13)})
    with pytest.raises(PlanMismatchError, match=r"Keep 8\.$"):
        structure.plan({"experts.gate_up": range(3)})


@pytest.mark.parametrize("dtype", GRIDS)
def test_every_width_on_the_grid_runs_and_none_beside_it(dtype: torch.dtype) -> None:
    """The kernel itself is the oracle: tried at every width."""
    model = reader(dtype)
    x = torch.randn(2, 6, 5, dtype=dtype)
    structure = trace(model, x)
    for num in range(1, 49):
        if num % GRIDS[dtype] == 0 and num < 48:
            assert cut(model, structure.plan({"experts.gate_up": range(num)}))(x).isfinite().all()
        elif num % GRIDS[dtype]:
            small = Experts(32, num).to(dtype)
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
                small(torch.randn(2, 6, 32, dtype=dtype))


def test_no_other_rule_has_a_grid_without_a_test() -> None:
    assert {name: rule.grid_bytes for name, rule in RULES.items() if rule.grid_bytes > 1} == {
        "_grouped_mm.default": 16
    }


AXES = [Axis(4), Axis(6), Axis(12), Axis(8, pin="pinned"), Axis(3, pin="pinned"), Axis(2)]
A, B, C, EIGHT, THREE, TWO = map(Expr.of, AXES)


EXPRESSIONS = (
    *(A, C, times(A, B), times(B, A), times(EIGHT, B), times(THREE, A, B)),
    *(times(THREE, sum_of([A, C])), times(TWO, sum_of([B, TWO])), sum_of([A, C]), sum_of([B, TWO])),
    sum_of([times(A, TWO), times(B, A), C]),
)


@pytest.mark.parametrize(
    ("expr", "multiple"),
    [(own, n) for own in EXPRESSIONS for n in (2, 4, 8) if size_of(own) % n == 0],
    ids=str,
)
def test_sizes_that_keep_to_what_is_needed_are_on_the_grid(expr: Expr, multiple: int) -> None:
    """Every combination of allowed sizes, counted."""
    needed: dict[Axis, list[int]] = {}
    for axis, own in _needed(expr, multiple):
        needed.setdefault(axis, []).append(own)
    free = list(dict.fromkeys(axis for axis in expr.axes() if axis.pin is None))
    chains = {
        axis: [n for n in range(1, axis.size + 1) if all(n % own == 0 for own in needed[axis])]
        for axis in free
    }
    assert all(chain[-1] == axis.size for axis, chain in chains.items()), "whole is allowed"
    sizes = [{}]
    for axis in free:
        sizes = [own | {axis: num} for own in sizes for num in chains[axis]]
    assert all(size_of(expr, own) % multiple == 0 for own in sizes)
