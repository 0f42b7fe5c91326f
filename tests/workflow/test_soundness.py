"""NaN, infinity and weights that are no real numbers are refused where they come in, and never go out."""

import copy
import math

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.checkpoint import load, save
from apoptosis.criteria import CRITERIA
from apoptosis.errors import ApoptosisError, CheckpointError, ModelError, NonFiniteError
from apoptosis.records import Outcome
from apoptosis.soundness import check_numbers
from apoptosis.training import FitOptions, fit_
from apoptosis.workflow import CompareOptions, ContestData, compare


class Net(nn.Module):
    """With a mask that holds -inf, as attention has: in a buffer and in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((3,), -math.inf).index_fill(0, torch.arange(3), 0))
        self.register_buffer("hidden", torch.tensor([0.0, -math.inf]))
        self.register_buffer("bound", torch.tensor(math.inf))
        self.frozen = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    def forward(self, x):
        x = self.norm(self.first(x)).relu().clamp(max=self.bound)
        shown = torch.softmax(torch.stack([x.mean((2, 3)), x.amax((2, 3))], -1) + self.hidden, -1)
        return self.last(shown[..., 0] + x.mean((2, 3)) + self.frozen.exp().sum()) + self.mask


def make():
    torch.manual_seed(0)
    return Net().eval()


def batches(change=id):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 1, 6, 6, generator=generator)
    change(images)
    labels = torch.randint(3, (24,), generator=generator)
    return list(zip(images.split(8), labels.split(8), strict=True))


def put(name, value):
    def change(net):
        with torch.no_grad():
            net.get_parameter(name).view(-1)[1] = value

    return change


def put_statistic(name, value):
    return lambda net: net.get_buffer(name).view(-1)[1].fill_(value)


def retype(name, dtype):
    def change(net):
        module, _, own = name.rpartition(".")
        tensor = net.get_parameter(name).detach().to(dtype)
        setattr(net.get_submodule(module), own, nn.Parameter(tensor, requires_grad=False))

    return change


UNSOUND = {
    "a weight NaN": (put("first.weight", math.nan), "first.weight", NonFiniteError),
    "a bias infinite": (put("last.bias", math.inf), "last.bias", NonFiniteError),
    "a norm NaN": (put("norm.weight", math.nan), "norm.weight", NonFiniteError),
    "a mean NaN": (
        put_statistic("norm.running_mean", math.nan),
        "norm.running_mean",
        NonFiniteError,
    ),
    "a variance infinite": (
        put_statistic("norm.running_var", math.inf),
        "norm.running_var",
        NonFiniteError,
    ),
    "a variance negative": (
        put_statistic("norm.running_var", -0.5),
        "norm.running_var",
        ModelError,
    ),
    "whole numbers": (retype("last.weight", torch.int32), "last.weight", ModelError),
    "complex": (retype("first.weight", torch.complex64), "first.weight", ModelError),
}
KINDS = pytest.mark.parametrize("unsound", UNSOUND.values(), ids=UNSOUND)


def broken(change):
    net = make()
    change(net)
    return net


@KINDS
@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_refuses_them(unsound, name):
    change, where, kind = unsound
    structure, how = ap.trace(make(), torch.zeros(1, 1, 6, 6)), CRITERIA[name]
    with pytest.raises(kind, match=where):
        how.units(broken(change), structure, batches())
    if how.score is not None:
        with pytest.raises(kind, match=where):
            how.score(broken(change), batches(), None)


@KINDS
def test_whole_runs_refuse_them_before_the_model_runs(unsound):
    change, where, kind = unsound
    net, budget = broken(change), ap.Budget(flops=0.6)
    net.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    data = ContestData(scoring=batches(), test=batches())
    with pytest.raises(kind, match=where):
        ap.prune(net, batches(), budget, criterion="random")
    with pytest.raises(kind, match=where):
        ap.sparsify(net, batches(), ap.Sparsity(keep=0.5), criterion="random")
    with pytest.raises(kind, match=where):
        compare(net, ["random"], [0.6], data, CompareOptions(steps=1))


@KINDS
def test_they_are_not_saved(unsound, tmp_path):
    change, where, _ = unsound
    plan = ap.trace(make(), torch.zeros(1, 1, 6, 6)).identity()
    net = broken(change)
    if not all(p.is_floating_point() for p in net.parameters()):
        assert save(tmp_path / "a", Outcome(net, plan)), "numbers of any type can be kept"
        return
    with pytest.raises(CheckpointError, match=f"{where}.*Nothing was written"):
        save(tmp_path / "a", Outcome(net, plan))
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_that_has_them_is_not_loaded(tmp_path, monkeypatch):
    plan = ap.trace(make(), torch.zeros(1, 1, 6, 6)).identity()
    monkeypatch.setattr("apoptosis.checkpoint.saving.check_numbers", lambda *_, **__: None)
    path = save(tmp_path / "a", Outcome(broken(put("last.weight", math.nan)), plan))
    with pytest.raises(CheckpointError, match="saved network has NaN in 'last.weight'"):
        load(path, make)


def one_nan(images):
    images[3, 0, 2, 2] = math.nan


def one_large(images):
    images[3, 0, 2, 2] = 1e30


@pytest.mark.parametrize("change", [one_nan, one_large])
def test_statistics_of_bad_data_are_refused(change):
    """`magnitude` and `random` read no data, so nothing is noticed before the norms are measured."""
    bad, budget = batches(change), ap.Budget(flops=0.6)
    for repair in (["batch_norm"], ["batch_norm", "refit"]):
        with pytest.raises(NonFiniteError, match=r"norm\.running"):
            ap.prune(make(), bad, budget, criterion="magnitude", steps=1, repair=repair)
    with pytest.raises(NonFiniteError, match=r"norm\.running"):
        ap.sparsify(make(), bad, ap.Sparsity(keep=0.5), batch_norm="re-estimate")
    whole = ap.trace(make(), torch.zeros(1, 1, 6, 6)).identity()
    with pytest.raises(NonFiniteError, match=r"norm\.running"):
        ap.repair.batch_norm(make(), make(), whole, bad)


@pytest.mark.parametrize("change", [one_nan, one_large])
@pytest.mark.parametrize("repair", ["batch_norm", "refit", "refit_blocks", "distil"])
def test_no_repair_gives_a_network_with_them(change, repair):
    try:
        found = ap.prune(
            make(),
            batches(change),
            ap.Budget(flops=0.6),
            criterion="random",
            steps=1,
            repair=[repair],
        )
    except ApoptosisError:
        return
    check_numbers(found.model)


@pytest.mark.parametrize("change", [one_nan, one_large])
def test_training_ends_where_they_come_up(change):
    net = make()
    with pytest.raises(NonFiniteError):
        fit_(net, batches(change), options=FitOptions(epochs=2, learning_rate=0.1))


def test_the_last_step_of_an_epoch_is_looked_at_too():
    """Its loss is taken before it."""
    net = nn.Linear(4, 3)
    batch = (torch.full((8, 4), 1e25), torch.randint(3, (8,)))
    options = FitOptions(epochs=1, learning_rate=1e30, schedule="constant")
    with pytest.raises(NonFiniteError, match="After epoch 1 the network has"):
        fit_(net, [batch], options=options)


def test_masks_of_infinities_stay_legal(tmp_path):
    net, before = make(), copy.deepcopy(make().state_dict())
    outcome = ap.prune(net, batches(), ap.Budget(flops=0.6), criterion="magnitude", steps=1)
    path = save(tmp_path / "a", outcome)
    found = load(path, make)
    x = batches()[0][0]
    torch.testing.assert_close(found(x), outcome.model(x), rtol=0, atol=0)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_what_has_no_numbers_is_passed_over():
    with torch.device("meta"):
        empty = make()
    check_numbers(empty)
    check_numbers(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    eight = nn.Linear(4, 3).to(torch.float8_e4m3fn)
    check_numbers(eight)


def test_a_number_of_eight_bits_can_be_nan():
    eight = nn.Linear(4, 3).to(torch.float8_e4m3fn)
    eight.bias = nn.Parameter(torch.full((3,), math.nan).to(torch.float8_e4m3fn))
    with pytest.raises(NonFiniteError, match="NaN in 'bias'"):
        check_numbers(eight)
