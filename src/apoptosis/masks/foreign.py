"""Masks that others have made: `torch.nn.utils.prune` keeps a weight, its mask and their product in three places.

There, a masked module holds `weight_orig` and `weight_mask` and computes `weight` before every call. Here, the weight
is a parameter again, under its own name, and the mask is kept beside the model.
"""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from apoptosis.errors import ModelError
from apoptosis.masks.keeping import mask_
from apoptosis.masks.plan import Mask, MaskPlan, fingerprint
from apoptosis.structure import copy_with, model_tensors

__all__ = ["import_masks"]

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def import_masks(model: AnyModel) -> AnyModel:
    """A copy of a model pruned by `torch.nn.utils.prune`, with plain weights, that keeps the same masks.

    Raises:
        ModelError: nothing of it was pruned that way, or a shared weight not everywhere alike.

    >>> net = torch_prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=3)
    >>> plain = import_masks(net)
    >>> list(plain.state_dict()), int((plain.weight != 0).sum())
    (['bias', 'weight'], 5)
    """
    plain = copy_with(model, {})
    removed: dict[str, Mask] = {}
    for path, module in plain.named_modules():
        for name in _pruned(module):
            whole = f"{path}.{name}" if path else name
            _check_ties(plain, whole, module, name)
            removed[whole] = Mask.of([whole], getattr(module, f"{name}_mask") != 0)
    for whole in removed:
        path, _, name = whole.rpartition(".")
        torch_prune.remove(plain.get_submodule(path), name)
    if not removed:
        raise ModelError(
            f"Masks of torch.nn.utils.prune were to be taken over, and no module of {type(model).__name__} has any. "
            "For weights that are zero already, `zeros_of(model)` makes masks."
        )
    held, names = model_tensors(plain), dict[int, list[str]]()
    for name, tensor in held.items():
        names.setdefault(id(tensor), []).append(name)
    masks = {
        first: replace(removed[first], names=tuple(own))
        for first, *more in names.values()
        if (own := [first, *more]) and first in removed
    }
    return mask_(plain, MaskPlan(masks, fingerprint(plain)))


def _pruned(module: nn.Module) -> list[str]:
    """Names of the module's tensors that torch has pruned."""
    hooks = module._forward_pre_hooks.values()
    return [h._tensor_name for h in hooks if isinstance(h, torch_prune.BasePruningMethod)]


def _check_ties(model: nn.Module, whole: str, module: nn.Module, name: str) -> None:
    """Where several modules share a weight, one mask must be every one's: there will be one weight again.

    Raises:
        ModelError: it is not.
    """
    weight, own = module._parameters[f"{name}_orig"], getattr(module, f"{name}_mask")
    for path, other in model.named_modules():
        for there, parameter in other.named_parameters(recurse=False):
            if parameter is not weight or other is module:
                continue
            theirs = getattr(other, f"{there.removesuffix('_orig')}_mask", None)
            if theirs is None or not torch.equal(theirs != 0, own != 0):
                raise ModelError(
                    f"{whole!r} and a weight of {path!r} are one tensor, and torch.nn.utils.prune masks them "
                    "differently, which one weight cannot do. Untie them, or prune both alike."
                )
