"""Single weights that go: masks, and models that keep them.

`layers` says which weights may go, `plan` holds which did, one bit each (`Mask`, `MaskPlan`; `pattern` for N:M), and
`keeping` makes a model and its training respect it. `foreign` takes over masks of torch's own pruning,
`semi_structured` hands 2:4 masks to the GPU.

Which weights go is decided in `planning`; this room knows no scores.
"""

from apoptosis.masks.foreign import import_masks
from apoptosis.masks.keeping import mask, mask_, mask_optimizer_, masks_of, release_
from apoptosis.masks.layers import Layer, as_patterns, maskable
from apoptosis.masks.pattern import Pattern
from apoptosis.masks.plan import Mask, MaskPlan, check_fits, identity_masks, zeros_of
from apoptosis.masks.semi_structured import semi_structured

__all__ = [
    "Layer",
    "Mask",
    "MaskPlan",
    "Pattern",
    "as_patterns",
    "check_fits",
    "identity_masks",
    "import_masks",
    "mask",
    "mask_",
    "mask_optimizer_",
    "maskable",
    "masks_of",
    "release_",
    "semi_structured",
    "zeros_of",
]
