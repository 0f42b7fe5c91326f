"""Moments of layers against sums over samples, positions and classes, written out."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.criteria.gates import find_gates
from apoptosis.curvature import Gate, gate_curvature, layer_moments
from apoptosis.errors import ConfigError, DataError, NonFiniteError
from apoptosis.structure import trace
from apoptosis.task import Task
from oracles.shrinking import small_case

TASK = Task.classification()


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()


def data(num: int = 6, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 2, 6, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=generator)


def inputs_by_hand(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """A, patch by patch."""
    x = F.pad(x, (conv.padding[1], conv.padding[1], conv.padding[0], conv.padding[0]))
    per, (kh, kw), (sh, sw) = x.shape[1] // conv.groups, conv.kernel_size, conv.stride
    total = [0.0] * conv.groups
    for sample in x:
        for group in range(conv.groups):
            own = sample[group * per : (group + 1) * per]
            for i in range(0, x.shape[2] - kh + 1, sh):
                for j in range(0, x.shape[3] - kw + 1, sw):
                    patch = own[:, i : i + kh, j : j + kw].flatten()
                    if conv.bias is not None:
                        patch = torch.cat([patch, torch.ones(1, dtype=patch.dtype)])
                    total[group] = total[group] + torch.outer(patch, patch)
    return torch.stack(total) / len(x)


def test_inputs_are_patches_of_every_position():
    model, (x, y) = small_net(), data()
    measured = layer_moments(model, [(x, y)], TASK, ["0", "2", "5"])
    found = measured.layers
    assert measured.count == 6
    assert measured.loss == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    with torch.no_grad():
        hidden = model[:2](x)
        flat = model[:5](x)
    torch.testing.assert_close(found["0"].inputs, inputs_by_hand(model[0], x))
    torch.testing.assert_close(found["2"].inputs, inputs_by_hand(model[2], hidden))
    wide = torch.cat([flat, torch.ones(6, 1, dtype=flat.dtype)], 1)
    torch.testing.assert_close(found["5"].inputs[0], wide.T @ wide / 6)
    for number, half in enumerate(found["5"].halves):
        own = wide[number::2]
        torch.testing.assert_close(half[0], own.T @ own / 6)


def outputs_by_hand(
    model: nn.Sequential, layer: int, x: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """S in expectation over labels: Σ_y p_y s_y s_yᵀ of the gradients of −T log p_y, sample by sample."""
    groups = getattr(model[layer], "groups", 1)
    total = 0.0
    for sample in x:
        with torch.no_grad():
            y = model[: layer + 1](sample[None])
        y.requires_grad_()
        logs = (model[layer + 1 :](y) / temperature).log_softmax(1)[0]
        for log in logs:
            (slope,) = torch.autograd.grad(-temperature * log, y, retain_graph=True)
            by = slope.flatten(2)[0] if slope.dim() > 2 else slope.T
            by = by.detach().reshape(groups, -1, by.shape[-1])
            total = total + float(log.detach().exp()) * by @ by.mT / by.shape[2]
    return total / len(x)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("layer", [0, 2, 5])
def test_of_few_classes_both_are_exact_at_any_temperature(layer, temperature):
    model, (x, y) = small_net(), data(num=8)
    found = layer_moments(model, [(x, y)], TASK, [str(layer)], temperature=temperature).layers
    own = found[str(layer)]
    torch.testing.assert_close(own.outputs, outputs_by_hand(model, layer, x, temperature))
    torch.testing.assert_close(own.gates, gates_by_hand(model, layer, x, temperature))


def test_as_temperature_grows_all_logits_count_alike():
    """H = (I − 1 1ᵀ / K) / K for every sample, however sure the network is of it."""
    model, (x, y) = small_net(), data(num=8)
    found = layer_moments(model, [(x, y)], TASK, ["5"], temperature=math.inf).layers["5"]
    want = torch.eye(3, dtype=torch.float64) / 3 - torch.full((3, 3), 1 / 9, dtype=torch.float64)
    torch.testing.assert_close(found.outputs[0], want)
    near = layer_moments(model, [(x, y)], TASK, ["2"], temperature=1e9).layers["2"]
    far = layer_moments(model, [(x, y)], TASK, ["2"], temperature=math.inf).layers["2"]
    torch.testing.assert_close(near.outputs, far.outputs)


def test_a_loss_that_is_no_cross_entropy_has_no_temperature():
    model, (x, y) = small_net(), data()
    plain = layer_moments(model, [(x, y)], squares(), ["2"]).layers["2"]
    heated = layer_moments(model, [(x, y)], squares(), ["2"], temperature=9.0).layers["2"]
    assert torch.equal(plain.outputs, heated.outputs)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, "2"])
def test_temperatures_that_nobody_can_mean_are_refused(temperature):
    with pytest.raises(ConfigError, match="a number above 0"):
        layer_moments(small_net(), [data()], TASK, ["2"], temperature=temperature)


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_outputs_approach_the_mean_over_labels(layer):
    model, (x, y) = small_net(), data(num=8)
    found = layer_moments(model, [(x, y)], TASK, [str(layer)], draws=2000).layers
    want = outputs_by_hand(model, layer, x)
    got = found[str(layer)].outputs
    assert float((got - want).norm() / want.norm()) < 0.06  # about 1/√(2000 · 8) · a few


def gates_by_hand(
    model: nn.Sequential, layer: int, x: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Γ in expectation over labels, by a factor on every channel that the layer reads, sample by sample."""
    total = 0.0
    for sample in x:
        with torch.no_grad():
            given = model[:layer](sample[None])
        factors = torch.ones(given.shape[1], dtype=given.dtype, requires_grad=True)
        shape = (1, -1, *[1] * (given.dim() - 2))
        logs = (model[layer:](given * factors.view(shape)) / temperature).log_softmax(1)[0]
        for log in logs:
            (slope,) = torch.autograd.grad(-temperature * log, factors, retain_graph=True)
            total = total + float(log.detach().exp()) * torch.outer(slope, slope)
    return total / len(x)


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_gates_approach_the_mean_over_labels(layer):
    model, (x, y) = small_net(), data(num=8)
    found = layer_moments(model, [(x, y)], TASK, [str(layer)], draws=2000).layers
    want = gates_by_hand(model, layer, x)
    assert float((found[str(layer)].gates - want).norm() / want.norm()) < 0.06


