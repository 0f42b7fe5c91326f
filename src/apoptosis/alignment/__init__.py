"""The same network in other coordinates: attention heads in their principal axes, so that dimensions can go.

Start with `aligning.align_heads`. `bonds` guesses which entries of which tensors are summed over together and nowhere
else, `trials` decides it on a twin with random weights; `moments` sees what passes, `bases` has the algebra, `turning`
carries it out. `quiet` runs networks so that nothing stays behind.

This room knows networks, data and groups of units; it removes and scores nothing, and leaves alone, with the reason,
what it cannot show to be the same network afterwards.
"""

from apoptosis.alignment.aligning import Aligned, align_heads

__all__ = ["Aligned", "align_heads"]
