"""`sparsify`: stages lead to exactly what was asked, scored anew on the way; nothing comes back, nothing is touched."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from apoptosis.criteria import CRITERIA, Criterion, Saliency, Scores, oba
from apoptosis.data import Batches, digits
from apoptosis.errors import BudgetError, ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.masks import identity_masks, mask, masks_of
from apoptosis.models import digits_cnn
from apoptosis.planning import Sparsity
from apoptosis.progress import listen
from apoptosis.repair import batch_norm
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.workflow import sparsify
from oracles.mask_choice import saliency, stage_keeps, stage_patterns


@pytest.fixture(scope="module")
def batches() -> Batches:
    whole = digits().train.batches(200)
    return Batches(*next(iter(whole)), size=100)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    model = digits_cnn()
    fit_(model, digits().train.batches(128), options=FitOptions(epochs=2))
    return model.eval()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(2)
    ]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("stages", [1, 3, 7])
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.07])
def test_every_stage_leaves_its_share_and_only_removes(
    net: nn.Module, data: Any, keep: float, stages: int
) -> None:
    outcome = sparsify(
        net, data, Sparsity(keep=keep, allow_empty=True), criterion="oba", stages=stages
    )
    total = outcome.plan.num_weights
    left = [sum(record.left.values()) for record in outcome.history]
    assert left == [int(share * total + 1e-9) for share in stage_keeps(keep, stages)]
    assert left == sorted(left, reverse=True)
    for record, num in zip(outcome.history, left, strict=True):
        gone = total - num if record.step == 1 else left[record.step - 2] - num
        assert sum(record.removed.values()) == gone


def test_each_stage_scores_the_network_as_it_is_by_then(net: nn.Module, data: Any) -> None:
    """Done by hand: score, rank by the formula, zero the lowest of those that are left."""
    outcome = sparsify(
        net, data, Sparsity(keep=0.2), criterion="oba", stages=4, saliency=Saliency("max", 1.0)
    )
    twin = copy.deepcopy(net)
    names = ["0.weight", "2.weight", "4.weight"]
    alive = {name: torch.ones_like(twin.get_parameter(name), dtype=torch.bool) for name in names}
    total = sum(own.numel() for own in alive.values())
    for share in stage_keeps(0.2, 4):
        scores = oba(twin, data).values
        ranked = sorted(
            (
                (float(value), name, place)
                for name in names
                for place, value in enumerate(
                    saliency(scores[name], twin.get_parameter(name).detach(), "max", 1.0).view(-1)
                )
                if alive[name].view(-1)[place]
            ),
            reverse=True,
        )
        for _, name, place in ranked[int(share * total + 1e-9) :]:
            alive[name].view(-1)[place] = False
        with torch.no_grad():
            for name in names:
                twin.get_parameter(name).mul_(alive[name])
    for name in names:
        assert torch.equal(outcome.plan.kept(name), alive[name])
        assert torch.equal(outcome.model.get_parameter(name), twin.get_parameter(name))


def test_weights_that_are_gone_keep_no_old_scores(net: nn.Module, data: Any) -> None:
    """A criterion that gives the highest score to what is gone cannot bring it back."""

    def perverse(model: nn.Module, *_: Any) -> Scores:
        values = {name: 1 / (p.detach().abs() + 1e-3) for name, p in model.named_parameters()}
        return Scores(values, "perverse")

    way = Criterion("perverse", "1/|θ|", perverse)
    outcome = sparsify(net, data, Sparsity(keep=0.3), criterion=way, stages=5, saliency="plain")
    assert outcome.plan.num_kept == int(0.3 * outcome.plan.num_weights + 1e-9)
    assert outcome.plan.holds(outcome.model)
    counted = sum(int((outcome.model.get_parameter(n) != 0).sum()) for n in outcome.plan.masks)
    assert counted == outcome.plan.num_kept == outcome.spent[0].left


@pytest.mark.parametrize("name", [n for n, own in CRITERIA.items() if own.score is not None])
def test_every_criterion_of_weights_does(net: nn.Module, data: Any, name: str) -> None:
    outcome = sparsify(net, data, Sparsity(keep=0.25), criterion=name, stages=2)
    assert outcome.spent[0].left == int(0.25 * outcome.plan.num_weights)
    assert outcome.settings["criterion"] == name


def test_magnitudes_go_alike_in_one_stage_and_in_many(trained: nn.Module) -> None:
    once, often = (
        sparsify(trained, [], Sparsity(keep=0.1), criterion="magnitude", stages=stages).plan
        for stages in (1, 9)
    )
    assert once.same_as(often)


@pytest.mark.parametrize(("pattern", "stages"), [("2:4", 1), ("2:4", 2), ("1:4", 7), ("2:4", 20)])
def test_patterns_go_through_those_between(
    net: nn.Module, data: Any, pattern: str, stages: int
) -> None:
    outcome = sparsify(net, data, Sparsity(pattern=pattern), criterion="oba", stages=stages)
    n, m = map(int, pattern.split(":"))
    total, between = outcome.plan.num_weights, stage_patterns(n, m, stages)
    expected = [num * total // m for i, num in enumerate(between) if num != ([m, *between])[i]]
    assert [sum(record.left.values()) for record in outcome.history] == expected
    for name, own in outcome.plan.masks.items():
        assert str(own.pattern) == pattern
        assert own.dim == 1
        rows = outcome.plan.kept(name).unflatten(1, (-1, m)).sum(-1)
        assert bool((rows == n).all())


def test_masks_a_model_keeps_already_stay_and_count(net: nn.Module, data: Any) -> None:
    first = sparsify(net, data, Sparsity(keep=0.5), stages=1)
    second = sparsify(first.model, data, Sparsity(keep=0.2), stages=2, criterion="magnitude")
    assert second.plan.num_kept == int(0.2 * second.plan.num_weights + 1e-9)
    assert second.plan.then(first.plan).same_as(second.plan)
    assert masks_of(first.model).same_as(first.plan)


def test_a_model_that_has_less_already_loses_nothing(net: nn.Module, data: Any) -> None:
    first = sparsify(net, data, Sparsity(keep=0.2), stages=1)
    second = sparsify(first.model, data, Sparsity(keep=0.6), stages=2)
    assert second.plan.same_as(first.plan)


def test_shares_of_some_layers_are_kept_on_the_way_and_at_the_end(
    net: nn.Module, data: Any
) -> None:
    asked = Sparsity(keep=0.3, shares={"4.*": 0.75})
    outcome = sparsify(net, data, asked, stages=3)
    assert outcome.plan.counts()["4.weight"] == (24, 32)
    assert outcome.plan.num_kept == int(0.3 * outcome.plan.num_weights)
    for record, share in zip(outcome.history, stage_keeps(0.75, 3), strict=True):
        assert record.left["4.weight"] == int(share * 32 + 1e-9)


def test_frozen_norms_stay_and_measured_ones_are_those_of_the_end(
    trained: nn.Module, batches: Batches
) -> None:
    asked = Sparsity(keep=0.3)
    frozen = sparsify(trained, batches, asked, stages=2)
    measured = sparsify(trained, batches, asked, stages=2, batch_norm="re-estimate")
    for name, buffer in trained.named_buffers():
        assert torch.equal(dict(frozen.model.named_buffers())[name], buffer)
    again = dict(batch_norm(trained, measured.model, measured.plan, batches).named_buffers())
    for name, buffer in measured.model.named_buffers():
        if "running" in name:
            assert torch.equal(again[name], buffer)
    assert masks_of(measured.model).same_as(measured.plan)


def test_norms_measured_after_a_stage_change_the_scores_of_the_next(
    trained: nn.Module, batches: Batches
) -> None:
    outcomes = {
        policy: sparsify(
            trained, batches, Sparsity(keep=0.2), criterion="oba", stages=2, batch_norm=policy
        )
        for policy in ("frozen", "re-estimate")
    }
    losses = {policy: outcome.history[1].loss for policy, outcome in outcomes.items()}
    assert losses["frozen"] != losses["re-estimate"]


def test_asked_and_got_are_counted_in_the_network(trained: nn.Module, batches: Batches) -> None:
    outcome = sparsify(trained, batches, Sparsity(keep=0.1), stages=2)
    weights, params = outcome.spent
    assert (weights.what, weights.asked) == ("weights", 0.1)
    names = outcome.plan.masks
    nonzero = {n: int((p != 0).sum()) for n, p in outcome.model.named_parameters()}
    assert weights.left == sum(nonzero[n] for n in names) == outcome.plan.num_kept
    assert weights.dense == sum(outcome.model.get_parameter(n).numel() for n in names)
    assert params.left == sum(nonzero.values()) == outcome.history[-1].params
    assert "asked 10.0%" in str(outcome)


def test_zeros_that_were_there_are_told_apart_from_what_was_asked(
    net: nn.Module, data: Any
) -> None:
    with torch.no_grad():
        net[0].weight.zero_()
    outcome = sparsify(net, data, Sparsity(keep=0.9, allow_empty=True), stages=1)
    assert outcome.plan.density == pytest.approx(0.9, abs=0.01)
    assert outcome.spent[0].got < 0.6


def test_records_tell_the_spread_of_what_ranked_and_the_loss(net: nn.Module, data: Any) -> None:
    outcome = sparsify(net, data, Sparsity(keep=0.5), criterion="oba", stages=2, saliency="plain")
    first = outcome.history[0]
    expected = oba(net, data)
    values = expected.values["2.weight"].abs().flatten().sort().values
    assert first.scores["2.weight"].lowest == pytest.approx(float(values[0]))
    assert first.scores["2.weight"].highest == pytest.approx(float(values[-1]))
    assert first.scores["2.weight"].median == pytest.approx(float(values[(len(values) - 1) // 2]))
    assert first.loss == pytest.approx(expected.loss)
    assert first.count == 12
    assert first.macs is None


def test_fine_tuning_keeps_the_zeros_and_mends_the_network(
    trained: nn.Module, batches: Batches
) -> None:
    outcome = sparsify(trained, batches, Sparsity(keep=0.15), stages=2)
    before = evaluate(outcome.model, batches).loss
    options = FitOptions(epochs=3, learning_rate=0.02)
    fit_(outcome.model, digits().train.batches(64), options=options)
    assert outcome.plan.holds(outcome.model)
    assert evaluate(outcome.model, batches).loss < before


def test_nothing_of_the_given_model_changes(trained: nn.Module, batches: Batches) -> None:
    before, flags = state_of(trained), [m.training for m in trained.modules()]
    random = torch.random.get_rng_state()
    sparsify(trained, batches, Sparsity(keep=0.3), stages=2, batch_norm="re-estimate")
    assert_same_state(trained, before)
    assert [m.training for m in trained.modules()] == flags
    assert masks_of(trained) is None
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(p.grad is None for p in trained.parameters())


def test_progress_is_told_by_stages(net: nn.Module, data: Any) -> None:
    events: list[Any] = []
    with listen(events.append):
        sparsify(net, data, Sparsity(keep=0.5), criterion="oba", stages=3)
    assert max(e.done for e in events if e.what == "sparsifying by oba") == 3


def test_weights_alone_need_no_data_and_one_stage_the_others_twenty(
    net: nn.Module, data: Any
) -> None:
    outcome = sparsify(net, [], Sparsity(keep=0.5))
    assert outcome.settings["criterion"] == "magnitude"
    assert outcome.settings["stages"] == len(outcome.history) == 1
    assert sparsify(net, data, Sparsity(keep=0.5), criterion="oba").settings["stages"] == 20


def test_settings_are_plain_values(net: nn.Module, data: Any) -> None:
    import json

    for asked in (Sparsity(keep=0.5, names=("!4.*",)), Sparsity(pattern="2:4")):
        settings = dict(sparsify(net, data, asked, stages=1).settings)
        assert json.loads(json.dumps(settings)) == settings


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"stages": 0}, ConfigError, "stages=0"),
        ({"stages": 2.0}, ConfigError, "stages=2.0"),
        ({"criterion": "obaa"}, ConfigError, "there are oba"),
        ({"criterion": "taylor-gate"}, ConfigError, "scores whole units"),
        ({"saliency": "max"}, ConfigError, "there are plain, normalised, paper"),
        ({"batch_norm": "mended"}, ConfigError, "frozen, re-estimate"),
        ({"batch_norm": "re-estimate"}, ModelError, "no such module"),
        ({"task": "classification"}, ConfigError, "The task is a str"),
    ],
)
def test_words_nobody_can_mean_are_refused(
    net: nn.Module, data: Any, words: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sparsify(net, data, Sparsity(keep=0.5), **words)


def test_a_number_is_no_sparsity(net: nn.Module, data: Any) -> None:
    with pytest.raises(ConfigError, match=r"Sparsity\(keep=0.1\)"):
        sparsify(net, data, 0.5)  # type: ignore[arg-type]


def test_batches_that_can_be_read_once_are_refused(net: nn.Module, data: Any) -> None:
    with pytest.raises(DataError, match="only once"):
        sparsify(net, iter(data), Sparsity(keep=0.5))


def test_labels_that_do_not_fit_are_explained(net: nn.Module, data: Any) -> None:
    wrong = [(inputs, labels + 10) for inputs, labels in data]
    with pytest.raises(DataError, match="Scoring by oba failed"):
        sparsify(net, wrong, Sparsity(keep=0.5), criterion="oba", stages=1)


def test_scores_that_are_no_numbers_are_refused_by_name(net: nn.Module, data: Any) -> None:
    def broken(model: nn.Module, *_: Any) -> Scores:
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        values["2.weight"][0, 0] = torch.nan
        return Scores(values, "broken")

    way = Criterion("broken", "NaN", broken)
    before = state_of(net)
    for form in ("plain", "paper"):
        with pytest.raises(NonFiniteError, match="2.weight"):
            sparsify(net, data, Sparsity(keep=0.5), criterion=way, stages=1, saliency=form)
    assert_same_state(net, before)


def test_a_layer_that_would_empty_is_named_unless_that_is_allowed(
    net: nn.Module, data: Any
) -> None:
    with torch.no_grad():
        net[2].weight *= 1e-6
    asked: dict[str, Any] = {"criterion": "magnitude", "stages": 3}
    with pytest.raises(BudgetError, match="none of 2.weight"):
        sparsify(net, data, Sparsity(keep=0.2), **asked)
    outcome = sparsify(net, data, Sparsity(keep=0.2, allow_empty=True), **asked)
    assert outcome.plan.counts()["2.weight"][0] == 0


def test_masks_of_a_network_that_is_not_the_models_own_are_refused(net: nn.Module) -> None:
    other = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    with pytest.raises(ValueError, match="another|has none"):
        mask(net, identity_masks(other))


def test_what_is_gone_does_not_count_in_a_mean(net: nn.Module, data: Any) -> None:
    """A criterion that scores what is gone: the mean is over what is left."""

    def even(model: nn.Module, *_: Any) -> Scores:
        generator = torch.Generator().manual_seed(0)
        values = {n: torch.rand(p.shape, generator=generator) for n, p in model.named_parameters()}
        return Scores(values, "even")

    way = Criterion("even", "chance", even)
    once = sparsify(net, data, Sparsity(keep=0.5), criterion=way, stages=1, saliency="plain")
    asked = Sparsity(keep=0.3)
    twice = sparsify(once.model, data, asked, criterion=way, stages=1, saliency=Saliency("mean"))
    scores, best = even(net).values, []
    for name, own in once.plan.masks.items():
        left = scores[name] * once.plan.kept(name)
        best += (left / (left.sum() / own.num_kept)).flatten().tolist()
    lowest = sorted(best, reverse=True)[twice.plan.num_kept - 1]
    for name, own in once.plan.masks.items():
        left = scores[name] * once.plan.kept(name)
        expected = left / (left.sum() / own.num_kept) >= lowest
        assert torch.equal(twice.plan.kept(name), expected)