def test_gates_of_tokens_are_factors_for_all_tokens_of_a_sample():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Flatten(), nn.Linear(8, 3)
    )
    model, x = model.double(), torch.randn(4, 4, 3, dtype=torch.float64)
    total = torch.zeros(5, 5, dtype=torch.float64)
    for sample in x:
        factors = torch.ones(5, dtype=x.dtype, requires_grad=True)
        logs = model[2:](model[:2](sample[None]) * factors).log_softmax(1)[0]
        for log in logs:
            (slope,) = torch.autograd.grad(-log, factors, retain_graph=True)
            total += float(log.detach().exp()) * torch.outer(slope, slope) / len(x)
    found = layer_moments(model, [x], TASK, ["2"], draws=4000).layers["2"].gates
    assert float((found - total).norm() / total.norm()) < 0.06


def squares() -> Task:
    """Its Gauss-Newton matrix is exact, without draws."""
    return Task.classification(lambda outputs, _: outputs.square().sum(1).mean())


def gates_of(model: nn.Module, id: str) -> list[Gate]:
    structure = trace(model, small_case(id).inputs(2))
    return [gate for group in structure.groups for gate in find_gates(model, group)]


@pytest.mark.parametrize("id", ["separate", "fused", "residual"])
@pytest.mark.parametrize("sizes", [(6,), (4, 2), (0, 3, 3)], ids=str)
def test_gates_beside_the_layers_are_those_of_gates_alone(id, sizes):
    case = small_case(id)
    model, x = case.model(), case.inputs(6)
    wanted, task = gates_of(model, id), squares()
    batches = [(part, torch.zeros(len(part)).long()) for part in x.split(sizes)]
    layer = {"residual": "head"}.get(id, "parts.0.o" if id == "separate" else "parts.0.proj")
    found = layer_moments(model, batches, task, [layer], gates=wanted)
    alone = gate_curvature(model, batches, task, wanted)
    assert set(found.gates) == set(alone.diagonal) == {gate.group for gate in wanted}
    for name, diagonal in alone.diagonal.items():
        torch.testing.assert_close(found.gates[name], diagonal, rtol=1e-9, atol=1e-15)
    without = layer_moments(model, batches, task, [layer])
    assert without.gates == {}
    assert torch.equal(without.layers[layer].outputs, found.layers[layer].outputs)


