"""A teacher's part of the loss is the formula of `Task.distillation`, written another way."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.task import Task


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 5).double(), nn.Linear(4, 5).double()


CLOSE = {"rtol": 1e-4, "atol": 1e-7, "check_dtype": False}  # divergences are single numbers
BATCH = (numbers(6, 4, seed=3), torch.tensor([0, 4, 2, 2, 1, 3]))


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² KL by torch's own function, a number for each row."""
    ours, theirs = ((z / temperature).log_softmax(1) for z in (student, teacher))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1) * temperature**2


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 16.0, 20.0])
def test_the_loss_is_the_weighed_sum(weight: float, temperature: float) -> None:
    student, teacher = networks()
    task = Task.classification().distillation(teacher, weight=weight, temperature=temperature)
    outputs = student(BATCH[0])
    apart = divergence(outputs, teacher(BATCH[0]), temperature).mean()
    want = (1 - weight) * F.cross_entropy(outputs, BATCH[1]) + weight * apart
    torch.testing.assert_close(task.loss(outputs, BATCH), want, **CLOSE)


def test_rows_that_do_not_count_do_not_weigh() -> None:
    student, teacher = networks()
    counted = torch.tensor([True, False, True, True, False, False])
    task = replace(Task.classification(), rows=lambda outputs, _batch: (outputs, counted))
    outputs = student(BATCH[0])
    found = task.distillation(teacher, temperature=2.0).loss(outputs, BATCH)
    want = divergence(outputs, teacher(BATCH[0]), 2.0)[counted].mean()
    torch.testing.assert_close(found, want, **CLOSE)
    spread = task.smoothed(0.2).loss(outputs, BATCH)
    even = -outputs.log_softmax(1)[counted].mean()
    torch.testing.assert_close(spread, 0.8 * F.cross_entropy(outputs, BATCH[1]) + 0.2 * even)


def test_rows_of_which_none_counts_give_zero() -> None:
    student, teacher = networks()
    nothing = torch.zeros(6, dtype=torch.bool)
    task = replace(Task.classification(), rows=lambda outputs, _batch: (outputs, nothing))
    assert task.distillation(teacher).loss(student(BATCH[0]), BATCH) == 0


@pytest.mark.parametrize("temperature", [1e2, 1e4])
def test_hot_divergences_are_exact_in_half_and_single_numbers(temperature: float) -> None:
    """At high temperatures the difference of two logarithms loses all digits unless it is taken in double."""
    student, teacher = numbers(6, 5, seed=4).float(), numbers(6, 5, seed=5).float()
    task = Task.classification().distillation(nn.Identity(), temperature=temperature)
    found = task.loss(student, (teacher, BATCH[1]))
    want = divergence(student.double(), teacher.double(), temperature).mean()
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=0.0)


def test_an_endless_temperature_is_the_limit() -> None:
    student, teacher = numbers(6, 5, seed=4), numbers(6, 5, seed=5)
    task = Task.classification().distillation(nn.Identity(), temperature=math.inf)
    found = task.loss(student, (teacher, BATCH[1]))
    apart = student - teacher
    centred = apart - apart.mean(1, keepdim=True)
    torch.testing.assert_close(found, centred.square().mean(1).mean() / 2, **CLOSE)
    near = Task.classification().distillation(nn.Identity(), temperature=1e5)
    torch.testing.assert_close(near.loss(student, (teacher, BATCH[1])), found, **CLOSE)


def test_the_teacher_learns_nothing_and_is_in_eval_mode() -> None:
    student, teacher = networks()
    modes: list[tuple[bool, bool]] = []
    noisy = nn.Sequential(nn.Dropout(0.5), teacher).train()
    noisy.register_forward_hook(lambda m, *_: modes.append((m.training, torch.is_grad_enabled())))
    Task.classification().distillation(noisy).loss(student(BATCH[0]), BATCH).backward()
    assert modes == [(False, False)]
    assert noisy.training
    assert teacher.weight.grad is None
    assert student.weight.grad is not None


@pytest.mark.parametrize("weight", [-0.01, 1.01, math.nan])
def test_weights_outside_of_their_bounds_are_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Task.classification().distillation(nn.Linear(4, 5), weight=weight)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperatures_that_are_not_above_zero_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        Task.classification().distillation(nn.Linear(4, 5), temperature=temperature)


def test_no_labels_are_needed_where_the_teacher_alone_counts() -> None:
    def nothing(_outputs: Tensor, _batch: object) -> Tensor:
        raise AssertionError("the loss of labels was asked for")

    student, teacher = networks()
    task = replace(Task.classification(), loss=nothing).distillation(teacher, weight=1.0)
    outputs = student(BATCH[0])
    want = divergence(outputs, teacher(BATCH[0]), 1.0).mean()
    torch.testing.assert_close(task.loss(outputs, BATCH), want, **CLOSE)
