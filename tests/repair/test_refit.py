"""Refitted layers are least-squares solutions of the dense ones' outputs, on what the mended network sends them."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.pytorch_utils import Conv1D

import apoptosis as ap
from apoptosis.data import digits
from apoptosis.models import digits_cnn
from apoptosis.repair import REPAIRS, Refit, find_repair
from apoptosis.repair.refit import _kept
from apoptosis.structure import cut, trace
from oracles.building import Net, built
from oracles.refitted import CLOSE, error, halved, normal, unlabelled
from oracles.shrinking import SMALL_CASES, small_case
from oracles.untouched import Snapshot

pytestmark = pytest.mark.usefixtures("way")
"""Every claim holds on both ways through the networks."""


# --- against other ways to the same ----------------------------------------------------------------------------------


def two_linear(bias: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Linear(8, 3, bias=bias))


def test_a_linear_network_gets_the_closed_form():
    """W_K + W_C A_CK A_KK⁻¹, with A of the dense hidden units."""
    model, x, kept = built(two_linear), normal(50, 6), [0, 2, 5]
    gone = [u for u in range(8) if u not in kept]
    plan = trace(model, x[:1]).plan({"0": kept})
    found = Refit(ridge=0.0)(model, cut(model, plan), plan, unlabelled(x, 20, 30))
    with torch.no_grad():
        hidden = x @ model[0].weight.T
        A, W = hidden.T @ hidden, model[1].weight
        want = W[:, kept] + W[:, gone] @ A[gone][:, kept] @ torch.linalg.inv(A[kept][:, kept])
    torch.testing.assert_close(found[1].weight, want, **CLOSE)
    torch.testing.assert_close(found[0].weight, model[0].weight[kept], rtol=0, atol=0)


CONVS = {
    "plain": {},
    "bias": {"bias": True},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "two by three": {"kernel_size": (2, 3), "padding": (1, 0)},
}


@pytest.mark.parametrize("name", CONVS)
def test_a_convolution_gets_what_lstsq_gives_on_all_patches(name):
    options = {"kernel_size": 3, "bias": False} | CONVS[name]
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, **options)))
    x, kept = normal(12, 2, 9, 8), [0, 1, 4]
    plan = trace(model, x[:1]).plan({"0": kept})
    found = Refit(ridge=0.0)(model, cut(model, plan), plan, unlabelled(x, 5, 7))
    conv = model[2]
    with torch.no_grad():
        hidden, wanted = torch.relu(model[0](x)), conv(torch.relu(model[0](x)))
        patches = F.unfold(
            hidden[:, kept], conv.kernel_size, conv.dilation, conv.padding, conv.stride
        )
        rows = patches.transpose(1, 2).flatten(0, 1)
        if conv.bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        want = torch.linalg.lstsq(rows, wanted.flatten(2).transpose(1, 2).flatten(0, 1)).solution.T
    weight = found[2].weight.flatten(1)
    if conv.bias is not None:
        weight = torch.cat([weight, found[2].bias[:, None]], 1)
    torch.testing.assert_close(weight, want, **CLOSE)


def test_a_grouped_convolution_gets_what_lstsq_gives_in_each_group():
    model = built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 1),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, groups=2, padding=1),
            nn.Flatten(),
            nn.Linear(96, 2),
        )
    )
    x = normal(20, 2, 4, 4)
    structure = trace(model, x[:1])
    plan = structure.plan({"0#2": [0, 1]})
    small = cut(model, plan)
    assert small[2].weight.shape == (6, 2, 3, 3)
    found = Refit(ridge=0.0, scope="consumers")(model, small, plan, unlabelled(x))
    with torch.no_grad():
        read, wanted = torch.relu(small[0](x)), model[2](torch.relu(model[0](x)))
        for group in range(2):
            patches = F.unfold(read[:, 2 * group : 2 * group + 2], 3, padding=1)
            rows = patches.transpose(1, 2).flatten(0, 1)
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            own = slice(3 * group, 3 * group + 3)
            outputs = wanted[:, own].flatten(2).transpose(1, 2).flatten(0, 1)
            want = torch.linalg.lstsq(rows, outputs).solution.T
            torch.testing.assert_close(found[2].weight[own].flatten(1), want[:, :-1], **CLOSE)
            torch.testing.assert_close(found[2].bias[own], want[:, -1], **CLOSE)


def test_later_layers_read_what_the_mended_ones_before_give():
    """By hand: the second layer is fitted first, and the third on what comes out of it then."""
    model, x = small_case("mlp").model(), 3 * normal(60, 4)  # so that no unit is always off
    plan, small = halved(model, x, "0")
    found = Refit(ridge=0.0)(model, small, plan, unlabelled(x))

    def fitted(read: Tensor, wanted: Tensor) -> Tensor:
        return torch.linalg.lstsq(
            torch.cat([read, read.new_ones(len(read), 1)], 1), wanted
        ).solution

    with torch.no_grad():
        read = torch.relu(small[0](x))
        second = fitted(read, model[:3](x))
        after = torch.sigmoid(read @ second[:-1] + second[-1])
        third = fitted(after, model(x))
        not_mended = fitted(torch.sigmoid(small[:3](x)), model(x))
    torch.testing.assert_close(found[2].weight, second[:-1].T, **CLOSE)
    torch.testing.assert_close(found[4].weight, third[:-1].T, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found[4].weight, not_mended[:-1].T, rtol=1e-3)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_attention_of_torch_gets_its_output_projection_fitted(batch_first, batched):
    make = lambda: nn.MultiheadAttention(8, 4, batch_first=batch_first)  # noqa: E731
    model = built(lambda: Net(lambda m, x: m.attn(x, x, x)[0], attn=make()))
    x = normal(9, 7, 8) if batched else normal(60, 8)
    structure = trace(model, x)
    group = next(g for g in structure.groups if g.kind == "head")
    plan = structure.plan({group.name: [0, 3]})
    small, read = cut(model, plan), []
    handle = small.attn.out_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        small(x)
        wanted = model(x) if batch_first or not batched else model(x).transpose(0, 1)
    handle.remove()
    found = Refit(ridge=0.0).fitted(model, small, plan, [(x, None)])
    rows = torch.cat([read[0].flatten(0, 1), torch.ones(len(wanted.reshape(-1, 8)), 1).double()], 1)
    want = torch.linalg.lstsq(rows, wanted.reshape(-1, 8)).solution
    torch.testing.assert_close(found.model.attn.out_proj.weight, want[:-1].T, **CLOSE)
    torch.testing.assert_close(found.model.attn.out_proj.bias, want[-1], **CLOSE)
    assert found.left_alone["attn"] == "CutAttention holds weights in a form that cannot be fitted"


# --- laws ------------------------------------------------------------------------------------------------------------


def with_copies() -> nn.Module:
    """Of the hidden channels 4–7 are multiples of 0–3."""
    model = built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 5, 3),
            nn.Flatten(),
            nn.Linear(80, 3),
        )
    )
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias, *model[1].state_dict().values()):
            if tensor.ndim:
                tensor[4:] = tensor[:4]
        for tensor in (model[1].weight, model[1].bias):
            tensor[4:] *= torch.tensor([0.5, 2.0, 3.0, 0.1]).double()
    return model


def test_units_that_were_copies_are_not_missed():
    model, x, new = with_copies(), normal(30, 2, 6, 6), normal(9, 2, 6, 6, seed=8)
    plan, small = halved(model, x, "0")
    found = Refit(ridge=0.0)(model, small, plan, unlabelled(x))
    assert error(small, model, new) > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(found(new), model(new), **CLOSE)


@pytest.mark.parametrize("sizes", [(1, 59), (20, 20, 20), (7,) * 8 + (4,)])
@pytest.mark.parametrize("case", ["mlp", "residual", "fused", "glu"])
def test_how_data_are_cut_into_batches_makes_no_difference(case, sizes):
    model, x = small_case(case).model(), small_case(case).inputs(60)
    plan, small = halved(model, x)
    whole = Refit()(model, small, plan, unlabelled(x))
    split = Refit()(model, small, plan, unlabelled(x, *sizes))
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], tensor, rtol=1e-7, atol=1e-9)


FITTED = [
    pytest.param(case, scope, id=f"{case.id}, {scope}")
    for case in SMALL_CASES
    for scope in ("every", "consumers")
    if case.delivery == "module" and (case.id, scope) != ("experts", "consumers")  # refused, below
]


@pytest.mark.parametrize(("case", "scope"), FITTED)
def test_no_layer_gets_worse_on_the_data_and_the_outputs_get_better(case, scope):
    model, x = case.model(), case.inputs(40)
    plan, small = halved(model, x)
    found = Refit(scope=scope, ridge=1e-9).fitted(model, small, plan, unlabelled(x))
    assert found.layers
    for layer in found.layers:
        assert layer.after <= layer.before * (1 + 1e-9), layer
    if case.id != "tied":  # its head cannot be fitted, and what it reads is another stream
        assert error(found.model, model, x) < error(small, model, x)


def test_errors_told_are_those_measured():
    model, x = small_case("mlp").model(), normal(40, 4)
    plan, small = halved(model, x)
    found = Refit().fitted(model, small, plan, unlabelled(x, 15, 25))
    last = found.layers[-1]
    with torch.no_grad():
        size = float(model(x).square().mean())
    assert last.path == "4"
    assert last.after == pytest.approx(error(found.model, model, x) / size, rel=1e-6)
    assert last.before > last.after


def test_a_penalty_draws_towards_the_weights_that_were_cut():
    model, x = small_case("mlp").model(), normal(40, 4)
    plan, small = halved(model, x, "0")
    found = [Refit(ridge=r)(model, small, plan, unlabelled(x))[2] for r in (0.0, 1e-2, 1e2, 1e10)]
    apart = [float((own.weight - small[2].weight).detach().norm()) for own in found]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-6 < apart[0]


def test_an_identity_plan_changes_nothing():
    model, x = small_case("residual").model(), small_case("residual").inputs(8)
    plan = trace(model, x[:1]).identity()
    found = Refit().fitted(model, model, plan, unlabelled(x))
    assert not found.layers
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor)


def test_consumers_alone_are_fitted_in_their_scope():
    model, x = small_case("mlp").model(), normal(40, 4)
    plan, small = halved(model, x, "0")
    paths = {
        scope: [f.path for f in Refit(scope=scope).fitted(model, small, plan, unlabelled(x)).layers]
        for scope in ("every", "consumers")
    }
    assert paths == {"every": ["2", "4"], "consumers": ["2"]}


def test_rows_that_the_cut_has_scaled_are_wanted_scaled():
    """Queries of fused attention: fitted to the dense rows as they were, they would lose their scale."""
    model, x = small_case("fused").model(), small_case("fused").inputs(40)
    structure = trace(model, x[:2])
    group = next(g for g in structure.groups if g.kind in {"qk_dim", "head_dim"})
    plan = structure.plan({group.name: [0, 2, 3]})
    small = cut(model, plan)
    assert plan.scalings
    fitted = [f.path for f in Refit().fitted(model, small, plan, unlabelled(x)).layers]
    assert "parts.0.qkv" not in fitted
    forgotten = replace(plan, scalings=())
    fitted = [f.path for f in Refit().fitted(model, small, forgotten, unlabelled(x)).layers]
    assert "parts.0.qkv" in fitted


# --- nothing of the caller's changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_the_given_networks_stay_as_they_are(train):
    model, x = built(digits_cnn, train=train), normal(24, 1, 8, 8)
    plan, small = halved(model, x)
    for parameter in small.parameters():
        parameter.grad = torch.ones_like(parameter)
    loader = DataLoader(TensorDataset(x, torch.zeros(24)), batch_size=8, shuffle=True)
    of_dense, of_small, data = Snapshot(model), Snapshot(small), x.clone()
    found = Refit()(model, small, plan, loader)
    of_dense.assert_unchanged()
    of_small.assert_unchanged()
    assert torch.equal(x, data)
    assert [m.training for m in found.modules()] == [m.training for m in small.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in found.modules())
    assert {p.requires_grad for p in found.parameters()} == {True}


def test_inputs_that_a_network_writes_to_are_copied():
    model = built(
        lambda: Net(
            lambda m, x: m.b(torch.relu(m.a(x.mul_(2)))), a=nn.Linear(4, 6), b=nn.Linear(6, 3)
        )
    )
    x = normal(30, 4)
    before = x.clone()
    plan = trace(model, x[:1]).plan({"a": [0, 1, 2]})
    assert Refit().fitted(model, cut(model, plan), plan, unlabelled(x)).layers[0].path == "b"
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_types_stay(dtype):
    model, x = small_case("mlp").model().to(dtype), normal(60, 4).to(dtype)
    plan, small = halved(model, x)
    found = Refit()(model, small, plan, unlabelled(x))
    assert {p.dtype for p in found.parameters()} == {dtype}
    assert error(found, model, x) < error(small, model, x)


# --- with the rest ---------------------------------------------------------------------------------------------------


def test_prune_takes_it_by_name_or_with_options_and_checkpoints_bring_it_back(tmp_path):
    torch.manual_seed(0)
    model, batches = digits_cnn(width=6), digits().train.batches(200)
    assert find_repair("refit") is REPAIRS["refit"] == Refit()
    outcomes = [
        ap.prune(
            model, batches, ap.Budget(flops=0.5), criterion="magnitude-l2", steps=1, repair=[how]
        )
        for how in ("refit", Refit(scope="consumers"), "batch_norm")
    ]
    assert outcomes[0].settings["repair"] == ["refit(scope='every', ridge=None, rounds=3)"]
    weights = [copy.deepcopy(outcome.model.state_dict()) for outcome in outcomes]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    ap.save(tmp_path / "run", outcomes[0])
    loaded = ap.load(tmp_path / "run", dense=lambda: digits_cnn(width=6))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[0][name]), name


class TurnedBlock(nn.Module):
    """Attention and an MLP as GPT-2 has them, of transformers' turned layers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 3
        self.qkv, self.proj = Conv1D(36, 12), Conv1D(12, 12)
        self.up, self.down = Conv1D(20, 12), Conv1D(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        width = self.num_heads * self.head_dim
        q, k, v = (
            part.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(*x.shape[:2], width))
        return x + self.down(F.gelu(self.up(x)))


def test_transformers_layers_with_turned_weights_are_fitted():
    model = built(lambda: nn.Sequential(TurnedBlock(), nn.LayerNorm(12), nn.Linear(12, 5)))
    x = 5 * normal(30, 6, 12)
    structure = trace(model, x[:2])
    kinds = {"head", "hidden"}
    chosen = [g for g in structure.groups if g.kind in kinds]
    assert {g.kind for g in chosen} == kinds
    plan = structure.plan({g.name: range(g.size // 2) for g in chosen})
    small = cut(model, plan)
    found = Refit(ridge=0.0).fitted(model, small, plan, unlabelled(x, 10, 20))
    assert [f.path for f in found.layers] == ["0.proj", "0.up", "0.down", "2"]
    read: list[Tensor] = []
    handle = small[0].proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        small(x)
        handle.remove()
        handle = model[0].proj.register_forward_hook(lambda *args: read.append(args[2]))
        model(x)
        handle.remove()
        rows = torch.cat([read[0].flatten(0, 1), torch.ones(180, 1).double()], 1)
        want = torch.linalg.lstsq(rows, read[1].flatten(0, 1)).solution
    torch.testing.assert_close(found.model[0].proj.weight, want[:-1], **CLOSE)
    torch.testing.assert_close(found.model[0].proj.bias, want[-1], **CLOSE)
    assert error(found.model, model, x) < error(small, model, x)


def test_kept_masks_are_none_where_nothing_is_masked():
    assert _kept(built(lambda: nn.Linear(4, 3)), "") is None


def test_batches_may_come_in_another_order_each_time(monkeypatch):
    """As loaders shuffle: sums of one round are not solved with those of another, of other places."""
    model = built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1), nn.ReLU()
        )
    )
    x = normal(30, 2, 12, 12).cumsum(2).cumsum(3) / 12
    plan, small = halved(model, x, "0")
    monkeypatch.setattr("apoptosis.curvature.linear_maps.FEWEST_PLACES", 16)
    monkeypatch.setattr("apoptosis.curvature.linear_maps.PLACES_PER_INPUT", 0.0)

    def missed(*, shuffle: bool) -> float:
        torch.manual_seed(1)
        data = TensorDataset(x, torch.zeros(len(x)))
        found = Refit(ridge=1e-4)(model, small, plan, DataLoader(data, 5, shuffle=shuffle))
        with torch.no_grad():
            return float((found(x) - model(x)).square().sum())

    assert missed(shuffle=True) < 1.2 * missed(shuffle=False)


def test_of_more_equations_than_are_needed_some_of_every_batch_are_taken(monkeypatch):
    """Data may be sorted: what is seen first is not what there is."""
    model = built(lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)))
    x = normal(60, 40, 6)  # tokens: of each sample some
    x[:30, :, :3] *= 0.01
    x[30:, :, 3:] *= 0.01
    plan, small = halved(model, x, "0")

    def missed(enough: int) -> float:
        monkeypatch.setattr("apoptosis.repair.fits.ENOUGH", enough)
        found = Refit(ridge=1e-4)(model, small, plan, unlabelled(x, *[5] * 12))
        with torch.no_grad():
            return float((found(x) - model(x)).square().sum())

    assert missed(10**6) < missed(20) < 1.2 * missed(10**6)


