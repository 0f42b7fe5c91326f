"""Named data sets, and batches of tensors. Knows nothing of networks or pruning.

A `DataSet` has parts; a part gives batches, again and again (splits.py). Order and random numbers belong to a seed and
the number of a pass (passes.py). Images lie in memory (`Split`: digits, CIFAR) or stay in files (`ImageFiles`). What
comes from a file is checked before it is used, and nothing in a file is ever run. Start with `find_data_set`.
"""

from apoptosis.data.augmentation import Augmentation
from apoptosis.data.batches import Batches
from apoptosis.data.cifar import cifar10, cifar100
from apoptosis.data.digits import digits
from apoptosis.data.image_files import ImageFiles
from apoptosis.data.image_sets import image_folder, image_zip
from apoptosis.data.image_views import CentreCrop, ResizedCrop
from apoptosis.data.named import NAMES, find_data_set, is_data_set_name, why_missing
from apoptosis.data.splits import DataSet, Part, Split

__all__ = [
    "NAMES",
    "Augmentation",
    "Batches",
    "CentreCrop",
    "DataSet",
    "ImageFiles",
    "Part",
    "ResizedCrop",
    "Split",
    "cifar10",
    "cifar100",
    "digits",
    "find_data_set",
    "image_folder",
    "image_zip",
    "is_data_set_name",
    "why_missing",
]
