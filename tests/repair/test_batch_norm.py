"""Statistics measured anew are those of numpy over all that reaches a norm, and nothing else changes."""

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.models import digits_cnn
from apoptosis.progress import listen
from apoptosis.repair import REPAIRS, batch_norm, find_repair
from apoptosis.structure import Plan, cut, trace
from apoptosis.task import Task
from oracles.building import built
from oracles.shrinking import hard_coded
from oracles.untouched import Snapshot


def first_norm(make_norm, *rest):
    return lambda: nn.Sequential(make_norm, *rest)


def cut_up(x: torch.Tensor, *sizes: int) -> list[tuple[torch.Tensor, None]]:
    return [(part, None) for part in x.split(sizes)]


def plan_of(model: nn.Module, x: torch.Tensor) -> Plan:
    return trace(model, x).identity()


def mended(model: nn.Module, batches, task: Task | None = None) -> nn.Module:
    return batch_norm(model, model, plan_of(model, batches[0][0]), batches, task)


SHAPES = [
    pytest.param(nn.BatchNorm1d(3), (11, 3), id="1d (N, C)"),
    pytest.param(nn.BatchNorm1d(3), (11, 3, 5), id="1d (N, C, L)"),
    pytest.param(nn.BatchNorm2d(3), (11, 3, 4, 5), id="2d"),
    pytest.param(nn.BatchNorm3d(3), (11, 3, 2, 3, 2), id="3d"),
    pytest.param(nn.SyncBatchNorm(3), (11, 3, 4, 5), id="sync"),
    pytest.param(nn.BatchNorm2d(3, affine=False, momentum=None), (11, 3, 4, 5), id="not affine"),
]


@pytest.mark.parametrize(("norm", "shape"), SHAPES)
@pytest.mark.parametrize("sizes", [(11,), (4, 4, 3), (2, 9)])
def test_statistics_are_numpys_over_all_samples_and_positions(norm, shape, sizes):
    model = built(lambda: nn.Sequential(copy.deepcopy(norm)))
    x = 3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    found = mended(model, cut_up(x, *sizes))[0]
    values = np.moveaxis(x.numpy(), 1, 0).reshape(3, -1)
    np.testing.assert_allclose(found.running_mean, values.mean(1), rtol=1e-12)
    np.testing.assert_allclose(found.running_var, values.var(1, ddof=1), rtol=1e-12)


def test_a_mean_of_batch_variances_would_be_caught():
    x = torch.randn(12, 3, dtype=torch.float64)
    x[6:] += 50
    found = mended(built(lambda: nn.Sequential(nn.BatchNorm1d(3))), cut_up(x, 6, 6))[0]
    each = torch.stack([part.var(0) for part in x.split(6)]).mean(0)
    assert (found.running_var > 3 * each).all()


def deep():
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 5, 3),
            norm=nn.BatchNorm2d(5),
            act=nn.ReLU(),
            drop=nn.Dropout(0.5),
            flat=nn.Flatten(),
            line=nn.Linear(80, 6),
            last=nn.BatchNorm1d(6),
            head=nn.Linear(6, 3),
        )
    )


def test_later_norms_see_what_earlier_ones_make_of_the_batch():
    """By hand: each norm normalises by the batch, dropout is off."""
    model, x = built(deep), torch.randn(10, 2, 6, 6, dtype=torch.float64)
    found = mended(model, [(x, None)])
    with torch.no_grad():
        z = model.conv(x)
        mean, var = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False)
        z = (z - mean[:, None, None]) / (var + model.norm.eps).sqrt()[:, None, None]
        z = z * model.norm.weight[:, None, None] + model.norm.bias[:, None, None]
        z = model.line(torch.relu(z).flatten(1))
    torch.testing.assert_close(found.last.running_mean, z.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.last.running_var, z.var(0), rtol=1e-10, atol=1e-12)


def test_normalised_activations_have_mean_zero_and_variance_one_in_eval_mode():
    model, x = built(deep), torch.randn(10, 2, 6, 6, dtype=torch.float64) + 1
    found = mended(model, [(x, None)]).eval()
    with torch.no_grad():
        z = found.conv(x)
        out = nn.functional.batch_norm(z, found.norm.running_mean, found.norm.running_var, eps=0)
        before = nn.functional.batch_norm(z, model.norm.running_mean, model.norm.running_var, eps=0)
    zero, one = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(out.mean((0, 2, 3)), zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.var((0, 2, 3)), one, rtol=1e-10, atol=0)
    assert (before.mean((0, 2, 3)).abs() > 0.01).any()


@pytest.mark.parametrize("train", [False, True])
def test_only_statistics_change_and_the_given_model_not_at_all(train):
    model = built(deep, train=train)
    model.last.eval()
    model.norm.momentum = 0.37
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    batches = cut_up(torch.randn(9, 2, 6, 6, dtype=torch.float64), 4, 5)
    plan, before = plan_of(model, batches[0][0]), Snapshot(model)
    found = batch_norm(model, model, plan, batches)
    before.assert_unchanged()
    assert found is not model
    assert [m.training for m in found.modules()] == [m.training for m in model.modules()]
    assert (found.norm.momentum, found.last.momentum) == (0.37, 0.1)
    assert not any(m._forward_pre_hooks for m in found.modules())
    for name, tensor in model.state_dict().items():
        changed = "running" in name or name.endswith("num_batches_tracked")
        assert torch.equal(found.state_dict()[name], tensor) != changed, name
    assert found.norm.num_batches_tracked == model.norm.num_batches_tracked + 2
    assert {p.requires_grad for p in found.parameters()} == {True}


