"""Exact curvature products on unmodified models.

Start with `product.curvature_product`, the fast path, and `switches`, which says what the four kinds are. `reference`
computes the same in another, slower way and is what the fast path is tested against; `paper` splits the paper's
product into its terms, `diagonal`, `gradient` and `activations` are for the criteria that need no more. `gates` takes
curvature by factors on activations instead of weights, with `gate_sums` and `loss_factors`. Below them: `tangents` (the
mode that carries tangents through a forward), `rules*` (one entry per operation), `fallback` (every other operation),
`interception`, `calls` and `duals` (how operations and tensors are recognised).

This room knows models, batches and tasks; it knows nothing of scores, neurons or pruning.
"""

# pyright: reportUnusedImport=false
from apoptosis.curvature import (  # noqa: F401 - importing a family registers its rules
    rules_attention,
    rules_composite,
    rules_embedding,
    rules_layer,
    rules_linear,
    rules_norm,
    rules_pointwise,
    rules_product,
    rules_select,
)
from apoptosis.curvature.activations import Place, Seen, visit_activations
from apoptosis.curvature.diagonal import curvature_diagonal
from apoptosis.curvature.dual_ridge import DualRidge
from apoptosis.curvature.gates import (
    GATE_FORMS,
    Gate,
    GateCurvature,
    GateOptions,
    gate_curvature,
)
from apoptosis.curvature.gradient import fisher_diagonal, mean_gradient
from apoptosis.curvature.grams import Products
from apoptosis.curvature.layer_moments import LayerMoments, Moments, layer_moments
from apoptosis.curvature.linear_maps import as_matrix, is_bearable, is_linear_map
from apoptosis.curvature.paper import PaperTerms, layer_tangents, paper_terms
from apoptosis.curvature.problem import Curvature
from apoptosis.curvature.product import curvature_product
from apoptosis.curvature.reference import reference_product
from apoptosis.curvature.rules import RULES
from apoptosis.curvature.switches import KINDS

__all__ = [
    "GATE_FORMS",
    "KINDS",
    "RULES",
    "Curvature",
    "DualRidge",
    "Gate",
    "GateCurvature",
    "GateOptions",
    "LayerMoments",
    "Moments",
    "PaperTerms",
    "Place",
    "Products",
    "Seen",
    "as_matrix",
    "curvature_diagonal",
    "curvature_product",
    "fisher_diagonal",
    "gate_curvature",
    "is_bearable",
    "is_linear_map",
    "layer_moments",
    "layer_tangents",
    "mean_gradient",
    "paper_terms",
    "reference_product",
    "visit_activations",
]
