import pytest
import torch
from torch.testing import assert_close

from apoptosis.data import DataSet, Split
from apoptosis.errors import DataError

BYTES = torch.randint(0, 256, (7, 2, 3, 3), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(7) % 3


def read(split, **options) -> torch.Tensor:
    return torch.cat([images for images, _ in split.batches(4, **options)])


def test_bytes_are_normalised_when_they_are_read_and_stay_bytes():
    split = Split(BYTES.to(torch.uint8), LABELS, mean=(0.5, 0.25), std=(0.1, 0.2))
    wanted = (BYTES.double() / 255 - torch.tensor([0.5, 0.25]).view(2, 1, 1)) / torch.tensor(
        [0.1, 0.2]
    ).view(2, 1, 1)
    assert_close(read(split), wanted.float())
    assert split.batches(4, device="cpu").tensors[0].dtype == torch.uint8
    assert torch.equal(split.images, BYTES.to(torch.uint8))


def test_bytes_without_mean_count_from_0_to_1():
    assert_close(read(Split(BYTES.to(torch.uint8), LABELS)), BYTES.float() / 255)


def test_floats_stay_as_they_are_unless_a_mean_is_given():
    floats = BYTES.float()
    assert torch.equal(read(Split(floats, LABELS)), floats)
    before = floats.clone()
    made = read(Split(floats, LABELS, (1.0, 2.0), (2.0, 4.0)))
    assert_close(made[:, 1], (before[:, 1] - 2) / 4)
    assert torch.equal(floats, before), "what was handed in is not changed"
    assert read(Split(floats.double(), LABELS)).dtype == torch.float32


def test_the_first_images_are_a_split_with_the_same_normalisation():
    split = Split(BYTES.to(torch.uint8), LABELS, (0.5, 0.5), (0.1, 0.2))
    assert len(split.first(3)) == 3
    assert torch.equal(read(split.first(3)), read(split)[:3])
    assert len(split.first(None)) == len(split.first(99)) == 7


def test_batches_come_on_the_device_asked_for():
    images, labels = next(iter(Split(BYTES.float(), LABELS).batches(2, device="meta")))
    assert images.is_meta
    assert labels.is_meta


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            BYTES[0].float(),
            LABELS,
            "of shape \\(n, c, h, w\\); found torch.float32 of shape \\(2, 3",
        ),
        (BYTES, LABELS, "bytes or floats .*; found torch.int64"),
        (BYTES.float(), LABELS[:6], "found torch.int64 of shape \\(6,\\)"),
        (BYTES.float(), LABELS.float(), "found torch.float32 of shape \\(7,\\)"),
        (BYTES.float(), LABELS.view(7, 1), "found torch.int64 of shape \\(7, 1\\)"),
    ],
)
def test_what_are_no_images_or_labels_is_refused(images, labels, message):
    with pytest.raises(DataError, match=message):
        Split(images, labels)


@pytest.mark.parametrize(
    ("mean", "std"),
    [((0.5, 0.5), None), (None, (1.0, 1.0)), ((0.5,), (1.0,)), ((0.5, 0.5), (1.0, 0.0))],
)
def test_a_normalisation_that_does_not_fit_is_refused(mean, std):
    with pytest.raises(DataError, match="one number for each of 2 channels"):
        Split(BYTES.float(), LABELS, mean, std)


def test_a_data_set_knows_its_parts_and_the_shape_of_its_inputs():
    split = Split(BYTES.float(), LABELS)
    data = DataSet("own", split, None, split.first(2), num_classes=3)
    assert data.input_shape == (1, 2, 3, 3)
    assert list(data.parts()) == ["train", "test"]


@pytest.mark.parametrize(("labels", "found"), [(LABELS, "label 2"), (LABELS - 1, "label -1")])
def test_a_label_that_is_no_class_is_refused(labels, found):
    good, bad = Split(BYTES.float(), LABELS % 2), Split(BYTES.float(), labels)
    with pytest.raises(DataError, match=f"own, test: labels of 2 classes are 0 … 1; .*{found}"):
        DataSet("own", good, None, bad, num_classes=2)


def test_parts_of_different_shapes_are_refused():
    split = Split(BYTES.float(), LABELS)
    with pytest.raises(DataError, match=r"\(2, 3, 3\) in training, and of shape \(2, 2, 3\)"):
        DataSet("own", split, Split(BYTES[:, :, :2].float(), LABELS), None, num_classes=3)
