"""The handwritten digits that ship with scikit-learn: 1797 grey images of 8×8 pixels in ten classes.

They need no download and a small network learns them in seconds, which makes them the data of the demo, the examples
and the tests. The split is drawn from a seed; images are shifted and scaled by the mean and deviation of the *training*
images alone, so nothing of validation or test leaks into training.
"""

import torch
from torch import Tensor

from apoptosis.data.splits import DataSet, Split
from apoptosis.errors import ConfigError, DataError

__all__ = ["digits"]

NUM_IMAGES = 1797


def digits(*, seed: int = 0, num_validation: int = 297, num_test: int = 300) -> DataSet[Split]:
    """The digits, split by a seed; float32, normalised.

    Args:
        seed: draws which image goes where.
        num_validation: images set aside for choosing between models.
        num_test: images set aside for the final figure.

    Raises:
        ConfigError: the sizes leave nothing to train on.
        DataError: scikit-learn, which carries the images, is not installed.

    >>> data = digits()
    >>> len(data.train), len(data.validation), len(data.test), data.input_shape
    (1200, 297, 300, (1, 1, 8, 8))
    """
    held_out = num_validation + num_test
    if min(num_validation, num_test) < 0 or held_out >= NUM_IMAGES:
        raise ConfigError(
            f"{num_validation} validation and {num_test} test images were asked for. There are {NUM_IMAGES} digits in "
            "all; ask for sizes that are not negative and leave some to train on."
        )
    images, labels = _load()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    training = images[held_out:]
    images = (images - training.mean()) / training.std()
    sizes = [num_validation, num_test, NUM_IMAGES - held_out]
    validation, test, train = map(Split, images.split(sizes), labels.split(sizes))
    return DataSet("digits", train, validation or None, test or None, num_classes=10)


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as cause:
        raise DataError(
            "The digits come with scikit-learn, and scikit-learn is not installed. "
            "Install it with: pip install 'torch-apoptosis[demo]'"
        ) from cause
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).view(NUM_IMAGES, 1, 8, 8)
    return images, torch.as_tensor(labels, dtype=torch.int64)
