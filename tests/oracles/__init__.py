"""Answers to compare with, written another way than the library: nothing here imports
`apoptosis.curvature`.

- `compare`: comparators that raise by themselves;
- `brute_force`: dense Hessians, functional Hessians and Gauss-Newton matrices by double backward,
  column by column;
- `differences`: the same products from first derivatives only, by central differences;
- `frozen`: the definition of `connectivity`, on networks written out as functions of their
  parameters;
- `networks`: those networks, each beside the module it spells out;
- `cases`: tiny float64 models of every kind; `library`: models of timm, torchvision and
  transformers;
- `strategies`: random architectures for hypothesis.
"""

from oracles.brute_force import (
    brute_force_product,
    dense_ggn,
    dense_hessian,
    dense_kind,
    flatten,
    unflatten,
)
from oracles.cases import SMALL_CASES, Case
from oracles.compare import assert_products_close, relative_error
from oracles.differences import finite_difference_product
from oracles.evaluation import gradient, parameters_of, random_direction

__all__ = [
    "SMALL_CASES",
    "Case",
    "assert_products_close",
    "brute_force_product",
    "dense_ggn",
    "dense_hessian",
    "dense_kind",
    "finite_difference_product",
    "flatten",
    "gradient",
    "parameters_of",
    "random_direction",
    "relative_error",
    "unflatten",
]
