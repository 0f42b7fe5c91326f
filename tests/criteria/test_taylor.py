"""First-order Taylor is θ ⊙ g of the mean loss, and what makes a channel is worth what reads it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.criteria import taylor
from apoptosis.errors import ConfigError
from apoptosis.task import Task
from oracles.building import CLASSES, built, images, rows
from oracles.compare import EXACT, assert_products_close


def normed():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )


def by_autograd(model, x, y):
    twin = copy.deepcopy(model).eval()
    F.cross_entropy(twin(x), y).backward()
    return {name: p.detach() * p.grad for name, p in twin.named_parameters()}


@pytest.mark.parametrize("cut", [7, 3, 1])
def test_taylor_is_theta_times_gradient_of_the_mean_however_data_are_cut(cut):
    model, (x, y) = built(normed, train=True), images(7)
    batches = list(zip(x.split(cut), y.split(cut), strict=True))
    scores = taylor(model, batches)
    assert_products_close(scores.values, by_autograd(model, x, y), tolerance=EXACT)
    assert (scores.criterion, scores.count, scores.fallbacks) == ("taylor", 7, {})


def test_a_mean_of_batch_means_would_be_caught():
    model, (x, y) = built(normed), images(7)
    parts = [by_autograd(model, *part) for part in ((x[:5], y[:5]), (x[5:], y[5:]))]
    wrong = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
    with pytest.raises(AssertionError, match="differs"):
        assert_products_close(wrong, by_autograd(model, x, y), tolerance=1e-2)


def test_tokens_count_where_the_task_says_so():
    """Two batches with 6 and 2 predicted tokens weigh 3 to 1."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

        def forward(self, input_ids):
            return self.head(self.table(input_ids))

    model = built(Tiny)
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, 0, 0]])
    labels = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, 0, -100]])
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    want = {
        name: p.detach() * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)
    }
    batches = [{"input_ids": ids[i], "labels": labels[i]} for i in (slice(2), slice(2, 3))]
    scores = taylor(model, batches, Task.language_model())
    assert scores.count == 8
    assert_products_close(scores.values, want, tolerance=EXACT)


def chain(*middle):
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *middle)


@pytest.mark.parametrize(
    ("make", "reader", "sum_over"),
    [
        pytest.param(
            chain(nn.MaxPool2d(2), nn.Conv2d(4, CLASSES, 2), nn.Flatten()),
            "3.weight",
            lambda v: v.sum((0, 2, 3)),
            id="conv-max-pool-conv",
        ),
        pytest.param(
            chain(nn.AvgPool2d(2), nn.Conv2d(4, CLASSES, 2), nn.Flatten()),
            "3.weight",
            lambda v: v.sum((0, 2, 3)),
            id="conv-avg-pool-conv",
        ),
        pytest.param(
            chain(nn.Flatten(), nn.Linear(64, CLASSES)),
            "3.weight",
            lambda v: v.view(CLASSES, 4, 16).sum((0, 2)),
            id="conv-flatten-linear",
        ),
    ],
)
def test_worth_is_conserved_from_producer_rows_to_consumer_columns(make, reader, sum_over):
    values = taylor(built(make), [images()]).values
    made = values["0.weight"].sum((1, 2, 3)) + values["0.bias"]
    assert made.abs().min() > 1e-4
    torch.testing.assert_close(made, sum_over(values[reader]), rtol=1e-9, atol=1e-13)


def test_conservation_fails_with_an_activation_that_is_not_homogeneous():
    def make():
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))

    values = taylor(built(make), [images()]).values
    made = values["0.weight"].sum((1, 2, 3)) + values["0.bias"]
    assert (made - values["3.weight"].view(CLASSES, 4, 16).sum((0, 2))).norm() > 0.05 * made.norm()


def test_weight_and_bias_of_a_norm_are_worth_the_gate_after_it():
    """Σ z·∂L/∂z = γ ∂L/∂γ + β ∂L/∂β for z the norm's output, in eval mode."""
    model, (x, y) = built(normed, train=True), images()
    values = taylor(model, [(x, y)]).values
    twin = copy.deepcopy(model).eval()
    z = twin[:2](x).detach().requires_grad_()
    F.cross_entropy(twin[2:](z), y).backward()
    want = (z * z.grad).sum((0, 2, 3)).detach()
    torch.testing.assert_close(values["1.weight"] + values["1.bias"], want, rtol=1e-9, atol=1e-13)


def test_micro_batches_change_nothing():
    model, batch = built(normed), images(5)
    want = taylor(model, [batch]).values
    assert_products_close(taylor(model, [batch], micro_batch=2).values, want, tolerance=EXACT)


def test_impossible_micro_batch():
    with pytest.raises(ConfigError, match="micro_batch=0"):
        taylor(built(lambda: nn.Linear(4, CLASSES)), [rows()], micro_batch=0)
