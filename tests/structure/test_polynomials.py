"""Costs as polynomials equal the costs found by walking expressions, and those of the network that is cut."""

import numpy as np
import pytest
import torch
from torch import nn

from apoptosis.errors import PlanMismatchError
from apoptosis.structure import Structure, cut, trace
from apoptosis.structure.polynomials import Polynomial
from oracles.cut_checks import counted_macs
from oracles.random_networks import build, random_blueprint
from oracles.shrinking import SMALL_CASES, SmallCase

RNG = np.random.default_rng(0)


class Dense(nn.Module):
    """Every layer reads all that came before, side by side, as DenseNet does."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 5, 4, 6]
        self.layers = nn.ModuleList(
            nn.Conv2d(sum(widths[: i + 1]), width, 3, padding=1)
            for i, width in enumerate(widths[1:])
        )
        self.head = nn.Linear(sum(widths), 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, torch.relu(layer(x))], 1)
        return self.head(x.mean((2, 3)))


class Stream(nn.Module):
    """Convolutions from a stream into the same stream: its width counts twice in their cost."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x.mean((2, 3)))


class Joined(nn.Module):
    """A stream of two groups side by side, mixed into itself: (a + b)·(a + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 9, 1)
        self.head = nn.Linear(9, 2)

    def forward(self, x):
        x = torch.cat([self.a(x), self.b(x)], 1)
        return self.head((x + self.mix(x)).mean((2, 3)))


def shrunk(structure: Structure) -> list[int]:
    return [int(RNG.integers(1, group.size + 1)) for group in structure.groups]


def assert_same_costs(structure: Structure, num: int = 4) -> None:
    names = [group.name for group in structure.groups]
    macs, params = structure.polynomials(names)
    sizes = [group.size for group in structure.groups]
    for counts in [sizes, [1] * len(sizes), *(shrunk(structure) for _ in range(num))]:
        asked = dict(zip(names, counts, strict=True))
        assert macs(np.array(counts)) == structure.macs(asked), asked
        assert params(np.array(counts)) == structure.params(asked), asked


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_costs_of_random_networks_are_those_of_their_expressions(seed):
    network = build(random_blueprint(seed, longest=3))
    structure = trace(network.model, network.inputs(network.batch, 0))
    assert_same_costs(structure)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_costs_after_a_cut_are_polynomials_of_what_is_left(case: SmallCase):
    structure = trace(case.model(), case.inputs())
    assert_same_costs(structure)
    kept = {g.name: range(g.size - 1) for g in structure.groups if g.size - 1 >= max(g.smallest, 1)}
    assert_same_costs(structure.after(structure.plan(kept)))


@pytest.mark.parametrize("make", [Dense, Stream, Joined])
def test_costs_are_those_of_the_network_that_is_cut(make):
    model, x = make().double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    structure = trace(model, x)
    names = [group.name for group in structure.groups]
    macs, params = structure.polynomials(names)
    for _ in range(4):
        counts = [
            min(n, group.size - 1)
            for n, group in zip(shrunk(structure), structure.groups, strict=True)
        ]
        plan = structure.plan({name: range(n) for name, n in zip(names, counts, strict=True)})
        small = cut(model, plan)
        assert params(np.array(counts)) == sum(p.numel() for p in small.parameters())
        assert macs(np.array(counts)) == counted_macs(small, x)


def test_an_axis_that_is_there_twice_counts_squared():
    structure = trace(Stream().double(), torch.randn(1, 3, 4, 4, dtype=torch.float64))
    (name,) = (group.name for group in structure.groups)
    macs, _ = structure.polynomials([name])
    own = {tuple(f): int(c) for c, f in zip(macs.coefficients, macs.factors, strict=True)}
    assert own == {(0, 1): 16 * 27 + 2, (0, 0): 2 * 16 * 9}


@pytest.mark.parametrize("chosen", [slice(None, None, 2), slice(1, 2), slice(None, None, -1)])
def test_groups_that_are_not_named_stay_as_they_are_and_the_order_is_that_of_the_names(chosen):
    structure = trace(Dense().double(), torch.randn(1, 3, 4, 4, dtype=torch.float64))
    names = [group.name for group in structure.groups][chosen]
    macs, params = structure.polynomials(names)
    counts = [structure[name].size - 1 - i for i, name in enumerate(names)]
    asked = dict(zip(names, counts, strict=True))
    assert macs(np.array(counts)) == structure.macs(asked)
    assert params(np.array(counts)) == structure.params(asked)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
def test_what_changes_with_some_groups_is_in_their_part(case: SmallCase):
    structure = trace(case.model(), case.inputs())
    sizes = np.array([group.size for group in structure.groups])
    places = list(range(len(sizes)))
    for whole in structure.polynomials([group.name for group in structure.groups]):
        for changing in ([0], places[::2], places):
            part = whole.part(changing)
            counts = np.array(shrunk(structure))
            fewer = counts.copy()
            fewer[changing] = np.maximum(1, fewer[changing] - 1)
            assert part(counts) - part(fewer) == whole(counts) - whole(fewer)
            assert part.num_variables == whole.num_variables


def test_a_part_without_a_term_would_be_noticed():
    structure = trace(Dense().double(), torch.randn(1, 3, 4, 4, dtype=torch.float64))
    macs, _ = structure.polynomials([group.name for group in structure.groups])
    part = macs.part([1])
    lost = Polynomial(part.coefficients[1:], part.factors[1:], part.num_variables)
    counts, fewer = np.array([5, 4, 6]), np.array([5, 3, 6])
    assert part(counts) - part(fewer) == macs(counts) - macs(fewer)
    assert lost(counts) - lost(fewer) != macs(counts) - macs(fewer)


def test_no_groups_leave_a_number_and_unknown_ones_are_refused():
    structure = trace(Dense().double(), torch.randn(1, 3, 4, 4, dtype=torch.float64))
    macs, params = structure.polynomials([])
    nothing = np.array([], dtype=np.int64)
    assert (macs(nothing), params(nothing)) == (structure.macs(), structure.params())
    assert macs.part([])(nothing) == 0
    with pytest.raises(PlanMismatchError, match="no group 'nowhere'"):
        structure.polynomials(["nowhere"])


def test_costs_of_networks_with_billions_of_weights_do_not_overflow():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**16, 2**16, bias=False) for _ in range(3)])
        x = torch.zeros(2**12, 2**16)
    structure = trace(model, x)
    names = [group.name for group in structure.groups]
    assert_same_costs(structure, 1)
    assert structure.polynomials(names)[0](np.array([2**16] * 2)) == 3 * 2**44
