import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from apoptosis.errors import ConfigError
from apoptosis.models import mlp


def test_images_and_vectors_of_the_same_numbers_give_the_same():
    model = mlp((12, 5, 3))
    images = torch.randn(4, 3, 2, 2)
    assert torch.equal(model(images), model(images.flatten(1)))


def test_relus_stand_between_layers_and_not_after_the_last():
    model = mlp((6, 5, 4, 3))
    first, second, last = model.layers
    x = torch.randn(8, 6)
    assert_close(model(x), last(F.relu(second(F.relu(first(x))))))
    assert (model(x) < 0).any()


def test_fewer_than_two_sizes_are_refused():
    with pytest.raises(ConfigError, match="input and its output"):
        mlp((4,))
