"""Weights that `torch.nn.utils.prune` has left in a file: `NAME_orig` and `NAME_mask` in the place of `NAME`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from apoptosis.masks import Mask, MaskPlan, mask_, maskable
from apoptosis.masks.plan import fingerprint

__all__ = ["keep_masks_", "without_torch_masks"]

ORIGINAL, MASK = "_orig", "_mask"


def without_torch_masks(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same weights under their plain names, with zeros where torch's pruning had them; and where they stay."""
    masks = {
        name: found[f"{name}{MASK}"] != 0
        for name in (key.removesuffix(ORIGINAL) for key in found if key.endswith(ORIGINAL))
        if isinstance(found.get(f"{name}{MASK}"), Tensor)
    }
    gone = {f"{name}{ending}" for name in masks for ending in (ORIGINAL, MASK)}
    plain = {name: item for name, item in found.items() if name not in gone}
    return plain | {n: found[f"{n}{ORIGINAL}"] * own for n, own in masks.items()}, masks


def keep_masks_(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Make the model keep the zeros."""
    own: dict[str, Mask] = {}
    for name, layer in maskable(model, tuple(masks)).items():
        known = next(one for one in layer.names if one in masks)
        own[name] = Mask.of(layer.names, masks[known])
    mask_(model, MaskPlan(own, fingerprint(model)))
