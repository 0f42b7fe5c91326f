"""Random small networks: the fast path is the reference in every kind, and the derivative of gradients."""

import torch
from hypothesis import HealthCheck, assume, given, settings

from apoptosis.curvature import KINDS, curvature_product, paper_terms, reference_product
from oracles.compare import EXACT, FINITE, assert_products_close
from oracles.differences import finite_difference_product
from oracles.evaluation import gradient, random_direction
from oracles.strategies import Architecture, architectures

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]


def size(product):
    return torch.stack([value.norm() for value in product.values()]).norm().item()


@settings(max_examples=40, suppress_health_check=SLOW_IS_FINE)
@given(architectures())
def test_fast_is_reference_in_every_kind(architecture: Architecture):
    model, batch = architecture.make_model(), architecture.make_batch()
    scale = size(gradient(model, batch))
    for kind in KINDS:
        for direction in (None, random_direction(model, architecture.seed)):
            got = curvature_product(model, [batch], kind=kind, direction=direction)
            want = reference_product(model, [batch], kind=kind, direction=direction)
            assert got.fallbacks == {}
            assert_products_close(
                got.product, want.product, tolerance=EXACT, scale=scale, what=kind
            )


@settings(max_examples=40, suppress_health_check=SLOW_IS_FINE)
@given(architectures())
def test_hessian_is_the_derivative_of_gradients(architecture: Architecture):
    model, batch = architecture.make_model(), architecture.make_batch()
    direction = random_direction(model, architecture.seed)
    coarse, fine = (
        finite_difference_product(model, batch, None, "hessian", direction, steps=steps)
        for steps in ((8e-6, 4e-6), (1.6e-6, 8e-7))
    )
    apart = size({name: coarse[name] - fine[name] for name in fine})
    assume(apart < 1e-7 * size(fine))  # else a kink lies within the step
    got = curvature_product(model, [batch], kind="hessian", direction=direction).product
    assert_products_close(got, fine, tolerance=FINITE, scale=size(gradient(model, batch)))


@settings(max_examples=25, suppress_health_check=SLOW_IS_FINE)
@given(architectures())
def test_paper_terms_add_up(architecture: Architecture):
    model, batch = architecture.make_model(), architecture.make_batch()
    terms = paper_terms(model, [batch])
    total = {
        name: terms.upper[name] + terms.lower[name] + terms.parallel[name] for name in terms.upper
    }
    want = curvature_product(model, [batch], kind="connectivity").product
    assert_products_close(total, want, tolerance=EXACT, scale=size(gradient(model, batch)))
