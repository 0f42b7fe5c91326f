"""Named data sets, and batches of tensors. Knows nothing of networks or pruning."""

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.batches import Batches
from apoptosis.data.digits import digits
from apoptosis.data.splits import DataSet, Part, Split

__all__ = ["Augmentation", "Batches", "DataSet", "Part", "Split", "digits"]