def test_gates_are_wanted_without_any_layer():
    case = small_case("separate")
    model, x = case.model(), case.inputs(6)
    wanted = [g for g in gates_of(model, "separate") if g.group.endswith("qk_dim")]
    found = layer_moments(model, [(x, torch.zeros(6).long())], squares(), [], gates=wanted)
    assert found.layers == {}
    assert list(found.gates) == ["parts.0.q:qk_dim"]


def test_the_oracle_of_outputs_can_fail():
    model, (x, y) = small_net(), data(num=8)
    found = layer_moments(model, [(x, y)], TASK, ["2"], draws=2000).layers
    want = outputs_by_hand(model, 2, x)
    positions = 4  # a sum over positions in the place of the mean
    assert float((found["2"].outputs * positions - want).norm() / want.norm()) > 1


def test_batches_do_not_matter_and_labels_are_not_needed():
    model, (x, y) = small_net(), data()
    whole = layer_moments(model, [(x, y)], TASK, ["0", "2"]).layers
    for batches in ([(x[:2], y[:2]), (x[2:], y[2:])], [x[:5], x[5:]]):
        parts = layer_moments(model, batches, TASK, ["0", "2"]).layers
        for path in whole:
            torch.testing.assert_close(parts[path].halves, whole[path].halves)


def test_the_model_and_random_numbers_stay_as_they_were():
    model, (x, y) = small_net(), data()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    layer_moments(model, [(x, y)], TASK, ["0"])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layers_that_the_outputs_do_not_depend_on_are_left_out():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    found = layer_moments(Aside(), [torch.randn(4, 3)], TASK, ["used", "unused"]).layers
    assert set(found) == {"used"}


def test_bad_values_and_no_data_are_refused():
    model, (x, y) = small_net(), data()
    with pytest.raises(DataError, match="no samples"):
        layer_moments(model, [], TASK, ["0"])
    x[0, 0, 0, 0] = float("nan")
    for batch in ((x, y), x):
        with pytest.raises(NonFiniteError, match=r"[Nn]a[Nn]"):
            layer_moments(model, [batch], TASK, ["0"])


def test_places_that_are_drawn_stand_for_all():
    """Where all places say the same: 100 of them, of which 64 are enough."""
    conv = nn.Conv2d(2, 3, 3).double()
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.ones(4, 2, 12, 12, dtype=torch.float64)
    found = layer_moments(model, [x[:3], x[3:]], TASK, ["0"]).layers["0"]
    want = torch.full((1, 19, 19), 100.0, dtype=torch.float64)
    torch.testing.assert_close(found.inputs, want)
    torch.testing.assert_close(found.outputs, outputs_by_hand(model, 0, x))


def test_places_of_gradients_are_drawn_anew_for_every_cotangent():
    """100 places, all different, 64 at a time: of many cotangents S is that of all places, not of some 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(300, 3)).double()
    x = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    want = outputs_by_hand(model, 0, x)
    found = layer_moments(model, [x], TASK, ["0"], draws=3000).layers["0"].outputs
    assert float((found - want).norm() / want.norm()) < 0.02
    few = layer_moments(model, [x], TASK, ["0"]).layers["0"].outputs
    assert float((few - want).norm() / want.norm()) > 0.05


def test_how_many_labels_are_drawn_does_not_change_what_is_read():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.randn(4, 2, 12, 12, dtype=torch.float64)
    once, often = (layer_moments(model, [x], TASK, ["0"], draws=n).layers["0"] for n in (1, 9))
    assert torch.equal(once.inputs, often.inputs)


def many_classes(seed: int = 0) -> nn.Module:
    """More than 32, so that labels are drawn."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 40)).double()


