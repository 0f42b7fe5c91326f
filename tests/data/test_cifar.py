import numpy as np
import pytest
import torch
from torch.testing import assert_close

from apoptosis.data import Augmentation, cifar10, cifar100
from apoptosis.errors import ConfigError, DataError
from oracles.cifar_fakes import arrays, pickles, write, write_folder, write_tar

LOAD = {"cifar10": cifar10, "cifar100": cifar100}
LAYOUTS = ["npz", "folder", "around", "tar", "tar with dots"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LOAD)
def test_every_layout_gives_the_images_with_their_labels(tmp_path, kind, layout):
    held = arrays(kind)
    data = LOAD[kind](write(tmp_path, kind, layout, held), num_validation=5)
    assert [len(part) for part in data.parts().values()] == [15, 5, 8]
    assert data.num_classes == (10 if kind == "cifar10" else 100)
    assert data.input_shape == (1, 3, 32, 32)
    assert data.augmentation == Augmentation(pad=4, flip=True)
    assert torch.equal(data.test.images, torch.from_numpy(held["x_test"]).permute(0, 3, 1, 2))
    assert data.test.labels.tolist() == held["y_test"].tolist()
    found = {
        image.permute(1, 2, 0).numpy().tobytes(): int(label)
        for part in (data.train, data.validation)
        for image, label in zip(part.images, part.labels, strict=True)
    }
    wanted = zip(held["x_train"], held["y_train"], strict=True)
    assert found == {image.tobytes(): int(label) for image, label in wanted}


def test_bytes_stay_bytes_and_batches_are_normalised_by_the_published_numbers(tmp_path):
    data = cifar10(write(tmp_path, "cifar10", "npz", arrays("cifar10")), num_validation=0)
    assert data.validation is None
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.is_contiguous()
    images, _ = next(iter(data.test.batches(8)))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.test.mean, data.test.std))
    assert_close(images, (data.test.images / 255 - mean) / std)
    assert data.test.mean == (0.4914, 0.4822, 0.4465)


def test_the_seed_draws_the_validation_images(tmp_path):
    path = write(tmp_path, "cifar10", "npz", arrays("cifar10"))
    one, again, other = (cifar10(path, seed=s, num_validation=5).validation for s in (1, 1, 2))
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)


def test_labels_in_a_column_are_read(tmp_path):
    held = arrays("cifar10")
    column = {name: value[:, None] if name[0] == "y" else value for name, value in held.items()}
    data = cifar10(write(tmp_path, "cifar10", "npz", column), num_validation=5)
    assert data.test.labels.tolist() == held["y_test"].tolist()


@pytest.mark.parametrize("num", [-1, 20, 5000])
def test_something_is_left_to_train_on(tmp_path, num):
    path = write(tmp_path, "cifar10", "npz", arrays("cifar10"))
    with pytest.raises(ConfigError, match=f"{num} validation images .* 20 training images"):
        cifar10(path, num_validation=num)


WRONG_ARRAYS = {
    "floats": ({"x_test": np.zeros((8, 32, 32, 3), np.float32)}, "test: .*found float32"),
    "channels first": ({"x_train": np.zeros((20, 3, 32, 32), np.uint8)}, "channels last"),
    "grey": ({"x_test": np.zeros((8, 32, 32), np.uint8)}, r"shape \(8, 32, 32\)"),
    "too few labels": ({"y_test": np.zeros(7, np.uint8)}, "8 images need as many"),
    "labels as floats": ({"y_test": np.zeros(8)}, "found float64"),
    "a label too large": ({"y_test": np.arange(3, 11)}, "0 … 9; image 7 has label 10"),
    "a label below 0": ({"y_test": np.full(8, -1)}, "image 0 has label -1, and 8 of 8"),
    "no image": (
        {"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros(0, int)},
        "at least one",
    ),
    "objects": ({"y_test": np.array([None] * 8)}, "cannot be read as an .npz .*Object arrays"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_arrays_that_are_no_cifar_are_refused(tmp_path, case):
    wrong, message = WRONG_ARRAYS[case]
    path = write(tmp_path, "cifar10", "npz", {**arrays("cifar10"), **wrong})
    with pytest.raises(DataError, match=message):
        cifar10(path, num_validation=5)


def test_an_npz_that_lacks_an_array_is_told_what_it_has(tmp_path):
    held = arrays("cifar10")
    del held["y_test"]
    with pytest.raises(DataError, match=r"c.*npz has no y_test; found x_train, y_train, x_test"):
        cifar10(write(tmp_path, "cifar10", "npz", held))


@pytest.mark.parametrize("layout", ["npz", "tar"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off_is_refused(tmp_path, layout, share):
    path = write(tmp_path, "cifar10", layout, arrays("cifar10"))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=path.name):
        cifar10(path, num_validation=5)


@pytest.mark.parametrize("layout", ["npz", "tar"])
def test_a_damaged_file_is_refused(tmp_path, layout):
    path = write(tmp_path, "cifar10", layout, arrays("cifar10"))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        cifar10(path, num_validation=5)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
@pytest.mark.parametrize("write_files", [write_folder, write_tar])
def test_a_missing_file_is_named_with_where_to_get_it(tmp_path, name, write_files):
    files = pickles("cifar10", arrays("cifar10"))
    del files[name]
    path = write_files(tmp_path / "c", "cifar10", files)
    with pytest.raises(DataError, match=f"has no {name} of .*https://www.cs.toronto.edu"):
        cifar10(path)


def test_nothing_there_is_told_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"nothing is there. Get https://.*cifar-100-python.tar.gz"):
        cifar100(tmp_path / "none")


def test_the_other_cifar_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no data_batch_1, "):
        cifar10(write(tmp_path, "cifar100", "folder", arrays("cifar100")))
    path = write(tmp_path, "cifar100", "npz", arrays("cifar100"))
    with pytest.raises(DataError, match="labels of 10 classes"):
        cifar10(path, num_validation=5)
