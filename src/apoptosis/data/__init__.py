"""Named data sets, and batches of tensors. Knows nothing of networks or pruning."""

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.batches import Batches
from apoptosis.data.cifar import cifar10, cifar100
from apoptosis.data.digits import digits
from apoptosis.data.splits import DataSet, Part, Split

__all__ = ["Augmentation", "Batches", "DataSet", "Part", "Split", "cifar10", "cifar100", "digits"]