def test_a_first_batch_where_units_are_silent_does_not_spare_a_layer():
    """All that will be removed is silent there, so nothing differs; in the other batches it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].weight[4:, 0] = 50.0
    x = normal(60, 4)
    x[:, 0].abs_()
    x[0, 0] = -1.0
    plan = trace(model, x[:2]).plan({"0": [0, 1, 2, 3]})
    small = cut(model, plan)
    torch.testing.assert_close(small(x[:1]), model(x[:1]))
    found = [
        Refit().fitted(model, small, plan, unlabelled(own, *(1,) * 60)) for own in (x, x.flip(0))
    ]
    assert [[fit.path for fit in own.layers] for own in found] == [["2"], ["2"]]
    errors = [error(own.model, model, x) for own in found]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert max(errors) < 0.9 * error(small, model, x)


def test_empty_batches_are_passed_over_wherever_they_come():
    torch.manual_seed(0)
    deep = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    model, x = nn.Sequential(*deep).double(), normal(30, 4)
    plan, small = halved(model, x)
    want = Refit()(model, small, plan, unlabelled(x, 10, 10, 10))
    for place in (0, 1, 3):
        batches = unlabelled(x, 10, 10, 10)
        batches.insert(place, (x[:0], None))
        found = Refit()(model, small, plan, batches)
        for name, tensor in want.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], tensor, **CLOSE)