def test_a_cut_network_is_mended_and_the_dense_one_is_not_looked_at():
    model, x = digits_cnn(width=4), torch.randn(20, 1, 8, 8)
    with torch.no_grad():
        model.train()(5 * x)
    structure = trace(model, x[:1])
    plan = structure.plan({"stem.conv": [0, 2], "top.conv": range(5)})
    small = cut(model, plan)
    before, of_small = Snapshot(model), Snapshot(small)
    found = batch_norm(model, small, plan, [(x, None)])
    before.assert_unchanged()
    of_small.assert_unchanged()
    with torch.no_grad():
        want = small.stem.conv(x)
    torch.testing.assert_close(found.stem.norm.running_mean, want.mean((0, 2, 3)))
    torch.testing.assert_close(found.stem.norm.running_var, want.var((0, 2, 3)))


class Odd(nn.Module):
    """A norm called by keyword, one called twice, one without statistics, one that runs in train mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.twice, self.aside = (nn.BatchNorm1d(4) for _ in range(3))
        self.without = nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.without(self.twice(self.twice(self.named(input=x)) + 1))
        return self.aside(self.head(x)) if self.training else self.head(x)


def test_norms_are_measured_however_they_are_called_and_idle_ones_keep_what_they_had():
    torch.manual_seed(0)
    model, x = built(Odd), torch.randn(8, 4, dtype=torch.float64)
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), x)
    found = batch_norm(model, model, plan, [(x, None)])
    torch.testing.assert_close(found.named.running_mean, x.mean(0))
    with torch.no_grad():
        once = copy.deepcopy(model.named).train()(x)
        twice = copy.deepcopy(model.twice).train()(once) + 1
        pooled = torch.cat([once, twice])
    torch.testing.assert_close(found.twice.running_mean, pooled.mean(0))
    torch.testing.assert_close(found.twice.running_var, pooled.var(0))
    assert torch.equal(found.aside.running_mean, model.aside.running_mean)
    assert found.aside.num_batches_tracked == model.aside.num_batches_tracked
    assert found.without.running_mean is None


def test_tasks_say_what_the_model_gets():
    model, x = built(deep), torch.randn(6, 2, 6, 6, dtype=torch.float64)
    found = batch_norm(model, model, plan_of(model, x), [{"input": x}], Task.hugging_face())
    want = mended(model, [(x, None)])
    assert torch.equal(found.last.running_var, want.last.running_var)


def test_statistics_keep_the_models_precision():
    model = built(deep).bfloat16()
    found = batch_norm(
        model, model, plan_of(built(deep), torch.zeros(2, 2, 6, 6).double()),
        [(torch.randn(6, 2, 6, 6).bfloat16(), None)],
    )  # fmt: skip
    assert found.norm.running_mean.dtype == torch.bfloat16
    assert found.norm.running_var.isfinite().all()


@pytest.mark.parametrize("sizes", [(1,), (5, 1), (1, 5)])
def test_a_batch_of_one_value_per_channel_is_refused(sizes):
    model = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    batches = cut_up(torch.randn(sum(sizes), 4, dtype=torch.float64), *sizes)
    plan, before = plan_of(model, torch.zeros(2, 4).double()), Snapshot(model)
    with pytest.raises(DataError, match=r"1 values per channel.*\(1, 3\).*at least two"):
        batch_norm(model, model, plan, batches)
    before.assert_unchanged()


def test_one_image_has_many_values():
    model = built(lambda: nn.Sequential(nn.BatchNorm2d(2)))
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(mended(model, [(x, None)])[0].running_var, x[0].flatten(1).var(1))


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_samples_are_refused(batches):
    model = built(deep)
    plan = plan_of(model, torch.zeros(2, 2, 6, 6).double())
    with pytest.raises(DataError, match="saw no samples"):
        batch_norm(model, model, plan, batches)


def test_a_network_without_batch_norms_is_refused():
    model, x = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), torch.zeros(2, 4)
    with pytest.raises(ModelError, match=r"Sequential has no such module\. Leave them as they are"):
        mended(model, [(x.double(), None)])


def test_a_program_is_refused_with_the_reason():
    model, x = hard_coded(), torch.randn(4, 4, dtype=torch.float64)
    plan = trace(model, x).plan({"a": [0, 1]})
    assert plan.delivery == "program"
    with pytest.raises(ModelError, match="delivered as a program, which has none"):
        batch_norm(model, cut(model, plan), plan, [(x, None)])


def test_progress_is_told():
    events = []
    with listen(events.append):
        mended(built(deep), cut_up(torch.randn(6, 2, 6, 6, dtype=torch.float64), 2, 4))
    assert [(e.what, e.done, e.total) for e in events][-1] == ("measuring batch norms", 2, 2)


def test_the_table_knows_repairs_by_name_and_takes_ones_own():
    def mine(dense, small, plan, batches, task):
        return small

    assert find_repair("batch_norm") is REPAIRS["batch_norm"] is batch_norm
    assert find_repair(mine) is mine
    with pytest.raises(
        ConfigError, match="The repair 'polish' was asked for; there are batch_norm"
    ):
        find_repair("polish")
    with pytest.raises(TypeError):
        REPAIRS["mine"] = mine
