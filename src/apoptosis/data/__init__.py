"""Named data sets, and batches of tensors. Knows nothing of networks or pruning."""

from apoptosis.data.batches import Batches
from apoptosis.data.digits import Digits, Split, digits

__all__ = ["Batches", "Digits", "Split", "digits"]
