"""A network that follows the dense one: without labels, the same in every run, in eval mode all along."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.data import Batches, digits
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.masks import mask, masks_of
from apoptosis.models import digits_cnn
from apoptosis.progress import listen
from apoptosis.repair import REPAIRS, Distil, Refit
from apoptosis.structure import Plan, cut, trace
from apoptosis.task import Task
from oracles.building import built
from oracles.masked_networks import random_masks
from oracles.shrinking import hard_coded, small_case
from oracles.untouched import Snapshot


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.5), nn.Linear(10, 3)
    )


def halved(model: nn.Module, x: Tensor) -> tuple[Plan, nn.Module]:
    structure = trace(model, x[:2])
    plan = structure.plan({g.name: range((g.size + 1) // 2) for g in structure.groups if g.exact})
    return plan, cut(model, plan)


def apart(dense: nn.Module, small: nn.Module, x: Tensor) -> float:
    """KL(dense ‖ small), torch's."""
    with torch.no_grad():
        theirs, ours = (m.eval()(x).log_softmax(1) for m in (dense, small))
        return float(F.kl_div(ours, theirs, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("case", ["mlp", "residual", "fused", "encoder"])
def test_predictions_come_closer_without_any_label(case):
    model, x = small_case(case).model(), small_case(case).inputs(40)
    model = (
        nn.Sequential(model, nn.Flatten(), nn.LazyLinear(3).double())
        if case == "encoder"
        else model
    )
    with torch.no_grad():
        model(x)
    plan, small = halved(model, x)
    found = Distil(steps=100, learning_rate=1e-2)(model, small, plan, [x[:20], x[20:]])
    assert apart(model, found, x) < 0.5 * apart(model, small, x)


@pytest.mark.parametrize("temperature", [1.0, math.inf])
def test_a_step_is_adams_on_what_is_apart(temperature):
    """By hand: the first step of AdamW without decay moves every weight by the rate, against the gradient's sign."""
    model, x = small_case("mlp").model(), 3 * normal(30, 4)
    plan, small = halved(model, x)
    how = Distil(steps=1, learning_rate=1e-3, temperature=temperature)
    found = how(model, small, plan, [(x, None)])
    mine = copy.deepcopy(small)
    theirs, ours = model(x).detach(), mine(x)
    if math.isinf(temperature):
        missing = (ours - ours.mean(1, keepdim=True)) - (theirs - theirs.mean(1, keepdim=True))
        (0.5 * missing.square().mean()).backward()
    else:
        theirs, ours = theirs.log_softmax(1), ours.log_softmax(1)
        F.kl_div(ours, theirs, log_target=True, reduction="batchmean").backward()
    for name, parameter in mine.named_parameters():
        clear = parameter.grad.abs() > 1e-4  # else Adam's ε and the loss in float32 count
        want = (parameter - 1e-3 * parameter.grad.sign()).detach()
        torch.testing.assert_close(
            found.get_parameter(name)[clear], want[clear], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("train", [False, True])
def test_statistics_flags_and_the_given_networks_stay(train):
    model, x = built(with_dropout, train=train), normal(30, 4)
    plan, small = halved(model, x)
    small[1].eval()
    of_dense, of_small = Snapshot(model), Snapshot(small)
    found = Distil(steps=5)(model, small, plan, [(x, None)])
    of_dense.assert_unchanged()
    of_small.assert_unchanged()
    assert [m.training for m in found.modules()] == [m.training for m in small.modules()]
    assert all(p.grad is None for p in found.parameters())
    for name, tensor in small.state_dict().items():
        fixed = "running" in name or name.endswith("num_batches_tracked")
        assert torch.equal(found.state_dict()[name], tensor) == fixed, name


def test_the_same_run_twice_gives_the_same_weights_and_labels_do_not_matter():
    model, x = built(with_dropout, train=True), normal(30, 4)
    plan, small = halved(model, x)
    labels = torch.arange(30) % 3
    runs = [
        Distil(steps=7)(model, small, plan, batches).state_dict()
        for batches in ([(x, None)], [x], [(x, labels)], [(x, labels.flip(0))])
    ]
    for run in runs[1:]:
        for name, tensor in run.items():
            assert torch.equal(tensor, runs[0][name]), name


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_data_are_read_again_until_the_steps_are_done(steps):
    model, x = small_case("mlp").model(), normal(30, 4)
    plan, small = halved(model, x)
    events, served = [], []

    class Counting:
        def __iter__(self):
            for part in x.split(10):
                served.append(len(part))
                yield part, None

    with listen(events.append):
        Distil(steps=steps)(model, small, plan, Counting())
    assert len(served) == steps
    assert ("distilling", steps, steps) in [(e.what, e.done, e.total) for e in events]


def test_options_make_a_difference():
    model, x = small_case("mlp").model(), normal(30, 4)
    plan, small = halved(model, x)
    found = [
        how(model, small, plan, [x])[0].weight
        for how in (
            Distil(steps=5),
            Distil(steps=6),
            Distil(steps=5, learning_rate=1e-2),
            Distil(steps=5, temperature=1.0),
        )
    ]
    assert not any(torch.equal(found[0], other) for other in found[1:])


def test_seeds_draw_what_batches_draw():
    model, x = small_case("mlp").model(), normal(30, 4)
    plan, small = halved(model, x)
    loader = torch.utils.data.DataLoader(x, batch_size=10, shuffle=True)
    first, again, other = (
        Distil(steps=4, seed=seed)(model, small, plan, loader)[0].weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_masked_weights_stay_zero():
    model, x = small_case("mlp").model(), normal(30, 4)
    masks = random_masks(model, 0.5)
    found = Distil(steps=20)(model, mask(model, masks), masks, [x])
    kept = masks_of(found)
    assert kept is not None
    for name, own in masks.masks.items():
        assert torch.equal(kept.masks[name].kept(), own.kept())
        assert not found.get_parameter(name)[~own.kept()].any()


def test_programs_can_be_trained():
    model, x = hard_coded(), normal(30, 4)
    plan = trace(model, x[:2]).plan({"a": [0, 1]})
    small = cut(model, plan)
    assert plan.delivery == "program"
    found = Distil(steps=50, learning_rate=1e-2)(model, small, plan, [(x, None)])
    assert apart(model, found, x) < apart(model, small, x)


def test_it_goes_on_from_a_refit_and_checkpoints_bring_it_back(tmp_path):
    torch.manual_seed(0)
    model, batches = digits_cnn(width=4), digits().train.batches(300)
    options = {"criterion": "magnitude-l2", "steps": 1, "repair": ["refit", Distil(steps=3)]}
    outcome = ap.prune(model, batches, ap.Budget(flops=0.5), **options)
    refitted = Refit()(model, cut(model, outcome.plan), outcome.plan, batches)
    by_hand = Distil(steps=3)(model, refitted, outcome.plan, batches)
    ap.save(tmp_path / "run", outcome)
    loaded = ap.load(tmp_path / "run", dense=lambda: digits_cnn(width=4))
    for name, tensor in by_hand.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert REPAIRS["distil"] == Distil()


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_batches_are_refused(batches):
    model, x = small_case("mlp").model(), normal(8, 4)
    plan, small = halved(model, x)
    with pytest.raises(DataError, match=r"follow the dense one and there are no batches"):
        Distil()(model, small, plan, batches)


def test_bad_numbers_are_refused():
    model, x = small_case("mlp").model(), normal(8, 4)
    plan, small = halved(model, x)
    with pytest.raises(NonFiniteError, match="training loss became nan"):
        Distil(steps=2)(model, small, plan, [x / 0])


def test_tasks_without_predictions_are_refused():
    model, x = small_case("mlp").model(), normal(8, 4)
    plan, small = halved(model, x)
    with pytest.raises(ConfigError, match="Distillation was asked for.*Give it `rows`"):
        Distil()(model, small, plan, [(x, x)], Task.classification(F.mse_loss))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "steps=0 was asked for; it is a whole number from 1 on"),
        ({"steps": 5.0}, "steps=5.0 was asked for; it is a whole number from 1 on"),
        ({"temperature": 0.0}, r"temperature=0.0 was asked for; it is a number above 0, or inf"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 was asked for; it is a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan was asked for"),
    ],
)
def test_options_nobody_can_mean_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        Distil(**options)


def test_shuffled_batches_come_in_the_same_order_in_every_run():
    model, x = small_case("mlp").model(), normal(30, 4)
    plan, small = halved(model, x)
    batches = Batches(x, torch.arange(30) % 3, size=4, shuffle_seed=0)
    first, again = (Distil(steps=20)(model, small, plan, batches) for _ in range(2))
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_batches_in_which_nothing_counts_do_no_harm():
    """Nothing is apart, and not nothing divided by nothing."""
    model, x = small_case("mlp").model(), normal(12, 4)
    plan, small = halved(model, x)
    counted, ignored = torch.zeros(6, dtype=torch.int64), torch.full((6,), -100)
    batches = [(x[:6], counted), (x[6:], ignored)]
    found = Distil(steps=20)(model, small, plan, batches)
    assert apart(model, found, x[:6]) < apart(model, small, x[:6])


def test_inputs_that_networks_write_to_are_copied():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return self.a(x)

    model, x = built(Writing), normal(6, 4)
    before, plan = x.clone(), trace(model, x[:1].clone()).identity()
    Distil(steps=3)(model, copy.deepcopy(model), plan, [x])
    assert torch.equal(x, before)


def test_steps_are_taken_where_the_caller_wants_no_gradients():
    model, x = small_case("mlp").model(), normal(30, 4)
    with torch.no_grad():
        plan, small = halved(model, x)
        found = Distil(steps=2)(model, small, plan, [x])
    assert not torch.equal(found[0].weight, small[0].weight)


def test_weights_of_float16_are_refused():
    model = small_case("mlp").model().half()
    plan = trace(model, normal(2, 4).half()).identity()
    with pytest.raises(ModelError, match=r"model\.float\(\)"):
        Distil()(model, copy.deepcopy(model), plan, [normal(8, 4).half()])
