"""Random networks: every group of every one is cut, and compared with what knows nothing of axes.

`benchmarks/fuzz_structure.py` does the same for as many as one likes. Networks that once failed are kept below, each as
small as it could be made.
"""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.structure import cut, trace, zero
from oracles.cut_checks import TOLERANCE, check
from oracles.random_choice import BLOCKS, Unfit
from oracles.random_networks import Blueprint, Placed, build, random_blueprint

NUM_NETWORKS = 60


@pytest.mark.parametrize("seed", range(NUM_NETWORKS))
@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match num_features")
def test_every_group_of_a_random_network_is_cut_exactly(seed: int) -> None:
    report = check(build(random_blueprint(seed, longest=2)), alone=1, joint=1)
    assert report.findings == []


def test_a_wrong_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def twin_of_nothing(model: nn.Module, plan: object) -> nn.Module:
        return model

    monkeypatch.setattr("oracles.cut_checks.zero", twin_of_nothing)
    network = build(Blueprint(0, "vector", (Placed("Joined", 1, "plain"),), "head"))
    assert "wrong" in {finding.kind for finding in check(network).findings}


def test_every_block_has_something_to_cut() -> None:
    """Groups that should be there are: no kind of block pins all of its networks."""
    without = [name for name in BLOCKS if not any(num_groups(name, seed) for seed in range(8))]
    assert without == []


def num_groups(name: str, seed: int) -> int:
    """Of a network of one block, after a layer that gives it something to shrink."""
    start, before = {2: ("vector", "Layer"), 3: ("tokens", "Project"), 4: ("image", "Conv")}[
        BLOCKS[name].takes
    ]
    with suppress(Unfit):
        blocks = (Placed(before, seed, "plain"), Placed(name, seed, "plain"))
        network = build(Blueprint(seed, start, blocks, "head"))
        return len(trace(network.model, network.inputs(2, 0)).groups)
    return 0


def assert_cut_is_exact(model: nn.Module, x: torch.Tensor, kept: dict[str, list[int]]) -> None:
    """Cut equals twin, at the example's batch size and at another."""
    model = model.double().eval()
    plan = trace(model, x).plan(kept)
    small, twin = cut(model, plan), zero(model, plan)
    for inputs in (x, torch.cat([x, x.flip(0), x])):
        torch.testing.assert_close(small(inputs), twin(inputs), rtol=TOLERANCE, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_recurrent_layers_of_unequal_size_run_as_a_program(kind, options) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 5, batch_first=True, **options)
            self.head = nn.Linear(10 if "bidirectional" in options else 5, 2)

        def forward(self, x):
            return self.head(self.cell(x)[0])

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 4, 3, dtype=torch.float64)
    name = trace(model.double(), x).groups[0].name
    assert_cut_is_exact(model, x, {name: [0, 1, 4]})


def test_a_recurrent_program_follows_the_batch() -> None:
    class AfterProducts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.cell = nn.Linear(3, 6), nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            h = self.a(x).view(*x.shape[:2], 2, 3)  # sizes in the code: no module can be cut here
            return self.cell(h[:, :, 0] * h[:, :, 1])[0]

    torch.manual_seed(0)
    model, x = AfterProducts(), torch.randn(2, 4, 3, dtype=torch.float64)
    assert_cut_is_exact(model, x, {"a": [0, 2]})


def test_a_stride_from_a_place_counted_from_the_end() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 12), nn.Linear(4, 2)
            self.c = nn.Linear(12, 2)

        def forward(self, x):
            h = self.a(x)
            return self.b(h[:, -11::3]) + self.c(h)  # 1, 4, 7, 10: of nine, -11 would be the first

    structure = trace(Strided(), torch.zeros(2, 3))
    assert [group.name for group in structure.groups] == []


class Attention(nn.Module):
    """Attention that divides by the square root of its width, after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(6, 4)
        self.q, self.k, self.v = (nn.Linear(5, 6) for _ in range(3))

    def forward(self, x):
        n, t, _ = x.shape
        x = self.a(x)
        q, k, v = (f(x).view(n, t, 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.b(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def two_cuts(first: dict[str, list[int]], second: dict[str, list[int]]) -> tuple[str, str]:
    """Deliveries of two cuts in turn, both compared with the twin of both."""
    torch.manual_seed(0)
    model, x = Attention().double().eval(), torch.randn(2, 4, 3, dtype=torch.float64)
    structure = trace(model, x)
    plan = structure.plan(first)
    later = structure.after(plan).plan(second)
    expected = zero(model, plan.then(later))(x)
    for small in (cut(cut(model, plan), later), cut(model, plan.then(later))):
        torch.testing.assert_close(small(x), expected, rtol=TOLERANCE, atol=1e-14)
    return plan.delivery, later.delivery


def test_attention_scaled_by_a_first_cut_is_left_alone_by_a_second() -> None:
    assert two_cuts({"q:qk_dim": [0, 2]}, {"a": [0, 1, 4]}) == ("module", "module")


def test_a_program_takes_back_the_scaling_of_a_first_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x):
        n, t, _ = x.shape
        x = self.a(x)
        q, k = (f(x).view(n, t, 2, -1).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x).view(n, t, 2, 3).transpose(1, 2)  # a size in the code
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.b(y)

    monkeypatch.setattr(Attention, "forward", forward)
    assert two_cuts({"q:qk_dim": [0, 2]}, {"v:v_dim": [1, 2]}) == ("module", "program")


def test_states_written_through_a_view_are_no_zeros() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
            self.cell = nn.GRU(3, 5, num_layers=2, batch_first=True)

        def forward(self, x):
            state = torch.zeros(2, x.shape[0], 5, dtype=x.dtype)
            state[1] = self.start(x.mean(1))
            return self.head(self.cell(x, state)[0])

    torch.manual_seed(0)
    model, x = Started().double(), torch.randn(2, 4, 3, dtype=torch.float64)
    for group in trace(model, x).groups:
        assert_cut_is_exact(model, x, {group.name: [0, 1, 4]})
