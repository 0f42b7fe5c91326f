"""The slow path is right on every tiny case: against dense matrices, and against differences of ordinary gradients."""

import pytest

from apoptosis.curvature import reference_product
from oracles.cases import SMALL_CASES
from oracles.compare import assert_products_close
from oracles.evaluation import SEED, seeded
from oracles.expected import by_brute_force, by_differences, direction_of, directions_of

TRUE_KINDS = ["hessian", "functional", "ggn"]


def reference(case, kind, direction):
    with seeded(SEED):
        return reference_product(
            case.make_model(),
            [case.make_batch()],
            case.task,
            kind=kind,
            direction=direction_of(case, direction),
        ).product


@pytest.mark.parametrize(
    "case", [c for c in SMALL_CASES if c.brute_force], ids=lambda case: case.id
)
@pytest.mark.parametrize("kind", TRUE_KINDS)
def test_reference_is_the_dense_matrix_times_direction(case, kind):
    for direction in directions_of(case):
        want = by_brute_force(case, kind, direction)
        got = reference(case, kind, direction)
        assert_products_close(
            got,
            want.product,
            tolerance=want.tolerance,
            scale=want.scale,
            what=f"{kind}, {direction}",
        )


@pytest.mark.parametrize(
    "case", [c for c in SMALL_CASES if c.differences], ids=lambda case: case.id
)
def test_reference_is_the_derivative_of_gradients(case):
    direction = directions_of(case)[-1]
    for kind in TRUE_KINDS[:1] if case.brute_force else TRUE_KINDS:
        want = by_differences(case, kind, direction)
        got = reference(case, kind, direction)
        assert_products_close(
            got, want.product, tolerance=want.tolerance, scale=want.scale, what=kind
        )
