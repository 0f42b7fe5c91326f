"""Layers that `Refit` cannot fit, or had better not: left as they are, and listed with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from apoptosis.errors import DataError
from apoptosis.progress import listen
from apoptosis.repair import Refit
from apoptosis.structure import cut, trace
from oracles.building import Net, built
from oracles.refitted import CLOSE, error, halved, normal, unlabelled
from oracles.shrinking import small_case

pytestmark = pytest.mark.usefixtures("way")
"""Every claim holds on both ways through the networks."""


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.relu(m.a(x))
    x += m.b(x)
    return m.c(x)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Casting(nn.Linear):
    """As timm writes it: a forward of its own that gives the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PaddedBefore(nn.Conv2d):
    """Pads by itself, which its attributes do not say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1)))


@pytest.mark.parametrize(("kind", "is_fitted"), [(Doubled, False), (Casting, True)])
def test_a_forward_of_ones_own_is_tried(kind, is_fitted):
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), kind(8, 3)))
    x = normal(40, 4)
    plan, small = halved(model, x, "0")
    found = Refit().fitted(model, small, plan, unlabelled(x))
    assert ([f.path for f in found.layers] == ["2"]) is is_fitted
    reason = "what Doubled gives is not its weight times what it reads"
    assert found.left_alone == ({} if is_fitted else {"2": reason})
    if not is_fitted:
        assert torch.equal(found.model[2].weight, small[2].weight)


def test_a_convolution_that_pads_by_itself_is_left_alone():
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), PaddedBefore(6, 4, 3)))
    x = normal(9, 2, 6, 6)
    plan, small = halved(model, x, "0")
    found = Refit().fitted(model, small, plan, unlabelled(x))
    assert "PaddedBefore gives is not" in found.left_alone["2"]


def test_layers_that_hooks_make_something_else_of_are_left_alone():
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    x = normal(40, 4)
    plan, small = halved(model, x, "0")
    small[2].register_forward_hook(lambda *args: args[2].relu())
    assert "gives is not" in Refit().fitted(model, small, plan, unlabelled(x)).left_alone["2"]


ODD = {
    "it shares a tensor with words.weight": ("head", lambda: small_case("tied").make()),
    "it is called 2 times in a run": (
        "b",
        lambda: Net(
            lambda m, x: m.c(m.b(torch.relu(m.b(m.a(x))))),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 6),
            c=nn.Linear(6, 3),
        ),
    ),
    "its weight is computed from other tensors": (
        "b",
        lambda: Net(
            lambda m, x: m.c(m.b(torch.relu(m.a(x)))),
            a=nn.Linear(4, 6),
            b=weight_norm(nn.Linear(6, 5)),
            c=nn.Linear(5, 3),
        ),
    ),
    "it is not called as a module": (
        "b",
        lambda: Net(
            lambda m, x: m.c(F.linear(torch.relu(m.a(x)), m.b.weight)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 5),
            c=nn.Linear(5, 3),
        ),
    ),
    "Bilinear holds weights in a form that cannot be fitted": (
        "b",
        lambda: Net(
            lambda m, x: m.c(m.b(torch.relu(m.a(x)), x)),
            a=nn.Linear(4, 6),
            b=nn.Bilinear(6, 4, 5),
            c=nn.Linear(5, 3),
        ),
    ),
}


@pytest.mark.parametrize("why", ODD)
def test_what_cannot_be_fitted_is_left_alone_and_listed(why):
    path, make = ODD[why]
    model = built(make)
    x = torch.arange(28).view(7, 4) % 7 if "words" in why else normal(40, 4)
    structure = trace(model, x[:2])
    plan = structure.plan({structure.groups[0].name: range(structure.groups[0].size // 2)})
    small = cut(model, plan)
    found = Refit().fitted(model, small, plan, unlabelled(x))
    assert found.left_alone == {path: why}
    before, after = (dict(m.get_submodule(path).state_dict()) for m in (small, found.model))
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_layers_that_read_the_same_tensor_share_a_pass(way):
    model, x = small_case("separate").model(), small_case("separate").inputs(30)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5), model).double()
    plan, small = halved(model, x, "0")
    events = []
    with listen(events.append):
        found = Refit().fitted(model, small, plan, unlabelled(x))
    parts = ("embed", "parts.0.q", "parts.0.k", "parts.0.v", "parts.0.o", "head")
    assert [f.path for f in found.layers] == ["2", *(f"3.{part}" for part in parts)]
    # "0" was looked at once and gives what it gave; in step there is one pass for all.
    assert max(e.total or 0 for e in events) == (6 if way == "by stages" else 8)


def test_a_tensor_that_was_written_to_in_between_is_another():
    model = built(lambda: Net(in_place, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3)))
    x = normal(60, 4)
    structure = trace(model, x[:1])
    plan = structure.plan({structure.groups[0].name: range(3)})
    found = Refit(ridge=0.0).fitted(model, cut(model, plan), plan, unlabelled(x))
    assert found.layers[-1].path == "c"
    with torch.no_grad():
        size = float(model(x).square().mean())
    assert error(found.model, model, x) / size == pytest.approx(found.layers[-1].after, rel=1e-6)


def scaled_in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.relu(m.first(x))
    q = m.q(y)
    q.mul_(10)
    return m.last(q + m.k(y))


def test_outputs_that_are_written_to_later_in_the_run_are_fitted_as_they_were():
    parts = {"first": (4, 8), "q": (8, 5), "k": (8, 5), "last": (5, 3)}
    model = built(lambda: Net(scaled_in_place, **{n: nn.Linear(*s) for n, s in parts.items()}))
    x = 3 * normal(60, 4)
    plan = trace(model, x[:1]).plan({"first": range(4)})
    small = cut(model, plan)
    found = Refit(ridge=0.0)(model, small, plan, unlabelled(x))
    with torch.no_grad():
        read = torch.relu(small.first(x))
        rows = torch.cat([read, read.new_ones(60, 1)], 1)
        want = torch.linalg.lstsq(rows, model.q(torch.relu(model.first(x)))).solution
    torch.testing.assert_close(found.q.weight, want[:-1].T, **CLOSE)


def test_empty_batches_among_others_count_for_nothing():
    model, x = small_case("mlp").model(), normal(40, 4)
    plan, small = halved(model, x)
    found = Refit()(model, small, plan, unlabelled(x, 0, 25, 0, 15))
    want = Refit()(model, small, plan, unlabelled(x, 25, 15))
    for name, tensor in want.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    with pytest.raises(DataError, match="saw no samples"):
        Refit()(model, small, plan, unlabelled(x[:0]))


def test_a_layer_that_not_every_batch_reaches_is_fitted_on_those_that_do():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.relu(m.a(x))
        return m.b(y) if len(x) > 5 else y.sum(1, keepdim=True).expand(-1, 3)

    model = built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = normal(43, 4)
    plan = trace(model, x[:40]).plan({"a": [0, 1, 2]})
    small = cut(model, plan)
    found = Refit()(model, small, plan, unlabelled(x, 40, 3))
    want = Refit()(model, small, plan, unlabelled(x[:40]))
    assert torch.equal(found.b.weight, want.b.weight)
