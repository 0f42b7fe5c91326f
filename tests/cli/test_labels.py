import pytest
import torch
import torch.nn.functional as F

from apoptosis.cli.labels import check_labels_fit
from apoptosis.cli.named_data import NamedData
from apoptosis.errors import DataError
from apoptosis.task import Task

X = torch.randn(4, 2)


def check(labels, *, num_classes=None, task=None, outputs=3):
    batch = (X, torch.tensor(labels))
    data = NamedData(scoring=[batch], task=task or Task.classification(), num_classes=num_classes)
    check_labels_fit("net and data do not fit", data, torch.randn(4, outputs), batch)


def test_labels_that_have_an_output_pass():
    check([0, 1, 2, -100])
    check([0, 1, 2, 2], num_classes=3)


def test_a_label_without_an_output_is_refused():
    with pytest.raises(DataError, match="do not fit: .* up to 3, and the model has outputs for 3"):
        check([0, 1, 3, 2])


def test_labels_of_later_batches_count():
    with pytest.raises(DataError, match="Labels go up to 99, and the model has outputs for 3"):
        check([0, 1, 2, 2], num_classes=100)


def test_a_dict_is_looked_into():
    batch = {"x": X, "labels": torch.tensor([0, 1, 2, 3])}
    data = NamedData(scoring=[batch], task=Task.classification())
    with pytest.raises(DataError, match="Labels go up to 3"):
        check_labels_fit("n", data, torch.randn(4, 3), batch)


def test_targets_that_are_no_classes_are_the_loss_s_own_business():
    counts = Task.classification(
        loss=lambda outputs, targets: F.poisson_nll_loss(outputs[:, 0], targets.float())
    )
    check([0, 5, 90, 7], task=counts, outputs=1)


def test_batches_without_labels_pass():
    data = NamedData(scoring=[X], task=Task.classification(), num_classes=9)
    check_labels_fit("n", data, torch.randn(4, 3), X)


def test_a_negative_label_is_told_from_where_to_count():
    with pytest.raises(
        DataError, match="Labels go down to -1, and classes are counted from 0 to 2"
    ):
        check([0, -1, 2, -100])
    check([0, -5, 2, 1], task=Task.classification(loss=lambda outputs, _: outputs.sum()))