@pytest.mark.parametrize("sizes", [(5, 7), (1, 11), (4, 0, 8)], ids=str)
def test_drawn_labels_do_not_depend_on_how_data_are_cut(sizes):
    model, x = many_classes(), torch.randn(12, 4, dtype=torch.float64)
    whole = layer_moments(model, [x], TASK, ["2"]).layers["2"]
    parts = layer_moments(model, list(x.split(sizes)), TASK, ["2"]).layers["2"]
    torch.testing.assert_close(parts.outputs, whole.outputs)
    torch.testing.assert_close(parts.gates, whole.gates)
    pieces = layer_moments(model, [x], TASK, ["2"], micro_batch=5).layers["2"]
    torch.testing.assert_close(pieces.outputs, whole.outputs)


def test_rows_that_a_task_leaves_out_are_never_taken_for_others():
    """Two positions of each sample, those of the second do not count: marked as such, or not among the rows at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, counted = torch.randn(2, 2, 3).double(), torch.tensor([True, True, False, False])
    marked = replace(TASK, rows=lambda outputs, _: (outputs.flatten(0, 1), counted))
    left_out = replace(TASK, rows=lambda outputs, _: (outputs.flatten(0, 1)[counted], None))
    want = layer_moments(model, [x], marked, ["2"]).layers["2"]
    drawn = [
        layer_moments(model, [x], left_out, ["2"], seed=seed).layers["2"] for seed in range(100)
    ]
    for name in ("outputs", "gates"):
        own, mean = getattr(want, name), sum(getattr(found, name) for found in drawn) / len(drawn)
        assert float((mean - own).norm() / own.norm()) < 0.1  # 0.5 and more if taken for others


@pytest.mark.parametrize("draws", [0, -1, 2.5, "8"])
def test_draws_that_nobody_can_mean_are_refused(draws):
    with pytest.raises(ConfigError, match="a number from 1 on"):
        layer_moments(small_net(), [data()], TASK, ["2"], draws=draws)


def test_classes_that_a_network_rules_out_stay_out_at_any_temperature():
    class Ruled(nn.Module):
        def forward(self, x):
            return torch.where(torch.tensor([True, True, False]), x, -torch.inf)

    model, (x, y) = small_net().append(Ruled()), data()
    for temperature in (1.0, 2.0, math.inf):
        found = layer_moments(model, [(x, y % 2)], TASK, ["5"], temperature=temperature).layers["5"]
        assert found.outputs.isfinite().all()
        assert found.outputs[0, :2, :2].any()
        assert not found.outputs[0, 2].any()


def test_empty_batches_count_nothing():
    model, (x, y) = small_net(), data()
    found = layer_moments(model, [(x, y), (x[:0], y[:0])], TASK, ["5"])
    assert found.count == 6
    torch.testing.assert_close(
        found.layers["5"].gates, layer_moments(model, [(x, y)], TASK, ["5"]).layers["5"].gates
    )


def test_data_stay_as_they_are_where_forward_writes_to_them():
    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x, y = data()
    before = x.clone()
    layer_moments(nn.Sequential(Doubling(), small_net()), [(x, y)], TASK, ["1.5"])
    assert torch.equal(x, before)


def test_gates_of_networks_in_16_bits_do_not_vanish():
    """Products of 1e-4 and 1e-4 are zero in float16."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e-4)
        model[1].weight.copy_(1e-4 * torch.eye(3, 4) + 1e-4)
    batch = (torch.ones(2, 3).half(), torch.tensor([0, 1]))
    found = layer_moments(model.half(), [batch], TASK, ["1"])
    assert (found.layers["1"].gates.diagonal()[:3] > 0).all()
