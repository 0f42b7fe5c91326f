"""The same network in other coordinates: attention heads in their principal axes, so that dimensions can go.

Start with `aligning.align_heads`. `bonds` finds which entries of which tensors are summed over together and nowhere
else, `bases` has the algebra. This room knows networks, data and groups of units; it removes and scores nothing.
"""

from apoptosis.alignment.aligning import Aligned, align_heads

__all__ = ["Aligned", "align_heads"]
