"""Data as a person names them on the command line.

    digits                          the embedded digits
    cifar10, cifar100               found here or in ./data; or cifar10:PATH
    PATH                            a folder of images, an .npz or .tar.gz of CIFAR, a .zip of images
    whole:FILE.zip                  all images of a zip file, for a network that was trained on others
    package.module:make             a function without arguments; own_data.py says what it may return
    path/to/file.py:make            the same, in a file

Named data sets are scored on training images as they are, trained on training images with the augmentation that is
usual for them, and evaluated on test images.
"""

from typing import Any

from apoptosis.cli.functions import call_function, check_has_function, is_function_name
from apoptosis.cli.named_data import NamedData, Reading
from apoptosis.cli.names import nearest
from apoptosis.cli.own_data import own_data
from apoptosis.data import NAMES, DataSet, find_data_set, is_data_set_name, why_missing
from apoptosis.errors import DataError
from apoptosis.task import Task

__all__ = ["NamedData", "Reading", "find_data"]

BATCH_SIZES = {"digits": 400, "cifar10": 500, "cifar100": 500}
TRAINING_BATCH_SIZES = {"digits": 64, "cifar10": 128, "cifar100": 128}
IMAGE_BATCH_SIZE = 50  # of 224 × 224 pixels: what fits into the memory of a laptop


def find_data(name: str, reading: Reading) -> NamedData:
    """The data of that name.

    Raises:
        ConfigError: the function cannot be called.
        DataError: there are no such data, or what the function gave are no batches.
    """
    if is_data_set_name(name) and not name.endswith(".py"):
        return _of_data_set(find_data_set(name, reading.split_seed), reading)
    if is_function_name(name):
        made = call_function(name, "batches")
        if isinstance(made, DataSet):
            return _of_data_set(made, reading)
        return own_data(name, made, reading)
    check_has_function(name)
    raise DataError(
        f"There are no data {name!r}{why_missing(name)}.{nearest(name, NAMES)} Known are {', '.join(NAMES)} (also "
        "cifar10:PATH), the path "
        "of a folder, .npz, .tar.gz or .zip, and module:function or file.py:function for your own: a function that "
        "returns batches, a tuple (batches to score on, batches to evaluate on), a dict of batches, or a DataSet."
    )


def _of_data_set(data: DataSet[Any], reading: Reading) -> NamedData:
    size = reading.batch_size or BATCH_SIZES.get(data.name, IMAGE_BATCH_SIZE)

    def judged(part: Any) -> Any:
        return None if part is None else part.batches(size, device=reading.device)

    return NamedData(
        scoring=judged(data.train.first(reading.samples)),
        training=data.train.batches(
            reading.training_batch_size or TRAINING_BATCH_SIZES.get(data.name, IMAGE_BATCH_SIZE),
            shuffle_seed=reading.seed,
            device=reading.device,
            augmentation=data.augmentation,
        ),
        validation=judged(data.validation),
        evaluation=judged(data.test),
        task=Task.classification(),
        num_classes=data.num_classes,
    )
