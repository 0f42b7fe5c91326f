"""The twin of a cut through norms: full size, removed entries zero, and every norm sees the kept entries alone.

It knows the plan's slices of each norm's weight and nothing of axes: a norm whose weight the plan cuts gets its kept
channels gathered, is run as a norm of that size, and its result is put back among zeros.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.structure import Plan, zero

__all__ = ["twin_with_kept_statistics"]


def twin_with_kept_statistics(model: nn.Module, plan: Plan) -> tuple[nn.Module, int]:
    """The twin, and how many of its norms run over kept entries only."""
    twin, changed = zero(model, plan), 0
    cuts = {name: cut for cut in plan.tensors for name in cut.names}
    for path, module in twin.named_modules():
        cut = cuts.get(f"{path}.weight")
        if "Norm" in type(module).__name__ and "Batch" not in type(module).__name__ and cut:
            module.forward = _Gathered(module, torch.as_tensor(cut.kept[0]))
            changed += 1
    return twin, changed


class _Gathered:
    def __init__(self, norm: nn.Module, kept: Tensor) -> None:
        self.kept, self.small = kept, copy.deepcopy(norm)
        for name, parameter in norm.named_parameters():
            setattr(self.small, name, nn.Parameter(parameter.detach()[kept]))
        if hasattr(norm, "normalized_shape"):
            self.small.normalized_shape = (len(kept),)
        self.dim = 1 if type(norm).__name__.endswith("2d") else -1

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        found = self.small(x.index_select(self.dim, self.kept), *args)
        return torch.zeros_like(x).index_copy(self.dim, self.kept, found)
