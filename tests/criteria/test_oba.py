"""OBA is θ ⊙ Hθ: against dense Hessians, and the identities that say what it measures."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apoptosis.criteria import oba, taylor
from apoptosis.curvature import KINDS
from apoptosis.errors import ConfigError
from apoptosis.task import Task
from oracles.brute_force import brute_force_product
from oracles.building import CLASSES, built, images, rows
from oracles.compare import EXACT, assert_products_close
from oracles.evaluation import gradient
from oracles.frozen import connectivity_matrix, flatten, unflatten
from oracles.networks import NETWORKS

TASK = Task.classification()


def conv_net():
    """Curved everywhere, and different in train mode."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )


def times_theta(model, product):
    return {name: model.get_parameter(name).detach() * value for name, value in product.items()}


@pytest.mark.parametrize("kind", ["hessian", "functional", "ggn"])
def test_oba_is_theta_times_the_dense_matrix_times_theta_in_eval_mode(kind):
    model, batch = built(conv_net, train=True), images(5)
    want = times_theta(model, brute_force_product(copy.deepcopy(model).eval(), batch, TASK, kind))
    uneven = list(TASK.split(batch, 3))
    assert [len(labels) for _, labels in uneven] == [3, 2]
    scores = oba(model, uneven, kind=kind)
    assert_products_close(scores.values, want, tolerance=EXACT)
    assert scores.criterion == "oba"
    assert scores.options == {"kind": kind, "first_order": 0.0}
    assert scores.count == 5


@pytest.mark.parametrize("written", NETWORKS[::5], ids=lambda written: written.id)
def test_oba_as_published_is_theta_times_the_hessian_of_the_frozen_network(written):
    model, batch = written.make_model(), written.make_batch()
    matrix = connectivity_matrix(written.net, model, batch)
    want = times_theta(model, unflatten(matrix @ flatten(model), model))
    scale = float(flatten(model, times_theta(model, gradient(model, batch))).norm())
    assert_products_close(oba(model, [batch]).values, want, tolerance=EXACT, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amount", [1.0, -2.5])
def test_first_order_adds_that_much_of_theta_times_gradient(kind, amount):
    model, batch = built(conv_net), images()
    plain = oba(model, [batch], kind=kind).values
    first = times_theta(model, gradient(model, batch))
    want = {name: plain[name] + amount * first[name] for name in plain}
    scores = oba(model, [batch], kind=kind, first_order=amount)
    assert_products_close(scores.values, want, tolerance=EXACT)
    assert scores.options["first_order"] == amount


def test_the_oracle_tells_the_kinds_apart():
    model, batch = built(conv_net), images()
    values = {kind: oba(model, [batch], kind=kind).values for kind in KINDS}
    for kind, other in zip(KINDS, [*KINDS][1:], strict=False):
        with pytest.raises(AssertionError, match="differs"):
            assert_products_close(values[kind], values[other], tolerance=1e-3)


def bias_free(*widths):
    layers = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("kind", ["connectivity", "functional"])
@pytest.mark.parametrize("widths", [(4, 3), (4, 5, 3), (4, 6, 5, 4, 3)], ids=str)
def test_on_a_bias_free_relu_chain_oba_is_taylor_times_the_other_layers(kind, widths):
    model, batch = built(lambda: bias_free(*widths)), rows()
    first = taylor(model, [batch]).values
    want = {name: (len(widths) - 2) * value for name, value in first.items()}
    scale = float(flatten(model, first).norm())
    assert_products_close(oba(model, [batch], kind=kind).values, want, tolerance=EXACT, scale=scale)


def test_with_biases_it_is_not():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)))
    first = taylor(model, [rows()]).values
    with pytest.raises(AssertionError, match="bias"):
        assert_products_close(oba(model, [rows()]).values, first, tolerance=0.1)


def quadratic():
    (x, _), (y, _) = rows(), rows(width=2, seed=9)
    return built(lambda: nn.Linear(4, 2)), (x, y), Task.classification(F.mse_loss)


def test_removing_everything_from_a_quadratic_takes_minus_first_order_and_half_of_second():
    """L(0) − L(θ) = Σ (−θ⊙g + ½ θ⊙Hθ), exactly where the loss is quadratic."""
    model, (x, y), task = quadratic()
    first = taylor(model, [(x, y)], task).values
    second = oba(model, [(x, y)], task, kind="hessian").values
    predicted = sum(float((0.5 * second[name] - first[name]).sum()) for name in second)
    true = (F.mse_loss(torch.zeros_like(y), y) - F.mse_loss(model(x), y)).item()
    assert predicted == pytest.approx(true, rel=1e-12)
    mixed = oba(model, [(x, y)], task, kind="hessian", first_order=-2.0).values
    assert 0.5 * sum(float(v.sum()) for v in mixed.values()) == pytest.approx(true, rel=1e-12)


def test_the_score_of_one_weight_is_not_what_removing_it_costs():
    """δ = θ counts a weight's interactions with all others; removing it alone has none."""
    model, (x, y), task = quadratic()
    first = taylor(model, [(x, y)], task).values["weight"][0, 0]
    second = oba(model, [(x, y)], task, kind="hessian").values["weight"][0, 0]
    before = F.mse_loss(model(x), y)
    with torch.no_grad():
        model.weight[0, 0] = 0
    true = (F.mse_loss(model(x), y) - before).item()
    assert abs(float(0.5 * second - first) - true) > 0.1 * abs(true)


def test_micro_batches_change_nothing():
    model, batch = built(conv_net), images(5)
    want = oba(model, [batch], first_order=1.0).values
    got = oba(model, [batch], first_order=1.0, micro_batch=2).values
    assert_products_close(got, want, tolerance=EXACT)


def test_half_precision_weights_have_float32_scores():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)).bfloat16()
    x, y = rows()
    scores = oba(model, [(x.bfloat16(), y)], first_order=1.0)
    assert {value.dtype for value in scores.values.values()} == {torch.float32}


def test_what_took_the_generic_path_and_what_is_unused_is_told():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, CLASSES), nn.Linear(2, 2)

        def forward(self, x):
            return torch.atan(self.used(x))

    scores = oba(built(Odd), [rows()], kind="hessian")
    assert scores.fallbacks == {"atan": 1}
    assert scores.unreached == ("unused.weight", "unused.bias")
    assert not scores.values["unused.weight"].any()


def test_unknown_kind():
    with pytest.raises(ConfigError, match="'exact' was asked for; there are connectivity"):
        oba(built(conv_net), [images()], kind="exact")


@pytest.mark.parametrize("micro_batch", [0, -1])
def test_impossible_micro_batch(micro_batch):
    with pytest.raises(ConfigError, match=f"micro_batch={micro_batch}"):
        oba(built(conv_net), [images()], micro_batch=micro_batch)
