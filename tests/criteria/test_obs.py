"""`obs`: prices of units with refits, against networks that are refitted by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.criteria import CRITERIA, gates, obs_units
from apoptosis.criteria.held_out import optimism
from apoptosis.curvature import Moments, Products, layer_moments
from apoptosis.errors import ModelError
from apoptosis.structure import trace
from oracles.shrinking import SeparateAttention, small_case

TASK = ap.Task.classification()


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def inputs(num: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 4, generator=generator, dtype=torch.float64)


def scale(moments: Moments, weight: torch.Tensor) -> float:
    """What Γ says that hidden units cost, over what the Kronecker form says, unit by unit."""
    exact = sum(float(moments.gates[u, u]) for u in range(weight.shape[1]))
    said = sum(
        float(weight[:, u] @ moments.outputs[0] @ weight[:, u] * moments.inputs[0][u, u])
        for u in range(weight.shape[1])
    )
    return exact / said


def doubt(moments: Moments, ridge: float = 0.0, kernel: int = 1) -> float:
    """κ of a layer of one group of channels."""
    first, second = map(Products, moments.halves)
    num = len(moments.gates) * kernel
    columns = torch.arange(num).reshape(-1, kernel)
    return optimism((first, second), columns, ridge=ridge, has_bias=first.own.shape[1] > num)


def with_refit(values: torch.Tensor, moments: Moments, ridge: float = 0.0) -> torch.Tensor:
    """The price along the path: a score is p^((1 − κ)/2) q^((1 + κ)/2) of it and of q = ½ Γ_uu."""
    kappa, alone = doubt(moments, ridge), 0.5 * moments.gates.diagonal()
    return (values / alone ** ((1 + kappa) / 2)) ** (2 / (1 - kappa))


@pytest.mark.parametrize("bias", [True, False])
def test_the_first_price_is_the_loss_of_the_best_refit(bias):
    """½ tr(S E A Eᵀ), scaled, of least squares on the hidden activations themselves; the least is first."""
    model, x = mlp(bias), inputs()
    with torch.no_grad():
        hidden = model[:2](x)
    design = torch.cat([hidden, torch.ones(len(x), int(bias), dtype=x.dtype)], 1)
    target = design @ torch.cat([model[2].weight.T, *([model[2].bias[None]] if bias else [])])
    moments = layer_moments(model, [x], TASK, ["2"]).layers
    prices = []
    for unit in range(6):
        stay = [i for i in range(design.shape[1]) if i != unit]
        new = torch.linalg.lstsq(design[:, stay], target).solution
        error = (target - design[:, stay] @ new).detach()
        prices.append(0.5 * float(((error @ moments["2"].outputs[0]) * error).sum()) / len(x))
    values = obs_units(model, trace(model, x[:1]), [x], ridge=0.0, temperature=1.0).values["0"]
    found = with_refit(values, moments["2"])
    wanted = min(prices) * scale(moments["2"], model[2].weight.detach())
    assert int(found.argmin()) == prices.index(min(prices))
    assert float(found.min()) == pytest.approx(wanted, rel=1e-6)


def test_all_prices_add_up_to_the_loss_of_reading_nothing():
    """Without a bias: E = W, so ½ tr(S W A Wᵀ), scaled."""
    model, x = mlp(bias=False), inputs()
    moments = layer_moments(model, [x], TASK, ["2"]).layers
    own, weight = moments["2"], model[2].weight.detach()
    whole = 0.5 * float(torch.trace(own.outputs[0] @ weight @ own.inputs[0] @ weight.T))
    whole *= scale(own, weight)
    values = obs_units(model, trace(model, x[:1]), [x], ridge=0.0, temperature=1.0).values["0"]
    values = with_refit(values, own)
    # Prices rise along the path, so their sum is no less; equal where prices rise by themselves.
    assert float(values.sum()) >= whole * (1 - 1e-9)
    assert float(values.sum()) < 2 * whole


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_a_temperature_is_a_network_with_smaller_logits(temperature):
    """T² times the prices of the network whose head gives z / T."""
    model, x = mlp(), inputs()
    flatter = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in flatter[4].parameters():
            parameter /= temperature
    found = obs_units(model, trace(model, x[:1]), [x], temperature=temperature).values
    plain = obs_units(flatter, trace(flatter, x[:1]), [x], temperature=1.0).values
    assert set(found) == {"0", "2"}
    for name, own in found.items():
        torch.testing.assert_close(own, temperature**2 * plain[name])


def test_what_scales_prices_is_what_gates_cost():
    """Γ, from drawn labels, against the exact criterion; ahead of a mean over places, where errors add up."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)),
    ).double()
    x = torch.randn(100, 3, 9, 9, dtype=torch.float64)
    own = layer_moments(model, [x], TASK, ["2"], draws=100).layers["2"]
    exact = gates(model, trace(model, x[:1]), [x]).values["0"].double()
    torch.testing.assert_close(0.5 * own.gates.diagonal(), exact, rtol=0.1, atol=0)
    weight = model[2].weight.detach()
    said = sum(
        torch.trace(own.outputs[0] @ w @ own.inputs[0][9 * u : 9 * u + 9, 9 * u : 9 * u + 9] @ w.T)
        for u, w in ((u, weight[:, u].flatten(1)) for u in range(6))
    )
    assert float(own.gates.diagonal().sum() / said) > 2  # so that scaling them matters


