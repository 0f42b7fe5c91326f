"""The network as it was given is a candidate for the best epoch: training that does harm is not kept."""

import copy

import pytest
import torch
from torch import nn

from apoptosis.checkpoint import Journal, open_journal
from apoptosis.data import Batches, digits
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Sparsity
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.workflow import Material, Pruning, Sparsifying, gradual, iterative, one_shot, prune

DATA = digits()
VALIDATION = Batches(DATA.validation.images[:100], DATA.validation.labels[:100], size=100)
HARM = FitOptions(epochs=2, learning_rate=2.0, schedule="constant", momentum=0.0)
HOW = Pruning(criterion="magnitude", steps=1)


def batches() -> Batches:
    return Batches(DATA.train.images[:200], DATA.train.labels[:200], size=50, shuffle_seed=0)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    model = digits_cnn(width=6, seed=1)
    fit_(model, DATA.train.batches(100), options=FitOptions(epochs=2, learning_rate=0.05))
    return model.eval()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for name, own in model.state_dict().items():
        assert torch.equal(own, other.state_dict()[name]), name


def test_training_that_does_harm_is_undone_buffers_and_all(dense):
    model = copy.deepcopy(dense)
    fit = fit_(model, batches(), options=HARM, validation=VALIDATION)
    assert fit.kept == 0
    assert len(fit.epochs) == 2
    assert fit.before == evaluate(dense, VALIDATION)
    assert_same(model, dense)


def test_it_is_no_candidate_where_nothing_is_chosen(dense):
    for how in ({"validation": None}, {"options": FitOptions(**{**vars(HARM), "keep": "last"})}):
        words = {"options": HARM, "validation": VALIDATION, **how}
        model = copy.deepcopy(dense)
        fit = fit_(model, batches(), **words)
        assert (fit.kept, fit.before) == (2, None)
        assert not torch.equal(next(model.parameters()), next(dense.parameters()))


def test_among_equals_it_is_the_first(dense):
    model = copy.deepcopy(dense)
    still = FitOptions(epochs=2, learning_rate=1e-30, weight_decay=0.0, schedule="constant")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    assert fit_(model, batches(), options=still, validation=VALIDATION).kept == 0


class Stopped(BaseException):
    """As if the process had ended here."""


def test_a_run_that_goes_on_knows_it_too(dense, tmp_path, monkeypatch):
    write = Journal.write

    def stopping(self, *words, **more):
        write(self, *words, **more)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", stopping)
        with pytest.raises(Stopped), open_journal(tmp_path / "run", {}) as journal:
            fit_(
                copy.deepcopy(dense), batches(), None, HARM, validation=VALIDATION, journal=journal
            )
    model = copy.deepcopy(dense)
    with open_journal(tmp_path / "run", {}, resume=True) as journal:
        fit = fit_(model, batches(), None, HARM, validation=VALIDATION, journal=journal)
    assert (fit.kept, len(fit.epochs)) == (0, 2)
    assert fit.before == evaluate(dense, VALIDATION)
    assert_same(model, dense)


def test_every_road_keeps_the_network_as_pruned_and_says_so(dense):
    data = Material(scoring=batches(), training=batches(), validation=VALIDATION)
    pruned = prune(dense, batches(), Budget(flops=0.8), criterion="magnitude", steps=1)
    found = one_shot(dense, Budget(flops=0.8), data, pruning=HOW, fit=HARM)
    assert_same(found.model, pruned.model)
    rounds = iterative(dense, [Budget(flops=0.9), Budget(flops=0.8)], data, pruning=HOW, fit=HARM)
    sparse = gradual(
        dense, Sparsity(keep=0.7), data, sparsifying=Sparsifying(criterion="magnitude"), fit=HARM
    )
    for outcome in (found, *rounds, sparse):
        for record in outcome.settings["training"]:
            assert record["kept"] == 0
            assert record["before"]["count"] == 100
