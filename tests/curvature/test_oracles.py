"""The oracles agree with each other and with a peer before anything is compared with them."""

import pytest
import torch
from torch import nn

from apoptosis.task import Task
from oracles.brute_force import brute_force_product, flatten, unflatten
from oracles.cases import SMALL_CASES
from oracles.compare import assert_products_close, relative_error
from oracles.differences import finite_difference_product
from oracles.evaluation import forward, parameters_of, random_direction
from oracles.expected import by_brute_force, by_differences, directions_of, gradient_size
from oracles.frozen import Plain, connectivity_by_differences, connectivity_matrix
from oracles.networks import NETWORKS

TASK = Task.classification()
TWICE = [case for case in SMALL_CASES if case.brute_force and case.differences]


@pytest.mark.parametrize("case", TWICE[::7], ids=lambda case: case.id)
@pytest.mark.parametrize("kind", ["hessian", "functional", "ggn"])
def test_brute_force_is_the_derivative_of_gradients(case, kind):
    direction = directions_of(case)[-1]
    want = by_differences(case, kind, direction)
    got = by_brute_force(case, kind, direction)
    assert_products_close(got.product, want.product, tolerance=1e-7, scale=gradient_size(case))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_brute_force_agrees_with_curvlinops(kind):
    import curvlinops

    case = next(case for case in SMALL_CASES if case.id == "op-gelu")
    model, batch = case.make_model(), case.make_batch()
    params = list(parameters_of(model).values())
    operator = {"hessian": curvlinops.HessianLinearOperator, "ggn": curvlinops.GGNLinearOperator}[
        kind
    ]
    linear = operator(model, nn.CrossEntropyLoss(), params, [batch], check_deterministic=False)
    direction = random_direction(model)
    peer = unflatten(linear @ flatten(model, direction), model)
    ours = brute_force_product(model, batch, TASK, kind, direction)
    assert_products_close(ours, peer, tolerance=1e-10)


@pytest.mark.parametrize("written", NETWORKS, ids=lambda written: written.id)
def test_written_out_network_is_the_module(written):
    model, batch = written.make_model(), written.make_batch()
    plain = written.net(dict(model.named_parameters()), batch[0], Plain())
    torch.testing.assert_close(plain, forward(model, batch, TASK), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("written", NETWORKS, ids=lambda written: written.id)
def test_connectivity_matrix_is_symmetric_and_the_derivative_of_the_surrogate(written):
    model, batch = written.make_model(), written.make_batch()
    matrix, direction = connectivity_matrix(written.net, model, batch), random_direction(model)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12 * float(matrix.norm()))
    slope = connectivity_by_differences(written.net, model, batch, TASK, direction)
    got = unflatten(matrix @ flatten(model, direction), model)
    assert_products_close(got, slope, tolerance=1e-8)


def test_comparator_sees_a_small_parameter_and_a_wrong_name():
    want = {"big": torch.full((10,), 1e3).double(), "small": torch.ones(2).double()}
    off = {"big": want["big"], "small": want["small"] * (1 + 1e-6)}
    assert relative_error(off, want) > 1e-7
    with pytest.raises(AssertionError, match="small"):
        assert_products_close(off, want, tolerance=1e-8)
    with pytest.raises(AssertionError, match="names differ"):
        assert_products_close({"big": want["big"]}, want, tolerance=1)
    with pytest.raises(AssertionError, match="all together"):
        assert_products_close(
            {"big": want["big"] * float("nan"), "small": want["small"]}, want, tolerance=1
        )


def test_differences_survive_a_kink_close_by():
    model = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.fill_(1e-4)
        model[2].weight.copy_(torch.tensor([[1.0], [2.0]]))
    batch = (torch.ones(1, 1).double(), torch.tensor([0]))
    direction = {"0.weight": torch.ones(1, 1).double()}
    got = finite_difference_product(model, batch, TASK, "hessian", direction)
    assert_products_close(
        got, brute_force_product(model, batch, TASK, "hessian", direction), tolerance=1e-7
    )