def test_a_unit_that_another_can_stand_in_for_is_free():
    model, x = mlp(), inputs()
    with torch.no_grad():
        model[0].weight[3] = 2 * model[0].weight[1]
        model[0].bias[3] = 2 * model[0].bias[1]
    values = obs_units(model, trace(model, x[:1]), [x], ridge=1e-9, temperature=1.0).values["0"]
    assert int(values.argmin()) in (1, 3)
    prices = with_refit(values, layer_moments(model, [x], TASK, ["2"]).layers["2"], ridge=1e-9)
    assert float(prices.min()) < 1e-6 * float(prices.max())


class Net(nn.Module):
    """A stream with two readers, a grouped convolution and a depthwise one on the way."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.grouped = nn.Conv2d(6, 8, 3, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (self.left(x) + self.right(x)).relu()
        x = self.depthwise(self.grouped(x).relu()).relu()
        return self.head(x.mean((2, 3)))


def test_every_group_with_linear_readers_has_prices():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 3, 9, 9)
    structure = trace(model, x[:1])
    found = obs_units(model, structure, [x])
    assert set(found.values) | set(found.missing) == {group.name for group in structure.groups}
    assert {"stem"} <= set(found.values)
    for name, own in found.values.items():
        assert own.shape == (structure[name].size,)
        assert bool((own >= 0).all())
        assert len(own.unique()) == len(own)


def test_it_prunes_and_refit_mends_what_it_removed():
    """Together they lose less of the outputs than magnitudes with the same repair."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(64, 3, 9, 9)
    with torch.no_grad():
        want = model(x)
    lost = {}
    for name in ("obs", "random"):
        outcome = ap.prune(
            model, [x], ap.Budget(units=0.6), criterion=name, steps=1, repair=["refit"]
        )
        with torch.no_grad():
            lost[name] = float((outcome.model(x) - want).square().mean())
    assert lost["obs"] < lost["random"]


