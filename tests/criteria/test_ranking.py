import copy

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from apoptosis.criteria import spearman, unit_truth
from apoptosis.errors import DataError, PlanMismatchError
from apoptosis.models import digits_cnn
from apoptosis.progress import listen
from apoptosis.structure import Structure, cut, trace, zero
from apoptosis.task import Task
from apoptosis.training import evaluate
from oracles.untouched import Snapshot

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


def traced(model: nn.Module) -> Structure:
    return trace(model, batches()[0][0][:1])


def loss_without(model: nn.Module, consumers: list[str], channel: int) -> float:
    """The oracle, by weights: a channel is gone when no consumer reads it."""
    deaf = copy.deepcopy(model)
    with torch.no_grad():
        for name in consumers:
            deaf.get_submodule(name).weight[:, channel] = 0
    return evaluate(deaf, batches()).loss


CONSUMERS = {
    "stem.conv": [
        "side.conv",
        "down.conv",
    ],  # the branch reads the stem, and its end reads their sum
    "down.conv": ["top.conv"],
    "top.conv": ["head"],
}


def test_truth_is_the_loss_without_the_columns_of_every_reader():
    model = lively_model()
    plain = evaluate(model, batches()).loss
    truth = unit_truth(model, traced(model), batches(), TASK)
    assert list(truth) == list(CONSUMERS)
    for group, consumers in CONSUMERS.items():
        own = truth[group]
        expected = [loss_without(model, consumers, c) - plain for c in range(len(own))]
        assert_close(own, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
        assert own.abs().min() > 1e-6


def test_truth_is_the_loss_of_the_twin_that_a_cut_equals():
    model = lively_model()
    structure = traced(model)
    plain = evaluate(model, batches()).loss
    for group, own in unit_truth(model, structure, batches(), TASK).items():
        for unit in range(len(own)):
            plan = structure.plan({group: [u for u in range(len(own)) if u != unit]})
            for removed in (zero(model, plan), cut(model, plan)):
                lost = evaluate(removed, batches()).loss - plain
                assert float(own[unit]) == pytest.approx(lost, rel=1e-9, abs=1e-12)


def test_the_oracle_can_fail():
    """Without the branch's own reading, the stem's channels are worth something else."""
    model = lively_model()
    plain = evaluate(model, batches()).loss
    truth = unit_truth(model, traced(model), batches(), TASK, groups=["stem.conv"])["stem.conv"]
    trunk_alone = torch.tensor([loss_without(model, ["down.conv"], c) - plain for c in range(4)])
    assert (truth - trunk_alone).abs().min() > 1e-6


class Normed(nn.Module):
    """A norm over units counts the zeroed ones, so cutting them is not zeroing them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.b(self.norm(self.a(x)))))


def test_exact_groups_are_measured_unless_others_are_named():
    model = Normed().double()
    batch = (torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2)
    structure = trace(model, batch[0])
    assert [group.exact for group in structure.groups] == [False, True]
    assert list(unit_truth(model, structure, [batch], TASK)) == ["b"]
    assert list(unit_truth(model, structure, [batch], TASK, groups=["a"])) == ["a"]
    assert list(unit_truth(model, structure, [batch], TASK, groups=["b", "a"])) == ["b", "a"]


def test_a_tied_weight_is_zeroed_wherever_it_is_used():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), *model).double()
    batch = (torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3)
    structure = trace(model, batch[0])
    plain = evaluate(model, [batch]).loss
    for group, own in unit_truth(model, structure, [batch], TASK).items():
        for unit in range(len(own)):
            plan = structure.plan({group: [u for u in range(len(own)) if u != unit]})
            lost = evaluate(cut(model, plan), [batch]).loss - plain
            assert float(own[unit]) == pytest.approx(lost, rel=1e-9, abs=1e-12)


def test_truth_does_not_depend_on_how_data_are_cut():
    model = lively_model()
    structure = traced(model)
    whole = unit_truth(model, structure, batches(), TASK, groups=["down.conv"])
    parts = unit_truth(model, structure, iter(batches(7)), TASK, groups=["down.conv"])
    assert whole.keys() == parts.keys() == {"down.conv"}
    assert_close(parts["down.conv"], whole["down.conv"], rtol=1e-10, atol=1e-12)


def test_the_model_is_left_as_it_was():
    model = lively_model().train()
    model.top.eval()
    structure, before = traced(model), Snapshot(model)
    unit_truth(model, structure, batches(), TASK, groups=["stem.conv"])
    before.assert_unchanged()


@pytest.mark.parametrize("failing_call", [1, 2])
def test_the_model_is_left_as_it_was_when_the_loss_fails(failing_call):
    calls = []

    def loss(outputs, labels):
        calls.append(outputs)
        if len(calls) == failing_call:
            raise RuntimeError("loss failed")
        return nn.functional.cross_entropy(outputs, labels)

    model = lively_model().train()
    structure, before = traced(model), Snapshot(model)
    with pytest.raises(RuntimeError, match="loss failed"):
        unit_truth(model, structure, batches(), Task.classification(loss))
    before.assert_unchanged()


def test_every_unit_is_told_to_whoever_listens():
    model, events = lively_model(), []
    with listen(events.append):
        unit_truth(model, traced(model), batches(), TASK)
    assert {(e.what, e.total) for e in events} == {("removing each unit", 4 + 8 + 8)}
    assert events[-1].finished


def test_an_unknown_group_is_refused_with_the_name_that_was_meant():
    model = lively_model()
    with pytest.raises(PlanMismatchError, match=r"no group 'stem.relu'.*'stem.conv'"):
        unit_truth(model, traced(model), batches(), TASK, groups=["stem.relu"])


@pytest.mark.parametrize("empty", [[], [(torch.zeros(0, 1, 8, 8), torch.zeros(0).long())]])
def test_truth_without_samples_is_an_error(empty):
    model = lively_model()
    with pytest.raises(DataError, match="found no samples"):
        unit_truth(model, traced(model), empty, TASK)


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


def weight_normed(norm) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(64, 6)), nn.Tanh(), norm(nn.Linear(6, 10)))
    return model.double().eval()


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(nn.utils.parametrizations.weight_norm, id="parametrised"),
        pytest.param(
            nn.utils.weight_norm,
            id="hooked",
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
        ),
    ],
)
def test_the_truth_of_a_weight_norm_is_that_of_its_twin(norm):
    """Directions of length zero have no norm to be divided by: `zero` leaves them alone, and so must the truth."""
    model, data = weight_normed(norm), [(x.flatten(1), y) for x, y in batches()]
    model(data[0][0])  # leaves a weight that is no leaf, which torch does not copy
    structure = trace(model, data[0][0][:1])
    (group,) = structure.groups
    truth = unit_truth(model, structure, data)[group.name]
    plain = evaluate(model, data).loss
    for unit in range(group.size):
        plan = structure.plan({group.name: [u for u in range(group.size) if u != unit]})
        expected = evaluate(zero(model, plan), data).loss - plain
        assert truth[unit].item() == pytest.approx(expected, abs=1e-12)
