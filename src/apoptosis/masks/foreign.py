"""Masks that others have made: `torch.nn.utils.prune` keeps a weight, its mask and their product in three places.

There, a masked module holds `weight_orig` and `weight_mask` and computes `weight` before every call. Here, the weight
is a parameter again, under its own name, and the mask is kept beside the model.
"""

from typing import TypeVar

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
        ModelError: nothing of it was pruned that way.

    >>> net = torch_prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=3)
    >>> plain = import_masks(net)
    >>> list(plain.state_dict()), int((plain.weight != 0).sum())
    (['bias', 'weight'], 5)
    """
    plain = copy_with(model, {})
    removed: dict[str, Mask] = {}
    for path, module in plain.named_modules():
        for name in [
            hook._tensor_name
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, torch_prune.BasePruningMethod)
        ]:
            whole = f"{path}.{name}" if path else name
            removed[whole] = Mask.of([whole], getattr(module, f"{name}_mask") != 0)
            torch_prune.remove(module, name)
    if not removed:
        raise ModelError(
            f"Masks of torch.nn.utils.prune were to be taken over, and no module of {type(model).__name__} has any. "
            "For weights that are zero already, `zeros_of(model)` makes masks."
        )
    names: dict[int, list[str]] = {}
    for name, tensor in model_tensors(plain).items():
        names.setdefault(id(tensor), []).append(name)
    held = model_tensors(plain)
    masks = {
        name: Mask(tuple(names[id(held[name])]), own.shape, own.bits)
        for name, own in removed.items()
    }
    return mask_(plain, MaskPlan(masks, fingerprint(plain)))
