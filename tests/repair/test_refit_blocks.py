"""Blocks come as near to the dense ones as their layers can together, and nothing else is touched."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.data import digits
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.masks import MaskPlan, mask, masks_of
from apoptosis.models import digits_cnn
from apoptosis.repair import REPAIRS, Refit, RefitBlocks, batch_norm, find_repairs, lockstep
from apoptosis.structure import cut, trace
from oracles.building import Net, built
from oracles.masked_networks import random_masks
from oracles.refitted import error, halved, normal
from oracles.shrinking import hard_coded
from oracles.untouched import Snapshot


class Branch(nn.Module):
    """Two convolutions with norms, added to the input or to what a convolution makes of it."""

    def __init__(self, inputs: int, outputs: int, hidden: int = 8) -> None:
        super().__init__()
        self.a = nn.Conv2d(inputs, hidden, 3, padding=1, bias=False)
        self.b = nn.Conv2d(hidden, outputs, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(hidden), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.b(F.relu(self.norm(self.a(x)))))
        return F.relu(y + self.shortcut(x))


def residual() -> nn.Module:
    branches = nn.Sequential(Branch(4, 4), Branch(4, 6), Branch(6, 6))
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), branches, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(6, 3)
    )


QUICK = RefitBlocks(batch_size=10)
NOTHING = MaskPlan({}, "")
INNER = ("1.0.a", "1.1.a", "1.2.a")


# --- against other ways to the same ----------------------------------------------------------------------------------


def test_two_linear_layers_come_to_the_best_map_of_their_rank(way):
    """Reduced-rank regression has a closed form; the layer behind alone, on units that were kept, stays above it."""
    block = Net(lambda m, x: x + m.b(m.a(x)), a=nn.Linear(6, 6, False), b=nn.Linear(6, 6, False))
    model = built(lambda: nn.Sequential(block, nn.Linear(6, 2)))
    x = normal(320, 6) @ normal(6, 6, seed=3)
    plan = trace(model, x[:1]).plan({"0.a": [0, 1, 2]})
    refitted = Refit(ridge=0.0)(model, cut(model, plan), plan, [x])
    found = RefitBlocks(epochs=45, batch_size=20, learning_rate=0.03)(model, refitted, plan, [x])
    with torch.no_grad():
        wanted = (model[0](x) - x).T
        size = torch.linalg.svd(wanted).S
        best = float(size[3:].square().sum() / size.square().sum())
        missed = [
            float((own[0](x) - model[0](x)).square().sum() / wanted.square().sum())
            for own in (refitted, found)
        ]
    assert best < 0.7 * missed[0]
    assert best <= missed[1] < 1.1 * best


def test_errors_told_are_those_of_plain_runs_on_samples_held_out(way):
    """z of the block, and what is to be seen of it, written out."""
    model, x = built(residual), normal(80, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    found = QUICK.fitted(model, small, plan, [x])
    by_path = {own.path: own for own in found.layers}
    held = x[30:40]  # the fourth of eight pieces

    def z(block: nn.Module, x: Tensor) -> Tensor:
        return block.last(block.b(F.relu(block.norm(block.a(x))))) + x

    with torch.no_grad():
        given = model[0](held)
        wanted = z(model[1][0], given)
        for told, own in ((by_path["1.0"].before, small), (by_path["1.0"].after, found.model)):
            there = z(own[1][0], given)
            missed = torch.where(wanted > 0, wanted - there, F.relu(there))
            share = missed.square().sum() / F.relu(wanted).square().sum()
            assert told == pytest.approx(float(share), rel=1e-9)
    assert by_path["1.0"].after < by_path["1.0"].before


def test_both_ways_through_the_networks_come_to_the_same(monkeypatch):
    model, x = built(residual), normal(60, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    want = QUICK(model, small, plan, x.split(30)).state_dict()
    monkeypatch.setattr(lockstep, "MOST_BATCHES", 0)
    found = QUICK(model, small, plan, x.split(30)).state_dict()
    for name, own in found.items():
        torch.testing.assert_close(own, want[name], rtol=1e-6, atol=1e-8)


# --- what it brings --------------------------------------------------------------------------------------------------


def perceptrons() -> nn.Module:
    def mixer() -> nn.Module:
        return Net(
            lambda m, x: x + m.down(F.gelu(m.up(m.norm(x)))),
            norm=nn.LayerNorm(6),
            up=nn.Linear(6, 24),
            down=nn.Linear(24, 6),
        )

    return nn.Sequential(mixer(), mixer(), nn.Flatten(), nn.Linear(24, 3))


def attention() -> nn.Module:
    def layer() -> nn.Module:
        return Net(
            lambda m, x: x + m.out(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))),
            **{name: nn.Linear(6, 6) for name in ("q", "k", "v", "out")},
        )

    return nn.Sequential(layer(), layer(), nn.Flatten(), nn.Linear(24, 3))


def plain() -> nn.Module:
    parts = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(24, 3))


CASES = {
    "residual": (residual, (3, 6, 6)),
    "perceptrons": (perceptrons, (4, 6)),
    "attention": (attention, (4, 6)),
    "plain": (plain, (4, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_come_nearer_than_a_refit_alone_brings_them(way, case):
    make, shape = CASES[case]
    model, x, other = built(make), normal(300, *shape), normal(100, *shape, seed=9)
    plan, small = halved(model, x)
    refitted = Refit()(model, small, plan, [x])
    found = RefitBlocks(epochs=16, batch_size=20).fitted(model, refitted, plan, [x])
    assert not found.left_alone
    assert error(found.model, model, other) < 0.95 * error(refitted, model, other)


def test_layers_in_no_block_are_fitted_to_what_the_blocks_give_now():
    model, x = built(residual), normal(60, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    found = QUICK.fitted(model, small, plan, [x])
    assert [own.path for own in found.layers] == ["1.0", "1.1", "1.2", "4"]
    with_old_head = nn.Sequential(*found.model[:4], small[4])
    assert error(found.model, model, x) < 0.9 * error(with_old_head, model, x)


def test_digits_without_parts_are_one_block_and_get_better():
    data, model = digits(), digits_cnn()
    ap.training.fit_(
        model, data.train.batches(64, shuffle_seed=0), options=ap.training.FitOptions(epochs=3)
    )
    batches = data.train.batches(200)
    outcome = ap.prune(
        model, batches, ap.Budget(flops=0.2), criterion="magnitude-l2", steps=1, repair=["refit"]
    )
    found = RefitBlocks()(model, outcome.model, outcome.plan, batches)
    first, then = (
        ap.training.evaluate(own, data.test.batches(300)).loss for own in (outcome.model, found)
    )
    assert then < first


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_the_given_networks_stay_as_they_are(way, train):
    model, x = built(residual).train(train), normal(40, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    small.train(train)
    before = [Snapshot(own) for own in (model, small)]
    found = QUICK(model, small, plan, [x])
    for snapshot in before:
        snapshot.assert_unchanged()
    assert found.training is train
    assert not any(p.grad is not None for p in found.parameters())
    assert all(p.requires_grad for p in found.parameters())


def test_only_weights_and_biases_of_blocks_and_of_layers_behind_them_change():
    model, x = built(residual), normal(60, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    found, before = QUICK(model, small, plan, [x]).state_dict(), small.state_dict()
    changed = {name for name, own in found.items() if not torch.equal(own, before[name])}
    of_blocks = ("a.weight", "b.weight", "norm.bias", "last.bias", "shortcut.weight")
    assert changed
    for name in changed:
        assert name.startswith("4.") or name.endswith((*of_blocks, "shortcut.bias")), name


def test_the_same_words_give_the_same_weights(way):
    model, x = built(residual), normal(40, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    first, again = (QUICK(model, small, plan, [x]).state_dict() for _ in range(2))
    other = replace(QUICK, seed=1)(model, small, plan, [x]).state_dict()
    assert all(torch.equal(own, again[name]) for name, own in first.items())
    assert any(not torch.equal(own, other[name]) for name, own in first.items())


def test_where_nothing_was_lost_nothing_changes():
    model, x = built(residual), normal(20, 3, 6, 6)
    found = QUICK(model, copy.deepcopy(model), NOTHING, [x]).state_dict()
    assert all(torch.equal(own, found[name]) for name, own in model.state_dict().items())


def test_masked_weights_stay_zero(way):
    model, x = built(residual), normal(60, 3, 6, 6)
    plan = random_masks(model, 0.6)
    small = mask(model, plan)
    found = QUICK(model, small, plan, [x])
    masks = masks_of(found)
    assert masks is not None
    for name, own in masks.masks.items():
        weight = found.get_parameter(name)
        assert not weight[~own.kept()].any()
    assert not torch.equal(found[1][0].a.weight, small[1][0].a.weight)
    assert error(found, model, x) < error(small, model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_types_stay(dtype):
    model, x = built(residual).to(dtype), normal(60, 3, 6, 6).to(dtype)
    plan, small = halved(model, x, *INNER)
    found = QUICK(model, small, plan, [x])
    assert all(p.dtype == dtype for p in found.parameters())
    assert error(found, model, x) < error(small, model, x)


def test_what_does_not_hold_on_other_samples_is_not_taken():
    """Steps far too long: the block stays as it was."""
    model, x = built(residual), normal(80, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    found = RefitBlocks(epochs=2, batch_size=10, learning_rate=1e4).fitted(model, small, plan, [x])
    first = found.layers[0]
    assert first.path == "1.0"
    assert first.after == first.before
    assert torch.equal(found.model[1][0].a.weight, small[1][0].a.weight)


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_parameters_that_change_more_than_the_sum_are_not_free():
    """The first layer's outputs leave the block a second way: fitting the sum alone would spoil them."""

    def two_ways(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(m.a(x))
        return x + m.c(F.relu(m.b(hidden))), hidden

    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 6)}
    block = Net(two_ways, **layers)
    model = built(
        lambda: Net(
            lambda m, x: m.head(torch.cat(m.block(x), 1)), block=block, head=nn.Linear(14, 2)
        )
    )
    x = normal(100, 6)
    plan, small = halved(model, x, "block.b")
    found = QUICK(model, small, plan, [x])
    assert torch.equal(found.block.a.weight, small.block.a.weight)
    assert torch.equal(found.block.a.bias, small.block.a.bias)
    assert not torch.equal(found.block.b.weight, small.block.b.weight)