def test_without_a_cross_entropy_the_price_is_what_the_squared_error_grows_by():
    """The last layer's best refit to what it gave, unit by unit: the loss is quadratic there, so this is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = inputs(), torch.randn(64, 3, dtype=torch.float64)
    task = ap.Task.classification(lambda outputs, labels: (outputs - labels).square().sum(1).mean())
    with torch.no_grad():
        hidden, target = model[:2](x), model(x)
    design = torch.cat([hidden, torch.ones(len(x), 1, dtype=x.dtype)], 1)

    def price(*gone: int) -> float:
        stay = design[:, [i for i in range(8) if i not in gone]]
        error = target - stay @ torch.linalg.lstsq(stay, target).solution
        return float(error.square().sum()) / len(x)

    values = obs_units(model, trace(model, x[:1]), [(x, y)], task, ridge=0.0).values["0"]
    moments = layer_moments(model, [(x, y)], task, ["2"]).layers["2"]
    found = with_refit(values, moments) / scale(moments, model[2].weight.detach())
    gone, paid = [], 0.0
    for unit in found.argsort().tolist():
        others = [u for u in range(7) if u not in gone]
        assert unit == min(others, key=lambda u: price(*gone, u))
        paid = max(paid, price(*gone, unit) - price(*gone))  # the largest so far is the score
        assert float(found[unit]) == pytest.approx(paid, rel=1e-6)
        gone.append(unit)


def test_a_layer_that_reads_several_groups_is_inverted_once(monkeypatch):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(4, 6), nn.Linear(4, 3)
            self.head = nn.Linear(14, 3)

        def forward(self, x):
            return self.head(torch.cat([self.a(x).tanh(), self.b(x).tanh(), self.c(x).tanh()], 1))

    torch.manual_seed(0)
    model, x = Joined().double(), inputs()
    structure = trace(model, x[:1])
    sizes, inverse = [], torch.cholesky_inverse

    def counted(root):
        sizes.append(len(root))
        return inverse(root)

    monkeypatch.setattr(torch, "cholesky_inverse", counted)
    together = obs_units(model, structure, [x]).values
    assert sizes == [15]
    for group in structure.groups:
        alone = obs_units(model, replace(structure, groups=(group,)), [x]).values[group.name]
        torch.testing.assert_close(together[group.name], alone, rtol=1e-9, atol=0)


def test_layers_that_are_called_by_keyword_are_priced_alike():
    class Called(nn.Module):
        def __init__(self, by_keyword: bool):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
            self.by_keyword = by_keyword

        def forward(self, x):
            if not self.by_keyword:
                return self.head(self.stem(x).relu().mean((2, 3)))
            return self.head(input=self.stem(input=x).relu().mean((2, 3)))

    torch.manual_seed(0)
    plain, x = Called(by_keyword=False), torch.randn(8, 3, 5, 5)
    named = Called(by_keyword=True)
    named.load_state_dict(plain.state_dict())
    found, want = (obs_units(m, trace(m, x[:1]), [x]).values for m in (named, plain))
    assert found.keys() == want.keys() == {"stem"}
    assert torch.equal(found["stem"], want["stem"])
    outcome = ap.prune(named, [x], ap.Budget(units=0.5))
    assert outcome.settings["criterion"] == "obs"


SQUARES = ap.Task.classification(lambda outputs, _: outputs.square().sum(1).mean())
"""Its Gauss-Newton matrix is exact, without draws."""


def attention(id: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], ap.Structure]:
    case = small_case(id)
    model, x = case.model(), case.inputs(8)
    return model, (x, torch.zeros(8, dtype=torch.int64)), trace(model, x[:2])


def test_queries_and_keys_cost_what_gates_say_for_no_refit_can_mend_a_product():
    model, batch, structure = attention("separate")
    name = "parts.0.q:qk_dim"
    found = obs_units(model, structure, [batch], SQUARES).values[name]
    exact = gates(model, structure, [batch], SQUARES).values[name].double()
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=0)


def test_a_dimension_of_all_three_costs_its_values_refitted_and_its_queries_and_keys():
    """p is refitted + rest, q whole: a twin with layers of their own tells what the first is, and part of Γ."""
    model, batch, structure = attention("fused")
    twin, own = copy.deepcopy(model), SeparateAttention(8, 2, 2).double().eval()
    with torch.no_grad():
        for name in ("weight", "bias"):
            parts = getattr(model.parts[0].qkv, name).chunk(3)
            for layer, part in zip((own.q, own.k, own.v), parts, strict=True):
                getattr(layer, name).copy_(part)
        own.o.load_state_dict(model.parts[0].proj.state_dict())
        twin.parts[0] = own
        torch.testing.assert_close(twin(batch[0]), model(batch[0]))
    apart = trace(twin, batch[0][:2])
    price, alone = (
        score(twin, apart, [batch], SQUARES).values["parts.0.v:v_dim"].double()
        for score in (obs_units, gates)
    )
    found, whole = (
        score(model, structure, [batch], SQUARES).values["parts.0.qkv:head_dim"].double()
        for score in (obs_units, gates)
    )
    moments = layer_moments(twin, [batch], SQUARES, ["parts.0.o"]).layers["parts.0.o"]
    kappa, rest = doubt(moments, ridge=1e-4), (whole - alone).clamp_min(0)
    refitted = (price / alone ** ((1 + kappa) / 2)) ** (2 / (1 - kappa))
    wanted = (refitted + rest) ** ((1 - kappa) / 2) * whole ** ((1 + kappa) / 2)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)
    assert float((rest / whole).max()) > 0.01


def test_where_samples_cannot_be_told_apart_queries_and_keys_are_missing():
    class Turned(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = self.inner.embed(x).transpose(0, 1)  # positions first
            attend = self.inner.parts[0]
            q, k, v = (own(x).unflatten(-1, (2, 4)) for own in (attend.q, attend.k, attend.v))
            weights = torch.softmax(torch.einsum("lbhd,mbhd->bhlm", q, k), -1)
            x = x + attend.o(torch.einsum("bhlm,mbhd->lbhd", weights, v).flatten(2))
            return self.inner.head(x.mean(0))

    case = small_case("separate")
    model, x = Turned(case.model()), case.inputs(7)
    structure = trace(model, x[:2])
    found = obs_units(model, structure, [x])
    name = next(group.name for group in structure.groups if group.kind == "qk_dim")
    assert name in found.missing
    assert found.values


def test_what_nobody_could_refit_is_refused():
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(5, 4))
            self.second = nn.Parameter(torch.randn(3, 5))

        def forward(self, x):
            return (x @ self.first.T).relu() @ self.second.T

    model, x = Program(), torch.randn(6, 4)
    with pytest.raises(ModelError, match="No group is read by linear layers alone"):
        obs_units(model, trace(model, x[:1]), [x])


def test_predictions_are_taken_at_temperature_two_unless_one_says_otherwise():
    model, x = mlp(), inputs()
    structure = trace(model, x[:1])
    plain = obs_units(model, structure, [x])
    asked = obs_units(model, structure, [x], temperature=2.0, draws=None)
    assert (plain.options["temperature"], plain.options["draws"]) == (2.0, None)
    assert all(torch.equal(own, asked.values[name]) for name, own in plain.values.items())
    other = obs_units(model, structure, [x], temperature=1.0)
    assert not torch.equal(other.values["0"], plain.values["0"])


def test_it_stands_in_the_table():
    assert CRITERIA["obs"].score_units is obs_units


def test_a_first_batch_in_which_nothing_counts_is_no_obstacle():
    model, x = mlp(), inputs(12)
    counted, ignored = torch.zeros(6, dtype=torch.int64), torch.full((6,), -100)
    batches = [(x[:6], ignored), (x[6:], counted)]
    found = obs_units(model, trace(model, x[:1]), batches)
    assert all(own.isfinite().all() for own in found.values.values())
    assert found.count == 6


def test_units_whose_places_cancel_cost_nothing_and_are_no_nan():
    """By rounding what such a unit costs may come out below zero."""
    for seed in range(13, 16):
        torch.manual_seed(seed)
        conv, norm, head = nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6), nn.Linear(6 * 16, 3)
        with torch.no_grad():
            head.weight.copy_(torch.randn(3, 6, 1).expand(3, 6, 16).flatten(1))
        model = nn.Sequential(conv, norm, nn.Flatten(), head)
        x = torch.randn(8, 1, 6, 6)
        values = obs_units(model, trace(model, x[:1]), [x]).values["0"]
        assert bool(values.isfinite().all())
        assert bool((values >= 0).all())


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_how_data_are_cut_into_batches_changes_no_score(micro_batch: int):
    model, x = mlp(), inputs(30)
    structure = trace(model, x[:1])
    labels = torch.zeros(30).long()  # looked at by nobody
    pieces = [(x[:7], labels[:7]), (x[7:], labels[7:])]
    whole = obs_units(model, structure, [(x, labels)], SQUARES).values
    parts = obs_units(model, structure, pieces, SQUARES, micro_batch=micro_batch).values
    for name, own in whole.items():
        torch.testing.assert_close(parts[name], own, rtol=1e-9, atol=0)
