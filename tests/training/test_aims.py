"""Smoothed labels and teachers, against torch's own losses and closed forms."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.data import Batches, digits
from apoptosis.errors import ConfigError
from apoptosis.models import digits_cnn
from apoptosis.task import Task
from apoptosis.training import FitOptions, evaluate, fit_

DATA = digits()


def batches() -> Batches:
    return Batches(DATA.train.images[:96], DATA.train.labels[:96], size=32, shuffle_seed=0)


@pytest.mark.parametrize("labels", [[0, 2, 1, 1], [0, -100, 1, -100]])
def test_smoothed_labels_are_torchs(labels):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor(labels)
    task = Task.classification().smoothed(0.1)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(task.loss(logits, (torch.zeros(4), labels)), expected)


def test_smoothed_labels_of_positions_and_tokens_are_torchs():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)  # samples, classes, positions
    labels = torch.randint(0, 5, (2, 7))
    labels[0, 3] = -100
    found = Task.classification().smoothed(0.2).loss(logits, (torch.zeros(2), labels))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, label_smoothing=0.2))

    tokens = {"input_ids": torch.randint(0, 5, (2, 6)), "attention_mask": torch.ones(2, 6)}
    tokens["attention_mask"][1, 4:] = 0
    logits = torch.randn(2, 6, 5, dtype=torch.float64)
    targets = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)[:, 1:]
    expected = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets, label_smoothing=0.3, ignore_index=-100
    )
    found = Task.language_model().smoothed(0.3).loss(logits, tokens)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_is_the_mean_of_labels_and_divergence(weight, temperature):
    torch.manual_seed(0)
    teacher, student = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    x, labels = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    task = Task.classification().distillation(teacher, weight=weight, temperature=temperature)
    theirs = F.softmax(teacher(x).float() / temperature, 1)
    ours = F.log_softmax(student(x).float() / temperature, 1)
    apart = F.kl_div(ours, theirs, reduction="batchmean") * temperature**2
    expected = (1 - weight) * F.cross_entropy(student(x), labels) + weight * apart
    torch.testing.assert_close(task.loss(student(x), (x, labels)).float(), expected.float())


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_an_infinite_temperature_is_what_high_ones_come_to(weight):
    """By the divergence in float64 at a temperature of 10⁴, where T² KL is within 10⁻⁴ of its limit."""
    torch.manual_seed(0)
    teacher, student = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    x, labels = 3 * torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    task = Task.classification().distillation(teacher, weight=weight, temperature=math.inf)
    theirs, ours = (F.log_softmax(net(x) / 1e4, 1) for net in (teacher, student))
    apart = 1e8 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    expected = (1 - weight) * F.cross_entropy(student(x), labels) + weight * apart
    found = task.loss(student(x), (x, labels))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
    shifted = task.loss(student(x) + torch.arange(5.0)[:, None], (x, labels))
    torch.testing.assert_close(shifted, found)  # a shift of all logits changes no prediction


def test_a_teacher_alone_needs_no_labels():
    teacher = nn.Linear(6, 4)
    task = Task.classification().distillation(teacher)
    x = torch.randn(5, 6)
    assert task.loss(nn.Linear(6, 4)(x), x) > 0
    student = nn.Linear(6, 4)
    options = FitOptions(epochs=200, distil=1.0, learning_rate=0.5, weight_decay=0)
    fit_(student, [torch.randn(64, 6)], options=options, teacher=teacher)
    torch.testing.assert_close(student(x).softmax(1), teacher(x).softmax(1), rtol=0.05, atol=0.02)


def test_the_teacher_is_asked_in_eval_mode_and_stays_as_it_was():
    teacher = digits_cnn(width=4).train()
    before = {name: own.clone() for name, own in teacher.state_dict().items()}
    fit_(digits_cnn(width=4), batches(), options=FitOptions(epochs=1, distil=0.5), teacher=teacher)
    assert teacher.training
    assert all(torch.equal(own, before[name]) for name, own in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


def test_a_student_of_the_dense_network_learns_more_than_alone():
    teacher = digits_cnn()
    fit_(teacher, DATA.train.batches(64, shuffle_seed=0), options=FitOptions(epochs=6))
    few = Batches(DATA.train.images[:200], DATA.train.labels[:200], size=50, shuffle_seed=0)
    found = {}
    for distil in (0.0, 0.9):
        student = digits_cnn(width=4)
        fit_(
            student,
            few,
            options=FitOptions(epochs=30, distil=distil, temperature=4.0),
            teacher=teacher if distil else None,
        )
        found[distil] = evaluate(student, DATA.test.batches(300)).loss
    assert found[0.9] < found[0.0]


def test_a_teacher_without_weight_and_a_weight_without_teacher_are_refused():
    net = digits_cnn(width=4)
    with pytest.raises(ConfigError, match=r"distil=0\.5"):
        fit_(net, batches(), options=FitOptions(epochs=1), teacher=net)
    with pytest.raises(ConfigError, match="teacher=dense"):
        fit_(net, batches(), options=FitOptions(epochs=1, distil=0.5))


def test_tasks_without_rows_say_what_is_missing():
    task = replace(Task.classification(), rows=None)
    for make in (lambda: task.smoothed(0.1), lambda: task.distillation(nn.Identity())):
        with pytest.raises(ConfigError, match="`rows`"):
            make()
    for bad in ({"weight": 2.0}, {"temperature": 0.0}):
        with pytest.raises(ConfigError, match="weight lies in"):
            Task.classification().distillation(nn.Identity(), **bad)


def test_losses_of_epochs_are_means_over_predictions():
    """Uneven batches and ignored labels, counted by hand."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    data = [
        (torch.randn(4, 3), torch.tensor([0, 1, -100, 1])),
        (torch.randn(2, 3), torch.tensor([-100, 0])),
    ]
    options = FitOptions(epochs=1, learning_rate=1e-12, momentum=0, weight_decay=0)
    fit = fit_(net, data, options=options)
    x, y = torch.cat([a for a, _ in data]), torch.cat([b for _, b in data])
    expected = F.cross_entropy(net(x), y).item()
    assert fit.epochs[0].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [100.0, 1e4])
def test_high_temperatures_keep_their_digits(temperature):
    """In 32 bits T² KL of logits that differ by little is noise, and may be negative."""
    torch.manual_seed(0)
    teacher, student, x = nn.Linear(6, 4), nn.Linear(6, 4), torch.randn(5, 6)
    found, limit = (
        Task.classification().distillation(teacher, temperature=t).loss(student(x), x)
        for t in (temperature, math.inf)
    )
    torch.testing.assert_close(found.float(), limit, rtol=2 / temperature, atol=0)


def test_rows_that_do_not_count_may_hold_anything():
    teacher = nn.Linear(6, 4)
    x, labels = torch.randn(5, 6), torch.tensor([0, 1, -100, 2, 3])
    task = Task.classification().distillation(teacher)
    outputs = teacher(x) + torch.randn(5, 4)
    want = task.loss(outputs, (x, labels))
    broken = outputs.clone()
    broken[2] = torch.nan
    torch.testing.assert_close(task.loss(broken, (x, labels)), want)
