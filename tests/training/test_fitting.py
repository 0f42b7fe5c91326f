import math

import pytest
import torch
from torch import nn

from apoptosis.data import Batches, digits
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.models import digits_cnn
from apoptosis.progress import listen
from apoptosis.training import FitOptions, evaluate, fit_

DATA = digits()


def small_batches(seed: int | None = 0) -> Batches:
    return Batches(DATA.train.images[:96], DATA.train.labels[:96], size=32, shuffle_seed=seed)


def weights_after(**options) -> torch.Tensor:
    model = digits_cnn(width=4)
    fit_(model, small_batches(), options=FitOptions(epochs=2, **options))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_three_epochs_learn_the_digits():
    model = digits_cnn()
    history = fit_(
        model, DATA.train.batches(64, shuffle_seed=0), options=FitOptions(epochs=3)
    ).epochs
    assert len(history) == 3
    assert history[-1].loss < 0.5 * history[0].loss
    assert evaluate(model, DATA.test.batches(300)).metrics["correct"] > 0.9


def test_the_same_run_gives_the_same_weights_whatever_the_random_state():
    torch.manual_seed(1)
    first = weights_after()
    torch.manual_seed(2)
    assert torch.equal(weights_after(), first)


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "adamw"},
        {"learning_rate": 0.05},
        {"schedule": "cosine"},
        {"momentum": 0.5},
        {"weight_decay": 0.01},
        {"label_smoothing": 0.1},
        {"schedule": "step"},
        {"schedule": "constant"},
        {"precision": "bfloat16"},
    ],
    ids=lambda changed: "-".join(map(str, next(iter(changed.items())))),
)
def test_every_option_changes_the_weights(changed):
    assert not torch.equal(weights_after(**changed), weights_after())


def test_the_seed_draws_the_dropout():
    def trained(seed: int) -> torch.Tensor:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        fit_(model, small_batches(), options=FitOptions(epochs=1, seed=seed))
        return model[2].weight.detach()

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


def test_the_first_step_of_sgd_is_the_gradient_times_the_schedules_rate():
    model = nn.Linear(3, 2)
    batch = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    before = model.weight.detach().clone()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    gradient = model.weight.grad.clone()
    options = FitOptions(epochs=1, learning_rate=0.5, schedule="cosine", momentum=0, weight_decay=0)
    fit_(model, [batch], options=options)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * gradient)


def test_flags_random_state_and_frozen_parameters_are_left_as_they_were():
    model = digits_cnn(width=4).eval()
    model.down.train()
    model.stem.requires_grad_(False)
    flags = [m.training for m in model.modules()]
    frozen = model.stem.conv.weight.clone()
    torch.manual_seed(99)  # not the seed that fit_ uses itself
    state = torch.get_rng_state()
    fit_(model, small_batches(), options=FitOptions(epochs=1))
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(model.stem.conv.weight, frozen)
    assert not model.stem.conv.weight.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_training_runs_in_train_mode():
    model = digits_cnn(width=4).eval()
    before = model.stem.norm.running_mean.clone()
    fit_(model, small_batches(), options=FitOptions(epochs=1))
    assert not torch.equal(model.stem.norm.running_mean, before)


def test_epochs_and_their_batches_are_told_as_progress():
    events = []
    with listen(events.append):
        fit_(digits_cnn(width=4), small_batches(), options=FitOptions(epochs=2))
    assert (events[-1].what, events[-1].done, events[-1].total) == ("training", 2, 2)
    ends = [(e.what, e.done, e.total) for e in events if e.finished]
    assert ends == [("epoch 1", 3, 3), ("epoch 2", 3, 3), ("training", 2, 2)]


def test_rates_follow_the_schedule_over_the_whole_run():
    fit = fit_(
        digits_cnn(width=4), small_batches(), options=FitOptions(epochs=4, schedule="cosine")
    )
    steps = 4 * 3
    expected = [0.1 * 0.5 * (1 + math.cos(math.pi * 3 * e / (steps - 1))) for e in range(4)]
    assert [epoch.learning_rate for epoch in fit.epochs] == pytest.approx(expected)


def test_unsized_batches_are_counted():
    class Unsized:
        def __iter__(self):
            return iter(small_batches(None))

    def rates(batches):
        epochs = fit_(digits_cnn(width=4), batches, options=FitOptions(epochs=2)).epochs
        return [(epoch.loss, epoch.learning_rate) for epoch in epochs]

    assert rates(Unsized()) == rates(list(small_batches(None)))


def test_a_loss_that_explodes_stops_with_a_remedy():
    batch = torch.full((4, 1, 8, 8), math.nan), torch.zeros(4, dtype=torch.long)
    model = digits_cnn(width=4).eval()
    with pytest.raises(
        NonFiniteError, match=r"became nan in epoch 1 of 1.*Lower the learning rate"
    ):
        fit_(model, [batch], options=FitOptions(epochs=1))
    assert not model.training


@pytest.mark.parametrize("batches", [[], iter(small_batches())], ids=["empty", "used up"])
def test_an_epoch_without_samples_is_an_error(batches):
    with pytest.raises(DataError, match="no samples in an epoch"):
        fit_(digits_cnn(width=4), batches, options=FitOptions(epochs=2))


def test_a_frozen_model_is_refused():
    with pytest.raises(ModelError, match="requires_grad_"):
        fit_(digits_cnn(width=4).requires_grad_(False), small_batches())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"epochs": -1}, "epochs=-1"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"momentum": 1}, "momentum=1"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"optimizer": "lion"}, "optimizer='lion' is not one of sgd, adamw"),
        ({"schedule": "flat"}, "schedule='flat' is not one of constant, step, cosine, one-cycle"),
        ({"milestones": (0.5, 1.0)}, "milestones"),
        ({"label_smoothing": 1.0}, "label_smoothing=1"),
        ({"distil": 1.5}, "distil=1.5"),
        ({"temperature": 0.0}, "temperature=0"),
        ({"precision": "float16"}, "precision='float16' is not one of float32, bfloat16"),
        ({"keep": "all"}, "keep='all' is not one of best, last"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_nobody_can_mean_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        FitOptions(**bad)
