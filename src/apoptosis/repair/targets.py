"""What a layer is fitted to: what becomes of its outputs, not what they are.

On their way outputs y pass norms and factors, are added to another tensor, and are rectified (`structure.outlets`):

    z = a ⊙ y + c + other,        then max(z, 0)

The target is the dense network's z. So a layer that ends a residual branch is asked for what the whole sum lacks, the
errors of branches before included, and these do not add up along the stream. Where z is rectified next, of a wanted
z ≤ 0 it matters only that z is not positive: once some weights are found, the target there becomes min(z, 0) of what
they give, and the layer is fitted again. That bounds the error behind the ReLU from above, and meets it where the sign
is right, so with every round more of what is left goes where it can be seen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.curvature.linear_maps import as_outputs, output_dim
from apoptosis.repair.reaching import Passed
from apoptosis.repair.survey import Layer
from apoptosis.structure import Outlet

__all__ = ["Target"]

SILENT = 1e-6
"""Of the largest |a|: outputs with less are left as they are, for weights that could make them heard would be huge."""


@dataclass(frozen=True, eq=False)
class Target:
    """Of one layer: a and c as the small network has them (`ours`) and the dense one, rows that are left (`theirs`)."""

    layer: Layer
    module: nn.Module
    outlet: Outlet
    ours: tuple[Tensor, Tensor]
    theirs: tuple[Tensor, Tensor]

    @staticmethod
    def of(layer: Layer, dense: nn.Module, mended: nn.Module) -> "Target":
        """With the numbers that both networks hold now."""
        module: Any = mended.get_submodule(layer.path)
        groups, outlet = getattr(module, "groups", 1), layer.outlet or Outlet()
        ours = outlet.affine(mended, _num_outputs(module))
        theirs = ours
        if layer.outlet is not None:
            num = _num_outputs(dense.get_submodule(layer.target))
            theirs = tuple(
                _left(layer, own[None, :, None])[0, :, 0] for own in outlet.affine(dense, num)
            )
        device = module.weight.device
        a, c, a_dense, c_dense = (own.to(device).view(groups, -1, 1) for own in (*ours, *theirs))
        return Target(layer, module, outlet, (a, c), (a_dense, c_dense))

    def views(self, ours: Passed, theirs: Passed) -> tuple[Tensor, ...]:
        """What the layer gives and the dense one gave, then what both are added to; (samples, outputs, places) each."""
        own, dense = self.of_small(ours), self.of_dense(theirs)
        return tuple(view for both in zip(own, dense, strict=True) for view in both)

    def of_small(self, passed: Passed) -> tuple[Tensor, ...]:
        """What the layer gives, and what that is added to, if it is."""
        made = as_outputs(self.module, passed.made)
        return (made,) if self.outlet.other is None else (made, self._other(passed))

    def of_dense(self, passed: Passed) -> tuple[Tensor, ...]:
        """The same of the dense layer, rows that are left."""
        made = _left(self.layer, as_outputs(self.module, self.layer.wanted(passed.made)))
        if self.layer.factors is not None:
            made = made.double() * self.layer.factors.to(made.device)
        return (
            (made,) if self.outlet.other is None else (made, _left(self.layer, self._other(passed)))
        )

    def _other(self, passed: Passed) -> Tensor:
        return as_outputs(self.module, passed.other)

    def sums(self, made: Tensor, wanted: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """z as it is and as it should be, (g, outputs, positions), of what `views` showed."""
        (a, c), (a_dense, c_dense) = self.ours, self.theirs
        now, then = a * made + c, a_dense * wanted + c_dense
        return (now + others[0], then + others[1]) if others else (now, then)

    def as_far_as_seen(self, wanted: Tensor, z: Tensor) -> Tensor:
        """The target, given what there is: z itself wherever a ReLU will not show the difference."""
        if not self.outlet.rectified:
            return wanted
        target = torch.where(wanted > 0, wanted, z.clamp(max=0))
        most = self.outlet.most
        return target if most is None else torch.where(wanted < most, target, z.clamp(min=most))

    def seen(self, z: Tensor) -> Tensor:
        """What the next operation gets to see of z."""
        return z.clamp(0, self.outlet.most) if self.outlet.rectified else z

    def as_weights(self, change: Tensor) -> Tensor:
        """What makes z change so, (g, outputs, inputs), as a change of the layer's weights; none where a is about 0."""
        a = self.ours[0]
        is_silent = a.abs() <= SILENT * a.abs().max()
        return torch.where(is_silent, 0.0, change / torch.where(is_silent, 1.0, a))


def _left(layer: Layer, outputs: Tensor) -> Tensor:
    """Rows of the dense layer's outputs that the plan has kept."""
    if layer.rows is None:
        return outputs
    return outputs.index_select(1, torch.as_tensor(layer.rows, device=outputs.device))


def _num_outputs(module: Any) -> int:
    return module.weight.shape[output_dim(module)]
