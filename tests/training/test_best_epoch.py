"""Which epoch is kept: the best on validation data, by a rule that is written here another way."""

import copy

import pytest
import torch
from torch import nn

from apoptosis.data import Batches, digits
from apoptosis.models import digits_cnn
from apoptosis.training import FitOptions, evaluate, fit_

DATA = digits()
VALIDATION = Batches(DATA.validation.images[:40], DATA.validation.labels[:40], size=40)


def batches() -> Batches:
    return Batches(DATA.train.images[:96], DATA.train.labels[:96], size=32, shuffle_seed=0)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: own.clone() for name, own in model.state_dict().items()}


def test_the_kept_weights_are_those_of_the_best_epoch():
    options = FitOptions(epochs=6, learning_rate=0.5, schedule="constant")
    model = digits_cnn(width=4)
    fit = fit_(model, batches(), options=options, validation=VALIDATION)
    worths = [(e.validation.metrics["correct"], -e.validation.loss) for e in fit.epochs]
    assert fit.kept == worths.index(max(worths)) + 1
    assert fit.kept < 6, "else this shows nothing"
    assert evaluate(model, VALIDATION) == fit.epochs[fit.kept - 1].validation

    shorter = digits_cnn(width=4)
    stop = FitOptions(epochs=fit.kept, learning_rate=0.5, schedule="constant", keep="last")
    fit_(shorter, batches(), options=stop)
    for name, own in state(model).items():
        assert torch.equal(own, state(shorter)[name]), name


def test_the_last_is_kept_where_that_is_asked_or_nothing_tells():
    options = FitOptions(epochs=6, learning_rate=0.5, schedule="constant", keep="last")
    judged, alone = digits_cnn(width=4), digits_cnn(width=4)
    fit = fit_(judged, batches(), options=options, validation=VALIDATION)
    assert fit.kept == 6
    assert fit_(alone, batches(), options=options).kept == 6
    assert all(torch.equal(own, state(alone)[name]) for name, own in state(judged).items())


def test_validation_changes_nothing_but_the_choice():
    options = FitOptions(epochs=3, keep="last")
    with_, without = digits_cnn(width=4), digits_cnn(width=4)
    first = fit_(with_, batches(), options=options, validation=VALIDATION)
    second = fit_(without, batches(), options=options)
    assert [e.loss for e in first.epochs] == [e.loss for e in second.epochs]
    assert all(torch.equal(own, state(without)[name]) for name, own in state(with_).items())


def test_no_epochs_change_nothing():
    model = digits_cnn(width=4)
    before = state(model)
    fit = fit_(model, batches(), options=FitOptions(epochs=0), validation=VALIDATION)
    assert fit.epochs == ()
    assert fit.kept is None
    assert all(torch.equal(own, before[name]) for name, own in state(model).items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_filters_channels_last_are_put_back_and_learn_the_same(precision):
    options = FitOptions(epochs=2, precision=precision)
    plain, last = digits_cnn(width=4), digits_cnn(width=4)
    strides = [p.stride() for p in last.parameters()]
    one = fit_(plain, batches(), options=options)
    other = fit_(
        last, batches(), options=FitOptions(epochs=2, precision=precision, channels_last=True)
    )
    assert [p.stride() for p in last.parameters()] == strides
    tolerance = 1e-4 if precision == "float32" else 0.05
    assert other.epochs[-1].loss == pytest.approx(one.epochs[-1].loss, rel=tolerance)


def test_bfloat16_leaves_the_weights_in_their_own_type():
    model = digits_cnn(width=4)
    fit_(model, batches(), options=FitOptions(epochs=1, precision="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_copy_trains_to_the_same_weights():
    model = digits_cnn(width=4)
    twin = copy.deepcopy(model)
    for own in (model, twin):
        fit_(own, batches(), options=FitOptions(epochs=2, optimizer="adamw", learning_rate=0.01))
    assert all(torch.equal(own, state(twin)[name]) for name, own in state(model).items())
