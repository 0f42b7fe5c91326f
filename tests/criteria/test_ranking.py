import copy
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from apoptosis.criteria.ranking import channel_scores, masking_truth, spearman
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.models import digits_cnn
from apoptosis.task import Task
from apoptosis.training import evaluate

TASK = Task.classification()


def lively_model() -> nn.Module:
    """A float64 network whose norms have seen something, so that no term is zero by chance."""
    model = digits_cnn(width=4).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise)
        model(torch.randn(64, 1, 8, 8, generator=generator, dtype=torch.float64))
    return model.eval()


def batches(size: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 1, 8, 8, generator=generator, dtype=torch.float64)
    return list(zip(x.split(size), (torch.arange(20) % 10).split(size), strict=True))


def loss_without(model: nn.Module, consumers: list[str], channel: int) -> float:
    """The oracle, by weights: a channel is gone when no consumer reads it."""
    cut = copy.deepcopy(model)
    with torch.no_grad():
        for name in consumers:
            cut.get_submodule(name).weight[:, channel] = 0
    return evaluate(cut, batches()).loss


@pytest.mark.parametrize(("site", "consumers"), [("down.act", ["top.conv"]), ("top.act", ["head"])])
def test_masking_equals_cutting_every_reader_of_the_channel(site, consumers):
    model = lively_model()
    plain = evaluate(model, batches()).loss
    truth = masking_truth(model, batches(), TASK, [site])[site]
    expected = [loss_without(model, consumers, channel) - plain for channel in range(8)]
    assert_close(truth, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert truth.abs().min() > 1e-6


def test_the_oracle_tells_masking_before_the_norm_from_after_it():
    model = lively_model()
    truth = masking_truth(model, batches(), TASK, ["top.conv", "top.act"])
    assert (truth["top.conv"] - truth["top.act"]).abs().max() > 1e-4


def test_masking_the_stem_reaches_both_the_shortcut_and_the_branch():
    model = lively_model()
    plain = evaluate(model, batches()).loss
    truth = masking_truth(model, batches(), TASK, ["stem.act"])["stem.act"]
    branch_alone = torch.tensor([loss_without(model, ["side.conv"], c) - plain for c in range(4)])
    assert (truth - branch_alone).abs().min() > 1e-6


def test_truth_does_not_depend_on_how_data_are_cut():
    model = lively_model()
    whole = masking_truth(model, batches(), TASK, ["side.act", "top.act"])
    cut = masking_truth(model, batches(7), TASK, ["side.act", "top.act"])
    assert whole.keys() == cut.keys() == {"side.act", "top.act"}
    for site in whole:
        assert_close(cut[site], whole[site], rtol=1e-10, atol=1e-12)


def test_the_model_is_left_as_it_was():
    model = lively_model().train()
    model.top.eval()
    flags = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    masking_truth(model, batches(), TASK, ["stem.act"])
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("failing_call", [1, 2])
def test_hooks_and_flags_are_put_back_when_the_loss_fails(failing_call):
    calls = []

    def loss(outputs, labels):
        calls.append(outputs)
        if len(calls) == failing_call:
            raise RuntimeError("loss failed")
        return nn.functional.cross_entropy(outputs, labels)

    model = lively_model().train()
    with pytest.raises(RuntimeError, match="loss failed"):
        masking_truth(model, batches(), Task.classification(loss), ["stem.act"])
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_an_unknown_site_is_refused_with_the_names_there_are():
    with pytest.raises(ModelError, match=r"'stem.relu'.*stem.act"):
        masking_truth(lively_model(), batches(), TASK, ["stem.relu"])


def test_a_site_that_never_runs_is_refused():
    model = lively_model()
    model.unused = nn.ReLU()
    with pytest.raises(ModelError, match="unused.*saw no tensor"):
        masking_truth(model, batches(), TASK, ["unused"])
    assert not any(m._forward_hooks for m in model.modules())


def test_truth_without_samples_is_an_error():
    with pytest.raises(DataError, match="found no samples"):
        masking_truth(lively_model(), [], TASK, ["stem.act"])


def scores(**values: list) -> SimpleNamespace:
    return SimpleNamespace(
        values={name.replace("__", "."): torch.tensor(v) for name, v in values.items()}
    )


def test_a_channels_score_is_the_size_of_the_signed_sum_over_what_makes_it():
    given_scores = scores(
        a__conv__weight=[[[1.0, -3.0]], [[0.5, 0.5]]],
        a__norm__weight=[-1.0, 2.0],
        a__norm__bias=[0.0, -4.0],
        b__conv__weight=[[100.0], [100.0]],
    )
    predicted = channel_scores(given_scores, {"a.act": ["a.conv", "a.norm"]})
    assert predicted["a.act"].tolist() == [3.0, 1.0]


def test_names_that_merely_begin_alike_do_not_count():
    given_scores = scores(a__conv__weight=[[1.0]], a__conv2__weight=[[50.0]])
    assert channel_scores(given_scores, {"s": ["a.conv"]})["s"].tolist() == [1.0]


@pytest.mark.parametrize("modules", [["nowhere"], ["a.conv", "b.conv"]])
def test_producers_that_do_not_fit_are_refused(modules):
    given_scores = scores(a__conv__weight=[[1.0]], b__conv__weight=[[1.0], [2.0]])
    with pytest.raises(ConfigError, match="one row of parameters per channel"):
        channel_scores(given_scores, {"site": modules})


@given(st.integers(2, 30), st.integers(0, 1000), st.sampled_from([2, 5, 1000]))
def test_spearman_equals_scipys_with_and_without_ties(length, seed, levels):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, levels, length), rng.integers(0, levels, length)
    if len(set(a)) == 1 or len(set(b)) == 1:
        a[0], b[-1] = levels, levels  # constant vectors have no rank correlation
    expected = scipy.stats.spearmanr(a, b).statistic
    found = spearman(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    assert found == pytest.approx(expected, abs=1e-12)


def test_spearman_asks_for_the_order_alone():
    a = torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert spearman(a, a.exp()) == pytest.approx(1)
    assert spearman(a, -(a**3)) == pytest.approx(-1)


def test_spearman_of_a_constant_is_undefined():
    assert np.isnan(spearman(torch.ones(5), torch.arange(5.0)))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "one length"),
        (torch.zeros(3, 1), torch.zeros(3, 1), "one length"),
        (torch.tensor([0.0, float("nan")]), torch.zeros(2), "NaN has no rank"),
    ],
)
def test_spearman_refuses_what_has_no_ranks(a, b, message):
    with pytest.raises(DataError, match=message):
        spearman(a, b)
