"""Greedy removal with refits, against least squares that are solved anew for every set."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apoptosis.criteria import elimination
from apoptosis.criteria.elimination import Reader, eliminate, eliminate_alike, shape_of


def spd(n: int, generator: torch.Generator) -> torch.Tensor:
    root = torch.randn(n, n + 3, generator=generator, dtype=torch.float64)
    return root @ root.T / n


class Problem:
    """Layers that read the same units, each unit `k` columns of the layer and some columns of nobody (a bias)."""

    def __init__(self, seed: int, units: int = 6, layers: tuple[tuple[int, int], ...] = ((3, 2),)):
        generator = torch.Generator().manual_seed(seed)
        self.units = units
        self.layers = []
        for m, k in layers:
            n = units * k + 1
            columns = torch.randperm(n, generator=generator)[: units * k].reshape(units, k)
            weights = torch.randn(m, n, generator=generator, dtype=torch.float64)
            self.layers.append((spd(n, generator), spd(m, generator), weights, columns))

    def readers(self) -> list[Reader]:
        return [
            Reader(a.inverse(), torch.linalg.cholesky(s).T @ w, torch.arange(self.units), c)
            for a, s, w, c in self.layers
        ]

    def cost(self, gone: tuple[int, ...]) -> float:
        """Least ½ tr(S E A Eᵀ) over all E = W − W' whose W' has zeros at the columns that are gone."""
        total = 0.0
        for a, s, w, columns in self.layers:
            out = columns[list(gone)].flatten()
            stay = torch.tensor([i for i in range(len(a)) if i not in set(out.tolist())])
            new = torch.zeros_like(w)
            new[:, stay] = torch.linalg.lstsq(a[stay][:, stay], a[stay] @ w.T).solution.T
            error = w - new
            total += 0.5 * float(torch.trace(s @ error @ a @ error.T))
        return total


LAYERS = [((3, 2),), ((2, 1),), ((4, 3), (2, 1), (1, 2))]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_paid_along_the_path_is_what_removing_the_set_costs(seed, layers):
    problem = Problem(seed, layers=layers)
    path = eliminate(problem.readers(), problem.units)
    sums = path.costs.cumsum(0)
    for num in range(1, problem.units + 1):
        cost = problem.cost(tuple(path.order[:num].tolist()))
        assert float(sums[num - 1]) == pytest.approx(cost, rel=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("layers", LAYERS)
def test_readers_on_a_gpu_give_the_same_path(layers):
    problem = Problem(1, units=200, layers=layers)
    here = eliminate(problem.readers(), problem.units)
    there = eliminate(
        [
            Reader(*(t.cuda() for t in (own.inverse, own.weights, own.units, own.columns)))
            for own in problem.readers()
        ],
        problem.units,
    )
    assert torch.equal(here.order, there.order)
    torch.testing.assert_close(there.costs, here.costs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("layers", LAYERS)
def test_costs_stay_exact_where_several_go_in_a_round(layers, monkeypatch):
    monkeypatch.setattr(elimination, "ROUNDS", 3)
    problem = Problem(5, units=8, layers=layers)
    path = eliminate(problem.readers(), problem.units)
    assert sorted(path.order.tolist()) == list(range(8))
    for num in range(1, 9):
        cost = problem.cost(tuple(path.order[:num].tolist()))
        assert float(path.costs[:num].sum()) == pytest.approx(cost, rel=1e-8)


def test_rounds_of_several_lose_little_against_one_by_one(monkeypatch):
    """The costs of half of 48 units, over ten problems."""
    lost = []
    for seed in range(10):
        problem = Problem(seed, units=48, layers=((6, 1),))
        exact = float(eliminate(problem.readers(), 48).costs[:24].sum())
        with monkeypatch.context() as patch:
            patch.setattr(elimination, "ROUNDS", 8)
            rough = float(eliminate(problem.readers(), 48).costs[:24].sum())
        lost.append(rough / exact)
    assert sum(lost) / len(lost) < 1.02


@pytest.mark.parametrize("layers", LAYERS)
def test_the_cheapest_goes_at_every_step(layers):
    problem = Problem(7, layers=layers)
    gone: tuple[int, ...] = ()
    for unit in eliminate(problem.readers(), problem.units).order.tolist():
        others = [u for u in range(problem.units) if u not in gone]
        assert unit == min(others, key=lambda u: problem.cost((*gone, u)))
        gone = (*gone, unit)


def test_greedy_sets_are_near_the_best_of_all():
    """No proof, a sanity check: the best of all sets of three is at most a little cheaper."""
    excess = []
    for seed in range(20):
        problem = Problem(seed, layers=((3, 1),))
        greedy = float(eliminate(problem.readers(), problem.units).costs[:3].sum())
        best = min(problem.cost(own) for own in itertools.combinations(range(problem.units), 3))
        assert greedy >= best - 1e-9
        excess.append(greedy / best)
    assert sum(excess) / len(excess) < 1.15


def test_of_two_that_do_the_same_work_the_first_costs_nothing_and_the_second_all():
    a = torch.tensor([[1.0, 1.0, 0.2], [1.0, 1.0, 0.2], [0.2, 0.2, 1.0]], dtype=torch.float64)
    inverse = (a + 1e-9 * torch.eye(3)).inverse()
    weights = torch.tensor([[1.0, 1.0, 3.0]], dtype=torch.float64)
    path = eliminate([Reader(inverse, weights, torch.arange(3), torch.arange(3)[:, None])], 3)
    first, second = path.order[:2].tolist()
    assert {first, second} == {0, 1}
    assert path.costs[0] < 1e-6
    assert path.costs[1] > 1


def test_scores_rank_as_the_path_goes_even_where_costs_fall_or_are_equal():
    problem = Problem(3)
    a, s, w, columns = problem.layers[0]
    w[:, columns[[1, 4]].flatten()] = 0  # two dead units, which cost the same
    path = eliminate(problem.readers(), problem.units)
    scores = path.scores()
    assert scores.argsort().tolist() == path.order.tolist()
    assert bool((scores[path.order] >= path.costs).all())


def test_units_that_only_some_layers_read():
    problem = Problem(1, layers=((3, 2), (2, 1)))
    readers = problem.readers()
    some = torch.tensor([0, 2, 5])
    second = readers[1]
    readers[1] = Reader(second.inverse, second.weights, some, second.columns[some])
    a, s, w, columns = problem.layers[1]
    keep = [0, 2, 5]

    def cost(gone):
        first = Problem.cost(type("P", (), {"layers": problem.layers[:1]}), gone)
        read = tuple(u for u in gone if u in keep)
        return first + (
            Problem.cost(type("P", (), {"layers": problem.layers[1:]}), read) if read else 0
        )

    path = eliminate(readers, problem.units)
    assert float(path.costs.sum()) == pytest.approx(cost(tuple(range(6))), rel=1e-8)


class Crowd(Problem):
    """24 units that go in rounds: read by all of one layer, and by two groups of channels of another, half by each.

    Columns of nobody lie between those of units.
    """

    def __init__(self):
        super().__init__(11, units=24, layers=((5, 2), (40, 1)))
        generator = torch.Generator().manual_seed(12)
        self.parts = [torch.arange(24), torch.arange(24), torch.arange(12), torch.arange(12, 24)]
        for _ in range(2):
            columns = torch.randperm(41, generator=generator)[:36].reshape(12, 3)
            weights = torch.randn(4, 41, generator=generator, dtype=torch.float64)
            self.layers.append((spd(41, generator), spd(4, generator), weights, columns))

    def readers(self) -> list[Reader]:
        return [
            Reader(a.inverse(), torch.linalg.cholesky(s).T @ w, units, c)
            for (a, s, w, c), units in zip(self.layers, self.parts, strict=True)
        ]

    def cost(self, gone: tuple[int, ...]) -> float:
        total = 0.0
        for layer, units in zip(self.layers, self.parts, strict=True):
            alone = Problem(0)
            alone.layers = [layer]
            total += alone.cost(tuple(u - int(units[0]) for u in gone if u in units.tolist()))
        return total


def off_by(problem: Crowd, readers: list[Reader]) -> float:
    """The largest relative difference between what was paid so far and what the set costs."""
    path = eliminate(readers, problem.units)
    assert sorted(path.order.tolist()) == list(range(problem.units))
    paid, gone = path.costs.cumsum(0).tolist(), path.order.tolist()
    costs = [problem.cost(tuple(gone[: i + 1])) for i in range(problem.units)]
    return max(abs(a - b) / b for a, b in zip(paid, costs, strict=True))


@pytest.mark.parametrize("rounds", [6, 64])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_costs_stay_exact_while_columns_of_the_gone_are_dropped(rounds, window, monkeypatch):
    monkeypatch.setattr(elimination, "ROUNDS", rounds)
    monkeypatch.setattr(elimination, "WINDOW", window)
    monkeypatch.setattr(elimination, "PART", 1000)
    problem, compact, sizes = Crowd(), elimination._Layers.compact_, []

    def watched(self):
        compact(self)
        sizes.append(self.inverse.shape[1])

    monkeypatch.setattr(elimination._Layers, "compact_", watched)
    assert off_by(problem, problem.readers()) < 1e-8
    assert (len(set(sizes)) > 5) is (window < 1000)


@pytest.mark.parametrize("window", [4, 1000])
def test_groups_of_one_shape_go_together_as_each_goes_alone(window, monkeypatch):
    """Parts of a layer may lose their units at another pace in each of them."""
    monkeypatch.setattr(elimination, "ROUNDS", 6)
    monkeypatch.setattr(elimination, "WINDOW", window)
    monkeypatch.setattr(elimination, "PART", 1000)
    groups = []
    for seed in range(4):
        problem = Crowd()
        for number, (a, s, w, c) in enumerate(problem.layers):
            generator = torch.Generator().manual_seed(100 * seed + number)
            noise = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            problem.layers[number] = (a, s, w * noise.exp(), c)
        groups.append(problem.readers())
    assert len({shape_of(own, 24) for own in groups}) == 1
    together = eliminate_alike(groups, 24)
    assert len({tuple(own.order.tolist()) for own in together}) == 4
    for own, path in zip(groups, together, strict=True):
        alone = eliminate(own, 24)
        assert torch.equal(path.order, alone.order)
        torch.testing.assert_close(path.costs, alone.costs, rtol=1e-8, atol=0)


def test_layers_that_read_one_unit_each_ask_for_what_it_costs_there_whoever_goes():
    """As a depthwise convolution does; beside a layer that reads all, and by themselves."""
    problem = Problem(4, units=8, layers=((3, 2),))
    generator = torch.Generator().manual_seed(5)
    single, costs = [], torch.zeros(8).double()
    for unit in range(8):
        a, w = spd(4, generator), torch.randn(2, 4, generator=generator, dtype=torch.float64)
        columns = torch.arange(3)
        single.append(Reader(a.inverse(), w, torch.tensor([unit]), columns[None]))
        lost = w[:, columns] @ torch.linalg.inv(a.inverse()[:3, :3]) @ w[:, columns].T
        costs[unit] = 0.5 * lost.trace()
    path = eliminate(single, 8)
    assert path.order.tolist() == costs.argsort().tolist()
    torch.testing.assert_close(path.costs, costs[path.order], rtol=1e-10, atol=0)
    both = eliminate([*problem.readers(), *single], 8)
    gone = both.order.tolist()
    for num in range(1, 9):
        want = problem.cost(tuple(gone[:num])) + float(costs[gone[:num]].sum())
        assert float(both.costs[:num].sum()) == pytest.approx(want, rel=1e-8)


def test_a_gpu_would_be_asked_as_often_for_many_groups_as_for_one():
    """Operations are launches there."""

    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    problem, counts = Problem(3, units=100, layers=((5, 1),)), []
    for num in (1, 16):
        with Counting() as counting:
            eliminate_alike([problem.readers() for _ in range(num)], 100)
        counts.append(counting.num - 10 * num)  # a few to stack them
    assert counts[1] < 1.3 * counts[0]


def test_tensors_of_readers_stay_as_they_were():
    """Several groups that one layer reads share them."""
    for readers in (Problem(2).readers(), Crowd().readers()):
        before = [(r.inverse, r.weights, r.inverse.clone(), r.weights.clone()) for r in readers]
        eliminate(readers, 24 if len(readers) > 1 else 6)
        for inverse, weights, own, theirs in before:
            assert torch.equal(inverse, own)
            assert torch.equal(weights, theirs)


def test_a_wrong_way_of_dropping_columns_is_seen(monkeypatch):
    """Weights that stay where they were while the rest moves up."""
    compact = elimination._Layers.compact_

    def careless(self):
        weights = self.weights
        compact(self)
        self.weights = weights[:, : self.inverse.shape[1]].clone()

    problem = Crowd()
    monkeypatch.setattr(elimination, "WINDOW", 4)
    monkeypatch.setattr(elimination, "PART", 1000)
    assert off_by(problem, problem.readers()) < 1e-8
    monkeypatch.setattr(elimination._Layers, "compact_", careless)
    assert off_by(problem, problem.readers()) > 1e-3


def test_the_oracle_can_fail(monkeypatch):
    """Forgetting to update P gives other costs from the second unit on."""
    problem = Problem(0)
    monkeypatch.setattr(
        elimination._Layers, "without_", lambda self, units: self.places.scatter_(1, units, -1)
    )
    path = eliminate(problem.readers(), problem.units)
    wrong = float(path.costs[:3].sum())
    assert wrong != pytest.approx(problem.cost(tuple(path.order[:3].tolist())), rel=1e-3)
