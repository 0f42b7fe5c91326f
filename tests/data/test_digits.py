import sys

import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from apoptosis.data import digits
from apoptosis.errors import ConfigError, DataError


def rows(split) -> set[bytes]:
    return {image.numpy().tobytes() for image in split.images}


def test_the_three_parts_share_no_image_and_lose_none():
    data = digits(seed=3)
    parts = [data.train, data.validation, data.test]
    images = torch.cat([part.images for part in parts])
    assert len(images) == 1797
    assert len(set.union(*map(rows, parts))) == sum(len(rows(part)) for part in parts)


def test_images_keep_their_labels():
    data = digits(seed=1)
    source = load_digits()
    wanted = {
        image.tobytes(): label for image, label in zip(source.images, source.target, strict=True)
    }
    scale = 16 / float(data.train.images.max() - data.train.images.min())
    pixels = (data.test.images - data.train.images.min()).double() * scale
    found = [wanted[image.round().numpy().tobytes()] for image in pixels[:, 0]]
    assert found == data.test.labels.tolist()


def test_training_images_and_nothing_else_are_centred_and_scaled():
    data = digits()
    assert_close(data.train.images.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert_close(data.train.images.std(), torch.tensor(1.0))
    assert abs(data.test.images.mean().item()) > 1e-4


def test_the_split_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    assert torch.equal(digits(seed=5).test.labels, digits(seed=5).test.labels)
    assert not torch.equal(digits(seed=5).test.labels, digits(seed=6).test.labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_are_as_asked():
    data = digits(num_validation=0, num_test=97)
    assert (len(data.train), data.validation, len(data.test)) == (1700, None, 97)


@pytest.mark.parametrize(("validation", "test"), [(-1, 10), (10, -1), (1000, 797)])
def test_sizes_nobody_can_mean_are_refused(validation, test):
    with pytest.raises(ConfigError, match="There are 1797 digits"):
        digits(num_validation=validation, num_test=test)


def test_without_scikit_learn_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'torch-apoptosis\[demo\]'"):
        digits()


def test_batches_pair_images_with_labels():
    data = digits()
    images, labels = next(iter(data.train.batches(10, shuffle_seed=0)))
    assert images.shape == (10, 1, 8, 8)
    position = (data.train.images == images[0]).flatten(1).all(1).nonzero()[0, 0]
    assert labels[0] == data.train.labels[position]
