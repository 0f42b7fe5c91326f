"""What a case's product is, from the best oracle that knows it; computed once per session."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oracles.brute_force import dense_kind, double_backward_product, flatten, unflatten
from oracles.case import Case
from oracles.compare import EXACT, FINITE
from oracles.differences import finite_difference_product
from oracles.evaluation import gradient, random_direction

__all__ = [
    "DIRECTIONS",
    "Expected",
    "by_brute_force",
    "by_differences",
    "direction_of",
    "gradient_size",
]

DIRECTIONS = ("parameters", "random")
DENSE = 200


@dataclass(frozen=True)
class Expected:
    """A product, and how far a right answer may be from it."""

    product: dict[str, Tensor]
    tolerance: float
    scale: float


def directions_of(case: Case) -> tuple[str, ...]:
    """The directions that make sense for a case."""
    return DIRECTIONS if case.any_direction else DIRECTIONS[:1]


def direction_of(case: Case, name: str) -> dict[str, Tensor] | None:
    """The direction as the library takes it: None for the parameters themselves."""
    return random_direction(case.make_model()) if name == "random" else None


def by_brute_force(case: Case, kind: str, direction: str) -> Expected:
    """The dense matrix times the direction; beyond `DENSE` parameters one double backward instead."""
    model = case.oracle_model()
    if kind != "ggn" and len(flatten(model)) > DENSE:
        delta = flatten(model, direction_of(case, direction))
        vector = double_backward_product(model, case.make_batch(), case.task, kind, delta)
        return Expected(unflatten(vector, model), EXACT, gradient_size(case))
    matrix, delta = _matrix(case, kind), flatten(model, direction_of(case, direction))
    scale = max(gradient_size(case), float((matrix.abs() @ delta.abs()).norm()))
    return Expected(unflatten(matrix @ delta, model), EXACT, scale)


def by_differences(case: Case, kind: str, direction: str) -> Expected:
    """Central differences."""
    product = finite_difference_product(
        case.oracle_model(), case.make_batch(), case.task, kind, direction_of(case, direction)
    )
    return Expected(product, FINITE, gradient_size(case))


@cache
def gradient_size(case: Case) -> float:
    """The norm of the gradient."""
    grads = gradient(case.oracle_model(), case.make_batch(), case.task).values()
    return torch.stack([g.norm() for g in grads]).norm().item()


@cache
def _matrix(case: Case, kind: str) -> Tensor:
    return dense_kind(case.oracle_model(), case.make_batch(), case.task, kind)
