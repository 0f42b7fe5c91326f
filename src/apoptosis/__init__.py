"""Make a trained PyTorch network smaller by knowing, exactly, what each weight and each neuron is worth.

    import apoptosis as ap

    scores = ap.criteria.oba(model, batches, ap.Task.classification())

Names are fetched from their rooms on first use, so that `import apoptosis` and `apoptosis --help` do not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apoptosis import criteria, errors, masks
    from apoptosis.alignment import align_heads
    from apoptosis.checkpoint import load, load_outcome, open_journal, save
    from apoptosis.criteria import Aggregation, Scores, UnitScores, unit_scores
    from apoptosis.curvature import (
        Curvature,
        curvature_product,
        layer_tangents,
        paper_terms,
        reference_product,
    )
    from apoptosis.masks import MaskPlan, import_masks, mask, mask_, mask_optimizer_, masks_of
    from apoptosis.planning import Budget, Selection, Sparsity, make_masks, make_plan
    from apoptosis.records import Outcome
    from apoptosis.structure import Plan, Structure, cut, cut_optimizer, trace, verify, zero
    from apoptosis.task import Task
    from apoptosis.workflow import Material, gradual, iterative, one_shot, prune, sparsify

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "Budget",
    "Curvature",
    "MaskPlan",
    "Material",
    "Outcome",
    "Plan",
    "Scores",
    "Selection",
    "Sparsity",
    "Structure",
    "Task",
    "UnitScores",
    "__version__",
    "align_heads",
    "criteria",
    "curvature_product",
    "cut",
    "cut_optimizer",
    "errors",
    "gradual",
    "import_masks",
    "iterative",
    "layer_tangents",
    "load",
    "load_outcome",
    "make_masks",
    "make_plan",
    "mask",
    "mask_",
    "mask_optimizer_",
    "masks",
    "masks_of",
    "one_shot",
    "open_journal",
    "paper_terms",
    "prune",
    "reference_product",
    "save",
    "sparsify",
    "trace",
    "unit_scores",
    "verify",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Import the room a public name lives in, and remember the name."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"{__name__}.{_ROOMS[name]}")
    value = room if _ROOMS[name] == name else getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_ROOMS = {
    "Aggregation": "criteria",
    "Budget": "planning",
    "Curvature": "curvature",
    "MaskPlan": "masks",
    "Material": "workflow",
    "Outcome": "records",
    "Plan": "structure",
    "Scores": "criteria",
    "Selection": "planning",
    "Sparsity": "planning",
    "Structure": "structure",
    "Task": "task",
    "UnitScores": "criteria",
    "align_heads": "alignment",
    "criteria": "criteria",
    "curvature_product": "curvature",
    "cut": "structure",
    "cut_optimizer": "structure",
    "errors": "errors",
    "gradual": "workflow",
    "import_masks": "masks",
    "iterative": "workflow",
    "layer_tangents": "curvature",
    "load": "checkpoint",
    "load_outcome": "checkpoint",
    "make_masks": "planning",
    "make_plan": "planning",
    "mask": "masks",
    "mask_": "masks",
    "mask_optimizer_": "masks",
    "masks": "masks",
    "masks_of": "masks",
    "one_shot": "workflow",
    "open_journal": "checkpoint",
    "paper_terms": "curvature",
    "prune": "workflow",
    "reference_product": "curvature",
    "save": "checkpoint",
    "sparsify": "workflow",
    "trace": "structure",
    "unit_scores": "criteria",
    "verify": "structure",
    "zero": "structure",
}
