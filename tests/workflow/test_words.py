"""Input that is not what is meant ends in words that name it, before anything raw comes up."""

import os

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.cli.weights import load_weights_
from apoptosis.criteria import CRITERIA
from apoptosis.errors import ApoptosisError, CheckpointError, ConfigError, DataError, ModelError
from apoptosis.training import FitOptions, fit_

READERS = [name for name, own in CRITERIA.items() if own.reads_data]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def batches(images=lambda: torch.randn(8, 4), labels=lambda: torch.arange(8) % 3):
    return [(images(), labels()) for _ in range(2)]


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return self.inner(x).detach()


@pytest.mark.parametrize("name", READERS)
def test_labels_that_are_all_ignored_are_no_samples(name):
    structure = ap.trace(make(), torch.zeros(1, 4))
    ignored = batches(labels=lambda: torch.full((8,), -100))
    with pytest.raises(DataError, match="no sample|nothing counts"):
        CRITERIA[name].units(make(), structure, ignored)


@pytest.mark.parametrize("name", READERS)
def test_outputs_without_derivatives_are_told_so(name):
    with pytest.raises((ModelError, ap.errors.LossError), match="detached") as caught:
        ap.prune(Detached(), batches(), ap.Budget(flops=0.6), criterion=name, steps=1)
    assert "Labels must fit" not in str(caught.value)


def test_training_tells_so_too():
    with pytest.raises(ModelError, match="detached"):
        fit_(Detached(), batches(), options=FitOptions(epochs=1))


@pytest.mark.parametrize("criterion", [None, "magnitude", "taylor"])
def test_sparse_batches_are_refused(criterion):
    sparse = batches(lambda: torch.eye(8, 4).to_sparse())
    with pytest.raises(DataError, match="to_dense"):
        ap.prune(make(), sparse, ap.Budget(flops=0.6), criterion=criterion)


@pytest.mark.parametrize("how", ["block", "default"])
def test_numbers_are_not_made_on_another_device(how):
    net, data = make(), batches()
    structure = ap.trace(net, torch.zeros(1, 4))
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta"):
            for work in (
                lambda: ap.prune(net, data, ap.Budget(flops=0.6)),
                lambda: ap.sparsify(net, data, ap.Sparsity(keep=0.5)),
                *(lambda own=own: own.units(net, structure, data) for own in CRITERIA.values()),
            ):
                with pytest.raises(ConfigError, match="default device is meta"):
                    work()
    finally:
        torch.set_default_device("cpu")
    assert ap.sparsify(net, data, ap.Sparsity(keep=0.5)).plan is not None


class Runs:
    def __reduce__(self):
        return os.system, ("false",)


@pytest.mark.parametrize("content", [{"a": Runs()}, {"a": object}, nn.Linear(2, 2)])
def test_a_refused_pickle_is_told_without_the_advice_to_trust_it(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(
        CheckpointError, match="is not a file of weights alone.*so it is refused"
    ) as caught:
        load_weights_(make(), tmp_path / "w.pt")
    for advice in ("weights_only", "safe_globals", "torch.load", "trust the source"):
        assert advice not in str(caught.value)


@pytest.mark.parametrize("given", [None, 3, "x", b"x", [], object()])
@pytest.mark.parametrize("what", ["model", "batches", "budget", "steps", "repair", "selection"])
def test_arguments_of_another_kind(given, what):
    told = {
        "model": make(),
        "batches": batches(),
        "budget": ap.Budget(flops=0.6),
        "criterion": "magnitude",
    }
    if (given is None or given in (3, [])) and what in ("steps", "repair", "selection"):
        return  # meant
    with pytest.raises(ApoptosisError):
        ap.prune(**{**told, what: given})
