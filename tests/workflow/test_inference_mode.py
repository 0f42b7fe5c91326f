"""Under `torch.inference_mode()` all works as outside, and what comes out can be trained; or it is refused in words."""

import copy

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.checkpoint import save
from apoptosis.criteria import CRITERIA
from apoptosis.data import digits
from apoptosis.errors import DataError, ModelError
from apoptosis.models import digits_cnn
from apoptosis.planning import Budget, Sparsity
from apoptosis.repair import Distil, Refit, RefitBlocks, batch_norm
from apoptosis.structure import cut, trace, zero
from apoptosis.training import FitOptions, evaluate, fit_
from apoptosis.workflow import CompareOptions, ContestData, Material, Pruning, compare

BATCHES = digits().train.first(60).batches(30)
HALF = Budget(flops=0.5)
DATA = Material(scoring=BATCHES, training=BATCHES, validation=BATCHES)
FIT = FitOptions(epochs=1)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return digits_cnn(width=4).eval()


@pytest.fixture(scope="module")
def structure(net):
    return trace(net, next(iter(BATCHES))[0][:1])


@pytest.fixture(scope="module")
def plan(structure):
    return structure.plan({structure.groups[0].name: range(2)})


def both(work):
    """What it gives outside, and under inference mode."""
    torch.manual_seed(0)
    outside = work()
    torch.manual_seed(0)
    with torch.inference_mode():
        return outside, work()


def check_models(work) -> None:
    outside, inside = both(work)
    for name, own in inside.state_dict().items():
        assert torch.equal(own, outside.state_dict()[name]), name
        assert not own.is_inference(), name
    fit_(inside, BATCHES, options=FIT)


@pytest.mark.parametrize("criterion", [None, "taylor-activation", "oba"])
def test_prune(net, criterion):
    check_models(lambda: ap.prune(net, BATCHES, HALF, criterion=criterion).model)


def test_other_roads(net):
    how = Pruning(criterion="taylor", steps=1)
    check_models(lambda: ap.sparsify(net, BATCHES, Sparsity(keep=0.5), criterion="oba").model)
    check_models(lambda: ap.one_shot(net, HALF, DATA, pruning=how, fit=FIT).model)
    check_models(lambda: ap.iterative(net, [HALF], DATA, pruning=how, fit=FIT)[0].model)
    check_models(lambda: ap.gradual(net, Sparsity(keep=0.5), DATA, fit=FIT).model)


def test_cuts_and_repairs(net, plan, tmp_path):
    small = cut(net, plan)
    check_models(lambda: cut(net, plan))
    check_models(lambda: zero(net, plan))
    for mend in (Refit(), RefitBlocks(epochs=1), Distil(steps=1), batch_norm):
        check_models(lambda mend=mend: mend(net, small, plan, BATCHES, None))
    save(tmp_path / "net", ap.Outcome(small, plan))
    check_models(lambda: ap.load(tmp_path / "net", net))
    check_models(lambda: ap.mask(net, ap.make_masks(net, dict(net.named_parameters()), HALF_KEPT)))


HALF_KEPT = Sparsity(keep=0.5)


@pytest.mark.parametrize("name", CRITERIA)
def test_scores(net, structure, name):
    outside, inside = both(lambda: CRITERIA[name].units(net, structure, BATCHES, None, None))
    for group, own in inside.values.items():
        torch.testing.assert_close(own, outside.values[group])


def test_figures(net):
    outside, inside = both(lambda: evaluate(net, BATCHES))
    assert inside == outside
    data = ContestData(scoring=BATCHES, test=BATCHES)
    how = CompareOptions(steps=1)
    outside, inside = both(lambda: compare(net, ["taylor"], [0.5], data, how))
    assert [own.test for own in inside.trials] == [own.test for own in outside.trials]


def test_what_was_made_there_is_refused_in_words(net):
    with torch.inference_mode():
        made, batches = copy.deepcopy(net), [tuple(t.clone() for t in own) for own in BATCHES]
        for work in (
            lambda: ap.prune(made, BATCHES, HALF),
            lambda: ap.sparsify(made, BATCHES, HALF_KEPT),
            lambda: fit_(made, BATCHES, options=FIT),
        ):
            with pytest.raises(ModelError, match=r"inference_mode.*deepcopy"):
                work()
        for work in (
            lambda: ap.prune(net, batches, HALF),
            lambda: fit_(net, batches, options=FIT),
        ):
            with pytest.raises(DataError, match=r"batch was made under torch\.inference_mode"):
                work()
