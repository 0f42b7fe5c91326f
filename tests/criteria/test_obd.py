"""OBD is ½ θ² h: h against dense matrices, with the spread that theory gives the estimates, and per-sample loops."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from apoptosis.criteria import obd, taylor
from apoptosis.curvature import curvature_diagonal, fisher_diagonal, gradient
from apoptosis.errors import ConfigError
from apoptosis.task import Task
from oracles.brute_force import dense_kind, flatten, unflatten
from oracles.building import CLASSES, Net, built, rows
from oracles.compare import EXACT, assert_products_close
from oracles.untouched import Snapshot

TASK = Task.classification()
SIX_SIGMA = 6.0


def mlp():
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, CLASSES)
    )


def tiny():
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))


def halved(model, h):
    """½ θ² h, from a vector h."""
    return unflatten(0.5 * flatten(model) ** 2 * h, model)


# --- by sign vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_over_all_sign_vectors_the_estimate_is_the_diagonal(kind, monkeypatch):
    model, batch = built(tiny), rows(4, 2, classes=2)
    signs = itertools.chain(*itertools.product((0, 1), repeat=8))

    def enumerate_signs(low, high, shape, *, generator):
        assert (low, high) == (0, 2)
        assert isinstance(generator, torch.Generator)
        return torch.tensor(list(itertools.islice(signs, math.prod(shape)))).view(shape)

    monkeypatch.setattr(torch, "randint", enumerate_signs)
    scores = obd(model, [batch], diagonal=kind, probes=2**8)
    assert next(signs, None) is None
    want = halved(model, dense_kind(model, batch, TASK, kind).diagonal())
    assert_products_close(scores.values, want, tolerance=EXACT)
    assert scores.options == {"diagonal": kind, "probes": 2**8, "seed": 0}
    assert (scores.criterion, scores.count) == ("obd", 4)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_the_estimate_converges_at_the_rate_of_its_own_variance(kind):
    """Each probe has variance Σ_{r≠q} H_qr²; fresh signs per batch, so variances add by squared shares."""
    model, (x, y) = built(mlp), rows(6)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    matrices = [dense_kind(model, batch, TASK, kind) for batch in batches]
    diagonal = dense_kind(model, (x, y), TASK, kind).diagonal()
    shares = (4 / 6, 2 / 6)
    variance = sum(
        share**2 * (m.square().sum(1) - m.diagonal().square())
        for share, m in zip(shares, matrices, strict=True)
    )
    weight = 0.5 * flatten(model) ** 2
    for probes, seeds in ((4, 12), (100, 2)):
        scores = [
            flatten(model, obd(model, batches, diagonal=kind, probes=probes, seed=seed).values)
            for seed in range(seeds)
        ]
        z = (torch.stack(scores) - weight * diagonal) / (weight * (variance / probes).sqrt())
        assert z.abs().max() < SIX_SIGMA
        assert 0.7 < z.square().mean().sqrt() < 1.3, f"{probes} probes do not err as √(1/n)"


def test_signs_are_seeded_and_drawn_apart_from_the_global_generator():
    model, batch = built(mlp), rows()
    before = Snapshot(model)
    first, again, other = (obd(model, [batch], probes=2, seed=seed).values for seed in (0, 0, 1))
    before.assert_unchanged()
    assert_products_close(first, again, tolerance=0.0)
    assert (first["0.weight"] - other["0.weight"]).norm() > 1e-3 * first["0.weight"].norm()


def test_what_removing_one_weight_costs_is_minus_first_order_plus_obd_on_a_quadratic():
    """With the exact diagonal: MSE on one linear layer has h = 2·mean(x²)/outputs."""
    model, (x, _), (y, _) = built(lambda: nn.Linear(4, 2)), rows(), rows(width=2, seed=9)
    task = Task.classification(F.mse_loss)
    first = taylor(model, [(x, y)], task).values["weight"]
    true = torch.zeros(2, 4, dtype=torch.float64)
    for q in itertools.product(range(2), range(4)):
        cut = copy.deepcopy(model)
        with torch.no_grad():
            cut.weight[q] = 0
        true[q] = F.mse_loss(cut(x), y) - F.mse_loss(model(x), y)
    second = true + first
    want = 0.5 * model.weight.detach() ** 2 * x.square().mean(0)
    assert_close(second, want, rtol=1e-10, atol=1e-14)
    scores = obd(model, [(x, y)], task, probes=400).values["weight"]
    assert (scores - want).norm() < 0.3 * want.norm()


# --- per-sample squares ----------------------------------------------------------------------------------------------


def by_loop(model, x, y):
    """The mean over samples of squared gradients, one plain backward each."""
    twin = copy.deepcopy(model).eval()
    params = [p for p in twin.parameters() if p.requires_grad]
    squares = [
        torch.autograd.grad(F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]), params)
        for i in range(len(x))
    ]
    return torch.cat(
        [torch.stack(parts).square().mean(0).flatten() for parts in zip(*squares, strict=True)]
    )


@pytest.mark.parametrize("cut", [6, 4, 1])
def test_fisher_with_the_labels_of_the_data_is_a_loop_over_samples(cut):
    model, (x, y) = built(mlp, train=True), rows(6)
    batches = list(zip(x.split(cut), y.split(cut), strict=True))
    scores = obd(model, batches, diagonal="fisher", labels="data")
    assert_products_close(scores.values, halved(model, by_loop(model, x, y)), tolerance=EXACT)
    assert scores.options == {"diagonal": "fisher", "labels": "data", "seed": 0}
    assert scores.count == 6


def test_the_square_of_the_mean_gradient_is_something_else():
    model, (x, y) = built(mlp), rows(6)
    mean = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    square = torch.cat([g.square().flatten() for g in mean])
    assert (square - by_loop(model, x, y)).norm() > 0.5 * by_loop(model, x, y).norm()


def branching(m: Net, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh() if x.sum() > 0 else m.a(x).relu())


def branchless(m: Net, x: Tensor) -> Tensor:
    positive = x.sum(1, keepdim=True) > 0
    return m.b(torch.where(positive, m.a(x).tanh(), m.a(x).relu()))


def two_layers(forward):
    return built(lambda: Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, CLASSES)))


def test_a_model_that_vmap_cannot_follow_is_differentiated_one_by_one(monkeypatch):
    calls = []

    def counted(plain, *args):
        calls.append(plain.__name__)
        return plain(*args)

    for name in ("_together", "_one_by_one"):
        monkeypatch.setattr(gradient, name, partial(counted, getattr(gradient, name)))
    x, y = rows(8)
    assert 0 < int((x.sum(1) > 0).sum()) < 8, "both branches must be taken"
    together = obd(two_layers(branchless), [(x, y)], diagonal="fisher", labels="data").values
    assert calls == ["_together"]
    apart = obd(two_layers(branching), [(x, y)], diagonal="fisher", labels="data").values
    assert calls == ["_together", "_together", "_one_by_one"]
    assert_products_close(apart, together, tolerance=EXACT)
    want = halved(two_layers(branching), by_loop(two_layers(branching), x, y))
    assert_products_close(apart, want, tolerance=EXACT)


def test_in_pieces_that_fit_in_memory_it_is_the_same(monkeypatch):
    model, (x, y) = built(mlp), rows(7)
    want = obd(model, [(x, y)], diagonal="fisher", labels="data").values
    monkeypatch.setattr(gradient, "_CHUNK_BYTES", 3 * 8 * len(flatten(model)))
    got = obd(model, [(x, y)], diagonal="fisher", labels="data").values
    assert_products_close(got, want, tolerance=EXACT)


def test_fisher_with_sampled_labels_converges_to_the_gauss_newton_diagonal():
    """For softmax and cross-entropy; the spread is that of the squared gradients over the classes."""
    model, (x, y) = built(mlp), rows(6)
    ggn = dense_kind(model, (x, y), TASK, "ggn").diagonal()
    variance = _variance_over_classes(model, x) / len(x)
    for copies in (20, 500):
        many = (x.repeat(copies, 1), y.repeat(copies))
        found = flatten(model, fisher_diagonal(model, [many], seed=1).product)
        z = (found - ggn) / (variance / copies).sqrt()
        assert z.abs().max() < SIX_SIGMA
        assert 0.3 < z.square().mean().sqrt() < 2.0
    assert (by_loop(model, x, y) - ggn).norm() > 0.1 * ggn.norm(), "the data's labels do not"


def _variance_over_classes(model, x):
    """The mean over samples of Var_y[(∂ℓ/∂θ)²], y drawn from the model: a sum over all classes."""
    params, total = list(model.parameters()), 0.0
    for row in x.split(1):
        logs = F.log_softmax(model(row)[0], 0)
        squares = torch.stack(
            [
                torch.cat(
                    [
                        g.square().flatten()
                        for g in torch.autograd.grad(-logs[c], params, retain_graph=True)
                    ]
                )
                for c in range(CLASSES)
            ]
        )
        chance = logs.detach().exp()
        mean = chance @ squares
        total = total + chance @ (squares - mean).square()
    return total / len(x)


def test_sampled_labels_are_seeded():
    model, batch = built(mlp), rows()
    first, again, other = (
        obd(model, [batch], diagonal="fisher", seed=seed).values for seed in (0, 0, 2)
    )
    assert_products_close(first, again, tolerance=0.0)
    assert (first["0.weight"] - other["0.weight"]).norm() > 1e-3 * first["0.weight"].norm()


class _Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))


def sentences(rows_=slice(None), copies=1):
    """Three sentences with 3, 3 and 1 words to predict."""
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, 0, 0]])
    labels = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 2, -100, -100]])
    return {
        "input_ids": ids[rows_].repeat(copies, 1),
        "labels": labels[rows_].repeat(copies, 1),
    }


def test_fisher_of_sequences_does_not_depend_on_how_data_are_cut():
    model, task = built(_Words), Task.language_model()
    whole = fisher_diagonal(model, [sentences()], task, labels="data").product
    batches = [sentences(slice(2)), sentences(slice(2, 3))]
    cut = fisher_diagonal(model, batches, task, labels="data").product
    assert_products_close(cut, whole, tolerance=EXACT)


def test_fisher_of_sequences_converges_to_the_gauss_newton_diagonal():
    model, task = built(_Words), Task.language_model()
    ggn = dense_kind(model, sentences(), task, "ggn").diagonal()
    found = fisher_diagonal(model, [sentences(copies=1000)], task).product
    assert (flatten(model, found) - ggn).norm() < 0.1 * ggn.norm()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"diagonal": "kfac"}, "'kfac' was asked for; there are hessian, ggn, fisher"),
        ({"probes": 0}, "probes=0 was asked for"),
        ({"diagonal": "ggn", "probes": -3}, "probes=-3 was asked for"),
        ({"diagonal": "fisher", "labels": "true"}, "labels='true' was asked for"),
    ],
    ids=str,
)
def test_bad_options_are_refused_and_nothing_changes(options, match):
    model = built(mlp, train=True)
    before = Snapshot(model)
    with pytest.raises(ConfigError, match=match):
        obd(model, [rows()], **options)
    before.assert_unchanged()


def test_unknown_kind_of_diagonal():
    with pytest.raises(ConfigError, match="'exact' was asked for; there are connectivity"):
        curvature_diagonal(built(mlp), [rows()], kind="exact")


@pytest.mark.parametrize("diagonal", ["hessian", "ggn", "fisher"])
def test_half_precision_weights_have_float32_scores(diagonal):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)).bfloat16()
    x, y = rows()
    values = obd(model, [(x.bfloat16(), y)], diagonal=diagonal, probes=2).values.values()
    assert {value.dtype for value in values} == {torch.float32}


@pytest.mark.parametrize("diagonal", ["hessian", "ggn", "fisher"])
@pytest.mark.parametrize("forward", [branching, branchless], ids=["one-by-one", "together"])
def test_an_unused_parameter_scores_zero_and_is_told(diagonal, forward):
    def make():
        return Net(
            forward, a=nn.Linear(4, 5), b=nn.Linear(5, CLASSES), spare=nn.Parameter(torch.ones(2))
        )

    scores = obd(built(make), [rows()], diagonal=diagonal, probes=2)
    assert scores.unreached == ("spare",)
    assert not scores.values["spare"].any()