class _Deaf(torch.autograd.Function):
    @staticmethod
    def forward(_, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Tensor) -> Tensor:
        raise RuntimeError("no way back\nat all")


def test_a_block_without_gradients_is_left_alone_and_listed():
    block = Net(
        lambda m, x: x + m.b(_Deaf.apply(F.relu(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 6)
    )
    other = Net(lambda m, x: x + m.b(F.relu(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    model, x = built(lambda: nn.Sequential(block, other, nn.Linear(6, 2))), normal(60, 6)
    small = cut(model, plan := trace(model, x[:2]).plan({"1.a": range(4)}))
    with torch.no_grad():
        small[0].b.weight.mul_(0.9)
    found = QUICK.fitted(model, small, plan, [x])
    assert found.left_alone == {"0": "it cannot be run with gradients (no way back)"}
    assert torch.equal(found.model[0].a.weight, small[0].a.weight)
    assert not torch.equal(found.model[1].a.weight, small[1].a.weight)


def test_a_block_that_writes_to_its_input_is_fitted():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x.relu_()
        return x + m.b(F.relu(m.a(x)))

    block = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    model, x = built(lambda: nn.Sequential(nn.Linear(6, 6), block, nn.Linear(6, 2))), normal(80, 6)
    plan, small = halved(model, x, "1.a")
    kept = x.clone()
    found = RefitBlocks(epochs=25, batch_size=10).fitted(model, small, plan, [x])
    assert torch.equal(x, kept)
    assert [own.path for own in found.layers] == ["1", "2"]
    assert error(found.model, model, x) < 0.5 * error(small, model, x)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epochs": 0}, "epochs=0 was asked for"),
        ({"epochs": 2.5}, "epochs=2.5 was asked for"),
        ({"batch_size": 0}, "batch_size=0 was asked for"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 was asked for"),
        ({"learning_rate": float("nan")}, "learning_rate=nan was asked for"),
    ],
)
def test_options_nobody_can_mean_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        RefitBlocks(**options)


def test_a_network_without_blocks_is_refused_with_what_to_do():
    model, x = built(lambda: nn.Linear(4, 2)), normal(10, 4)
    with pytest.raises(ModelError, match="has none.*'refit' or 'distil'"):
        RefitBlocks()(model, copy.deepcopy(model), NOTHING, [x])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_are_refused_by_the_name_of_the_block(way, bad):
    model, x = built(residual), normal(40, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    model[1][0].last.bias.data[2] = bad
    with pytest.raises(NonFiniteError, match="Block '1.0' was to be fitted"):
        QUICK(model, small, plan, [x[:20], x[20:]])


@pytest.mark.parametrize("batches", [[], iter([normal(4, 3, 6, 6)])])
def test_no_batches_and_batches_that_can_be_read_once_are_refused(batches):
    model, x = built(residual), normal(4, 3, 6, 6)
    plan, small = halved(model, x, *INNER)
    with pytest.raises(DataError):
        QUICK(model, small, plan, batches)


def test_programs_are_refused_with_what_to_do():
    model, x = hard_coded(), normal(4, 4)
    plan = trace(model, x).plan({"a": [0, 1]})
    with pytest.raises(ModelError, match="delivered as a program"):
        QUICK(model, cut(model, plan), plan, [x])


def test_norms_are_not_measured_anew_after_it():
    assert find_repairs(["batch_norm", "refit", "refit_blocks"])[0] is batch_norm
    assert REPAIRS["refit_blocks"] == RefitBlocks()
    with pytest.raises(ConfigError, match="Put 'batch_norm' before"):
        find_repairs([RefitBlocks(), "batch_norm"])


class FrozenNorm(nn.Module):
    """As detection networks have it: numbers of a batch norm, all of them buffers."""

    def __init__(self, num: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in ("weight", "bias", "mean", "variance"):
            own = 0.5 + torch.rand(num, generator=generator, dtype=torch.float64)
            self.register_buffer(name, own)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias)


def test_frozen_norms_stay_as_they_are(way):
    def net() -> nn.Module:
        branch = Branch(4, 4)
        branch.norm, branch.last = FrozenNorm(8), FrozenNorm(4)
        return nn.Sequential(branch, nn.Flatten(), nn.Linear(4 * 36, 3))

    model, x = built(net), normal(64, 4, 6, 6)
    plan, small = halved(model, x)
    found = RefitBlocks()(model, small, plan, list(x.split(8)))
    assert error(found, model, x) < error(small, model, x)
    for name, own in small.named_buffers():
        assert torch.equal(found.get_buffer(name), own), name


def test_a_device_without_room_says_so():
    """A network that cannot be run with gradients is left alone; memory that is full is another thing."""

    class Full(Branch):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    model = built(lambda: nn.Sequential(Full(4, 4), nn.Flatten(), nn.Linear(4 * 36, 3)))
    x = normal(64, 4, 6, 6)
    with torch.no_grad():
        plan, small = halved(model, x)
        with pytest.raises(ModelError, match=r"no room for a single sample \(out of memory\)"):
            RefitBlocks()(model, small, plan, list(x.split(8)))
